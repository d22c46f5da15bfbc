"""The built-in table of models against published configs and published numbers of parameters."""

from __future__ import annotations

import pytest

from tasks.planner.known_models import ALIASES, KNOWN, known_config, unknown_model
from tasks.planner.model_spec import model_spec
from tests.unit.published_configs import IN_TRANSFORMERS, OWN_CODE, published

PUBLISHED = {**IN_TRANSFORMERS, **OWN_CODE}


@pytest.mark.parametrize("name", [name for name in KNOWN if name in PUBLISHED])
def test_a_known_model_is_the_published_one(name):
    assert model_spec(KNOWN[name]) == model_spec(published(name))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.738),
        ("llama-2-13b", 13.016),
        ("llama-2-70b", 68.977),
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.213),
        ("llama-3.1-70b", 70.554),
        ("llama-3.1-405b", 405.853),
        ("mistral-7b", 7.242),
        ("qwen-14b", 14.167),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("qwen2.5-3b", 3.086),
        ("qwen2.5-14b", 14.770),
        ("qwen2.5-32b", 32.764),
        ("qwen2.5-72b", 72.706),
        ("qwen3-8b", 8.191),
        ("baichuan2-7b", 7.506),
        ("bloom-7b1", 7.069),
        ("smollm2-1.7b", 1.711),
        ("gpt2", 0.124),
    ],
)
def test_the_others_have_as_many_parameters_as_their_pages_say(name, billions):
    assert model_spec(KNOWN[name]).parameters / 1e9 == pytest.approx(billions, abs=0.001)


def test_names_are_found_in_any_case_and_near_ones_are_told():
    assert known_config("Llama-3.1-8B") is KNOWN["llama-3.1-8b"]
    assert known_config("LLaVA-v1.6-7B") is KNOWN["llava-v1.6-vicuna-7b"]
    assert set(ALIASES.values()) <= set(KNOWN) and not set(ALIASES) & set(KNOWN)
    assert known_config("nothing") is None
    assert "near it: llama-2-7b" in str(unknown_model("llama2-7b"))
