"""The files of a Hugging Face data set.

`datasets` says which files make up a split; they are read here, like any local file. Its own JSON reader would make
one table of them, whose types depend on the rows that come first and in which every tool has all others' parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.data.files import suffix_kind
from tasks.errors import UserError

# owner/name[@revision][:subset[:split]]
HUB_ID = re.compile(r"(?P<name>[^@:]+)(@(?P<revision>[^:]+))?(:(?P<subset>[^:]*)(:(?P<split>[^:]+))?)?$")
TRAIN = "train"

Found = list[tuple[str, str]]


def hub_files(said: str) -> Found:
    """[(name to show, local path)] of the split of a data set, fetched into Hugging Face's cache.

    Args:
        said: `owner/name`, or with a revision, a subset and a split: `owner/name@main:subset:split`.

    Raises:
        UserError: not found, no network, or no such subset or split.
    """
    parts = HUB_ID.match(said)
    if not parts:
        raise UserError(
            f"prepare_data.source={said} is no Hugging Face id; write owner/name@revision:subset:split"
        )
    name, revision, subset = parts["name"], parts["revision"], parts["subset"] or None
    split = parts["split"] or TRAIN
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetNotFoundError

    try:
        builder = load_dataset_builder(name, subset, revision=revision)
        return _of_split(builder, said, name, split)
    except UserError:
        raise
    except (DatasetNotFoundError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        if "onfig name" in reason and "missing" in str(error):
            raise UserError(
                f"prepare_data.source={said} has several subsets; name one: {name}:SUBSET ({_one_line(error)})"
            ) from None
        raise UserError(
            f"prepare_data.source={said} is no file here and could not be fetched as a Hugging Face data set "
            f"({reason}); check the name and the network, or give a local .json or .jsonl file"
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _of_split(builder: Any, said: str, name: str, split: str) -> Found:
    by_split = builder.config.data_files
    if by_split:
        if split not in by_split:
            raise _no_split(said, name, list(map(str, by_split)))
        urls = [str(url) for url in by_split[split]]
        # Our readers know none of a loader's options, such as the field of a JSON object that holds the rows.
        if all(suffix_kind(url) for url in urls) and not getattr(builder.config, "field", None):
            return _fetched(name, urls)
    return _converted(builder, said, name, split)


def _no_split(said: str, name: str, splits: Sequence[str]) -> UserError:
    subset = said.split(":")[1] if ":" in said else ""
    return UserError(
        f"prepare_data.source={said}: {name} has no split {said.split(':')[2] if said.count(':') > 1 else TRAIN}, but "
        f"{', '.join(splits)}; write for example {said.partition(':')[0]}:{subset}:{splits[0]}"
    )


def _fetched(name: str, urls: Sequence[str]) -> Found:
    from huggingface_hub import HfFileSystem, hf_hub_download

    found: Found = []
    for url in urls:
        if not url.startswith("hf://"):
            found.append((f"{name}/{Path(url).name}" if "://" not in url else url, url))
            continue
        place: Any = HfFileSystem().resolve_path(url)
        local = hf_hub_download(
            place.repo_id, place.path_in_repo, repo_type=place.repo_type, revision=place.revision
        )
        found.append((f"{name}/{place.path_in_repo}", local))
    return found


def _converted(builder: Any, said: str, name: str, split: str) -> Found:
    """The Arrow files that `datasets` makes of what is no plain file of rows."""
    builder.download_and_prepare()
    if split not in builder.info.splits:
        raise _no_split(said, name, list(builder.info.splits))
    table = builder.as_dataset(split=split)
    return [(f"{name}/{Path(file['filename']).name}", file["filename"]) for file in table.cache_files]
