"""Where `elastane plan` takes a model's config from: a folder, a file, the hub."""

from __future__ import annotations

import json
import time

import pytest

from tasks.commands.plan_model import model_config
from tasks.errors import UserError
from tests.unit import hub
from tests.unit.published_configs import published


def test_a_folder_and_a_file_are_models_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(published("qwen3-4b")))
    assert model_config(str(tmp_path)) == model_config(str(tmp_path / "config.json")) == published("qwen3-4b")
    with pytest.raises(UserError, match=r"config\.json is missing"):
        (tmp_path / "config.json").unlink()
        model_config(str(tmp_path))


def test_a_hub_that_does_not_answer_is_a_sentence_at_once(monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{filename}"
    )
    start = time.monotonic()
    with pytest.raises(UserError, match=r"out of reach .* give a local config"):
        model_config("owner/model")
    assert time.monotonic() - start < 10


def test_a_config_is_fetched_from_the_hub(tmp_path, monkeypatch):
    with hub.serve() as served:
        (tmp_path / "config.json").write_text(json.dumps(published("qwen3-4b")))
        commit = served.push(tmp_path)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            f"{served.url}/{{repo_id}}/resolve/{commit}/{{filename}}",
        )
        assert model_config(hub.REPOSITORY) == published("qwen3-4b")
