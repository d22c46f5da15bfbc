"""Answers: alone and in a batch, where they end, how they are drawn, and what has no room."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tasks.commands import chat as chat_command
from tasks.commands.generate import generate as generate_command
from tasks.data.chosen_template import ensure_template
from tasks.errors import UserError
from tasks.paths import Paths
from tasks.sampling import GREEDY, Sampling
from tasks.trainer.inference import answer_what_fits, context_length, encoded, generate, stop_ids
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ["a", "What is the third letter?", "one two three", "?!"]


def asked(*prompts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def opinionated(folder: Path, **how: Any) -> Path:
    """A random model whose next token depends on what it read: weights ten times as large as they are drawn."""
    tiny.write_model(folder, **how)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(10)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("models")
    return {family: opinionated(top / family, family=family) for family in ("llama", "bloom")}


def opened(folder: Path, side: str = "right") -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(
        folder, padding_side=side
    )


# --- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_an_answer_is_the_same_alone_and_in_a_batch(folders: dict[str, Path], family: str, side: str) -> None:
    """unslothai/unsloth#772, huggingface/transformers#25790: right padding gave wrong text."""
    model, tokenizer = opened(folders[family], side)
    model.generation_config.repetition_penalty = 1.5  # would count the padding of a batch as text
    tokenizer.pad_token = tokenizer.eos_token
    told = generate(model, tokenizer, asked(*PROMPTS), 12)
    assert told == [generate(model, tokenizer, asked(prompt), 12)[0] for prompt in PROMPTS]
    assert len(set(told)) > 2, "the prompts matter"
    assert tokenizer.padding_side == side and model.generation_config.repetition_penalty == 1.5
    # The same batch as the tokenizer would pad it.
    ids = encoded(tokenizer, asked(*PROMPTS))
    padded = tokenizer.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
    wrong = model.generate(**padded, max_new_tokens=12, do_sample=False, repetition_penalty=1.0)
    wrong = tokenizer.batch_decode(wrong[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)
    assert [text.strip() for text in wrong] != told


def test_more_prompts_than_a_batch_keep_their_order(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.trainer.inference.BATCH", 3)
    model, tokenizer = opened(folders["llama"])
    told = generate(model, tokenizer, asked(*PROMPTS, *PROMPTS), 6)
    assert told == generate(model, tokenizer, asked(*PROMPTS), 6) * 2


# --- where an answer ends -----------------------------------------------------------------------


def test_an_answer_ends_at_any_of_several_end_tokens(folders: dict[str, Path]) -> None:
    model, tokenizer = opened(folders["llama"])
    (ids,) = encoded(tokenizer, asked("What is it?"))
    whole = model.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(ids) :].tolist()
    end = next(place for place in range(3, 12) if whole[place] not in whole[:place])
    never = next(token for token in range(100, 259) if token not in whole)
    for named in ([never, whole[end]], [whole[end], never]):
        model.generation_config.eos_token_id = named
        assert stop_ids(model, tokenizer) == {*named, 2}
        (told,) = generate(model, tokenizer, asked("What is it?"), 12)
        assert told == tokenizer.decode(whole[:end], skip_special_tokens=True).strip()


@pytest.mark.parametrize(
    ("behind", "found"),
    [
        ("{{ '<think></think>' }}{{ message['content'] }}<|im_end|>\n", "<|im_end|>"),
        ("{{ message['content'] }}\n\n<|im_end|>", "<|im_end|>"),
        ("{{ message['content'] }} END<|im_end|>", "<|im_end|>"),
        ("{{ message['content'] }}</done>\n", "</done>"),
        ("{{ message['content'] }}\n", ""),
        ("{{ message['content'] }} END", ""),
    ],
)
def test_the_token_behind_an_answer_ends_it(tmp_path: Path, behind: str, found: str) -> None:
    """Whether or not the model's files name it: `data/base/` does, and no other place is asked."""
    tiny.write_model(tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    tokenizer.eos_token = None
    tokenizer.add_tokens(["<think>", "</think>", "</done>"])
    turn = (
        "{% if message['role'] == 'assistant' %}"
        + behind
        + "{% else %}Q: {{ message['content'] }}\n{% endif %}"
    )
    tokenizer.chat_template = "{% for message in messages %}" + turn + "{% endfor %}"
    paths = Paths(tmp_path)
    tiny.write_model(paths.base)
    tokenizer.save_pretrained(paths.base)
    (paths.base / "generation_config.json").write_text('{"eos_token_id": null}')
    ensure_template(tiny.params(), paths)
    model, written = opened(paths.base)
    assert stop_ids(model, written) == ({written.convert_tokens_to_ids(found)} if found else set())


# --- the context --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model with 64 positions."""
    model, tokenizer = opened(opinionated(tmp_path_factory.mktemp("short") / "m"))
    model.config.max_position_embeddings = 64
    return model, tokenizer


def test_a_prompt_without_room_names_both_lengths(short: tuple[Any, Any]) -> None:
    model, tokenizer = short
    frame = len(encoded(tokenizer, asked(""))[0])
    with pytest.raises(UserError, match="prompt 2 of 2 has 64 tokens and the context of the model 64"):
        generate(model, tokenizer, asked("a", "b" * (64 - frame)), 8)
    assert answer_what_fits(model, tokenizer, asked("b" * 99, "a", "b" * 64), 8) == [
        "",
        *generate(model, tokenizer, asked("a"), 8),
        "",
    ]
    assert answer_what_fits(model, tokenizer, [], 8) == []


def test_a_token_without_a_row_is_named(short: tuple[Any, Any]) -> None:
    model, tokenizer = short
    tokenizer.add_tokens(["<tool>"])
    with pytest.raises(UserError, match="prompt 1 of 1 holds <tool>, for which the model has no row"):
        generate(model, tokenizer, asked("a <tool>"), 8)


def test_an_answer_ends_with_the_context_and_its_neighbours_go_on(short: tuple[Any, Any]) -> None:
    model, tokenizer = short
    model.generation_config.eos_token_id = None
    frame = len(encoded(tokenizer, asked(""))[0])
    nearly = "b" * (64 - frame - 3)
    lengths: list[tuple[int, int]] = []
    forward = model.generate

    def watched(**given: Any) -> Any:
        lengths.append((*given["input_ids"].shape,))
        return forward(**given)

    model.generate = watched
    try:
        told = generate(model, tokenizer, asked("a", nearly, "c"), 9)
        assert lengths == [(2, frame + 1), (1, 61)]
        assert told[::2] == generate(model, tokenizer, asked("a", "c"), 9)
        assert told[1] == generate(model, tokenizer, asked(nearly), 3)[0]
    finally:
        model.generate = forward


def test_a_stretched_context_counts(short: tuple[Any, Any]) -> None:
    model, _ = short
    assert context_length(model) == 64
    model.config.rope_parameters |= {"factor": 4.0, "original_max_position_embeddings": 64}
    assert context_length(model) == 256
    for key in ("factor", "original_max_position_embeddings"):
        del model.config.rope_parameters[key]


def test_alibi_names_no_end(folders: dict[str, Path]) -> None:
    model, _ = opened(folders["bloom"])
    del model.config.max_position_embeddings  # BLOOM's class has none; it came with how tests write models
    assert context_length(model) is None


# --- drawn answers ------------------------------------------------------------------------------


def test_drawn_answers_follow_the_seed(folders: dict[str, Path]) -> None:
    model, tokenizer = opened(folders["llama"])
    model.generation_config.top_k = 1  # the model's own settings do not narrow what was asked for

    def drawn(seed: int, sampling: Sampling) -> list[str]:
        torch.manual_seed(seed)
        return generate(model, tokenizer, asked(*PROMPTS), 12, sampling)

    warm = Sampling(temperature=2.0)
    assert drawn(1, warm) == drawn(1, warm) != drawn(2, warm)
    likeliest = generate(model, tokenizer, asked(*PROMPTS), 12, GREEDY)
    assert drawn(1, warm) != likeliest
    assert drawn(1, Sampling(temperature=2.0, top_p=1e-6)) == likeliest
    assert drawn(1, Sampling(temperature=1e-4)) == likeliest


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -0.5}, "--temperature -0.5 is no temperature"),
        ({"temperature": float("nan")}, "--temperature nan is no temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "--top-p 0.0 is no share"),
        ({"temperature": 1.0, "top_p": 1.1}, "--top-p 1.1 is no share"),
        ({"top_p": 0.9}, "--top-p 0.9 is of drawn tokens, and --temperature 0"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused(values: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Sampling(**values)


# --- commands -----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [[], [""], [" \n", ""]])
def test_no_prompt_is_refused_before_anything_is_loaded(prompts: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got no prompt"):
        generate_command(tiny.params(), Paths(tmp_path), prompts, None, False)


def test_base_and_a_version_are_two_models(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--base and --model models:/x/1 name two models"):
        generate_command(tiny.params(), Paths(tmp_path), ["a"], None, True, "models:/x/1")


def test_chat_takes_back_a_turn_without_room(
    short: tuple[Any, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(chat_command, "loaded", lambda paths, folder: short)
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n" + "b" * 70 + "\n\na\n"))
    chat_command.chat(tiny.params(), Paths(tmp_path), max_new_tokens=4)
    said = capsys.readouterr()
    (answer,) = generate(*short, asked("a"), 4)
    assert said.out == f"{answer}\n" * 2
    assert "tokens and the context of the model 64" in said.err


def test_the_tokens_of_a_generation_config_survive_as_json(tmp_path: Path) -> None:
    """Written by hand as hubs have it: a list."""
    folder = opinionated(tmp_path / "m")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, 77]}))
    model, tokenizer = opened(folder)
    assert stop_ids(model, tokenizer) == {2, 77}
