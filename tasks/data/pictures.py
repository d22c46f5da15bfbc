"""A row's pictures: where they are said, and that each has its mark in the text."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from tasks.data.rows import BadRow, ImageRef, check_writable, quoted

MARK = "<image>"
SHAPE = "a path, a URL, bytes, {bytes, path}, or a list of these"


def images_of(value: Any) -> list[ImageRef]:
    """The pictures that an `images` or `image` column says: one or a list.

    A text is one path, unless it is a JSON list (as a CSV cell is).

    Raises:
        BadRow: something else.
    """
    if value is None or value in ("", []):
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):  # a path may begin so
            value = json.loads(value)
    return [image_of(one) for one in (value if isinstance(value, list | tuple) else [value])]


def image_of(value: Any) -> ImageRef:
    """One picture: path, URL, data URL, bytes, or an object with one of these.

    Raises:
        BadRow: something else.
    """
    if isinstance(value, bytes) and value:
        return ImageRef("", value)
    if isinstance(value, str) and value:
        check_writable("an image path", value)
        return ImageRef("", _of_data_url(value)) if value.startswith("data:") else ImageRef(value)
    if isinstance(value, Mapping):
        content = value.get("bytes")
        place = next((value[key] for key in ("path", "url", "image_url", "image") if value.get(key)), None)
        if isinstance(content, str):
            content = _of_base64(content)
        if isinstance(content, bytes) and content:
            return ImageRef(place if isinstance(place, str) else "", content)
        if place:
            return image_of(place)
    raise BadRow("an image that is neither path nor bytes", f"write {SHAPE}", quoted(value), SHAPE)


def _of_data_url(url: str) -> bytes:
    head, _, body = url.partition(",")
    if not head.endswith(";base64"):
        raise BadRow(
            "an image in a data URL that is not base64", "write the file's bytes as base64", quoted(url)
        )
    return _of_base64(body)


def _of_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow(
            "image bytes that are not base64", "write them with base64.b64encode", str(error)
        ) from None


def check_marks(texts: Iterable[Any], images: int) -> None:
    """Refuses a row whose marks and pictures differ in number.

    Raises:
        BadRow: with both numbers.
    """
    marks = count_marks(texts)
    if marks != images:
        raise BadRow(
            f"the number of {MARK} marks is not that of its images",
            f"write {MARK} where each image belongs, and list every image once",
            f"{marks} {'mark' if marks == 1 else 'marks'}, {images} {'image' if images == 1 else 'images'}",
        )


def count_marks(texts: Iterable[Any]) -> int:
    return sum(text.count(MARK) for text in texts if isinstance(text, str))
