"""One published row -> what the planner is asked, and what was measured; or the reason it cannot be asked."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from scipy.special import gammainc

from benchmarks.planner_accuracy.frameworks import software_of
from benchmarks.planner_accuracy.measured import GIB, Row, memory_of, number, seconds_of
from benchmarks.planner_accuracy.shapes import spec_of
from tasks.contracts import ModelSpec, Plan
from tasks.planner.cost import CostModel
from tasks.planner.hardware_names import named_hardware
from tasks.planner.machine import Machine, machine
from tasks.planner.workload import Workload

GPUS = (  # part of gpu_type -> name in the planner's table; the first that is found counts
    ("GB300", "GB300"),
    ("GB200", "GB200"),
    ("B300", "B300"),
    ("B200", "B200"),
    ("H200", "H200"),
    ("H100", "H100"),
    ("A100", "A100-80G"),
    ("RTX-4090", "RTX4090"),
    ("RTX-3090", "RTX3090"),
    ("A6000-Ada", "RTX6000Ada"),
    ("A6000", "A6000"),
    ("A5000", "A5000"),
)
# What joins the nodes where a report says it; all others are taken for one 200 Gbit/s port a GPU.
FABRIC = {"i2": "IB100", "i1": "EFA3200", "i3": "4xIB100"}
# Figures of torch's allocator (nanotron logs it), which sees neither the CUDA context nor NCCL's buffers.
ALLOCATOR = (
    "log peak",
    "max_memory_allocated",
    "torch max_reserved",
    "peak reserved",
    "peak allocated",
    "peak active",
)
ALPACA_MEAN = 120.0  # tokens of an average Alpaca row with its prompt
ALPACA_LONGEST = 1050  # and of the longest (LitGPT's resource tables state 1,034 to 1,304 by tokenizer)


@dataclass(frozen=True)
class Case:
    """What is asked and what was measured. Seconds and bytes are None where the row does not give them."""

    regime: tuple[str, str, str]
    source: str
    model: str
    gpu: str
    cost: CostModel
    plan: Plan
    seconds: float | None
    memory: float | None
    status: str
    context_counts: bool
    allocator_only: bool
    row: Row


class Skip(Exception):
    """Why a row cannot be asked, in words."""


def case_of(row: Row, without: str = "") -> Case:
    """The row as a question to the planner; habits that were read off the source `without` are unknown then.

    Raises:
        Skip: a precision, method or layout that the planner does not plan, or numbers that are missing.
    """
    _refuse(row)
    spec = spec_of(row)
    plan = _plan(row, spec)
    software = software_of(row, without)
    work = _work(row, spec)
    hardware = _machine(row, plan)
    parallel = "+".join(
        name
        for name, used in (
            ("tp", plan.tp > 1),
            ("pp", plan.pp > 1),
            (plan.sharding if plan.sharding != "none" else "dp", plan.data_parallel > 1),
        )
        if used
    )
    source = row["file"].removesuffix(".csv")
    return Case(
        regime=(source, work.method, parallel or "single"),
        source=source,
        model=row["model"],
        gpu=row["gpu_type"],
        cost=CostModel(spec, work, hardware, 0.0, 1, software),
        plan=plan,
        seconds=seconds_of(row, plan, work),
        memory=memory_of(row),
        status=row["status"],
        context_counts="nvidia-smi" in row["mem_kind"],
        allocator_only=any(word in row["mem_kind"] for word in ALLOCATOR),
        row=row,
    )


def _refuse(row: Row) -> None:
    precision = row["precision"].lower()
    rules = (
        (any(word in precision for word in ("fp8", "float8", "fp4")), "8- or 4-bit floats are not planned"),
        ("gptq" in precision, "GPTQ bases are not planned"),
        ("adapter" in row["method"], "LLaMA-Adapter methods are not planned"),
        (number(row, "cp", 1) > 1, "context parallelism is not planned"),
        ("naive" in row["sharding"], "naive layer placement (device_map) is not planned"),
        ("INCONSISTENT" in row["notes"], "its batch sizes contradict each other"),
        (row["status"] == "unsupported", "the framework does not support it, so nothing was measured"),
        (number(row, "ep", 1) > 1, "expert parallelism is not planned"),
        *(
            (not row.get(key), f"no {key} is given")
            for key in ("hidden", "layers", "seq_len", "num_gpus", "dp")
        ),
    )
    for applies, reason in rules:
        if applies:
            raise Skip(reason)


# --- plan ---------------------------------------------------------------------------------------

SHARDING = (
    ("zero1", "zero1"),
    ("dist-optimizer", "zero1"),
    ("zero2", "zero2"),
    ("zero3", "zero3"),
    ("fsdp", "fsdp2"),
    ("hsdp", "fsdp2"),
)


def _plan(row: Row, spec: ModelSpec) -> Plan:
    dp, tp, pp = (int(number(row, key, 1)) for key in ("dp", "tp", "pp"))
    text = row["sharding"].lower()
    sharding = next((kind for key, kind in SHARDING if key in text), "none")
    micro = int(number(row, "micro_batch", 1))
    batch = number(row, "global_batch", 0)
    accumulation = number(row, "grad_accum", 0) or (batch / dp / micro if batch else 1)
    if number(row, "micro_batch", 0) == 0 and not row.get("global_batch"):
        raise Skip("no batch is given")
    virtual = int(number(row, "vpp", 1))
    kept = row["act_ckpt"].lower()
    if not kept and row["framework"] == "torchtune":
        kept = "full"  # its recipes have enable_activation_checkpointing on
    level = "selective" if "selective" in kept else "full" if kept.startswith(("full", "on")) else "none"
    if sharding == "none":
        replicate, shard = dp, 1
    else:
        per_node = 8
        replicate = dp // per_node if "hsdp" in text and dp > per_node else 1
        shard = dp // replicate
    schedule = "none" if pp == 1 else "interleaved1f1b" if virtual > 1 else "1f1b"
    return Plan.model_construct(
        engine="torch",
        device="cuda",
        backend="nccl",
        dp_replicate=replicate,
        dp_shard=shard,
        tp=tp,
        pp=pp,
        schedule=schedule,
        micro_batch=micro,
        accumulation=max(1, round(accumulation)),
        activation_checkpointing=level,
        offload="none",
        replication="ddp",
        sharding=sharding,
        sequence_parallel=_sequence_parallel(row, tp),
        virtual_stages=max(1, virtual),
        offload_parameters="cpu" if "params" in row["offload"] else "none",
    )


def _sequence_parallel(row: Row, tp: int) -> bool:
    if tp == 1:
        return False
    return any(
        word in row["framework"] + row["act_ckpt"] for word in ("nanotron", "torchtitan", "+SP", "Bridge")
    )


# --- work, machine ------------------------------------------------------------------------------


def _work(row: Row, spec: ModelSpec) -> Workload:
    method = "qlora" if "qlora" in row["method"] else "lora" if "lora" in row["method"] else "full"
    text = row["lora_targets"].lower()
    rank = int(number(row, "lora_rank", 64))
    if row["framework"] == "torchtune" and not text:
        text, rank = "q,v", 8  # its recipes' defaults
    targets: str | tuple[str, ...] = "all-linear"
    if "c_attn" in text:
        targets = ("q_proj", "k_proj", "v_proj")
    elif text == "q,v":
        targets = ("q_proj", "v_proj")
    sequence = int(number(row, "seq_len", 0))
    if "packed=no" in row["notes"]:
        sequence = min(sequence, ALPACA_LONGEST)
    precision = "float16" if row["precision"].startswith("fp16") else "bfloat16"
    return Workload(
        method=method,
        precision=precision,
        sequence=sequence,
        mean_row=_mean_row(row, sequence),
        lora_rank=rank if method != "full" else 1,
        lora_targets=targets,
        train_embeddings="+emb" in row["method"],
        tiles=1.0 if spec.vision else 0.0,
        longest_tiles=1 if spec.vision else 0,
    )


def _mean_row(row: Row, sequence: int) -> float:
    """The average row where a limit drops longer ones (ms-swift's truncation_strategy is delete by default): the mean
    of x below the limit for a gamma-distributed x with the stated moments; or a short instruction set's average.
    """
    stated = re.search(r"dataset mean ([\d.]+) tokens sd ([\d.]+)", row["notes"])
    if stated:
        mean, deviation = float(stated[1]), float(stated[2])
        shape = (mean / deviation) ** 2
        edge = sequence * shape / mean
        return mean * float(gammainc(shape + 1, edge) / gammainc(shape, edge))
    if "Alpaca" in row["notes"]:
        return ALPACA_MEAN
    return float(sequence)


def gpu_kind(text: str) -> str | None:
    """The planner's name of a row's GPU."""
    return next((name for key, name in GPUS if key in text), None)


_machines: dict[tuple[str, int, int, str, str], Machine] = {}


def _machine(row: Row, plan: Plan) -> Machine:
    kind = gpu_kind(row["gpu_type"])
    if kind is None:
        raise Skip(f"GPU {row['gpu_type']} is not in the planner's table")
    gpus = int(number(row, "num_gpus", 1))
    nodes = int(number(row, "nodes", max(1, gpus // 8)))
    each = max(1, gpus // nodes)
    fabric = FABRIC.get(row["file"].split("_")[0], "IB200")
    key = (row["gpu_type"], each, nodes, fabric, row["gpu_mem_gb"])
    if key not in _machines:
        text = f"{each}x{kind}" + (f" x {nodes} nodes {fabric}" if nodes > 1 else "")
        found = machine(named_hardware(text), "bfloat16")
        memory = number(row, "gpu_mem_gb", 0)
        if memory:
            found = replace(found, gpu_memory=int(memory * GIB * 0.99))
        if "no NVLink" in row["gpu_type"] or "PCIe" in row["gpu_type"]:
            found = replace(found, link=min(found.link, 12e9))
        if "HBM2e" in row["gpu_type"]:
            found = replace(found, peak=found.peak * 0.81, bandwidth=2.0e12)
        _machines[key] = found
    return _machines[key]
