"""One data file, wherever it lies: what kind it is, its bytes unpacked, its fingerprint."""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, cast

import pyarrow as pa

from tasks.data.json_values import DECODER
from tasks.errors import UserError

# lines: a JSON row a line; list: one JSON list of rows; values: JSON rows over several lines each; text: a row a line.
Kind = Literal["lines", "list", "values", "csv", "tsv", "parquet", "arrow", "text", "docstrings"]
KINDS: dict[str, Kind] = {
    ".json": "list",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".txt": "text",
}
PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
HEAD = 1 << 16
SUFFIXES = ", ".join(KINDS)
# What is seen where data was meant, by its first bytes.
STRAYS = {
    b"version https://git-lfs": "is a Git LFS pointer, not the data; run git lfs pull",
    b"<!doctype": "is a web page, not data; fetch the file itself",
    b"<html": "is a web page, not data; fetch the file itself",
    b"fea1": "is Feather of version 1; write it again as version 2",
    codecs.BOM_UTF16_LE: "is UTF-16; save it as UTF-8",
    codecs.BOM_UTF16_BE: "is UTF-16; save it as UTF-8",
}


@dataclass(frozen=True)
class SourceFile:
    """A file with rows. `name` is how the user would write it; `address` an absolute path or a URL; `size` in bytes."""

    name: str
    address: str
    kind: Kind
    packed: str = ""
    size: int = 0

    @property
    def local(self) -> bool:
        return is_local(self.address)


def is_local(address: str) -> bool:
    return "://" not in address


def suffix_kind(name: str) -> Kind | None:
    """The kind that a file's name promises, packed or not; None for what is no data file."""
    path = PurePosixPath(re.split(r"[?#]", name)[0] if "://" in name else name)
    if path.suffix.lower() in PACKED:
        path = path.with_suffix("")
    return KINDS.get(path.suffix.lower())


def file_system(url: str) -> tuple[Any, str]:
    """(fsspec file system, path in it) of a URL.

    Raises:
        UserError: the protocol is unknown or needs a package that is not installed.
    """
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"prepare_data.source={url} cannot be opened: {str(error).rstrip('.')}") from None
    return system, str(path)


@contextmanager
def faults_named(name: str) -> Iterator[None]:
    """Turns a fault of disk, network or packing into one that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{name} is gone; put it back or change prepare_data.source") from None
    except _faults() as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{name} cannot be read ({reason.rstrip('.')}); fetch or write it again") from None


def _faults() -> tuple[type[BaseException], ...]:
    import lzma

    from aiohttp import ClientError

    # A table's columns may have names that are not UTF-8; its cells never come here.
    return (OSError, EOFError, lzma.LZMAError, pa.ArrowException, ClientError, UnicodeDecodeError)


def open_raw(address: str) -> BinaryIO:
    """The file's bytes as they lie there."""
    if is_local(address):
        return open(address, "rb", buffering=1 << 20)
    system, path = file_system(address)
    return cast(BinaryIO, system.open(path, "rb"))


def open_unpacked(address: str, packed: str) -> BinaryIO:
    """The file's bytes, unpacked; an archive that was cut off is an error, never a shorter file."""
    raw = open_raw(address)
    if not packed:
        return raw
    if packed == "xz":
        import lzma

        return cast(BinaryIO, lzma.open(raw))
    unpacked = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), packed)
    return cast(BinaryIO, io.BufferedReader(unpacked, 1 << 20))


def examined(name: str, address: str) -> SourceFile | None:
    """The file with its kind, by its name and its first bytes; None if it is empty.

    Raises:
        UserError: of no known kind, or something other than data.
    """
    kind = suffix_kind(name)
    if kind is None:
        raise UserError(
            f"prepare_data.source={name} ends in {PurePosixPath(name).suffix or 'nothing'}; give a file that ends in "
            f"{SUFFIXES} (or one of these with {', '.join(PACKED)})"
        )
    with faults_named(name):
        with open_raw(address) as raw:
            start = raw.read(8)
        packed = next((how for magic, how in MAGIC.items() if start.startswith(magic)), "")
        if kind in ("parquet", "arrow"):
            head = start
        else:
            with open_unpacked(address, packed) as stream:
                head = stream.read(HEAD)
    if not head.removeprefix(codecs.BOM_UTF8).strip():
        return None
    return SourceFile(name, address, _kind_of_content(name, kind, head, packed), packed, _size(address))


def _size(address: str) -> int:
    if is_local(address):
        return os.path.getsize(address)
    system, path = file_system(address)
    return int(system.info(path).get("size") or 0)


def _kind_of_content(name: str, kind: Kind, head: bytes, packed: str) -> Kind:
    for start, what in STRAYS.items():
        if head[:64].lower().startswith(start.lower()):
            raise UserError(f"{name} {what}")
    if kind in ("parquet", "arrow"):
        if packed:
            raise UserError(f"{name} is packed as a whole, and {kind} files are packed inside; unpack it")
        return kind
    if head.startswith((b"PAR1", b"ARROW1")):
        raise UserError(f"{name} is a {'Parquet' if head[:1] == b'P' else 'Arrow'} file; name it as one")
    return _kind_of_json(name, kind, head) if kind in ("list", "lines") else kind


def _kind_of_json(name: str, kind: Kind, head: bytes) -> Kind:
    """Many .json files hold a row a line, some .jsonl files one list."""
    text = head.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape").lstrip()
    lines = text.split("\n", 2)
    first_is_whole, more = _is_json(lines[0]), any(line.strip() for line in lines[1:])
    if text.startswith("["):
        return "lines" if kind == "lines" and first_is_whole and more else "list"
    if kind == "lines":
        return "lines"
    if not text.startswith("{"):
        raise UserError(
            f"{name} is not valid JSON at line 1; mend it: a list of rows in [ ], or a row a line"
        )
    if len(head) == HEAD and len(lines) == 1:  # the first row is longer than the head
        return "lines"
    if (first_is_whole and more) or (len(lines) > 1 and lines[1].startswith("{")):
        return "lines"
    if first_is_whole or not re.search(r"^\}\s*\{", text, re.MULTILINE):
        raise UserError(f"{name} holds one object, not a list of rows; put the rows in [ ]")
    return "values"


def _is_json(text: str) -> bool:
    try:
        DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return False
    return True


def fingerprint(file: SourceFile) -> str:
    """Hash of a local file's content, or of what its server says of it (size, ETag, time)."""
    if file.kind == "docstrings":
        from tasks.data.docstrings import fingerprint as version

        return version()
    with faults_named(file.name):
        if file.local:
            with open(file.address, "rb") as opened:
                return hashlib.file_digest(opened, "sha256").hexdigest()
        system, path = file_system(file.address)
        said = {key: str(value) for key, value in system.info(path).items()}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
