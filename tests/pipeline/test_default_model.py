"""Every command on the default model and the built-in rows, as a newcomer meets them; only the amounts are small.

The replay is the longest of them, so it starts right after the run and goes on while the others are tried.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tasks.commands.reproduce import ReproduceReport
from tasks.contracts import DataManifest, HardwareProfile, TrainReport
from tasks.params import SECTIONS
from tasks.paths import Paths
from tests import tiny
from tests.pipeline.workspace import RECIPE, Workspace, make_workspace

pytestmark = pytest.mark.timeout(500)

AMOUNTS = {
    "prepare_data.max_rows": 60,
    "prepare_data.max_length": 96,
    "train.global_batch": 2,
    "train.token_budget": 300,
    "evaluate.max_rows": 4,
    "evaluate.samples": 1,
    "evaluate.max_new_tokens": 4,
}
QUESTION = "What does os.path.join do in Python?"


@dataclass(frozen=True)
class FirstLight:
    """A workspace after its first run, and the replay of the version that this run registered."""

    workspace: Workspace
    run: subprocess.CompletedProcess[str]
    replay: subprocess.Popen[str]

    @property
    def paths(self) -> Paths:
        return Paths(self.workspace.root)


def shipped(key: str) -> Any:
    """What params.yaml as delivered says under a dotted key."""
    value: Any = tiny.raw_params()
    for part in key.split("."):
        value = value[part]
    return value


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstLight]:
    delivered = {key: shipped(key) for key in ("model.name_or_path", *RECIPE)}
    # Commands run beside the replay here, and threads that wait for a core held by another process only spin.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        workspace = make_workspace(
            tmp_path_factory.mktemp("default") / "workspace", **{**delivered, **AMOUNTS}
        )
        run = workspace.must("elastane", "run", "--json")
        with (
            (workspace.root.parent / "replay.log").open("w") as log,
            subprocess.Popen(
                ["elastane", "reproduce", "models:/elastane/1", "--json"],
                cwd=workspace.root,
                env=workspace.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as replay,
        ):
            try:
                yield FirstLight(workspace, run, replay)
            finally:
                replay.kill()


def test_run_trains_evaluates_and_registers_it(light: FirstLight) -> None:
    summary = json.loads(light.run.stdout)
    assert summary["ran"] == list(SECTIONS)
    assert summary["evaluation"]["tuned"]["loss"] < summary["evaluation"]["base"]["loss"]
    assert (summary["registration"]["version"], summary["registration"]["alias"]) == (1, "candidate")
    trained = TrainReport.read(light.paths.train_report)
    assert trained.total_parameters > 134e6
    assert trained.steps > 1
    assert 200 < trained.tokens <= AMOUNTS["train.token_budget"]
    assert DataManifest.read(light.paths.manifest).source == "docstrings"
    for words in (f"{trained.steps} steps, {trained.tokens} tokens", "registered as elastane version 1"):
        assert words in light.run.stderr, words


def test_probe_shows_what_the_plan_was_made_for(light: FirstLight) -> None:
    done = light.workspace.must("elastane", "probe", "--json")
    seen = HardwareProfile.model_validate_json(done.stdout)
    assert seen.identity == HardwareProfile.read(light.paths.hardware).identity
    table = light.workspace.must("elastane", "probe").stdout
    assert f"device    {seen.device}\n" in table
    assert f"{seen.cpu_cores} cores" in table


@pytest.fixture(scope="module")
def answers(light: FirstLight) -> list[dict[str, str]]:
    """What `generate` says to a question on the command line and to one from a file."""
    file = light.workspace.root.parent / "questions.txt"
    file.write_text("Name a colour.\n\n")
    done = light.workspace.must("elastane", "generate", QUESTION, "--file", str(file), "--json")
    return json.loads(done.stdout)


def test_generate_answers_in_words(answers: list[dict[str, str]]) -> None:
    assert [row["prompt"] for row in answers] == [QUESTION, "Name a colour."]
    for row in answers:
        assert any(part.isalpha() for part in row["answer"].replace(".", " ").split()), row


def test_chat_answers_as_generate_does_and_starts_afresh(
    light: FirstLight, answers: list[dict[str, str]]
) -> None:
    talk = subprocess.run(
        ["elastane", "chat"],
        input=f"{QUESTION}\n\n{QUESTION}\nexit\nnot read\n",
        cwd=light.workspace.root,
        env=light.workspace.environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert talk.stdout == f"{answers[0]['answer']}\n" * 2
    assert "(new conversation)" in talk.stderr


def test_export_opens_with_plain_transformers_and_answers_alike(
    light: FirstLight, answers: list[dict[str, str]]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = light.workspace.must("elastane", "export", "out", "--merge")
    assert done.stdout == "out\n"
    assert "export: whole weights in out; logits differ from the tuned model's by at most" in done.stderr
    out = light.workspace.root / "out"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    told = model.generate(**prompt, max_new_tokens=AMOUNTS["evaluate.max_new_tokens"], do_sample=False)
    torch.set_num_threads(threads)
    new = told[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(new, skip_special_tokens=True).strip() == answers[0]["answer"]


def test_reproduce_says_the_same(light: FirstLight) -> None:
    printed, _ = light.replay.communicate(timeout=300)
    log = (light.workspace.root.parent / "replay.log").read_text()
    assert light.replay.returncode == 0, log
    report = ReproduceReport.model_validate_json(printed)
    assert report.same
    assert report.bit_identical
    assert report.replayed.tuned.loss == report.registered.tuned.loss
    assert report.registered_plan == report.replayed_plan
    assert "── train (replay)" in log
