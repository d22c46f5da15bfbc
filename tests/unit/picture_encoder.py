"""Encodes rows with pictures as preparation does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tasks.data.chosen_template import choose
from tasks.data.prepared import IGNORED
from tasks.data.rows import BadRow, Picture, Row
from tasks.data.templates import Encoded, Encoder, load_tokenizer
from tasks.data.vision import Vision
from tests import tiny_vision

QWEN_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
