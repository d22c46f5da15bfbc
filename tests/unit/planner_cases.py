"""Machines, models and settings that the planner's tests share."""

from __future__ import annotations

import re
from pathlib import Path

from tasks.contracts import Candidate, DataManifest, Gpu, HardwareProfile, Link, ModelSpec, SplitCounts
from tasks.params import Params, SelectStrategyParams, TrainParams, read_params
from tasks.planner.capabilities import TRAINABLE_NOW, Capabilities
from tasks.planner.model_spec import model_spec
from tasks.planner.problem import Problem
from tasks.planner.search import search
from tasks.select_strategy import as_problem

GIB = 2**30
PARAMS = read_params(Path(__file__).parents[2] / "params.yaml")
LLAMA_7B = model_spec({"model_type": "llama"})
SMOL = model_spec(
    {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
)
# Of a size that fits everywhere, with widths that 2, 4 and 8 divide.
TINY = model_spec(
    {
        "model_type": "qwen2",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    }
)
# Pins: no layer is cut over ranks, and none is on another stage.
WHOLE = {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1}


def train_params(**changes: object) -> TrainParams:
    return TrainParams.model_validate({**PARAMS.train.model_dump(), **changes})


def strategy_params(**changes: object) -> SelectStrategyParams:
    return SelectStrategyParams.model_validate({**PARAMS.select_strategy.model_dump(), **changes})


def params(**sections: object) -> Params:
    """The shipped params.yaml with keys changed: params(train={"precision": "float16"})."""
    raw = PARAMS.model_dump(by_alias=True)
    for section, changes in sections.items():
        raw[section] = {**raw[section], **changes}
    return Params.model_validate(raw)


def gpus(
    count: int, name: str = "NVIDIA A100-SXM4-40GB", gib: int = 40, capability=(8, 0)
) -> HardwareProfile:
    gpu = Gpu(name=name, memory_bytes=gib * GIB, compute_capability=capability)
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    return cpu(2).model_copy(
        update={
            "device": "cuda",
            "gpus": (gpu,) * count,
            "host_memory_bytes": 64 * count * GIB,
            "links": tuple(Link(a=a, b=b, kind="nvlink", nvlinks=12) for a, b in pairs),
        }
    )


def cpu(cores: int, gib: int = 16) -> HardwareProfile:
    return HardwareProfile(
        device="cpu",
        gpus=(),
        links=(),
        driver=None,
        cpu_name="some CPU",
        cpu_cores=cores,
        host_memory_bytes=gib * GIB,
        host_memory_source="physical",
        shm_bytes=GIB,
        notes=(),
    )


def manifest(rows: int = 1000, mean: int = 100, longest: int = 512) -> DataManifest:
    split = SplitCounts(rows=rows, tokens=rows * mean, target_tokens=rows * mean // 2, longest=longest)
    return DataManifest(
        source="x",
        source_fingerprint="x",
        format="alpaca",
        content_hash="x",
        max_length=longest,
        rows_in=2 * rows,
        train=split,
        validation=split,
        truncated=0,
        length_histogram=(),
        rejected={},
    )


def problem(
    hardware: HardwareProfile,
    spec: ModelSpec = SMOL,
    train: TrainParams | None = None,
    strategy: SelectStrategyParams | None = None,
    data: DataManifest | None = None,
    precision: str | None = None,
    capabilities: Capabilities = TRAINABLE_NOW,
) -> Problem:
    """A search with everything not said taken from params.yaml."""
    chosen = precision or ("float32" if hardware.device == "cpu" else "bfloat16")
    whole = PARAMS.model_copy(
        update={"train": train or PARAMS.train, "select_strategy": strategy or PARAMS.select_strategy}
    )
    made = as_problem(whole, data or manifest(), hardware, spec, chosen, capabilities)
    return made.changed(rates=None)  # none that this machine may have cached


def plans(hardware: HardwareProfile, *args, **kwargs) -> tuple[Candidate, ...]:
    """Candidates of a search, the chosen first."""
    return search(problem(hardware, *args, **kwargs)).candidates


def chosen(candidates: tuple[Candidate, ...]) -> Candidate:
    assert candidates[0].rejected is None
    return candidates[0]


def fitting(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.rejected is None]


def check_fit(candidate: Candidate, room: float, machine: HardwareProfile) -> None:
    """A plan is rejected exactly if it does not fit, in words with numbers."""
    cost = candidate.estimate
    assert min(cost.memory_bytes.values()) >= 0 and min(cost.seconds.values()) >= 0
    peak = max(sum(cost.memory_bytes.values()), cost.save_bytes, cost.evaluation_bytes)
    host = sum(cost.host_bytes.values()) <= 0.9 * machine.host_memory_bytes + 1
    fits = peak <= 0.9 * room and (host or machine.device == "cpu")
    assert fits == (candidate.rejected is None)
    if candidate.rejected:
        assert re.search(r"needs [\d.]+ GiB of [\d.]+ GiB .*, \d+\S* [GM]iB too much", candidate.rejected)
