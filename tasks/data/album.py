"""Pictures on disk: of a shard while it is prepared, and of data/prepared, each once, in the order of identities.

A picture is known by the first half of the SHA-256 of the bytes it came as.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tasks.data.files import is_local
from tasks.data.formats import content_group
from tasks.data.images import decode, local_file, read_image
from tasks.data.rows import ImageRef, Picture, Row
from tasks.data.vision import Vision
from tasks.stage import progress

Array = NDArray[Any]

WIDTH = 16  # bytes of an identity that are kept: two pictures of 10^12 share them in 1 of 10^14 cases
INDEX, BYTES, FILES = "pictures.npy", "pictures.bin", "picture-files.jsonl"
ENTRY = np.dtype(
    [
        ("identity", f"S{WIDTH}"),
        ("start", "<u8"),  # in the shard's file of bytes
        ("size", "<u4"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("tokens", "<u4"),
    ]
)
SCHEMA = pa.schema(
    [
        ("identity", pa.binary(WIDTH)),
        ("width", pa.uint32()),
        ("height", pa.uint32()),
        ("tokens", pa.uint32()),
        ("content", pa.large_binary()),
    ]
)
BATCH_BYTES, BATCH_PICTURES = 32 << 20, 1000
HELD = 1 << 20  # entries, 36 bytes each, that are held at once where there are fewer; else ranges of them
OPEN_FILES = 128


class ShardAlbum:
    """Decodes the images of a shard's rows and keeps each once, in two files of the shard's folder.

    What lay at each path is noted, so that a finished shard is known to be out of date when one has changed.
    """

    def __init__(self, folder: Path, root: str, vision: Vision | None) -> None:
        """
        Args:
            root: the folder of the source file, a path or URL.
            vision: counts a picture's tokens; None leaves rows as they are.
        """
        self._folder, self._root, self._vision = folder, root, vision
        self._entries: dict[bytes, tuple[Any, ...]] = {}
        self._bytes: IO[bytes] | None = None
        self._seen: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def decoded(self, row: Row) -> Row:
        """The row with pictures in the place of its images.

        Raises:
            BadRow: an image is missing, none, damaged, or of a shape that the model does not take.
        """
        if not row.images or self._vision is None:
            return row
        pictures = tuple(self._picture(image, self._vision) for image in row.images)
        # Rows about one picture stay on one side of the split, unless the source says which belong together.
        own = row.group == content_group(row.messages, row.images)
        group = f"picture {pictures[0].identity.hex()}" if own else row.group
        return replace(row, images=(), pictures=pictures, group=group)

    def close(self) -> None:
        """Writes the index; without pictures there is none."""
        if self._bytes is not None:
            self._bytes.close()
            entries = np.array(sorted(self._entries.values()), dtype=ENTRY)
            np.save(self._folder / INDEX, entries)
        if self._seen:
            lines = (json.dumps([place, found]) + "\n" for place, found in self._seen.items())
            (self._folder / FILES).write_text("".join(lines), encoding="utf-8")

    def _picture(self, image: ImageRef, vision: Vision) -> Picture:
        if image.content is None and is_local(self._root) and image.place not in self._seen:
            self._seen[image.place] = _state(image.place, self._root)
        name, content = read_image(image, self._root)
        identity = hashlib.sha256(content).digest()
        known = self._entries.get(identity[:WIDTH])
        if known is None:
            found = decode(name, content)
            tokens = vision.count(found.width, found.height)
            known = self._add(identity[:WIDTH], found.content, found.width, found.height, tokens)
        return Picture(identity[:WIDTH], *known[3:])

    def _add(self, identity: bytes, content: bytes, width: int, height: int, tokens: int) -> tuple[Any, ...]:
        if self._bytes is None:
            self._bytes = (self._folder / BYTES).open("wb")
        entry = (identity, self._bytes.tell(), len(content), width, height, tokens)
        self._bytes.write(content)
        self._entries[identity] = entry
        return entry


def _state(place: str, root: str) -> list[int] | None:
    """Size and time of what lies at a path; None where nothing does that may be read."""
    try:
        file = local_file(place, root)
        found = os.stat(file) if file is not None else None
    except (OSError, ValueError, RuntimeError):
        return None
    return [found.st_size, found.st_mtime_ns] if found else None


def unchanged(folder: Path, root: str) -> bool:
    """Whether all image files that a finished shard has read, or missed, are as they were."""
    file = folder / FILES
    if not file.is_file():
        return True
    with file.open(encoding="utf-8") as lines:
        return all(_state(place, root) == found for place, found in map(json.loads, lines))


# --- data/prepared ------------------------------------------------------------------------------


def identities(column: pa.ChunkedArray) -> Array:
    """The values of a column of lists of identities, shape (pictures,)."""
    flat = [chunk.flatten() for chunk in column.chunks]
    found = [
        np.frombuffer(chunk.buffers()[1], f"S{WIDTH}")[chunk.offset : chunk.offset + len(chunk)]
        for chunk in flat
        if len(chunk)
    ]
    return np.concatenate([np.zeros(0, f"S{WIDTH}"), *found])


def write_album(folders: Sequence[Path], used: Array, path: Path) -> None:
    """Writes the pictures `used` (sorted identities) as one Arrow file; picture n is number n of `used`.

    Args:
        folders: of the shards, in their order; the first one that has a picture gives it.
    """
    with ExitStack() as stack:
        sink = stack.enter_context(pa.OSFile(str(path), "wb"))
        writer = stack.enter_context(pa.ipc.new_file(sink, SCHEMA))
        bar = stack.enter_context(progress("write pictures", len(used)))
        held: list[dict[str, Any]] = []
        size = 0
        for entry, content in _entries(folders, used):
            named = {name: int(entry[name]) for name in ("width", "height", "tokens")}
            identity = bytes(entry["identity"]).ljust(WIDTH, b"\0")  # numpy takes zeros at the end away
            held.append({"identity": identity, **named, "content": content})
            size += len(content)
            if size >= BATCH_BYTES or len(held) == BATCH_PICTURES:
                writer.write_batch(pa.RecordBatch.from_pylist(held, schema=SCHEMA))
                bar.update(len(held))
                held, size = [], 0
        if held:
            writer.write_batch(pa.RecordBatch.from_pylist(held, schema=SCHEMA))
            bar.update(len(held))


def _entries(folders: Sequence[Path], used: Array) -> Iterator[tuple[Any, bytes]]:
    """(entry, bytes) of each used picture, in order: those of one range of identities after another."""
    total = sum((folder / INDEX).stat().st_size // ENTRY.itemsize for folder in folders)
    ranges = 256 if total > HELD else 1
    opened = _Files(folders)
    try:
        for first in range(ranges):
            parts = [_part(folder, first, ranges) for folder in folders]
            shard = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
            found = np.concatenate(parts)
            _, once = np.unique(found["identity"], return_index=True)
            wanted = used[_range(used, first, ranges)]
            for place in once[np.isin(found["identity"][once], wanted)].tolist():
                file = opened[int(shard[place])]
                file.seek(int(found["start"][place]))
                yield found[place], file.read(int(found["size"][place]))
    finally:
        opened.close()


class _Files(dict[int, IO[bytes]]):
    """The shards' files of bytes, of which few are open at a time."""

    def __init__(self, folders: Sequence[Path]) -> None:
        super().__init__()
        self._folders = folders

    def __missing__(self, shard: int) -> IO[bytes]:
        if len(self) >= OPEN_FILES:
            self.close()
        self[shard] = (self._folders[shard] / BYTES).open("rb")
        return self[shard]

    def close(self) -> None:
        for file in self.values():
            file.close()
        self.clear()


def _part(folder: Path, first: int, ranges: int) -> Array:
    index = np.load(folder / INDEX, mmap_mode="r")
    return np.array(index[_range(index["identity"], first, ranges)])


def _range(identities: Array, first: int, ranges: int) -> slice:
    """Which of the sorted identities begin with a byte of the range."""
    if ranges == 1:
        return slice(0, len(identities))
    bounds = np.array([bytes([first]), bytes([first, *[255] * WIDTH])], dtype=f"S{WIDTH}")
    start, stop = np.searchsorted(identities, bounds[0]), np.searchsorted(identities, bounds[1], "right")
    return slice(int(start), int(stop))
