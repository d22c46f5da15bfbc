"""Images in rows that are too long (D20), in the model itself, and rows that no picture can be shown in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from tasks.data.prepared import IGNORED
from tasks.data.rows import BadRow, Row
from tasks.data.templates import Encoded
from tests import tiny_vision
from tests.tiny_vision import picture
from tests.unit.picture_encoder import (
    encoded,
    encoder_of,
    qwen,
    refused,
    row_of,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.write_vision_model(tmp_path_factory.mktemp("model") / "m")


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
