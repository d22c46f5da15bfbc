"""Puts the chat template into `data/base/`, so that whatever writes a prompt later writes the one that was learnt.

`published.json` beside it keeps what the model came with wherever something else stands there now, and the hash of a
.jinja file of the user's.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tasks.contracts import write_text
from tasks.data.choice import JINJA, OWN, Choice, choose
from tasks.data.rendering import Template
from tasks.data.vision import processors_template
from tasks.errors import UserError
from tasks.params import Params
from tasks.paths import Paths
from tasks.stage import say

TEMPLATE, GENERATION, PUBLISHED = "chat_template.jinja", "generation_config.json", "published.json"


def ensure_template(params: Params, paths: Paths) -> Choice | None:
    """Brings the template in `data/base/` up to date with `prepare_data.template`, and says which it is and why.

    Where the end mark of an answer is no end token of the model's, generation_config.json gets it as one.

    Returns:
        None where nothing is known: then only rows without a template can be learnt.

    Raises:
        UserError: the template is unknown, or this tokenizer cannot write it.
    """
    from tasks.data.templates import Encoder, load_tokenizer

    model, wanted, base = params.model, params.prepare_data, paths.base
    tokenizer = load_tokenizer(base, model.name_or_path, model.trust_remote_code)
    published = _published(base, tokenizer.chat_template)
    tokenizer.chat_template = published["template"] or processors_template(base)
    choice = choose(wanted.template, tokenizer, base, model.name_or_path, paths.root)
    files: dict[str, str | None] = dict(published["files"])
    if choice is not None:
        if choice.text != published["template"]:
            files[TEMPLATE] = choice.text
        stops = {Template(tokenizer, choice.text).stop, tokenizer.eos_token} - {"", None}
        ids = sorted(tokenizer.get_vocab()[str(token)] for token in stops)
        files[GENERATION] = _with_stops(base, files[GENERATION], ids)
        say(f"prepare_data: prompts are {_called(choice.name)}, since {choice.evidence}")
        for note in Encoder(tokenizer, choice.text, wanted.max_length, wanted.learn).notes:
            say(f"  {note}")
    given = _digest(params, paths)
    if files == published["files"] and given is None:
        (base / PUBLISHED).unlink(missing_ok=True)
    else:
        published["given"] = given
        write_text(
            base / PUBLISHED, json.dumps(published, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        )
    for name, text in files.items():
        _bring(base / name, text)
    return choice


def template_changed(params: Params, paths: Paths) -> bool:
    """Whether a .jinja file of the user's is no longer the one in `data/base/`."""
    file = paths.base / PUBLISHED
    if not params.prepare_data.template.endswith(JINJA) or not file.is_file():
        return False
    return bool(json.loads(file.read_text(encoding="utf-8")).get("given") != _digest(params, paths))


def _digest(params: Params, paths: Paths) -> str | None:
    wanted = params.prepare_data.template
    file = paths.root / Path(wanted).expanduser()
    if not wanted.endswith(JINJA) or not file.is_file():
        return None
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _called(name: str) -> str:
    return f"written by {name} template" if name == OWN else f"those of {name}"


def _published(base: Path, template: Any) -> dict[str, Any]:
    """What the model came with: its template as the tokenizer has it, and the files as they were (None: no file)."""
    file = base / PUBLISHED
    if file.is_file():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    return {"template": template, "files": {name: _text(base / name) for name in (TEMPLATE, GENERATION)}}


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _bring(file: Path, text: str | None) -> None:
    if text is None:
        file.unlink(missing_ok=True)
    elif text != _text(file):
        write_text(file, text)


def _with_stops(base: Path, generation: str | None, stops: list[int]) -> str | None:
    """generation_config.json with `stops` among its end tokens; as it is where they are."""
    config = base / "config.json"
    if generation is None and not config.is_file():
        return None
    said = json.loads(generation if generation is not None else config.read_text(encoding="utf-8"))
    if not isinstance(said, dict):
        raise UserError(f"{base / GENERATION} is no JSON object; mend the model's files")
    known = said.get("eos_token_id")
    ends = known if isinstance(known, list) else [] if known is None else [known]
    more = [stop for stop in stops if stop not in ends]
    if not more:
        return generation
    values = (
        said if generation is not None else {key: said[key] for key in ("bos_token_id",) if said.get(key)}
    )
    return json.dumps(values | {"eos_token_id": [*ends, *more]}, indent=2, sort_keys=True) + "\n"
