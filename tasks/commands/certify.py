"""`elastane certify`: trains the same steps under several plans and shows that they learn the same."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file

from tasks.contracts import DataManifest, HardwareProfile, Plan, Precision, Resolved
from tasks.errors import UserError
from tasks.params import Params, read_params
from tasks.paths import Paths
from tasks.select_strategy import resolve
from tasks.stage import heartbeat, say
from tasks.train import launch
from tasks.trainer.run_state import StepLog, StepRecord
from tasks.trainer.worker import WorkerOrder

# What "the same" means in float32, docs/design.md. Other precisions are shown, not judged.
LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-3
MOST_MICRO_BATCH = 4
# What a run writes, and so must not be the workspace's own.
WRITTEN = {"params.yaml", "runs", "reports", "checkpoints", "mlflow.db", "mlartifacts", ".git", ".dvc"}
NAME = re.compile(r"single|ddp(?P<ddp>\d+)|(?:dp(?P<replicas>\d+))?fsdp(?P<shards>\d+)")


@dataclass(frozen=True)
class Proof:
    """How far a plan's run is from the first plan's: largest relative differences over all steps.

    `weights` is the largest, over tensors, of the difference over the distance moved; `unmoved` tensors have an exact
    gradient of zero and are left out of it.
    """

    plan: str
    steps: int
    loss: float
    grad_norm: float
    weights: float
    worst_tensor: str
    unmoved: tuple[str, ...]
    same: bool


@dataclass(frozen=True)
class Run:
    records: list[StepRecord]
    weights: dict[str, torch.Tensor]


def certify(
    params: Params, paths: Paths, names: Sequence[str], steps: int, precision: Precision | None
) -> list[Proof]:
    """Trains `steps` steps of the recipe on the prepared rows under each plan; the first is what others must equal.

    Raises:
        UserError: nothing is prepared, or a plan's name or degree is wrong here.
    """
    manifest = DataManifest.read(paths.manifest)
    hardware = HardwareProfile.read(paths.hardware)
    plans = [plan_named(name, params.global_batch, hardware) for name in names]
    chosen: Precision = precision or "float32"
    # Half a step more: a budget is never exceeded, and rows differ in length.
    budget = math.ceil((steps + 0.5) * params.global_batch * manifest.train.tokens / manifest.train.rows)
    resolved = resolve(params.train, hardware).model_copy(
        update={"precision": chosen, "token_budget": budget}
    )
    runs = [_train(params, paths, plan, resolved, hardware) for plan in plans]
    before = initial_weights(params, paths, chosen)
    return [
        compare(plan.name, runs[0], run, before, chosen == "float32")
        for plan, run in zip(plans, runs, strict=True)
    ]


def plan_named(name: str, batch: int, hardware: HardwareProfile) -> Plan:
    """single, ddp2, fsdp4 or dp2fsdp2 as a Plan for this machine.

    Raises:
        UserError: another name, a degree that does not divide the global batch, or more ranks than GPUs.
    """
    found = NAME.fullmatch(name)
    if found is None:
        raise UserError(
            f"--plans names {name!r}, which is no plan that can be trained; use single, ddp2, fsdp2 or dp2fsdp2"
        )
    replicas = int(found["ddp"] or found["replicas"] or 1)
    shards = int(found["shards"] or 1)
    ranks = replicas * shards
    if ranks < 1 or batch % ranks:
        raise UserError(f"--plans: {name} has {ranks} ranks, which do not divide train.global_batch={batch}")
    if hardware.device == "cuda" and ranks > len(hardware.gpus):
        raise UserError(f"--plans: {name} needs {ranks} GPUs, and {len(hardware.gpus)} are visible")
    share = batch // ranks
    micro = max(size for size in range(1, MOST_MICRO_BATCH + 1) if share % size == 0)
    return Plan(
        engine="torch",
        device=hardware.device,
        backend="nccl" if hardware.device == "cuda" else "gloo",
        dp_replicate=replicas,
        dp_shard=shards,
        tp=1,
        pp=1,
        schedule="none",
        micro_batch=micro,
        accumulation=share // micro,
        activation_checkpointing="none",
        offload="none",
        sharding="fsdp2" if found["shards"] else "none",
    )


def _train(params: Params, paths: Paths, plan: Plan, resolved: Resolved, hardware: HardwareProfile) -> Run:
    """The real workers on the real rows, in a folder that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="elastane-certify-") as name:
        root = Path(name)
        for entry in paths.root.iterdir():  # models and rows may lie anywhere in the workspace
            if entry.name not in WRITTEN:
                (root / entry.name).symlink_to(entry)
        raw = params.model_dump(by_alias=True, mode="json")
        raw["register"]["tracking_uri"] = f"sqlite:///{root / 'mlflow.db'}"
        raw["train"]["checkpoint_every_seconds"] = 1e9
        with (root / "params.yaml").open("w", encoding="utf-8") as file:
            YAML(typ="safe").dump(raw, file)
        here = Paths(root)
        read_params(here.params)
        run = here.run("certify")
        run.mkdir(parents=True)
        WorkerOrder(run_key="certify", plan=plan, resolved=resolved, starts=1).write(run / "order.json")
        hardware.write(here.hardware)
        with heartbeat(f"certify: {plan.name}"):
            code = launch(plan, hardware, run, here)
        if (run / "user_error").is_file():
            raise UserError((run / "user_error").read_text(encoding="utf-8"))
        if code:
            raise RuntimeError(
                f"the workers of plan {plan.name} ended with code {code}; their output is above"
            )
        weights: dict[str, torch.Tensor] = {}
        for file_ in sorted((run / "finished" / "final").rglob("*.safetensors")):
            weights |= load_file(file_)
        return Run(StepLog(run).read(), weights)


def initial_weights(params: Params, paths: Paths, precision: Precision) -> dict[str, torch.Tensor]:
    """What every run began with, by the names of the export."""
    from peft import get_peft_model_state_dict

    from tasks.trainer.loading import DTYPES, load_base
    from tasks.trainer.parallelize import attach_adapters

    full = params.train.finetuning_type == "full"
    base = load_base(paths, DTYPES["float32" if full else precision])
    model = attach_adapters(base, params.train, params.seed)
    state: dict[str, torch.Tensor] = model.state_dict() if full else get_peft_model_state_dict(model)
    return {name: value.detach().float() for name, value in state.items()}


def compare(name: str, reference: Run, run: Run, before: Mapping[str, torch.Tensor], judged: bool) -> Proof:
    """The largest differences of a run from the reference."""
    if len(reference.records) != len(run.records):
        raise RuntimeError(f"{name} took {len(run.records)} steps, the first plan {len(reference.records)}")
    pairs = list(zip(reference.records, run.records, strict=True))
    loss = max(_relative(a.loss, b.loss) for a, b in pairs)
    norm = max(_relative(a.grad_norm, b.grad_norm) for a, b in pairs)
    if any(a.samples != b.samples for a, b in pairs):
        raise RuntimeError(f"{name} trained on other samples than the first plan")
    worst, tensor, unmoved = 0.0, "", []
    for key, value in reference.weights.items():
        moved = float((value.float() - before[key]).norm())
        apart = float((run.weights[key].float() - value.float()).norm())
        if moved == 0.0:
            unmoved.append(key)
        elif apart / moved > worst:
            worst, tensor = apart / moved, key
    same = not judged or (loss <= LOSS_TOLERANCE and norm <= LOSS_TOLERANCE and worst <= WEIGHT_TOLERANCE)
    return Proof(name, len(pairs), loss, norm, worst, tensor, tuple(unmoved), same)


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), 1e-30)


def default_plans(params: Params, hardware: HardwareProfile) -> list[str]:
    """single, and each kind of plan on two ranks where there are two."""
    possible = hardware.device == "cpu" or len(hardware.gpus) >= 2
    return ["single", "ddp2", "fsdp2"] if possible and params.global_batch % 2 == 0 else ["single"]


def table(proofs: Sequence[Proof]) -> str:
    lines = [f"{'plan':10} {'steps':>5} {'loss':>9} {'grad norm':>9} {'weights':>9}  same"]
    lines += [
        f"{each.plan:10} {each.steps:5} {each.loss:9.1e} {each.grad_norm:9.1e} {each.weights:9.1e}  "
        f"{'yes' if each.same else 'NO'}"
        for each in proofs
    ]
    lines.append(
        f"Largest relative differences from {proofs[0].plan}; allowed in float32: {LOSS_TOLERANCE:g} for loss and "
        f"gradient norm, {WEIGHT_TOLERANCE:g} of the distance moved for weights."
    )
    if proofs[0].unmoved:
        lines.append(f"Not moved by any step, so not compared: {', '.join(proofs[0].unmoved)}")
    return "\n".join(lines)


def document(proofs: Sequence[Proof]) -> dict[str, Any]:
    return {"same": all(each.same for each in proofs), "plans": [asdict(each) for each in proofs]}


def run(names: Sequence[str] | None, steps: int, precision: Precision | None) -> list[Proof]:
    """Certifies the workspace of the current folder.

    Raises:
        UserError: see certify.
    """
    paths = Paths.here()
    params = read_params(paths.params)
    hardware = HardwareProfile.read(paths.hardware)
    wanted = list(names) if names else default_plans(params, hardware)
    if len(wanted) < 2:
        say("certify: there is one GPU here, so there is nothing to compare; name plans with --plans")
    return certify(params, paths, wanted, steps, precision)
