"""The files of a Hugging Face data set.

`datasets` says which files make up a split; they are read here, like any local file. Its own JSON reader would make
one table of them, whose types depend on the rows that come first and in which every tool has all others' parameters.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.data.files import suffix_kind
from tasks.errors import UserError
from tasks.paths import cache_folder
from tasks.stage import say

TRAIN = "train"

Found = list[tuple[str, str]]


@dataclass(frozen=True)
class HubId:
    """`owner/name`, or with more: `owner/name@revision:subset:split`."""

    said: str
    name: str
    revision: str | None
    subset: str | None
    split: str

    @classmethod
    def of(cls, said: str) -> HubId:
        parts = re.match(
            r"(?P<name>[^@:]+)(@(?P<revision>[^:]+))?(:(?P<subset>[^:]*)(:(?P<split>[^:]+))?)?$", said
        )
        if not parts:
            raise UserError(
                f"prepare_data.source={said} is no Hugging Face id; write owner/name@revision:subset:split"
            )
        return cls(said, parts["name"], parts["revision"], parts["subset"] or None, parts["split"] or TRAIN)

    def no_split(self, splits: Sequence[str]) -> UserError:
        revision = f"@{self.revision}" if self.revision else ""
        return UserError(
            f"prepare_data.source={self.said}: {self.name} has no split {self.split}, but {', '.join(splits)}; "
            f"write for example {self.name}{revision}:{self.subset or ''}:{splits[0]}"
        )


def hub_files(said: str) -> Found:
    """[(name to show, local path)] of the split of a data set, fetched into Hugging Face's cache.

    Without network those that were fetched before.

    Args:
        said: see HubId.

    Raises:
        UserError: not found, no network, or no such subset or split.
    """
    wanted = HubId.of(said)
    from datasets import load_dataset_builder

    try:
        builder = load_dataset_builder(wanted.name, wanted.subset, revision=wanted.revision)
        return _of_split(builder, wanted)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        known = _fetched_before(wanted) if isinstance(error, ConnectionError) else []
        if known:
            say(f"prepare_data: the hub cannot be reached; {said} is what was fetched before")
            return known
        raise _not_fetched(wanted, error) from None


def _not_fetched(wanted: HubId, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
    if reason.startswith("Config name is missing"):
        return UserError(
            f"prepare_data.source={wanted.said} has several subsets; name one: {wanted.name}:SUBSET ({reason})"
        )
    return UserError(
        f"prepare_data.source={wanted.said} is no file here and could not be fetched as a Hugging Face data set "
        f"({reason}); check the name and the network, or give a local .json or .jsonl file"
    )


def _of_split(builder: Any, wanted: HubId) -> Found:
    by_split = builder.config.data_files
    if by_split:
        if wanted.split not in by_split:
            raise wanted.no_split(list(map(str, by_split)))
        urls = [str(url) for url in by_split[wanted.split]]
        # Our readers know none of a loader's options, such as the field of a JSON object that holds the rows.
        if all(suffix_kind(url) for url in urls) and not getattr(builder.config, "field", None):
            return _fetched(wanted, urls)
    return _converted(builder, wanted)


def _fetched(wanted: HubId, urls: Sequence[str]) -> Found:
    from huggingface_hub import HfFileSystem

    if not all(url.startswith("hf://") for url in urls):  # a folder that `datasets` takes for a data set
        return [(f"{wanted.name}/{Path(url).name}", url) for url in urls]
    places: list[Any] = [HfFileSystem().resolve_path(url) for url in urls]
    files = [[place.repo_id, place.revision, place.path_in_repo] for place in places]
    found = [_file(*file) for file in files]
    record = _record(wanted)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(files))
    return found


def _file(repository: str, revision: str, path: str, *, fetch: bool = True) -> tuple[str, str]:
    from huggingface_hub import hf_hub_download

    local = hf_hub_download(
        repository, path, repo_type="dataset", revision=revision, local_files_only=not fetch
    )
    return f"{repository}/{path}", local


def _record(wanted: HubId) -> Path:
    """Which files the id meant when it was last fetched."""
    return cache_folder() / "hub" / f"{hashlib.sha256(wanted.said.encode()).hexdigest()[:32]}.json"


def _fetched_before(wanted: HubId) -> Found:
    try:
        files = json.loads(_record(wanted).read_text())
        return [_file(*file, fetch=False) for file in files]
    except (OSError, ValueError):  # never fetched, or removed from Hugging Face's cache since
        return []


def _converted(builder: Any, wanted: HubId) -> Found:
    """The Arrow files that `datasets` makes of what is no plain file of rows."""
    builder.download_and_prepare()
    if wanted.split not in builder.info.splits:
        raise wanted.no_split(list(builder.info.splits))
    table = builder.as_dataset(split=wanted.split)
    return [(f"{wanted.name}/{Path(file['filename']).name}", file["filename"]) for file in table.cache_files]
