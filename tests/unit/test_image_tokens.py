"""Image tokens: as many as the model's own processor has, where the marks stand, never cut, never learnt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from tasks.data.chosen_template import choose
from tasks.data.prepared import IGNORED
from tasks.data.rows import BadRow, Picture, Row
from tasks.data.templates import Encoded, Encoder, load_tokenizer
from tasks.data.vision import Vision
from tests import tiny_vision
from tests.tiny_vision import PARTS, picture

SIZES = 500
QWEN_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.write_vision_model(tmp_path_factory.mktemp("model") / "m")


def encoder_of(
    folder: Path, template: str | None = None, max_length: int = 500, learn: Any = "answers"
) -> Encoder:
    tokenizer = load_tokenizer(folder, "m", False)
    if template is None:
        choice = choose("auto", tokenizer, folder, "m", folder)
        assert choice is not None
        template = choice.text
    return Encoder(tokenizer, template, max_length, learn, Vision.of(folder, tokenizer, "m"))


def picture_of(encoder: Encoder, image: Image.Image, number: int = 0) -> Picture:
    assert encoder.vision is not None
    tokens = encoder.vision.count(image.width, image.height)
    return Picture(number.to_bytes(16, "big"), image.width, image.height, tokens)


def row_of(encoder: Encoder, images: list[Image.Image], *contents: str, **more: Any) -> Row:
    """User and assistant take turns."""
    turns = tuple((("user", "assistant")[number % 2], text) for number, text in enumerate(contents))
    pictures = tuple(picture_of(encoder, image, number) for number, image in enumerate(images))
    return Row(turns, "g", "w", pictures=pictures, **more)


def encoded(encoder: Encoder, row: Row) -> Encoded:
    (found,) = encoder.encode([row])
    assert not isinstance(found, BadRow), found
    return found


def refused(encoder: Encoder, row: Row) -> BadRow:
    (found,) = encoder.encode([row])
    assert isinstance(found, BadRow)
    assert found.fix
    return found


def learnt(encoder: Encoder, found: Encoded) -> str:
    labels = np.asarray(found.labels)
    return str(encoder._tokenizer.decode(labels[labels != IGNORED].tolist()))


# --- counts -------------------------------------------------------------------------------------


def random_sizes() -> list[tuple[int, int]]:
    draw = random.Random(0)
    shapes = [(1, 1), (8, 8), (16, 16), (1, 40), (40, 1), (17, 16), (3, 100), (100, 3)]
    return shapes + [(draw.randint(1, 60), draw.randint(1, 60)) for _ in range(SIZES - len(shapes))]


@pytest.mark.parametrize("family", ["llava_next", "llava"])
def test_counts_are_the_processors_for_500_random_sizes(tmp_path: Path, family: str) -> None:
    """By its call with pixels, which is another way than the one that counts."""
    folder = tiny_vision.write_vision_model(tmp_path / "m", family)
    encoder = encoder_of(folder)
    assert encoder.vision is not None
    processor = AutoProcessor.from_pretrained(folder, backend="pil")
    sizes = random_sizes()
    assert len(sizes) == SIZES
    for width, height in sizes:
        image = Image.new("RGB", (width, height))
        ids = processor(text="<image>", images=[image], return_tensors="np")["input_ids"]
        assert encoder.vision.count(width, height) == int((ids == encoder.vision.token_id).sum()), (
            width,
            height,
        )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_counts_of_qwen_are_its_grid_for_500_random_sizes(tmp_path: Path, family: str) -> None:
    """An image token stands for merge_size x merge_size patches of the grid that pixels are cut into."""
    encoder = qwen(tmp_path, family)
    assert encoder.vision is not None
    images = encoder.vision.image_processor
    for width, height in random_sizes():
        grid = images(Image.new("RGB", (width, height)), return_tensors="np")["image_grid_thw"]
        assert encoder.vision.count(width, height) == int(grid.prod()) // images.merge_size**2
    with pytest.raises(BadRow, match="a shape that the model does not take"):
        encoder.vision.count(1000, 2)


def qwen(folder: Path, family: str = "qwen2_vl", template: str | None = QWEN_PARTS) -> Encoder:
    from transformers import AutoConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    more = ("<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>")
    tokenizer = tiny_vision.write_vision_tokenizer(folder, None, "<|image_pad|>", *more)
    size = {"shortest_edge": 8 * 8, "longest_edge": 40 * 40}
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size).save_pretrained(folder)
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    AutoConfig.for_model(family, image_token_id=image_token).save_pretrained(folder)
    return encoder_of(folder, template)


# --- prompts ------------------------------------------------------------------------------------


def test_the_documented_prompt_of_vicuna_with_its_picture(model: Path) -> None:
    encoder = encoder_of(model)
    row = row_of(encoder, [picture(10, 6)], "<image>\nwhat?", "a dog", "sure?", "yes")
    found = encoded(encoder, row)
    count = row.pictures[0].tokens
    text = encoder._tokenizer.decode(found.input_ids)
    system = text.partition("USER: ")[0]
    assert system.startswith("<s>A chat between a curious user")
    marks = "<image>" * count
    assert text == f"{system}USER: {marks}\nwhat? ASSISTANT: a dog</s>USER: sure? ASSISTANT: yes</s>"
    assert learnt(encoder, found).replace(" ", "") == "adog</s>yes</s>"
    assert (found.shown, found.image_tokens) == (1, count)


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("<image>what?", "<image>\nwhat?"),
        ("<image>\nwhat?", "<image>\nwhat?"),
        ("<image> what?", "<image>\nwhat?"),
        ("<image><image>what?", "<image>\n<image>\nwhat?"),
        ("what?\n<image>", "what?\n<image>"),
        ("is <image> like <image>?", "is <image> like <image>?"),
        ("<image>", "<image>"),
    ],
)
def test_marks_stay_where_they_stand(model: Path, said: str, written: str) -> None:
    encoder = encoder_of(model)
    images = [picture(10 + number, 6, number) for number in range(said.count("<image>"))]
    row = row_of(encoder, images, said, "yes")
    ids = np.asarray(encoded(encoder, row).input_ids)
    parts = written.split("<image>")
    wanted = parts[0]
    for shown, part in zip(row.pictures, parts[1:], strict=True):
        wanted += "<image>" * shown.tokens + part
    assert encoder._tokenizer.decode(ids).partition("USER: ")[2] == f"{wanted} ASSISTANT: yes</s>"


def test_ids_are_those_of_the_processor_under_its_own_template(model: Path) -> None:
    encoder = encoder_of(model, PARTS)
    processor = AutoProcessor.from_pretrained(model, backend="pil")
    draw = random.Random(1)
    for case in range(20):
        images = [
            picture(draw.randint(1, 40), draw.randint(1, 40), case + number) for number in range(case % 3)
        ]
        contents = ["".join(f"<image>\n{number}" for number in range(len(images))) or "no image", "yes é"]
        contents += ["again?", "no"] * (case % 2)
        row = row_of(encoder, images, *contents)
        talk: list[dict[str, Any]] = []
        for role, text in row.messages:
            said = text.replace("<image>\n", "")
            shown = [{"type": "image"}] * text.count("<image>")
            talk.append({"role": role, "content": [*shown, {"type": "text", "text": said}]})
        # of several images in a turn the text between is parts, too; the template joins them with blanks
        if len(images) > 1:
            texts = [{"type": "text", "text": str(number)} for number in range(len(images))]
            talk[0]["content"] = [{"type": "image"}] * len(images) + texts
        text = "<s>" + processor.apply_chat_template(talk, chat_template=PARTS, tokenize=False)
        theirs = processor(text=text, images=images or None, add_special_tokens=False, return_tensors="np")
        found = np.asarray(encoded(encoder, row).input_ids)
        assert found.tolist() == [*theirs["input_ids"][0].tolist(), encoder._tokenizer.eos_token_id]


def test_qwens_own_template_and_its_prompt_as_text_give_the_same(tmp_path: Path) -> None:
    texts = []
    for template in (QWEN_PARTS, tiny_chatml()):
        encoder = qwen(tmp_path, template=template)
        row = row_of(encoder, [picture(16, 16), picture(24, 8)], "<image>and<image>", "x")
        found = encoded(encoder, row)
        texts.append(encoder._tokenizer.decode(found.input_ids))
        assert found.image_tokens == sum(shown.tokens for shown in row.pictures) == 4 + 3
    one, two = (f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>" for count in (4, 3))
    assert texts[0] == f"<s><|im_start|>user\n{one}and{two}<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
    assert texts[1] == texts[0].replace(f"{one}and", f"{one}\nand")


def tiny_chatml() -> str:
    from tests import tiny

    return tiny.CHATML


def test_a_mistral_inside_is_prompted_as_one(model: Path, tmp_path: Path) -> None:
    import json
    import shutil

    shutil.copytree(model, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["model_type"] = "mistral"
    file.write_text(json.dumps(config))
    encoder = encoder_of(tmp_path / "m")
    row = row_of(encoder, [picture(8, 8)], "<image>\nwhat?", "a dog")
    text = encoder._tokenizer.decode(encoded(encoder, row).input_ids)
    assert text == f"<s>[INST] {'<image>' * row.pictures[0].tokens}\nwhat? [/INST] a dog</s>"


def test_completions_and_texts_may_hold_pictures(model: Path) -> None:
    encoder = encoder_of(model)
    shown = (picture_of(encoder, picture(10, 6)),)
    marks = "<image>" * shown[0].tokens
    completion = Row(
        (("user", "see <image>: "), ("assistant", "dog")), "g", "w", "completion", pictures=shown
    )
    found = encoded(encoder, completion)
    assert encoder._tokenizer.decode(found.input_ids) == f"<s>see {marks}: dog</s>"
    assert learnt(encoder, found) == "dog</s>"
    assert encoder.prompt(completion)[0]["content"] == "see <image>: "
    text = Row((("assistant", "A dog: <image>\nand so on"),), "g", "w", "text", pictures=shown)
    assert list(encoder.pieces(text)) == [text]
    found = encoded(encoder, text)
    assert encoder._tokenizer.decode(found.input_ids) == f"<s>A dog: {marks}\nand so on</s>"
    assert learnt(encoder, found) == "<s>A dog: \nand so on</s>"


def test_image_tokens_are_never_learnt(model: Path) -> None:
    encoder = encoder_of(model, learn="all")
    found = encoded(encoder, row_of(encoder, [picture(10, 6)], "<image>\nwhat?", "a dog"))
    ids, labels = np.asarray(found.input_ids), np.asarray(found.labels)
    assert encoder.vision is not None
    images = ids == encoder.vision.token_id
    assert images.any() and (labels[images] == IGNORED).all() and (labels[~images] == ids[~images]).all()


# --- D20 ----------------------------------------------------------------------------------------


def test_no_cut_within_an_image(model: Path) -> None:
    """NielsRogge/Transformers-Tutorials#492, hiyouga/LlamaFactory#6911, at every length where something changes."""
    whole = encoder_of(model)
    images = [picture(10, 6), picture(6, 30, 1)]
    contents = ("<image>\nwhat?", "a dog", "and <image>?", "a cat")
    full = encoded(whole, row_of(whole, images, *contents))
    ids = np.asarray(full.input_ids)
    counts = [shown.tokens for shown in row_of(whole, images, *contents).pictures]
    needed = int(np.flatnonzero(np.asarray(full.labels) != IGNORED)[0]) + 1
    assert whole.vision is not None and counts[0] != counts[1]
    images_at = np.flatnonzero(ids == whole.vision.token_id)
    borders = {needed, len(ids), *images_at[:1], *images_at[-1:], *(images_at[counts[0] - 1 : counts[0] + 1])}
    lengths = {border + more for border in borders for more in (-1, 0, 1, 2)} | {1, counts[0]}
    for max_length in sorted(length for length in lengths if 0 < length <= len(ids) + 1):
        encoder = encoder_of(model, whole._template.text if whole._template else None, max_length)
        row = row_of(encoder, images, *contents)
        (found,) = encoder.encode([row])
        if max_length < needed:
            assert isinstance(found, BadRow)
            assert found.reason == f"no answer token within max_length={max_length}"
            assert f"this row has {len(ids)} tokens, {sum(counts)} of them its images'" in found.fix
            assert f"the first that is learnt is number {needed}" in found.fix
            continue
        assert isinstance(found, Encoded)
        kept = np.asarray(found.input_ids)
        assert len(kept) <= max_length and np.array_equal(kept, ids[: len(kept)])
        assert found.labels[-1] != IGNORED
        shown = sum(counts[: found.shown])
        assert found.image_tokens == shown == int((kept == whole.vision.token_id).sum())
        assert found.truncated == (len(kept) < len(ids))


def test_features_and_tokens_agree_in_a_batch_of_two(model: Path) -> None:
    """Two rows with images of different shape, one cut: the model itself refuses other numbers."""
    encoder = encoder_of(model, max_length=300)
    network = AutoModelForImageTextToText.from_pretrained(model).eval()
    images = [[picture(10, 6)], [picture(6, 30, 1), picture(3, 3, 2)]]
    talks = [("<image>\nwhat?", "a dog"), ("<image>\n<image>\nwhat?", "a cat " * 40)]
    rows = [row_of(encoder, shown, *talk) for shown, talk in zip(images, talks, strict=True)]
    found = [encoded(encoder, row) for row in rows]
    assert [one.truncated for one in found] == [False, True]
    assert [one.shown for one in found] == [1, 2]
    ids = [torch.tensor(np.asarray(one.input_ids), dtype=torch.long) for one in found]
    batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    assert encoder.vision is not None
    pixels = encoder.vision.image_processor(
        [image for shown in images for image in shown], return_tensors="pt"
    )
    with torch.no_grad():
        together = network(input_ids=batch, **pixels).logits
        alone = network(
            input_ids=ids[0][None],
            pixel_values=pixels["pixel_values"][:1],
            image_sizes=pixels["image_sizes"][:1],
        ).logits
    assert torch.allclose(together[0, : len(ids[0])], alone[0], atol=1e-4)
    with pytest.raises(ValueError, match=r"[Ii]mage features and image tokens do not match"):
        network(input_ids=batch[:, :-230], **pixels)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chat", "completion", "text"])
def test_a_text_that_speaks_of_the_token_gives_no_image_tokens(model: Path, kind: Any) -> None:
    encoder = encoder_of(model)
    turns = (("user", "what is <image> in SVG?"), ("assistant", "a tag"))
    row = Row(turns if kind != "text" else (("assistant", turns[0][1]),), "g", "w", kind)
    assert refused(encoder, row).reason == "a text holds <image>, which stands for a picture"
    tag = Row((("user", "what is < image >?"), ("assistant", "a tag")), "g", "w")
    assert encoded(encoder, tag).image_tokens == 0


def test_qwens_tokens_in_a_text_are_refused_beside_pictures_too(tmp_path: Path) -> None:
    encoder = qwen(tmp_path)
    for token in ("<|image_pad|>", "<|vision_start|>"):
        for images, mark in (([], ""), ([picture(16, 16)], "<image>")):
            assert token in refused(encoder, row_of(encoder, images, f"{mark} {token}", "x")).reason
    assert encoded(encoder, row_of(encoder, [], "what is <image>?", "a tag")).shown == 0


def test_other_rows_that_no_picture_can_be_shown_in(model: Path) -> None:
    from tasks.data.rows import ImageRef

    encoder = encoder_of(model)
    answer = row_of(encoder, [picture(8, 8)], "draw", "<image>")
    assert refused(encoder, answer).reason == "an image in an answer"
    unread = Row((("user", "<image>"), ("assistant", "a")), "g", "w", images=(ImageRef("a.png"),))
    assert refused(encoder, unread).reason == "it has images, which this model is not shown"
    blind = "{% for m in messages %}{{ m['content'] | replace('<image>', '') }}</s>{% endfor %}"
    encoder = encoder_of(model, blind)
    row = row_of(encoder, [picture(8, 8)], "<image>what?", "a")
    assert refused(encoder, row).reason == "its prompt has not one image token for each of its images"


def test_a_template_that_forgets_gives_each_answer_the_pictures_before_it(model: Path) -> None:
    forgets = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'].split('</think>')[-1] if m['role'] == 'assistant' "
        "and not loop.last else m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    encoder = encoder_of(model, forgets)
    images = [picture(10, 6), picture(6, 30, 1)]
    talk = ("<image>\nwhat?", "<think>hm</think>dog", "and <image>?", "<think>so</think>cat")
    pieces = list(encoder.pieces(row_of(encoder, images, *talk)))
    assert [len(piece.pictures) for piece in pieces] == [1, 2]
    found = [encoded(encoder, piece) for piece in pieces]
    assert [one.shown for one in found] == [1, 2]
    assert len({piece.id for piece in pieces}) == 2
