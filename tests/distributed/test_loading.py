"""Each rank reads its own boxes of the files, and has bit for bit what was cut from the whole model before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks import loading_memory
from tasks.contracts import Plan, Precision
from tasks.params import read_params
from tasks.paths import Paths
from tasks.trainer.base_model import ensure_base
from tests import tiny
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

MICRO = (1, 2, 2)
PLANS = {
    1: {"single": tiny.cpu_plan(*MICRO)},
    2: {
        "ddp2": tiny.cpu_plan(2, 2, 2),
        "fsdp2": tiny.cpu_plan(*MICRO, shards=2),
        "tp2": tiny.cpu_plan(*MICRO, tp=2),
        "pp2": tiny.cpu_plan(*MICRO, pp=2, schedule="1f1b"),
        "pp2v2": tiny.cpu_plan(*MICRO, pp=2, schedule="zerobubble", virtual_stages=2),
    },
    4: {
        "tp2pp2": tiny.cpu_plan(*MICRO, tp=2, pp=2, schedule="1f1b"),
        "fsdp2tp2": tiny.cpu_plan(*MICRO, shards=2, tp=2),
        "fsdp2pp2": tiny.cpu_plan(*MICRO, shards=2, pp=2, schedule="1f1b"),
        "dp2fsdp2": tiny.cpu_plan(2, 2, 1, shards=2),
    },
}
# name -> the model, what its files hold, the method, and what the run computes in. All have four layers.
CASES: dict[str, tuple[dict[str, Any], torch.dtype, str, Precision]] = {
    "llama-lora": ({"family": "llama"}, torch.float32, "lora", "float32"),
    "qwen2-full": ({"family": "qwen2", "tied": True}, torch.bfloat16, "full", "bfloat16"),
    "bloom-lora": ({"family": "bloom", "tied": True}, torch.bfloat16, "lora", "float16"),
    "qwen2-qlora": ({"family": "qwen2", "tied": True, "hidden": 128}, torch.bfloat16, "qlora", "float32"),
}


def workspace(root: Path, case: str) -> Path:
    """The model in several files; BLOOM's without the prefix, as the hub has them."""
    shape, stored, method, _ = CASES[case]
    root.mkdir(parents=True)
    folder = tiny.write_model(root / "whole", layers=4, **shape)
    if case == "bloom-lora":
        strip_the_prefix(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=stored)
    folder = root / "model"
    tiny.write_tokenizer(folder)
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    changes = {"model.name_or_path": str(folder), "train.finetuning_type": method, "train.lora.rank": 4}
    tiny.write_params(root, **changes)
    ensure_base(read_params(root / "params.yaml").model, Paths(root))
    return root


def strip_the_prefix(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    assert not any(name.startswith("transformer") for name in tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("loading")
    return {case: str(workspace(folder / case, case)) for case in CASES}


@pytest.mark.parametrize("ranks", list(PLANS))
def test_every_rank_has_its_part_of_the_whole_model(ranks: int, roots: dict[str, str]) -> None:
    run_ranks(ranks, hold_what_was_cut, ranks, roots)


def hold_what_was_cut(ranks: int, roots: dict[str, str]) -> None:
    dist.init_process_group("gloo")
    for name, plan in PLANS[ranks].items():
        for case, root in roots.items():
            if plan.schedule == "zerobubble" and CASES[case][2] != "full":
                continue
            with_files, cut = from_files(root, case, plan), list(from_the_whole(root, case, plan))
            assert len(with_files) == len(cut)
            for mine, expected in zip(with_files, cut, strict=True):
                assert_same_bits(mine, expected, f"{case} under {name} on rank {os.environ['RANK']}")


def from_files(root: str, case: str, plan: Plan) -> list[nn.Module]:
    """This rank's stages as the trainer makes them."""
    from tasks.trainer.loading import loaded_dtype, open_base
    from tasks.trainer.parallelize import parallelize

    params, (_, _, method, precision) = read_params(Path(root) / "params.yaml"), CASES[case]
    base = open_base(Paths(Path(root)), loaded_dtype(method, precision))
    parts = parallelize(base, params.train, plan, precision, params.seed)
    return [getattr(module, "module", module) for module in parts.modules]


def from_the_whole(root: str, case: str, plan: Plan) -> Iterator[nn.Module]:
    """The same stages cut from a model that transformers has loaded whole."""
    from tasks.trainer.adapters import attach_adapters
    from tasks.trainer.loading import DTYPES, load_base, loaded_dtype
    from tasks.trainer.loss import TokenLossSum
    from tasks.trainer.mesh import build_mesh, data_mesh
    from tasks.trainer.parallelize import shard
    from tasks.trainer.pipeline import copies, keep_stage, stages_of
    from tasks.trainer.quantize import quantize
    from tasks.trainer.tensor_parallel import cut_over_ranks

    params, (_, _, method, precision) = read_params(Path(root) / "params.yaml"), CASES[case]
    base = load_base(Paths(Path(root)), loaded_dtype(method, precision))
    model = attach_adapters(base, params.train, params.seed)
    mesh = build_mesh(plan)
    stages = stages_of(plan, mesh.get_local_rank("pp")) if plan.pp > 1 else (0,)
    for stage, (part, inner) in zip(stages, copies(model, base, len(stages)), strict=True):
        keep_stage(inner, stage, plan.pp * plan.virtual_stages)
        if method == "qlora":
            quantize(inner, DTYPES[precision], torch.device("cpu"), torch.device("cpu"))
        parts = cut_over_ranks(part, inner, mesh.get_group("tp"), False) if plan.tp > 1 else None
        module = TokenLossSum(part, inner, precision, parts)
        if plan.sharding == "fsdp2":
            shard(module, inner, data_mesh(mesh, plan), None, plan.pp > 1)
        yield module


def assert_same_bits(mine: nn.Module, expected: nn.Module, where: str) -> None:
    from tasks.trainer.pieces import local

    for kind in ("named_parameters", "named_buffers"):
        one, other = (dict(getattr(module, kind)(remove_duplicate=False)) for module in (mine, expected))
        assert one.keys() == other.keys() and (one or kind == "named_buffers"), where
        for name, tensor in one.items():
            assert tensor.shape == other[name].shape and tensor.dtype == other[name].dtype, (where, name)
            assert tensor.requires_grad == other[name].requires_grad, (where, name)
            left, right = (local(each.detach()).contiguous() for each in (tensor, other[name]))
            assert not left.is_meta and left.shape == right.shape, (where, name)
            assert torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8)), (
                where,
                name,
            )
        assert ties(one) == ties(other), where


def ties(tensors: dict[str, torch.Tensor]) -> set[tuple[str, ...]]:
    """Names of one tensor each."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {tuple(each) for each in names.values()}


OWN = 25e6  # bytes that a rank's Python and torch come to need beside the weights


def test_host_memory_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    """verl-project/verl#7834. The same check refuses a model that every rank loads whole."""
    warm_up, root = tmp_path / "tiny", tmp_path / "model"
    loading_memory.workspace(warm_up, torch.bfloat16)
    size = loading_memory.workspace(root, torch.bfloat16, 25, 4)
    assert 1e8 < size < 1.5e8

    def fits(name: str, whole: bool) -> bool:
        plan = loading_memory.PLANS[name]
        got = loading_memory.measure(root, warm_up, plan, whole)
        assert got.peak >= got.held > 0.9 * size
        return got.peak <= loading_memory.TARGET * size + OWN * plan.world_size

    assert fits("fsdp2", whole=False)
    assert fits("tp2pp2", whole=False)
    assert not fits("fsdp2", whole=True)
