"""What params.yaml names as the source -> files: one file, a folder, a pattern, a URL, a hub id, or several."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tasks.data import files
from tasks.data.columns import check_names
from tasks.data.files import SUFFIXES, SourceFile, examined, file_system, suffix_kind
from tasks.errors import UserError
from tasks.params import Format, PrepareDataParams, SourceParams

BUILTIN = "docstrings"
# What libraries put beside data.
SIDE_FILES = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
HELD_OUT = frozenset({"test", "validation", "valid", "val", "dev", "eval"})
PATTERN = re.compile(r"[*?\[]")
# ([(name to show, address)], files that are left out)
Listing = tuple[list[tuple[str, str]], list[str]]


@dataclass(frozen=True)
class Source:
    """One of the sources: its files in a fixed order, and how to read them.

    weight: how often an epoch sees its rows: 2.5 is twice, and a third time for half of them; 0.5 half of them once.
    ignored: files of a folder that are not read, each with the reason. hub: fetched, so not the user's own files.
    """

    name: str
    form: Format
    columns: Mapping[str, str]
    weight: float
    files: tuple[SourceFile, ...]
    ignored: tuple[str, ...] = field(default=(), compare=False)
    hub: bool = False

    @property
    def paths(self) -> list[Path]:
        """The user's own files among them, on this machine."""
        own = [] if self.hub or self.name == BUILTIN else self.files
        return [Path(file.address) for file in own if file.local]


def sources_of(wanted: PrepareDataParams, root: Path, fetch: bool = True) -> list[Source]:
    """The sources that `wanted` names, in its order. A source of a list that says no format or columns has those
    of prepare_data.

    Args:
        root: the workspace, which relative paths start from.
        fetch: get a hub data set's files; else such a source has none.

    Raises:
        UserError: a source is missing, empty, of no known kind, or a column is mapped that no format knows.
    """
    listed = wanted.source
    if isinstance(listed, str):
        listed = [SourceParams(source=listed)]
    return [
        _source(
            one.source,
            one.format if one.format != "auto" else wanted.format,
            one.columns or wanted.columns,
            one.weight,
            root,
            fetch,
        )
        for one in listed
    ]


def _source(
    name: str, form: Format, columns: Mapping[str, str], weight: float, root: Path, fetch: bool
) -> Source:
    check_names(columns)
    if name == BUILTIN:
        builtin = SourceFile(BUILTIN, BUILTIN, "docstrings")
        return Source(name, "chat", {"group": "group"}, weight, (builtin,))
    hub = _may_be_hub_id(name) and not (root / Path(name).expanduser()).exists()
    if hub and not fetch:
        return Source(name, form, dict(columns), weight, (), (), hub)
    found, ignored = _of_hub(name) if hub else _found(name, root)
    known: list[SourceFile] = []
    for shown, address in found:
        file = examined(shown, address)
        if file:
            known.append(file)
        else:
            ignored.append(f"{shown} (empty)")
    if not known:
        raise UserError(f"prepare_data.source={name} is empty; give a file with at least two rows")
    return Source(name, form, dict(columns), weight, tuple(known), tuple(ignored), hub)


def _of_hub(name: str) -> Listing:
    from tasks.data.hub import hub_files

    return hub_files(name), []


def _found(name: str, root: Path) -> Listing:
    if "://" in name:
        return _remote(name)
    path = root / Path(name).expanduser()
    if path.is_file():
        return [(name, str(path.absolute()))], []
    if path.is_dir():
        under = sorted(
            PurePosixPath(folder, file).relative_to(path).as_posix()
            for folder, _, names in os.walk(path)
            for file in names
        )
        return _chosen(
            name, [(f"{name.rstrip('/')}/{part}", part, str(path.absolute() / part)) for part in under]
        )
    if PATTERN.search(name):
        matched = sorted(found for found in glob.glob(str(path), recursive=True) if os.path.isfile(found))
        if not matched:
            raise UserError(f"prepare_data.source={name} matches no file; change the pattern")
        start = len(str(root)) + 1 if not Path(name).expanduser().is_absolute() else 0
        return _chosen(name, [(found[start:], Path(found).name, found) for found in matched])
    raise UserError(
        f"prepare_data.source={name} does not exist; give the path of a file ({SUFFIXES}), of a folder of them, "
        "a pattern, a URL, the id of a Hugging Face data set (owner/name), or docstrings"
    )


def _may_be_hub_id(name: str) -> bool:
    named_as_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    return not named_as_path and suffix_kind(name) is None and not PATTERN.search(name)


def _remote(url: str) -> Listing:
    system, path = file_system(url)
    with files.faults_named(url):
        if url.startswith(("http://", "https://")):
            return [(url, url)], []
        if PATTERN.search(path):
            below, start = sorted(system.glob(path)), 0
        elif system.isdir(path):
            below, start = sorted(system.find(path)), len(path.rstrip("/")) + 1
        else:
            return [(url, url)], []
        addresses = [(str(system.unstrip_protocol(found)), str(found)) for found in below]
    return _chosen(
        url,
        [
            (address, found[start:] if start else PurePosixPath(found).name, address)
            for address, found in addresses
        ],
    )


def _chosen(source: str, found: Sequence[tuple[str, str, str]]) -> Listing:
    """Of (name, part below the folder, address) those that hold rows to train on."""
    visible = [one for one in found if not any(step.startswith((".", "_")) for step in one[1].split("/"))]
    data = [one for one in visible if suffix_kind(one[1]) and PurePosixPath(one[1]).name not in SIDE_FILES]
    words = {part: set(re.split(r"[^a-z0-9]+", part.lower())) for _, part, _ in data}
    held = {part for part, said in words.items() if said & HELD_OUT and "train" not in said}
    if not any("train" in said for said in words.values()):
        held = set()
    if not data:
        others = ", ".join(part for _, part, _ in visible[:5]) or "nothing"
        raise UserError(
            f"prepare_data.source={source} holds no data file ({SUFFIXES}), but {others}; give one that does"
        )
    chosen = [(name, address) for name, part, address in data if part not in held]
    ignored = [f"{name} (no data file)" for name, part, _ in visible if part not in words]
    return chosen, ignored + [f"{name} (held out beside train)" for name, part, _ in data if part in held]


def fingerprint_of(source: Source) -> str:
    """Hash of the source's content: of one local file its SHA-256; of a remote one what its server says of it."""
    hashes = [(file.name, files.fingerprint(file)) for file in source.files]
    if len(hashes) == 1:
        return hashes[0][1]
    lines = "".join(f"{found} {name}\n" for name, found in hashes)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def size_of(source: Source) -> int:
    """Bytes of its files, as they lie there; of remote ones 0 where the server does not say."""
    return sum(file.size for file in source.files)
