"""A row's image -> the RGB picture that a model is shown, fully decoded, or why there is none.

Whatever a file holds becomes three channels of 8 bits: see-through parts are laid on white, 16-bit grey is scaled, an
EXIF turn is made, of an animation the first frame counts.
"""

from __future__ import annotations

import io
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from tasks.data.files import faults_named, file_system, is_local
from tasks.data.rows import BadRow, ImageRef, quoted

BACKGROUND = (255, 255, 255)  # behind see-through parts
MOST_PIXELS = 89_478_485  # a quarter of a GiB of RGB; Pillow warns from there on
MOST_BYTES = 256 << 20  # of a file
SEE_THROUGH = ("RGBA", "LA", "PA", "RGBa", "La")
DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
ORIENTATION = 0x0112  # the EXIF tag
# Formats that are read. Others that Pillow knows start a program (EPS) or are no pictures; which ones there are depends
# on how Pillow was built.
Image.init()
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO")
READ = tuple(name for name in FORMATS if name in Image.OPEN)
# Formats that most programs can show; a file of another one is written again.
KEPT_FORMATS = ("JPEG", "MPO", "PNG", "WEBP")
# How those files begin that are images, whatever else is wrong with them.
BEGINNINGS = (b"\x89PNG", b"\xff\xd8", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*", b"P6")
WEB_PAGE = (b"<!doctype", b"<html", b"<?xml", b"<head")


@dataclass(frozen=True)
class Decoded:
    """A picture: `content` is a file that holds it as plain RGB or grey, upright: the bytes it came as, where they do
    already. Width and height in pixels.
    """

    content: bytes
    width: int
    height: int


def read_image(image: ImageRef, folder: str) -> tuple[str, bytes]:
    """(what to call it, its file's bytes).

    Args:
        folder: of the source file, a path or URL, where relative paths start and which no path may leave.

    Raises:
        BadRow: no such file here, or one that may not be read.
        UserError: a server does not answer.
    """
    if image.content is not None:
        return image.place or "bytes in the row", image.content
    if "://" in image.place:
        raise BadRow(
            "an image by URL",
            "fetch it beside the source and write its path: what a server holds may change or go",
            quoted(image.place, 120),
        )
    content = _local(image.place, folder) if is_local(folder) else _remote(image.place, folder)
    return image.place, content


def local_file(place: str, folder: str) -> Path | None:
    """The file that a row's path means, None where it leaves the folder of the source, links followed."""
    root = Path(folder or "/").resolve()
    file = (root / place).resolve()
    return file if file.is_relative_to(root) else None


def _local(place: str, folder: str) -> bytes:
    try:
        file = local_file(place, folder)
        if file is None:
            raise _leaves(place)
        if not file.is_file():
            raise _missing(place)
        if file.stat().st_size > MOST_BYTES:
            raise _too_large(place, f"{file.stat().st_size >> 20} MiB")
        return file.read_bytes()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # no right to it, a name that none can have, links in a ring
        raise BadRow(
            "an image file that cannot be read", "mend its path or rights", f"{quoted(place)}: {error}"
        ) from None


def _remote(place: str, folder: str) -> bytes:
    if place.startswith("/") or ".." in place.split("/"):
        raise _leaves(place)
    url = f"{folder}/{place}"
    system, path = file_system(url)
    with faults_named(url):
        try:
            content: bytes = system.cat_file(path, end=MOST_BYTES + 1)
        except (FileNotFoundError, IsADirectoryError):
            raise _missing(place) from None
    if len(content) > MOST_BYTES:
        raise _too_large(place, f"over {MOST_BYTES >> 20} MiB")
    return content


def _leaves(place: str) -> BadRow:
    return BadRow(
        "an image path that leaves the folder of its source",
        "put the image beside the source file or in a folder there; links that lead out are not followed either",
        quoted(place, 120),
    )


def _missing(place: str) -> BadRow:
    return BadRow(
        "an image that is missing",
        "put it there (paths start from the folder of the source file), or remove the row",
        quoted(place, 120),
    )


def _too_large(place: str, size: str) -> BadRow:
    allowed = f"{MOST_PIXELS // 10**6} megapixels in {MOST_BYTES >> 20} MiB"
    return BadRow("an image that is too large", "make it smaller", f"{quoted(place)}, {size}", allowed)


# --- decoding -----------------------------------------------------------------------------------


def decode(name: str, content: bytes) -> Decoded:
    """The picture in a file's bytes, every pixel of it decoded.

    Args:
        name: what to call it in an error.

    Raises:
        BadRow: empty, no image, damaged, cut off, without area, or too large.
    """
    if not content:
        raise BadRow("an image file that is empty", "fetch it again or remove the row", quoted(name))
    image = _opened(name, content)
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise _too_large(name, f"{width} x {height}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind, frames = image.format, getattr(image, "n_frames", 1)  # which reads on in the file
            image.load()
            upright = _upright(image)
            plain = upright is image and image.mode in ("RGB", "L") and "transparency" not in image.info
            kept = plain and kind in KEPT_FORMATS and (frames == 1 or kind == "MPO")
            rgb = image if kept else to_rgb(upright)
    except Exception as error:  # noqa: BLE001 (decoders raise what they like over damaged bytes)
        raise _damaged(name, error) from None
    if not kept:
        written = io.BytesIO()
        rgb.save(written, "PNG")
    return Decoded(content if kept else written.getvalue(), *rgb.size)


def open_rgb(content: bytes) -> Image.Image:
    """The picture of `Decoded.content`, RGB."""
    return Image.open(io.BytesIO(content), formats=READ).convert("RGB")


def _opened(name: str, content: bytes) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Image.Image = Image.open(io.BytesIO(content), formats=READ)
    except Image.DecompressionBombError as error:
        raise _too_large(name, str(error).split(",")[0]) from None
    except UnidentifiedImageError as error:
        if content.startswith(b"\x89PNG") and not all(struct.unpack(">II", content[16:24].ljust(8, b"1"))):
            raise _no_area(name, "0 wide or high") from None
        if content.startswith(BEGINNINGS):
            raise _damaged(name, error) from None
        head = content[:64].lstrip().lower()
        page = head.startswith(WEB_PAGE)
        raise BadRow(
            "a web page in place of an image" if page else "a file that is no image",
            "fetch the image itself" if page else f"give one of {', '.join(READ)}",
            f"{quoted(name)} begins with {content[:16]!r}",
        ) from None
    except Exception as error:  # noqa: BLE001
        raise _damaged(name, error) from None
    if not all(image.size):
        raise _no_area(name, f"{image.width} x {image.height}")
    return image


def _no_area(name: str, found: str) -> BadRow:
    return BadRow("an image without a pixel", "write it again or remove the row", f"{quoted(name)}, {found}")


def _damaged(name: str, error: Exception) -> BadRow:
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UnidentifiedImageError):
        said = "its head is broken"
    return BadRow(
        "an image that is damaged or cut off",
        "fetch it again or remove the row",
        f"{quoted(name)}: {said[:120]}",
    )


# --- to RGB -------------------------------------------------------------------------------------


def to_rgb(image: Image.Image) -> Image.Image:
    """A loaded image of any mode as RGB: see-through parts on white, more than 8 bits scaled."""
    if image.mode in DEEP:
        return _of_deep(image)
    if image.mode in SEE_THROUGH or "transparency" in image.info:
        colours = image.convert("RGBA")
        ground = Image.new("RGBA", colours.size, (*BACKGROUND, 255))
        return Image.alpha_composite(ground, colours).convert("RGB")
    return image.convert("RGB")


def _of_deep(image: Image.Image) -> Image.Image:
    """Of 16 bits 65535 is white. Wider numbers within 0 to 65535 count as 16 bits, floats within 0 to 1 as shares of
    white; others are spread from the smallest to the largest.
    """
    values: NDArray[Any] = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it holds numbers that are not finite")
    low, high = 0.0, 1.0 if image.mode == "F" else 65535.0
    if values.min() < low or values.max() > high:
        low, high = float(values.min()), float(values.max())
    grey = np.rint((values - low) / ((high - low) or 1.0) * 255).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey[values == clear] = BACKGROUND[0]
    return Image.fromarray(grey).convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    """`image` itself, where EXIF says no turn or cannot be read."""
    try:
        turn = image.getexif().get(ORIENTATION, 1)
        return ImageOps.exif_transpose(image) if turn in range(2, 9) else image
    except Exception:  # noqa: BLE001 (a damaged EXIF part is no damaged picture)
        return image
