"""Image tokens: as many as the model's own processor has, where the marks stand, never cut, never learnt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor

from tasks.data.prepared import IGNORED
from tasks.data.rows import BadRow, Row
from tests import tiny_vision
from tests.tiny_vision import PARTS, picture
from tests.unit.picture_encoder import (
    QWEN_PARTS,
    encoded,
    encoder_of,
    learnt,
    picture_of,
    qwen,
    row_of,
)

SIZES = 500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.write_vision_model(tmp_path_factory.mktemp("model") / "m")


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
