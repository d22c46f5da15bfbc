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
RANGES = 256  # of identities, of which one at a time is held


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
    indexes = [np.load(folder / INDEX, mmap_mode="r") for folder in folders]
    with ExitStack() as stack:
        files = [stack.enter_context((folder / BYTES).open("rb")) for folder in folders]
        sink = stack.enter_context(pa.OSFile(str(path), "wb"))
        writer = stack.enter_context(pa.ipc.new_file(sink, SCHEMA))
        bar = stack.enter_context(progress("write pictures", len(used)))
        held: list[dict[str, Any]] = []
        size = 0
        for entry, number in _entries(indexes, used):
            files[number].seek(int(entry["start"]))
            content = files[number].read(int(entry["size"]))
            named = {name: int(entry[name]) for name in ("width", "height", "tokens")}
            held.append(
                {"identity": bytes(entry["identity"]).ljust(WIDTH, b"\0"), **named, "content": content}
            )
            size += len(content)
            if size >= BATCH_BYTES or len(held) == BATCH_PICTURES:
                writer.write_batch(pa.RecordBatch.from_pylist(held, schema=SCHEMA))
                bar.update(len(held))
                held, size = [], 0
        if held:
            writer.write_batch(pa.RecordBatch.from_pylist(held, schema=SCHEMA))
            bar.update(len(held))


def _entries(indexes: Sequence[Array], used: Array) -> Iterator[tuple[Any, int]]:
    """(entry, number of its shard) of each used picture, in order."""
    for first in range(RANGES):
        parts = [_range(index["identity"], first) for index in indexes]
        found = np.concatenate([index[part] for index, part in zip(indexes, parts, strict=True)])
        shard = np.repeat(np.arange(len(indexes)), [part.stop - part.start for part in parts])
        _, once = np.unique(found["identity"], return_index=True)
        for place in once[np.isin(found["identity"][once], used[_range(used, first)])].tolist():
            yield found[place], int(shard[place])


def _range(sorted_identities: Array, first: int) -> slice:
    start = np.searchsorted(sorted_identities, np.array(bytes([first]), dtype=f"S{WIDTH}"))
    if first == RANGES - 1:
        return slice(int(start), len(sorted_identities))
    stop = np.searchsorted(sorted_identities, np.array(bytes([first + 1]), dtype=f"S{WIDTH}"))
    return slice(int(start), int(stop))
