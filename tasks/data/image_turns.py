"""Where a row's pictures stand: marks in turns as a chat template takes them, and image tokens among a row's ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.data.pictures import MARK
from tasks.data.rows import BadRow, Picture, Row, quoted
from tasks.data.vision import Vision

FIRST = re.compile(rf"(?:\s*{MARK})+\s*")


def in_parts(content: str) -> list[dict[str, str]]:
    """A turn's text with marks as parts. A line end beside a mark is LLaVA's way to tell parts from each other."""
    parts: list[dict[str, str]] = []
    texts = content.split(MARK)
    for number, text in enumerate(texts):
        if number:
            parts.append({"type": "image"})
            text = text.removeprefix("\n")  # noqa: PLW2901
        if number < len(texts) - 1:
            text = text.removesuffix("\n")  # noqa: PLW2901
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def as_text(content: str, mark: str) -> str:
    """A turn's text with `mark` in the place of each mark; those it begins with stand on lines of their own, as in
    LLaVA's documented prompt.
    """
    first = FIRST.match(content)
    if not first:
        return content.replace(MARK, mark)
    rest = content[first.end() :].replace(MARK, mark)
    return "\n".join([mark] * first[0].count(MARK) + ([rest] if rest else []))


def text_of(content: Any) -> str:
    """What a turn says, images aside."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def turns(row: Row, vision: Vision | None, parts: bool) -> list[dict[str, Any]]:
    """`row.chat` as the template takes it: marks of pictures as parts of a turn, or as the image token in its text."""
    chat = row.chat
    if row.pictures and vision is not None:
        for turn in chat:
            if MARK in turn["content"]:
                content = turn["content"]
                turn["content"] = in_parts(content) if parts else as_text(content, vision.mark)
    return chat


def with_sizes(text: str, sizes: list[list[int]], token: str) -> str:
    """A part of a row's decoded text with a short mark for each picture instead of all its tokens.

    Args:
        sizes: (width, height, tokens) of the pictures to come, of which those that the text holds are taken away.
    """
    while sizes and token * sizes[0][2] in text:
        width, height, tokens = sizes.pop(0)
        text = text.replace(token * tokens, f"[image {width}x{height}, {tokens} tokens]", 1)
    return text


def refuse_unlike(row: Row, vision: Vision | None) -> None:
    """Refuses what would give image tokens without a picture, or a picture that the model is not shown.

    Raises:
        BadRow: with what it holds.
    """
    if row.images:
        raise BadRow(
            "it has images, which this model is not shown",
            "use a model of type llava, llava_next, qwen2_vl or qwen2_5_vl, or remove its images",
        )
    if vision is None:
        return
    for role, content in row.messages:
        if row.pictures and role == "assistant" and row.kind != "text" and MARK in content:
            raise BadRow(
                "an image in an answer", "move it to the question: only text is learnt", quoted(content)
            )
        found = vision.reserved.search(content.replace(MARK, "") if row.pictures else content)
        if found:
            raise BadRow(
                f"a text holds {found[0]}, which stands for a picture",
                "list the image in the row, or write the word otherwise",
                quoted(content[max(0, found.start() - 20) : found.end() + 20]),
            )


@dataclass(frozen=True)
class Expansion:
    """A row's tokens with one image token a picture, and how many each becomes; arrays of shape (tokens,)."""

    times: NDArray[np.int64]
    ends: NDArray[np.int64]  # tokens of the row up to each, itself included
    places: NDArray[np.int64]  # of the image tokens, shape (pictures,)

    @classmethod
    def of(cls, ids: NDArray[np.int32], pictures: Sequence[Picture], vision: Vision | None) -> Expansion:
        """
        Raises:
            BadRow: there are not as many image tokens as pictures.
        """
        places = np.flatnonzero(ids == vision.token_id) if vision else np.zeros(0, np.int64)
        if len(places) != len(pictures):
            raise BadRow(
                "its prompt has not one image token for each of its images",
                "give a prepare_data.template that writes every image, or write the token otherwise in its text",
                f"{len(places)} for {len(pictures)}",
            )
        times = np.ones(len(ids), dtype=np.int64)
        times[places] = [picture.tokens for picture in pictures]
        return cls(times, np.cumsum(times), places)

    def kept(self, tokens: int) -> int:
        """How many tokens have room within `tokens` of the row; an image that does not fit as a whole has none."""
        return int(np.searchsorted(self.ends, tokens, "right"))

    def shown(self, cut: int) -> int:
        """How many pictures stand before the token `cut`."""
        return int(np.searchsorted(self.places, cut))

    def image_tokens(self, cut: int) -> int:
        return int(self.times[self.places[: self.shown(cut)]].sum())
