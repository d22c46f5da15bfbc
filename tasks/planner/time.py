"""Seconds of one optimizer step by term: a device's rate, links, and what the step must do.

Good enough to rank plans of one model on one machine; rates are data-sheet figures times an achievable
fraction, not measurements of this machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.contracts import Gpu, HardwareProfile, ModelSpec, Plan, Precision
from tasks.params import TrainParams
from tasks.planner.memory import FLOAT32, trainable_parameters
from tasks.planner.model_spec import matmul_parameters


@dataclass(frozen=True)
class Rate:
    """Dense peaks in TFLOP/s (16-bit tensor cores; plain float32) and memory bandwidth in TB/s."""

    half: float
    single: float
    bandwidth: float


# NVIDIA's data sheets, without sparsity. The first name that stands whole in the GPU's name counts.
RATES: dict[str, Rate] = {
    "B300": Rate(2250, 75, 8.0),
    "B200": Rate(2250, 75, 8.0),
    "GB200": Rate(2500, 80, 8.0),
    "GH200": Rate(989, 67, 4.0),
    "H200": Rate(989, 67, 4.8),
    "H100 PCIe": Rate(756, 51, 2.0),
    "H100 NVL": Rate(835, 60, 3.9),
    "H100": Rate(989, 67, 3.35),
    "H800": Rate(989, 67, 3.35),
    "H20": Rate(148, 44, 4.0),
    "A100-SXM4-80GB": Rate(312, 19.5, 2.0),
    "A100 80GB": Rate(312, 19.5, 1.9),
    "A100": Rate(312, 19.5, 1.55),
    "A800": Rate(312, 19.5, 1.9),
    "A6000": Rate(155, 38.7, 0.77),
    "A40": Rate(150, 37.4, 0.7),
    "A30": Rate(165, 10.3, 0.93),
    "A10G": Rate(70, 31.5, 0.6),
    "A10": Rate(125, 31.2, 0.6),
    "L40S": Rate(362, 91.6, 0.86),
    "L40": Rate(181, 90.5, 0.86),
    "L4": Rate(121, 30.3, 0.3),
    "6000 Ada": Rate(364, 91.1, 0.96),
    "RTX 5090": Rate(210, 105, 1.79),
    "RTX 4090": Rate(165, 82.6, 1.0),
    "RTX 3090": Rate(71, 35.6, 0.94),
    "V100": Rate(125, 15.7, 0.9),
    "T4": Rate(65, 8.1, 0.32),
}
# A GPU of no known name is taken for a modest card of its generation.
BY_CAPABILITY: tuple[tuple[tuple[int, int], Rate], ...] = (
    ((12, 0), Rate(200, 100, 1.5)),
    ((10, 0), Rate(2000, 70, 7.0)),
    ((9, 0), Rate(750, 50, 2.0)),
    ((8, 9), Rate(160, 60, 0.7)),
    ((8, 6), Rate(70, 30, 0.6)),
    ((8, 0), Rate(300, 19, 1.5)),
    ((7, 5), Rate(60, 8, 0.32)),
    ((7, 0), Rate(110, 14, 0.9)),
    ((0, 0), Rate(10, 10, 0.4)),
)
# Eager transformers models reach about 0.45 of the 16-bit peak: torchtune reports 0.57 compiled for Llama
# 3.2 3B on an A100; matmuls alone reach 0.8 to 0.87 (stas00/ml-engineering). Plain float32 comes nearer.
ACHIEVABLE_HALF = 0.45
ACHIEVABLE_SINGLE = 0.7
ACHIEVABLE_BANDWIDTH = 0.75  # Calculon's A100 file: 0.75 to 0.9 above 10 MB

# 150 tokens/s of LoRA training of a 135 M model on 2 cores: 4 x 135e6 x 150 / 2 (measured, float32).
CPU_FLOPS_PER_CORE = 4e10
CPU_BANDWIDTH = 2e10  # bytes/s, assumed: about what one memory channel gives
CPU_HALF_SLOWDOWN = 30  # bfloat16 against float32 on such a CPU (measured)

# Efficiency of a micro-batch of t tokens is 1 - exp(-t / scale): 0.95 at three times the scale. On CUDA it
# gives LitGPT's 0.142 s and 0.151 s for one and two rows (some 120 tokens each) of Llama 2 7B LoRA on an A100.
TOKENS_SCALE = {"cuda": 640, "cpu": 64}
# A decoder layer's kernels, forward and backward, cannot be launched faster than so many seconds. Measured with
# this trainer on one H200 host (benchmarks/results/first-light-h200-x1-small-batches.json): a 0.8 B Llama of 18
# layers at micro-batches too small to fill the card, full tuning in bfloat16 and LoRA in float16.
LAUNCH_SECONDS = {"full": 4.5e-3, "lora": 11e-3}

NVLINK_LANE = 25e9  # bytes/s one way, NVLink 2 to 4
NVLINK_EFFICIENCY = 0.65  # Calculon's A100 file
LINK_BYTES = {"pcie": 12e9, "system": 8e9, "unknown": 8e9}
GLOO_BYTES = 1e9
LATENCY = 20e-6

# AdamW reads weight, gradient and two moments and writes three; norm and clipping touch the gradient thrice.
OPTIMIZER_BYTES = (4 + 3 + 3) * FLOAT32


def rate_of(gpu: Gpu) -> tuple[Rate, bool]:
    """The GPU's rate, and whether its name is known."""
    for name, rate in RATES.items():
        if re.search(rf"\b{name}(?![0-9A-Za-z])", gpu.name):  # an RTX A1000 is no A100
            return rate, True
    return next(rate for least, rate in BY_CAPABILITY if gpu.compute_capability >= least), False


def seconds(
    spec: ModelSpec,
    plan: Plan,
    train: TrainParams,
    hardware: HardwareProfile,
    precision: Precision,
    mean_row: float,
) -> dict[str, float]:
    """Seconds of one step by term; every rank works, and the slowest device counts.

    Args:
        mean_row: tokens of an average row; padding is not counted.
    """
    tokens = plan.micro_batch * mean_row
    forward, backward = _flops_per_token(spec, train, mean_row)
    flops, bandwidth = _device(hardware, plan, precision)
    usable = flops * -math.expm1(-tokens / TOKENS_SCALE[plan.device])
    launch = spec.layers * LAUNCH_SECONDS[train.finetuning_type] if plan.device == "cuda" else 0.0
    compute = max(tokens * (forward + backward) / usable, launch)
    again = max(tokens * forward / usable, launch / 3) if plan.activation_checkpointing == "full" else 0.0
    trained = trainable_parameters(spec, train)
    return {
        "compute": plan.accumulation * compute,
        "recompute": plan.accumulation * again,
        "communication": _exposed_all_reduce(plan, hardware, trained * FLOAT32, compute),
        "optimizer": trained * OPTIMIZER_BYTES / bandwidth,
    }


def link_bytes_per_second(hardware: HardwareProfile, plan: Plan) -> float:
    """One way between the two worst-joined ranks."""
    if plan.backend == "gloo":
        return GLOO_BYTES
    links = [link for link in hardware.links if link.b < plan.world_size]
    if not links:
        return LINK_BYTES["unknown"]
    return min(
        link.nvlinks * NVLINK_LANE * NVLINK_EFFICIENCY
        if link.kind == "nvlink" and link.nvlinks
        else LINK_BYTES.get(link.kind, LINK_BYTES["unknown"])
        for link in links
    )


def _flops_per_token(spec: ModelSpec, train: TrainParams, mean_row: float) -> tuple[float, float]:
    """Forward and backward FLOPs of a token.

    2N forward and 4N backward, or 2N when frozen weights need no gradient of their own (6N and 4N a step,
    arXiv:2001.08361 section 2.1); adapters 6 a parameter; causal attention 2sq a layer forward, 2.5 times
    that backward (FlashAttention-2, arXiv:2307.08691).
    """
    weights = 2.0 * matmul_parameters(spec)
    attention = 2.0 * mean_row * spec.heads * spec.head_dim * spec.layers
    if train.finetuning_type == "full":
        return weights + attention, 2 * weights + 2.5 * attention
    adapters = 2.0 * trainable_parameters(spec, train)
    return weights + attention + adapters, weights + 2.5 * attention + 2 * adapters


def _device(hardware: HardwareProfile, plan: Plan, precision: Precision) -> tuple[float, float]:
    """Achievable FLOP/s and bytes/s of one rank; ranks on one CPU share it."""
    if plan.device == "cpu":
        flops = CPU_FLOPS_PER_CORE * hardware.cpu_cores / plan.world_size
        return flops / (1 if precision == "float32" else CPU_HALF_SLOWDOWN), CPU_BANDWIDTH / plan.world_size
    return min(_gpu(gpu, precision)[0] for gpu in hardware.gpus), min(
        _gpu(gpu, precision)[1] for gpu in hardware.gpus
    )


def _gpu(gpu: Gpu, precision: Precision) -> tuple[float, float]:
    rate, _ = rate_of(gpu)
    no_units = precision == "bfloat16" and gpu.compute_capability < (8, 0)
    peak = (
        rate.single * ACHIEVABLE_SINGLE if precision == "float32" or no_units else rate.half * ACHIEVABLE_HALF
    )
    return peak * 1e12, rate.bandwidth * 1e12 * ACHIEVABLE_BANDWIDTH


def _exposed_all_reduce(plan: Plan, hardware: HardwareProfile, size: int, micro_batch: float) -> float:
    """Once a step, a ring all-reduce: 2(n-1) latencies and 2(n-1)/n of the bytes. Up to half of it hides
    behind the last micro-batch's backward pass, as DDP overlaps (arXiv:2006.15704).
    """
    ranks = plan.data_parallel
    if ranks == 1:
        return 0.0
    whole = 2 * (ranks - 1) * LATENCY + 2 * (ranks - 1) / ranks * size / link_bytes_per_second(hardware, plan)
    return whole - min(whole / 2, micro_batch / 2)


def guessed(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Names of GPUs whose speed is guessed from their compute capability."""
    return tuple(sorted({gpu.name for gpu in gpus if not rate_of(gpu)[1]}))
