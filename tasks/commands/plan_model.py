"""The config of a model that need not be here: a path, a known short name or a Hugging Face id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tasks.errors import UserError
from tasks.planner.known_models import known_config, unknown_model
from tasks.select_strategy import read_config


def model_config(name: str) -> Mapping[str, object]:
    """config.json of a folder or file, of the built-in table, or fetched from the hub.

    Raises:
        UserError: there is no such model, or the hub is out of reach.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return read_config(path / "config.json")
    if path.is_file():
        return read_config(path)
    known = known_config(name)
    if known is not None:
        return known
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _fetched(name)
    raise unknown_model(name)


def _fetched(name: str) -> Mapping[str, object]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return read_config(Path(hf_hub_download(name, "config.json", etag_timeout=10)))
    except GatedRepoError:
        reason = "its owner asks for consent; accept on its page and log in with `hf auth login`"
    except RepositoryNotFoundError:
        reason = "Hugging Face knows no such model; look at the spelling"
    except LocalEntryNotFoundError:
        reason = "Hugging Face is out of reach and it is not in the cache; give a local config.json or a known short name"
    except (HfHubHTTPError, OSError) as error:
        reason = f"{str(error).splitlines()[0]}; give a local config.json or a known short name"
    raise UserError(f"--model {name}: its config.json cannot be had: {reason}") from None
