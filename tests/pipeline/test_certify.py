"""`elastane certify`: equal plans pass, wrong sums planted in real ranks do not, and a version carries the result."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks.commands import certify_runs, certify_tiny
from tasks.commands.certify_names import NotRun, parse_name
from tasks.commands.certify_runs import ERROR_LINE, overheard, train_under
from tasks.contracts import HardwareProfile, Plan, Registration
from tasks.params import read_params
from tasks.paths import Paths
from tasks.register import register
from tests import tiny
from tests.distributed.ranks import run_ranks
from tests.pipeline.workspace import Workspace
from tests.unit import legacy_cases

pytestmark = [pytest.mark.timeout(400), pytest.mark.distributed]


# --- wrong sums, planted in the ranks of one plan ---------------------------------------------------


def mean_of_means() -> None:
    """Each rank divides by its own targets, and the ranks' means are averaged."""
    from tasks.trainer.torch_engine import TorchEngine

    train_step = TorchEngine.train_step

    def by_rank(self: Any, batches: Any, target_tokens: int, flags: Any) -> Any:
        own = sum(int((batch.labels[:, 1:] != -100).sum()) for batch in batches)
        return train_step(self, batches, max(1, own) * self.plan.data_parallel, flags)

    TorchEngine.train_step = by_rank


def norm_of_a_shard() -> None:
    """Each rank clips by the norm of what it holds itself."""
    from tasks.trainer.torch_engine import TorchEngine

    clip = TorchEngine._clip

    def alone(self: Any) -> Any:
        self._copy = None
        return clip(self)

    TorchEngine._clip = alone


def no_gradient_sum() -> None:
    """Copies of the model keep their own gradients."""
    from torch.nn.parallel import DistributedDataParallel

    from tasks.trainer.torch_engine import TorchEngine

    def never(self: Any, last: bool) -> Any:
        module = self.modules[0]
        return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()

    TorchEngine._reduce_after = never


def no_sum_of_replicated_gradients() -> None:
    """Norms between slices of a row keep the gradient of their slice."""
    from tasks.trainer import torch_engine

    torch_engine.sum_gradients = lambda weights, group: None


def no_sum_in_the_backward_pass() -> None:
    """What flows back out of an attention or MLP is one rank's term."""
    from tasks.trainer import collectives

    collectives._WholeToParts.backward = staticmethod(lambda ctx, gradient: (gradient, None))


def tied_tables_apart() -> None:
    """A table at both ends of a pipeline is trained twice, by half its gradient."""
    from tasks.trainer.torch_engine import TorchEngine

    TorchEngine._sum_tied = lambda self: None


def other_samples() -> None:
    from tasks.data.order import SampleOrder

    samples = SampleOrder.samples
    SampleOrder.samples = lambda self, step: samples(self, step + 1)


def _rank(root: str, run_key: str, fault: Callable[[], None] | None) -> None:
    from tasks.params import read_params
    from tasks.trainer import tracking, worker
    from tasks.trainer.guards import StopSignals

    class Nothing:
        def __init__(self, *args: Any) -> None: ...
        def log(self, *args: Any) -> None: ...
        def close(self, *args: Any) -> None: ...

    os.chdir(root)
    tracking.Tracker = Nothing  # making MLflow's tables takes longer than all the steps
    if fault is not None:
        fault()
    paths = Paths(Path(root))
    worker.train_rank(read_params(paths.params), paths, paths.run(run_key), StopSignals())


@pytest.fixture
def certify(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The command in an empty folder; its ranks come from the forkserver, those of named plans with a fault."""

    def run(*options: str, **faults: Callable[[], None]) -> tuple[int, dict[str, Any]]:
        def start(plan: Plan, hardware: HardwareProfile, run: Path, here: Paths) -> tuple[int, str]:
            fault = faults.get(run.name.removeprefix("certify-").replace("-", "_"))
            run_ranks(plan.processes, _rank, str(here.root), run.name, fault)
            return 0, ""

        monkeypatch.setattr(certify_runs, "start_workers", start)
        monkeypatch.chdir(tmp_path)
        done = CliRunner().invoke(app, ["certify", "--tiny", "--json", *options], catch_exceptions=False)
        return done.exit_code, json.loads(done.stdout)

    return run


def statuses(said: dict[str, Any]) -> dict[str, str]:
    return {each["plan"]: each["status"] for each in said["plans"]}


def test_right_sums_are_the_same_and_everything_was_met(certify: Any) -> None:
    plans = ["ddp2", "fsdp2", "tp2sp", "pp2"]
    code, said = certify("--family", "qwen2", "--plans", ",".join(plans))
    assert code == 0 and said["same"] is True, said
    assert statuses(said) == {"single": "reference", **dict.fromkeys(plans, "same")}
    assert said["reference"] == "single" and said["precision"] == "float32" and said["steps"] == 5
    assert all(said["facts"].values()), "clip, short batch, padding, accumulation, unequal targets"
    for each in said["plans"][1:]:
        assert each["loss"] <= 1e-5 and each["grad_norm"] <= 1e-5 and 0 < each["weights"] <= 1e-3
        assert each["sample_ids_equal"] and each["learning_rate"] == 0 and each["steps"] == 5


def test_float64_leaves_no_room_for_a_wrong_sum(certify: Any) -> None:
    code, said = certify("--family", "glm", "--method", "lora", "--float64", "--plans", "tp2pp2")
    assert code == 0 and statuses(said) == {"single": "reference", "tp2pp2": "same"}, said
    assert said["tolerance"] == {"loss": 1e-9, "grad_norm": 1e-9, "weights": 1e-9}
    assert 0 < said["plans"][1]["weights"] < 1e-11


def test_half_precision_is_shown_and_not_judged(certify: Any) -> None:
    code, said = certify("--family", "llama", "--steps", "1", "--precision", "bfloat16", "--plans", "ddp2")
    assert code == 0 and said["same"] is None and said["tolerance"] is None
    assert statuses(said) == {"single": "reference", "ddp2": "not_judged"}
    assert said["plans"][1]["weights"] > 0 and said["rounding"] == "bfloat16"


@pytest.mark.parametrize(
    "faults",
    [
        {"ddp2": mean_of_means, "fsdp2": norm_of_a_shard, "tp2": no_sum_in_the_backward_pass},
        {"ddp2": no_gradient_sum, "tp2sp": no_sum_of_replicated_gradients, "pp2": tied_tables_apart},
    ],
    ids=["first", "second"],
)
def test_wrong_sums_are_found(certify: Any, faults: dict[str, Callable[[], None]]) -> None:
    code, said = certify("--family", "qwen2", "--steps", "3", "--plans", ",".join(faults), **faults)
    assert code == 1 and said["same"] is False
    assert statuses(said) == {"single": "reference", **dict.fromkeys(faults, "differs")}, said
    for each in said["plans"][1:]:
        assert "is allowed" in each["reason"]


def test_other_samples_are_shown_not_raised(certify: Any) -> None:
    code, said = certify("--family", "llama", "--steps", "2", "--plans", "ddp2", ddp2=other_samples)
    assert code == 1 and said["plans"][1]["sample_ids_equal"] is False
    assert "it trained on other samples from step 1 on" in said["plans"][1]["reason"]


def test_a_plan_that_was_named_and_not_run_is_no_pass(certify: Any) -> None:
    code, said = certify("--family", "llama", "--steps", "1", "--plans", "single,dataparallel,ddp3,tp8")
    assert code == 1 and said["same"] is False
    off = dict.fromkeys(("dataparallel", "ddp3", "tp8"), "not_run")
    assert statuses(said) == {"single": "reference", **off}
    assert all(each["reason"] and each["loss"] is None for each in said["plans"][1:])
    assert "only calls the module on a CPU" in said["plans"][1]["reason"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("precision", [(), ("--float64",)], ids=["float32", "float64"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_every_plan_is_the_same(certify: Any, method: str, precision: tuple[str, ...]) -> None:
    plans = ["ddp2", "fsdp2", "dp2fsdp2", "tp2", "tp2sp", "tp4", "pp2", "pp2-gpipe", "pp2-interleaved", "pp4"]
    plans += ["tp2pp2", "dp2tp2", "dp2pp2", "fsdp2tp2", "fsdp2pp2", "dp2tp2pp2"]
    plans += ["pp2-zerobubble"] if method == "full" else []
    code, said = certify("--method", method, "--plans", ",".join(plans), *precision)
    assert statuses(said) == {"single": "reference", **dict.fromkeys(plans, "same")}, said
    assert code == 0
    assert said["tolerance"]["weights"] == (1e-9 if precision else 1e-3)


CONVERTED = ("baichuan", "chatglm3")  # published layouts, which `prepare_data` converts
EVERY = (*get_args(certify_tiny.Family), *CONVERTED)
TUNED = [(family, method) for family in EVERY for method in ("full", "lora")]
IN_4_BITS = [(family, "qlora") for family in ("llama", "qwen2", "glm")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), TUNED + IN_4_BITS)
def test_every_family_is_the_same(certify: Any, family: str, method: str, monkeypatch: Any) -> None:
    """In float64, but for bloom's attention, which rounds to float32 inside."""
    plans, name = ["ddp2", "fsdp2", "tp2", "pp2", "tp2pp2"], "llama" if family in CONVERTED else family
    if family in CONVERTED:
        monkeypatch.setattr(certify_tiny, "_write_model", lambda to, *_: legacy_cases.write(to, family))
    code, said = certify("--float64", "--family", name, "--method", method, "--plans", ",".join(plans))
    assert code == 0 and statuses(said) == {"single": "reference", **dict.fromkeys(plans, "same")}, said
    assert max(each["weights"] for each in said["plans"]) < (1e-5 if family == "bloom" else 1e-11)


# --- workers that fail -----------------------------------------------------------------------------


def test_workers_that_fail_are_named_by_their_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "[rank1]: Traceback\n[rank1]:   line\n[rank1]: RuntimeError: no room\nChildFailedError: \nx.ValueError: y\n"
    monkeypatch.setattr(certify_runs, "start_workers", lambda *_: (1, said))
    found = train_under(Paths(tmp_path), "ddp2", tiny.cpu_plan(2), "float32", tiny.cpu_hardware())
    assert found == NotRun("its workers ended with code 1: RuntimeError: no room", started=True)


def test_a_users_mistake_in_a_worker_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(plan: Plan, hardware: HardwareProfile, run: Path, here: Paths) -> tuple[int, str]:
        (run / "user_error").write_text("it cannot be cut")
        return 1, ""

    monkeypatch.setattr(certify_runs, "start_workers", refuse)
    found = train_under(Paths(tmp_path), "tp2", tiny.cpu_plan(2), "float32", tiny.cpu_hardware())
    assert found == NotRun("it cannot be cut", started=True)


def test_what_workers_say_is_kept_and_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); raise ValueError('broken')"
    with overheard() as said:
        subprocess.run([sys.executable, "-c", code], check=False)
    text = said.decode()
    assert "out\n" in text and "err\n" in text
    error = ERROR_LINE.search(text)
    assert error is not None and error.group(1) == "ValueError: broken"
    out, err = capfd.readouterr()
    assert out == "" and "out\n" in err and "err\n" in err


def test_names_may_be_written_in_any_case() -> None:
    assert parse_name(" TP2 ").name == "tp2"


# --- a workspace -----------------------------------------------------------------------------------


def test_a_workspace_is_certified_and_its_version_carries_it(
    finished: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = finished.copy(tmp_path / "w")
    root = workspace.root
    assert "- Plans: not certified" in page(root)
    stale = workspace.must("dvc", "status", "train", "evaluate", "register").stdout
    done = workspace.must("elastane", "certify", "--plans", "ddp2", "--steps", "3", "--json")
    said = json.loads(done.stdout)
    assert said["same"] is True and statuses(said) == {"single": "reference", "ddp2": "same"}
    assert [each["steps"] for each in said["plans"]] == [3, 3]
    # Two ranks sum in another order: equal to the bit would be the same run.
    assert 0 < said["plans"][1]["weights"] <= 1e-3
    assert said["run_key"] == Registration.read(root / "reports" / "registration.json").run_key
    assert json.loads((root / "reports" / "certificate.json").read_text()) == said
    assert not list(root.glob("runs/certify*"))
    assert "- Plans: certified, the same as single: ddp2" in page(root)
    assert workspace.must("dvc", "status", "train", "evaluate", "register").stdout == stale
    monkeypatch.setattr(os, "environ", os.environ.copy())  # where MLflow leaves the store it used last
    register(read_params(root / "params.yaml"), Paths(root))
    assert page(root).count("- Plans: certified, the same as single: ddp2") == 1


def page(root: Path) -> str:
    """The newest version's page, read past MLflow, which would keep the store as this process's own."""
    import sqlite3

    with sqlite3.connect(root / "mlflow.db") as store:
        row = store.execute("select description from model_versions order by version desc").fetchone()
    return str(row[0])
