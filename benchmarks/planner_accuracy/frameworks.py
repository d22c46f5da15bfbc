"""What published trainers keep and compute, as a `Software` each.

Bytes of states follow each trainer's precision recipe, from its code or documentation. Other habits are written
nowhere, and were inferred from the trainer's own published rows: `INFERRED` names each of them with the rows it was
read off, and scoring with a source left out forgets them (`framework_of`). What could not be found at all is this
project's own value.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.planner_accuracy.measured import Row
from tasks.planner.memory import GIB
from tasks.planner.workload import SavedBytes, Software

# Fused kernels (Megatron's softmax, bias-GELU; flash attention with fused norms) keep the published 34 s b h of a
# GPT layer, or about 20h + 8f of a gated one (arXiv:2205.05198 equation 1).
FUSED = {("full", 2): SavedBytes(18, 8, 4, 4, 4), ("lora", 2): SavedBytes(14, 8, 4, 4, 4)}

# bf16 weights and gradients, float32 gradient sum, float32 master and moments; stages are filled by FLOPs.
NANOTRON = Software(
    name="nanotron",
    gradients_stay=True,
    weight=2,
    cast=0,
    gradient=2,
    accumulated=4,
    moments=8,
    master=4,
    bucket=0,
    zero_bucket=0,
    saved=FUSED,
    logits=12,
    gathered_inputs=3,
    host_wait=(0.5e-3, 3.2e-3),
    launch=1.12e-3,
    context=0.0,
    stage_split="by_flops",
    elementwise=(33, 10),
    overlap=0.02,
    gradient_traffic=4,
)
# fp16 or bf16 weights, gradients of the same width, float32 master and moments (arXiv:1910.02054 section 3.1).
MEGATRON = Software(
    name="megatron",
    gradients_stay=True,
    weight=2,
    cast=0,
    gradient=4,
    moments=8,
    master=4,
    bucket=0,
    zero_bucket=0,
    saved=FUSED,
    logits=10,
    launch=0.81e-3,
    adapter_launch=0.1e-3,
    context=2.0 * GIB,
    reserved=1.15,
    elementwise=(10, 10),
    overlap=0.0,
    gradient_traffic=2,
)
# FSDP2 with float32 sharded weights and bf16 computing (its llama3 configurations).
TORCHTITAN = Software(
    name="torchtitan",
    weight=4,
    cast=0,
    gradient=4,
    moments=8,
    saved=FUSED,
    context=1.0 * GIB,
    launch=1.0e-3,
    selective=0.5,
    elementwise=(30, 8),
    overlap=0.8,
    gradient_traffic=4,
)
FOUNDRY = replace(TORCHTITAN, name="llm-foundry", elementwise=(50, 12))
# Decoders of transformers with PEFT's adapters, without what this project's own trainer does otherwise.
TRANSFORMERS = Software(name="transformers", native=True)
# The HF Trainer tunes a bf16 model in bf16, adapters and AdamW moments too; full tuning goes through DeepSpeed with
# float32 master weights, moments and, on one GPU, gradient sums.
HF_TRAINER = replace(
    TRANSFORMERS,
    name="hf-trainer",
    weight=2,
    cast=0,
    gradient=2,
    moments=4,
    logits=11,
    residual=2,
    launch=0.64e-3,
    adapter_launch=0.1e-3,
    context=2.0 * GIB,
    reserved=1.05,
)


def deepspeed(trainer: Software, summed: bool) -> Software:
    """The trainer with DeepSpeed's mixed-precision optimizer; `summed` with float32 gradient sums (no ZeRO)."""
    return replace(trainer, accumulated=4 if summed else 0, moments=8, master=4)


# Rows of all lengths leave holes between logits of all sizes, so that two to three of them stay reserved.
MS_SWIFT = replace(HF_TRAINER, name="ms-swift", logits=30, context=1.4 * GIB, launch=0.84e-3, reserved=1.0)
LITGPT = replace(
    TRANSFORMERS,
    name="litgpt",
    weight=2,
    cast=0,
    gradient=2,
    moments=4,
    logits=14,
    residual=2,
    context=0.0,
    loads_whole=True,
    launch=1.39e-3,
    adapter_launch=0.1e-3,
)
FSDP_QLORA = replace(
    TRANSFORMERS,
    name="fsdp-qlora",
    weight=2,
    cast=0,
    gradient=2,
    moments=4,
    residual=2,
    context=0.0,
    launch=0.9e-3,
    adapter_launch=0.1e-3,
)
TORCHTUNE = replace(
    TRANSFORMERS,
    name="torchtune",
    weight=2,
    cast=0,
    gradient=2,
    moments=4,
    chunked_loss=True,
    logits=14,
    residual=2,
    context=0.3 * GIB,
)


RESERVED = 1.05  # of allocated memory, where reserved memory is told
NF4_PLAIN = 0.5 + 4 / 64  # without double quantisation

# Habits that no documentation states, by trainer: field -> the source (start of `file`) whose rows it was read off.
# nanotron: which layer inputs stay gathered under tensor parallelism, and what the host spends on collectives;
# HF Trainer and ms-swift: how many copies of the logits stay reserved; and so on.
INFERRED: dict[str, dict[str, str]] = {
    "nanotron": dict.fromkeys(
        (
            *("logits", "gathered_inputs", "host_wait", "launch"),
            *("context", "elementwise", "overlap"),
        ),
        "i1",
    ),
    "megatron": {
        **dict.fromkeys(("launch", "elementwise", "overlap"), "i2"),
        **dict.fromkeys(("context", "reserved"), "i3"),
        "adapter_launch": "j1",
    },
    "torchtitan": dict.fromkeys(("context", "launch", "selective", "elementwise", "overlap"), "c"),
    "llm-foundry": dict.fromkeys(("launch", "elementwise", "overlap"), "f"),
    "hf-trainer": dict.fromkeys(
        ("logits", "launch", "adapter_launch", "four_bit_launch", "context", "reserved"), "j1"
    ),
    "ms-swift": dict.fromkeys(("logits", "launch", "context"), "j3"),
    "litgpt": {
        **dict.fromkeys(("logits", "launch", "adapter_launch", "four_bit_launch"), "j4"),
        **dict.fromkeys(("gather_launch", "context", "loads_whole"), "j4"),
    },
    "fsdp-qlora": dict.fromkeys(("launch", "adapter_launch", "context"), "j5"),
    "torchtune": dict.fromkeys(("logits", "context"), "d"),
}


def stored_scores(without: str = "") -> float:
    """Bytes a head and pair of positions where attention keeps its scores: 5 as published (arXiv:2205.05198,
    equation 1: softmax output, dropout mask and output), 2.8 read off vTrain's rows with a fused softmax.
    """
    return 5.0 if without.startswith("i2_") else 2.8


def framework_of(name: str, without: str = "") -> Software:
    """The Software whose habits the row's framework follows; plain transformers where it is not known.

    Habits inferred from the source `without` (a row's `file`) are the generic ones of `Software` instead.
    """
    table = (
        ("nanotron", NANOTRON),
        ("Megatron", MEGATRON),
        ("DeepSpeed ZeRO-3", MEGATRON),
        ("NeMo AutoModel", TORCHTITAN),
        ("NeMo", MEGATRON),
        ("torchtitan", TORCHTITAN),
        ("fms-fsdp", replace(TORCHTITAN, name="fms-fsdp")),
        ("llm-foundry", FOUNDRY),
        ("ms-swift", MS_SWIFT),
        ("HF Trainer", HF_TRAINER),
        ("LitGPT", LITGPT),
        ("fsdp_qlora", FSDP_QLORA),
        ("torchtune", TORCHTUNE),
    )
    found = next((software for key, software in table if key in name), TRANSFORMERS)
    source = without.split("_", maxsplit=1)[0]
    generic = Software(name="generic", four_bit_launch=0.0, gather_launch=0.0)
    unknown = [field for field, read in INFERRED.get(found.name, {}).items() if read == source]
    return replace(found, **{field: getattr(generic, field) for field in unknown})


def software_of(row: Row, without: str = "") -> Software:
    """The row's trainer with the settings that the row states: optimizer, widths, fused kernels, loss."""
    software = framework_of(row["framework"], without)
    if software.name == "hf-trainer" and "lora" not in row["method"]:
        software = deepspeed(software, summed=row["sharding"] == "none")
    if "fp32-accum" in row["grad_dtype"] and software.accumulated == 0:
        software = replace(software, gradient=6.0, gradient_traffic=4.0)
    if "8bit" in row["optimizer"]:
        software = replace(software, moments=2.0)
    if "step-in-b" in row["optimizer"]:
        software = replace(software, gradient=0.0)
    if "loss=full-logit CE" in row["notes"]:
        software = replace(software, chunked_loss=False)
    if "DEFAULT" not in row["notes"] and "PURE" in row["notes"]:
        software = replace(software, gradient_traffic=2.0)
    return _kernels_of(row, software, without)


def _kernels_of(row: Row, software: Software, without: str) -> Software:
    if row["attn_impl"].startswith(("fused-softmax", "unfused", "eager")):
        software = replace(software, scores=stored_scores(without))
    if row["compile"] == "yes":
        near, far = software.elementwise
        # Fused pointwise operations move less, and keep no float32 copies.
        software = replace(
            software, elementwise=(near * 0.6, far * 0.6), logits=software.logits - 2, saved=FUSED
        )
    if "nf4" in row["precision"] and "nf4-dq" not in row["precision"]:
        software = replace(software, four_bit=NF4_PLAIN)
    if "reserved" in row["mem_kind"] and "not stated" not in row["mem_kind"]:
        software = replace(software, reserved=max(software.reserved, RESERVED))
    return software
