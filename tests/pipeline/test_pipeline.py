"""The whole pipeline on a tiny model: what runs, what is skipped, what comes back, what users see."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from tasks.contracts import DataManifest, EvalReport, PlanReport, Registration, TrainReport
from tasks.errors import UserError
from tasks.params import SECTIONS
from tasks.paths import Paths
from tests import tiny
from tests.pipeline.workspace import Workspace, make_workspace

pytestmark = pytest.mark.timeout(500)


@pytest.fixture
def workspace(finished: Workspace, tmp_path: Path) -> Workspace:
    return finished.copy(tmp_path / "workspace")


def stages_run(workspace: Workspace) -> list[str]:
    """Brings the pipeline up to date by DVC and names the stages that ran."""
    done = workspace.must("dvc", "repro")
    return [name for name in SECTIONS if f"Running stage '{name}'" in done.stdout]


def test_sections_stages_modules_and_tasks_carry_the_same_names() -> None:
    from flows.finetune import STAGE_TASKS

    stages = list(YAML(typ="safe").load((tiny.REPOSITORY / "dvc.yaml").read_text())["stages"])
    assert stages == list(SECTIONS)
    assert [task.name for task in STAGE_TASKS] == stages
    assert [name for name in tiny.raw_params() if name in stages] == stages
    assert all((tiny.REPOSITORY / "tasks" / f"{stage}.py").is_file() for stage in stages)


def test_the_first_run_ends_in_a_table_and_a_registered_version(finished: Workspace) -> None:
    summary = json.loads((finished.root.parent / "first-run.json").read_text())
    assert summary["ran"] == list(SECTIONS)
    assert summary["registration"]["version"] == 1
    assert summary["evaluation"]["tuned"]["loss"] < summary["evaluation"]["base"]["loss"]
    log = (finished.root.parent / "first-run.log").read_text()
    for words in (
        "eval loss",
        "perplexity",
        "tokens/s",
        "why",
        "alias candidate",
        "mlflow ui",
        "prefect server start",
    ):
        assert words in log, words


def test_an_unchanged_repro_runs_only_the_probe_and_fast(workspace: Workspace) -> None:
    stages_run(workspace)
    begin = time.monotonic()
    assert stages_run(workspace) == ["probe_hardware"]
    assert time.monotonic() - begin < 10, "5 s on an idle machine; tests share the cores"


def test_another_plan_retrains_and_registers_nothing(workspace: Workspace) -> None:
    before = workspace.weights()
    registered = (workspace.root / "reports" / "registration.json").read_bytes()
    workspace.change(**{"select_strategy.per_device_train_batch_size": 1})
    assert stages_run(workspace) == ["probe_hardware", "select_strategy", "train"]
    assert PlanReport.read(workspace.root / "reports" / "plan.json").chosen.plan.micro_batch == 1
    assert all(torch.equal(value, before[name]) for name, value in workspace.weights().items())
    assert (workspace.root / "reports" / "registration.json").read_bytes() == registered
    assert len(list((workspace.root / "runs").glob("*/steps.jsonl"))) == 1, "no second run began"


def test_a_key_reruns_only_the_stages_that_read_it(workspace: Workspace) -> None:
    workspace.change(**{"register.min_loss_improvement": 0.001})
    assert stages_run(workspace) == ["probe_hardware", "register"]
    workspace.change(**{"evaluate.max_rows": 6})
    assert stages_run(workspace) == ["probe_hardware", "evaluate", "register"]


def test_a_new_recipe_trains_and_going_back_does_not(workspace: Workspace) -> None:
    first = workspace.weights()
    workspace.change(**{"train.num_train_epochs": 2})
    assert "train" in stages_run(workspace)
    assert any(not torch.equal(value, first[name]) for name, value in workspace.weights().items())
    workspace.change(**{"train.num_train_epochs": 4})
    logs = {path: path.stat().st_mtime_ns for path in (workspace.root / "runs").glob("*/steps.jsonl")}
    assert len(logs) == 2
    stages_run(workspace)
    assert all(torch.equal(value, first[name]) for name, value in workspace.weights().items())
    assert {path: path.stat().st_mtime_ns for path in logs} == logs, "nothing was trained"
    assert Registration.read(workspace.root / "reports" / "registration.json").version == 1


@pytest.mark.parametrize("how", ["checkout", "repro"])
def test_a_deleted_output_comes_back(workspace: Workspace, how: str) -> None:
    kept = {
        name: (workspace.root / name).read_bytes()
        for name in ("reports/train_report.json", "reports/plan.json")
    }
    weights = workspace.weights()
    for name in ("reports/train_report.json", "reports/train_performance.json", "reports/plan.json"):
        (workspace.root / name).unlink()
    shutil.rmtree(workspace.root / "checkpoints" / "final")
    workspace.must("dvc", how)
    assert {name: (workspace.root / name).read_bytes() for name in kept} == kept
    assert (workspace.root / "reports" / "train_performance.json").is_file()
    assert all(torch.equal(value, weights[name]) for name, value in workspace.weights().items())


def test_a_clone_with_a_remote_trains_nothing(workspace: Workspace, tmp_path: Path) -> None:
    workspace.must("dvc", "remote", "add", "-d", "store", str(tmp_path / "remote"))
    workspace.must("git", "add", "-A")
    workspace.must("git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "trained")
    workspace.must("dvc", "push")
    workspace.must("git", "clone", "-q", str(workspace.root), str(tmp_path / "clone"))
    clone = Workspace(tmp_path / "clone", dict(workspace.recipe))
    clone.must("dvc", "pull")
    assert stages_run(clone) == ["probe_hardware"]
    assert all(torch.equal(value, clone.weights()[name]) for name, value in workspace.weights().items())
    # Without the pull of everything, the train stage asks the remote itself.
    shutil.rmtree(clone.root / "checkpoints")
    shutil.rmtree(clone.root / ".dvc" / "cache")
    clone.must("dvc", "repro")
    assert not list((clone.root / "runs").glob("*/steps.jsonl"))
    assert all(torch.equal(value, clone.weights()[name]) for name, value in workspace.weights().items())


def test_everything_is_in_mlflow(finished: Workspace) -> None:
    registration = Registration.read(finished.root / "reports" / "registration.json")
    report = EvalReport.read(finished.root / "reports" / "eval_report.json")
    with sqlite3.connect(f"file:{finished.root / 'mlflow.db'}?mode=ro", uri=True) as store:
        curve = store.execute(
            "select count(*) from metrics where run_uuid = ? and key = 'train_loss'",
            [registration.mlflow_run_id],
        ).fetchone()[0]
        text = store.execute("select description from model_versions where version = 1").fetchone()[0]
        alias = store.execute("select alias, version from registered_model_aliases").fetchall()
    steps = len((finished.root / "runs" / registration.run_key / "steps.jsonl").read_text().splitlines())
    assert curve == steps
    assert alias == [("candidate", 1)]
    for words in (
        f"{report.base.loss:.4f}",
        f"{report.tuned.loss:.4f}",
        "no champion yet",
        "git ",
        "Plan single",
    ):
        assert words in text, words
    files = {path.name for path in (finished.root / "mlartifacts").rglob("*") if path.is_file()}
    assert {"params.yaml", "dvc.lock", "git.diff", "plan.json", "samples_table.json", "MLmodel"} <= files
    assert {"plan.txt", "plan.png"} <= files
    assert {"data.png", "data_table.json", "data.html"} <= files


def test_prefect_shows_what_was_prepared(finished: Workspace) -> None:
    """The content itself is tests/unit/test_data_report.py's."""
    store = next((finished.root / "runs" / "prefect").glob("prefect.db"))
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as opened:
        kept = dict(opened.execute("select key, data from artifact where key is not null").fetchall())
    assert {"data", "data-picture", "data-rows", "plan", "result"} <= kept.keys()
    lines = json.loads(json.loads(kept["data"]) if kept["data"].startswith('"') else kept["data"])
    manifest = DataManifest.read(Paths(finished.root).manifest)
    splits = {line["name"]: line["rows"] for line in lines if line["part"] == "split"}
    assert splits == {"train": manifest.train.rows, "validation": manifest.validation.rows}
    assert "data:image/png;base64,iVBOR" in kept["data-picture"]
    assert "<|im_end|>⟧" in json.loads(kept["data-rows"])


def test_a_registered_model_answers(finished: Workspace) -> None:
    code = (
        "import mlflow, json; mlflow.set_tracking_uri('sqlite:///mlflow.db'); "
        "print(json.dumps(mlflow.pyfunc.load_model('models:/elastane/1').predict(['Say backwards: alpha beta'])))"
    )
    done = finished.must("python", "-c", code)
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(answers) == 1
    assert isinstance(answers[0], str)


def test_a_model_worse_than_its_base_is_logged_and_not_registered(workspace: Workspace) -> None:
    workspace.change(**{"register.min_loss_improvement": 50.0})
    workspace.must("dvc", "repro")
    registration = Registration.read(workspace.root / "reports" / "registration.json")
    assert registration.version is None
    assert "not registered" in registration.reason
    assert "min_loss_improvement=50.0" in registration.reason


def test_a_later_version_is_compared_with_the_champion(workspace: Workspace) -> None:
    code = (
        "import mlflow; mlflow.set_tracking_uri('sqlite:///mlflow.db'); "
        "mlflow.MlflowClient().set_registered_model_alias('elastane', 'champion', '1')"
    )
    workspace.must("python", "-c", code)
    workspace.change(**{"train.num_train_epochs": 1})
    workspace.must("dvc", "repro")
    with sqlite3.connect(f"file:{workspace.root / 'mlflow.db'}?mode=ro", uri=True) as store:
        text = store.execute("select description from model_versions where version = 2").fetchone()[0]
    assert "champion (version 1)" in text


def test_a_version_is_reproduced_bit_for_bit(workspace: Workspace) -> None:
    done = workspace.must("elastane", "reproduce", "models:/elastane/1")
    assert "equal bit for bit" in done.stdout
    assert "not equal" not in done.stdout
    listed = workspace.must("git", "worktree", "list")
    assert len(listed.stdout.splitlines()) == 1, "its folder is gone"


def test_reproduce_names_what_is_not_there(workspace: Workspace) -> None:
    done = workspace.run("elastane", "reproduce", "models:/elastane/9")
    assert done.returncode == 2
    assert "models:/elastane/9 is not in the registry" in done.stderr


def test_commands_on_the_trained_model(workspace: Workspace) -> None:
    answers = json.loads(workspace.must("elastane", "generate", "--json", "hello", "and again").stdout)
    assert [row["prompt"] for row in answers] == ["hello", "and again"]
    base = json.loads(workspace.must("elastane", "generate", "--json", "--base", "hello").stdout)
    assert base[0]["answer"] != answers[0]["answer"]
    drawn = ["generate", "--json", "hello", "--temperature", "3", "--top-p", "0.99", "--seed", "1"]
    told = json.loads(workspace.must("elastane", *drawn, "--model", "models:/elastane@candidate").stdout)
    assert told[0]["answer"] != answers[0]["answer"]
    probe = json.loads(workspace.must("elastane", "probe", "--json").stdout)
    assert probe["cpu_cores"] >= 1
    import subprocess

    talk = subprocess.run(
        ["elastane", "chat"],
        input="hello\nand\n\nexit\n",
        cwd=workspace.root,
        env=workspace.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert talk.stdout.splitlines()[0] == answers[0]["answer"].splitlines()[0]


@pytest.mark.parametrize("merge", [False, True])
def test_an_export_opens_with_plain_libraries(workspace: Workspace, merge: bool) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    workspace.must(
        "elastane", "export", "out", *(["--merge"] if merge else ["--model", "models:/elastane/1"])
    )
    out = workspace.root / "out"
    if merge:
        model = AutoModelForCausalLM.from_pretrained(out)
    else:
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(workspace.root / "tiny-model"), out
        )
    assert AutoTokenizer.from_pretrained(out).chat_template
    ids = torch.arange(3, 40)[None]
    tuned = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(workspace.root / "tiny-model"),
        workspace.root / "checkpoints" / "final",
    )
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, tuned(input_ids=ids).logits, atol=1e-5)
    again = workspace.run("elastane", "export", "out")
    assert again.returncode == 2
    assert "overwrites nothing" in again.stderr


def test_a_step_that_is_kept_is_exported(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    from tasks.commands.export import export
    from tasks.params import read_params
    from tasks.trainer.checkpoint import complete_checkpoints
    from tasks.trainer.training_state import read_weights

    monkeypatch.chdir(workspace.root)
    paths = Paths(workspace.root)
    params = read_params(paths.params)
    key = TrainReport.read(paths.train_report).run_key
    (path, first), (_, last) = complete_checkpoints(paths.run(key))[-2:]
    export(params, paths, workspace.root / "early", merge=False, step=first.step)
    early = load_file(workspace.root / "early" / "adapter_model.safetensors")
    saved = {name.replace(".default.", "."): value for name, value in read_weights(path, None).items()}
    assert early.keys() == saved.keys() and all(torch.equal(early[name], saved[name]) for name in early)
    final = load_file(paths.final / "adapter_model.safetensors")
    assert any(not torch.equal(early[name], final[name]) for name in early)
    with pytest.raises(UserError, match=f"--step {last.step + 1} has no checkpoint: .* keeps those of steps"):
        export(params, paths, workspace.root / "none", merge=False, step=last.step + 1)
    assert not (workspace.root / "none").exists()


# --- bad input ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("bad") / "workspace")


BAD_INPUT = [
    ({"prepare_data.source": "data/raw/gone.json"}, "data/raw/gone.json does not exist"),
    ({"prepare_data.source": "data/raw/empty.json"}, "is empty"),
    ({"prepare_data.source": "data/raw/noanswer.json"}, "row 2: no answer"),
    ({"train.learnin_rate": 1}, "unknown key train.learnin_rate"),
    ({"select_strategy.data_parallel_degree": 3}, "data_parallel_degree=3 does not divide"),
    ({"model.name_or_path": "weightless"}, "has no weights"),
]


@pytest.mark.parametrize(("changes", "words"), BAD_INPUT, ids=[words for _, words in BAD_INPUT])
def test_bad_input_ends_in_one_sentence_and_code_2(
    untouched: Workspace, changes: dict[str, object], words: str
) -> None:
    """By the stage that meets it first; `elastane run` hands the same code on (tested in test_flow.py)."""
    root = untouched.root
    (root / "data" / "raw" / "empty.json").write_text("")
    rows = [{"instruction": "q", "output": "a"}, {"instruction": "q2", "output": ""}]
    (root / "data" / "raw" / "noanswer.json").write_text(json.dumps(rows))
    (root / "weightless").mkdir(exist_ok=True)
    shutil.copyfile(root / "tiny-model" / "config.json", root / "weightless" / "config.json")
    tiny.write_params(root, **{**untouched.recipe, **changes})
    done = untouched.run("python", "-m", "tasks.prepare_data")
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert words in last
    assert "Traceback" not in done.stderr
    assert not list((root / "data").glob("*prepared*"))
    assert not list((root / "data").glob("*base*"))
