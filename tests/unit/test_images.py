"""Images of every kind become RGB; what is none, or not to be read, is refused with a reason of its own."""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tasks.data.images import BACKGROUND, decode, open_rgb, read_image
from tasks.data.rows import BadRow, ImageRef
from tests.tiny_vision import file_of, picture

Colour = tuple[int, int, int]
RED, GREY = (200, 0, 0), (10, 20, 30)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(size: tuple[int, int], bits: int, kind: int, rows: bytes, clear: bytes = b"") -> bytes:
    """A PNG file by the specification, independent of Pillow; each row begins with a filter byte."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, bits, kind, 0, 0, 0))
    see_through = chunk(b"tRNS", clear) if clear else b""
    body = chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + see_through + body


def deep(*values: int, clear: bytes = b"") -> bytes:
    """16-bit grey, a row of these values."""
    return png((len(values), 1), 16, 0, b"\0" + struct.pack(f">{len(values)}H", *values), clear)


def flat(mode: str, first: object, last: object, kind: str = "PNG", **more: object) -> bytes:
    """4x4 pixels of `first`, the last one being `last`."""
    image = Image.new(mode, (4, 4), first)  # type: ignore[arg-type]
    if mode == "P":
        image.putpalette([*GREY, *RED])
    image.putpixel((3, 3), last)  # type: ignore[arg-type]
    return file_of(image, kind, **more)


def corners(content: bytes) -> tuple[Colour, Colour]:
    """The first and the last pixel of what is kept, which any program must see so."""
    found = decode("x", content)
    stored = Image.open(io.BytesIO(found.content))
    assert stored.mode in ("RGB", "L") and "transparency" not in stored.info
    assert stored.getexif().get(0x0112, 1) == 1
    image = open_rgb(found.content)
    assert image.mode == "RGB" and image.size == (found.width, found.height)
    ends = image.getpixel((0, 0)), image.getpixel((image.width - 1, image.height - 1))
    return ends  # type: ignore[return-value]


FLOATS = Image.fromarray(np.array([[0.0, 0.5], [1.0, 0.25]], np.float32))
WIDE = Image.fromarray(np.array([[-100, 0], [0, 100]], np.int32))
KINDS: dict[str, tuple[bytes, Colour, Colour]] = {
    # the five files of D19 (huggingface/transformers#49003, docling PR#3043)
    "palette + tRNS": (flat("P", 0, 1, transparency=0), BACKGROUND, RED),
    "RGB + tRNS": (flat("RGB", (1, 2, 3), (9, 8, 7), transparency=(1, 2, 3)), BACKGROUND, (9, 8, 7)),
    "LA": (flat("LA", (0, 0), (100, 255)), BACKGROUND, (100, 100, 100)),
    "CMYK": (flat("CMYK", (0, 255, 255, 0), (0, 255, 255, 0), "JPEG"), (255, 0, 0), (255, 0, 0)),
    "16-bit grey": (deep(40000, 65535), (156, 156, 156), (255, 255, 255)),  # 40000 / 65535 x 255 = 155.6
    # and their kin
    "palette": (flat("P", 0, 1), GREY, RED),
    "half see-through LA": (flat("LA", (0, 128), (0, 128)), (127, 127, 127), (127, 127, 127)),
    "RGBA": (flat("RGBA", (255, 0, 0, 0), (0, 0, 255, 255)), BACKGROUND, (0, 0, 255)),
    "RGBA WebP": (flat("RGBA", (9, 9, 9, 0), (9, 9, 9, 0), "WEBP", lossless=True), BACKGROUND, BACKGROUND),
    "grey": (flat("L", 7, 8), (7, 7, 7), (8, 8, 8)),
    "grey + tRNS": (flat("L", 7, 8, transparency=7), BACKGROUND, (8, 8, 8)),
    "one bit": (flat("1", 1, 0), (255, 255, 255), (0, 0, 0)),
    "16-bit grey + tRNS": (deep(40000, 0, clear=struct.pack(">H", 40000)), BACKGROUND, (0, 0, 0)),
    "16-bit RGB": (
        png((1, 1), 16, 2, b"\0" + struct.pack(">3H", 40000, 0, 65535)),
        (156, 0, 255),
        (156, 0, 255),
    ),
    "floats": (file_of(FLOATS, "TIFF"), (0, 0, 0), (64, 64, 64)),
    "32-bit numbers": (file_of(WIDE, "TIFF"), (0, 0, 0), (255, 255, 255)),
    "RGB": (flat("RGB", GREY, RED), GREY, RED),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_becomes_rgb(kind: str) -> None:
    content, first, last = KINDS[kind]
    assert corners(content) == (first, last)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF"])
def test_an_exif_turn_is_made_once(kind: str, turn: int) -> None:
    """Of an upright picture 16 wide and 8 high whose left upper corner is black."""
    upright = np.full((8, 16), 255, np.uint8)
    upright[:4, :4] = 0
    undo = {  # how the file's rows and columns lie (EXIF 2.3, tag Orientation)
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: upright.T[::-1],
        7: upright.T[::-1, ::-1],
        8: upright.T[:, ::-1],
    }
    exif = Image.Exif()
    exif[0x0112] = turn
    image = Image.fromarray(np.ascontiguousarray(undo[turn])).convert("RGB")
    found = decode("x", file_of(image, kind, exif=exif))
    assert (found.width, found.height) == (16, 8)
    seen = np.asarray(open_rgb(found.content).convert("L"))
    assert (
        (seen[1:3, 1:3] < 60).all() and (seen[5:, 5:] > 200).all() and seen[6, 1] > 200 and seen[1, 13] > 200
    )


def test_a_file_that_is_plain_already_is_kept_byte_for_byte() -> None:
    for content in (file_of(picture(9, 5)), file_of(picture(9, 5), "JPEG"), flat("L", 7, 8)):
        assert decode("x", content).content is content
    for content in (flat("P", 0, 1), file_of(picture(9, 5), "BMP"), KINDS["16-bit grey"][0]):
        assert decode("x", content).content.startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation_counts(kind: str) -> None:
    frames = [Image.new("RGB", (6, 4), colour) for colour in ((255, 255, 255), (0, 0, 0))]
    more = {"lossless": True} if kind == "WEBP" else {}
    content = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **more)
    assert getattr(Image.open(io.BytesIO(content)), "n_frames") == 2  # noqa: B009
    assert corners(content) == ((255, 255, 255), (255, 255, 255))
    assert getattr(Image.open(io.BytesIO(decode("x", content).content)), "n_frames", 1) == 1


NOISE = picture(64, 64)
BAD = {
    "an image file that is empty": [b""],
    "a web page in place of an image": [
        b"<!DOCTYPE html><html>",
        b"\n <html><body>404",
        b"<?xml version='1.0'?>",
    ],
    "a file that is no image": [
        b"hello",
        b"%PDF-1.7",
        bytes(99),
        file_of(NOISE, "EPS"),
        file_of(NOISE, "TGA"),
    ],
    "an image that is damaged or cut off": [
        *(file_of(NOISE)[:cut] for cut in (10, 30, 5000)),
        *(file_of(NOISE, "JPEG")[:cut] for cut in (4, 30, 1000, -40)),
        file_of(NOISE)[:200] + bytes(60) + file_of(NOISE)[260:],
        file_of(Image.fromarray(np.array([[np.nan]], np.float32)), "TIFF"),
        b"BM" + bytes(60),
    ],
    "an image without a pixel": [png((0, 4), 8, 2, b""), png((4, 0), 8, 2, b"")],
    "an image that is too large": [png((20000, 20000), 8, 2, b""), png((10000, 9000), 8, 2, b"")],
}


@pytest.mark.parametrize("reason", BAD)
def test_what_is_no_sound_image_has_its_own_reason(reason: str) -> None:
    for content in BAD[reason]:
        with pytest.raises(BadRow) as error:
            decode("some/a.jpg", content)
        assert error.value.reason == reason and error.value.fix
        assert "some/a.jpg" in str(error.value)


SOUND = [content for content, _, _ in KINDS.values()]
SOUND += [file_of(NOISE.resize((20, 20)), kind) for kind in ("JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM")]


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(SOUND),
    st.lists(st.tuples(st.integers(0, 2000), st.binary(max_size=8)), max_size=4),
    st.data(),
)
def test_any_bytes_are_a_picture_or_refused(
    content: bytes, changes: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    """Sound files, overwritten here and there and cut off."""
    damaged = bytearray(content)
    for place, other in changes:
        damaged[place % len(content) : place % len(content) + len(other)] = other
    cut = data.draw(st.integers(0, len(damaged)))
    try:
        found = decode("x", bytes(damaged[:cut] if cut % 3 == 0 else damaged))
    except BadRow as error:
        assert error.reason in BAD and error.fix
    else:
        assert open_rgb(found.content).size == (found.width, found.height)


def reason_of(place: str, folder: Path | str) -> str:
    with pytest.raises(BadRow) as error:
        read_image(ImageRef(place), str(folder))
    assert error.value.fix and repr(place[:20])[1:-1] in error.value.found
    return error.value.reason


def test_paths_start_from_the_sources_folder_and_stay_in_it(tmp_path: Path) -> None:
    root = tmp_path / "data"
    (root / "sub").mkdir(parents=True)
    for file in (root / "sub" / "a.png", tmp_path / "secret.png"):
        file.write_bytes(b"x")
    (root / "inner").symlink_to(root / "sub")
    (root / "out").symlink_to(tmp_path)
    (root / "out.png").symlink_to(tmp_path / "secret.png")
    (root / "ring.png").symlink_to(root / "ring.png")
    sound = ("sub/a.png", "./sub/../sub/a.png", "inner/a.png", str(root / "sub" / "a.png"))
    for place in sound:
        assert read_image(ImageRef(place), str(root)) == (place, b"x")
    leaving = (
        "../secret.png",
        "sub/../../secret.png",
        "out/secret.png",
        "out.png",
        str(tmp_path / "secret.png"),
    )
    for place in (*leaving, "/etc/passwd", "../missing.png"):
        assert reason_of(place, root) == "an image path that leaves the folder of its source"
    for place in ("b.png", "sub", "sub/a.png/b.png"):
        assert reason_of(place, root) == "an image that is missing"
    for place in ("https://x.org/a.jpg", "s3://bucket/a.jpg", "file:///etc/passwd"):
        assert reason_of(place, root) == "an image by URL"
    for place in ("a\0.png", "ring.png", "n" * 300 + ".png"):
        assert reason_of(place, root) in ("an image file that cannot be read", "an image that is missing")
    assert read_image(ImageRef("", b"y"), str(root)) == ("bytes in the row", b"y")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_the_right_to_it(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"x")
    (tmp_path / "a.png").chmod(0)
    assert reason_of("a.png", tmp_path) == "an image file that cannot be read"


def test_images_beside_a_remote_source() -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe_file("/data/img/a.png", b"x")
    assert read_image(ImageRef("img/a.png"), "memory://data") == ("img/a.png", b"x")
    assert reason_of("img/b.png", "memory://data") == "an image that is missing"
    assert reason_of("../a.png", "memory://data") == "an image path that leaves the folder of its source"
