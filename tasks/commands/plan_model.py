"""The config of a model that need not be here: a path, a known short name or a Hugging Face id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tasks.errors import UserError
from tasks.planner.known_models import known_config, unknown_model
from tasks.select_strategy import parse_config, read_config
from tasks.trainer.legacy.registry import native_config


def model_config(name: str) -> Mapping[str, object]:
    """config.json of a folder or file, of the built-in table, or fetched from the hub.

    A layout that is converted before training is planned as what it is converted to.

    Raises:
        UserError: there is no such model, or the hub is out of reach.
    """
    return native_config(_published(name), name)


def _published(name: str) -> Mapping[str, object]:
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
    """From the hub at its newest commit, asked once; from the cache where the hub does not answer."""
    from huggingface_hub import hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(name, "config.json")
    try:
        with urlopen(Request(url, headers=build_hf_headers()), timeout=10) as answer:
            return parse_config(answer.read().decode("utf-8"), url)
    except HTTPError as error:
        reason = {
            401: "knows no such model, or wants you to log in (`hf auth login`)",
            403: "wants its owner's consent: accept on the model's page and log in (`hf auth login`)",
            404: "has no config.json of that name",
        }.get(error.code, f"answers with {error.code}")
        raise UserError(
            f"--model {name}: Hugging Face {reason}; look at the spelling, or give a local config.json"
        ) from None
    except (URLError, TimeoutError) as error:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return read_config(Path(cached))
        reason = error.reason if isinstance(error, URLError) else error
        raise UserError(
            f"--model {name}: Hugging Face is out of reach ({reason}), nor is the config in the cache; give a local "
            "config.json or a known short name"
        ) from None
