"""What `benchmarks.native_gpu` runs: two models' shapes, layouts over one and two GPUs, and lists of variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tasks.contracts import Plan, Precision

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "llama-3.2-3b": {
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    # For the script itself, on a CPU.
    "tiny": {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
}
SEQUENCE = {"tiny": 64}  # tokens a row; of all others:
LONG = 4096
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp2": {"dp_replicate": 2},
    "dataparallel2": {"dp_replicate": 2, "replication": "data_parallel"},
    "fsdp2": {"dp_shard": 2, "sharding": "fsdp2"},
    "tp2": {"tp": 2},
    "tp2sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2, "schedule": "1f1b"},
    **{
        f"{zero}dp{ranks}": {"engine": "deepspeed", "sharding": zero, "dp_shard": ranks}
        for zero in ("zero1", "zero2", "zero3")
        for ranks in (1, 2)
    },
}
OFFLOADED = {
    "+cpu": {"offload": "cpu"},
    "+cpu+params": {"offload": "cpu", "offload_parameters": "cpu"},
    "+nvme": {"offload": "nvme"},
}
LAYOUTS |= {
    zero + where: LAYOUTS[zero] | more
    for zero in ("zero2dp1", "zero2dp2", "zero3dp1", "zero3dp2")
    for where, more in OFFLOADED.items()
    if zero.startswith("zero3") or where == "+cpu"
}
Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Variant:
    """One plan for one model. `micro` rows a micro-batch, `accumulation` micro-batches a step and data rank."""

    shape: str
    method: Literal["lora", "qlora", "full"]
    layout: str
    micro: int
    accumulation: int = 1
    level: Literal["none", "selective", "full"] = "none"
    compiled: bool = False

    @property
    def name(self) -> str:
        parts = [self.shape, self.method, self.layout, f"{self.micro}x{self.accumulation}", self.level]
        return " ".join([*parts, "compiled"] if self.compiled else parts)

    @property
    def length(self) -> int:
        return SEQUENCE.get(self.shape, LONG)

    def plan(self, device: Device) -> Plan:
        common = {
            "engine": "torch",
            "device": device,
            "backend": "nccl" if device == "cuda" else "gloo",
            "dp_replicate": 1,
            "dp_shard": 1,
            "tp": 1,
            "pp": 1,
            "schedule": "none",
            "micro_batch": self.micro,
            "accumulation": self.accumulation,
            "activation_checkpointing": self.level,
            "offload": "none",
            "compiled": self.compiled,
        }
        return Plan.model_validate(common | LAYOUTS[self.layout])


def single(shape: str) -> list[Variant]:
    """One GPU, the most telling first: what the yardsticks ran, then what lies around it."""
    return [
        Variant(shape, "lora", "single", 4, compiled=True),
        Variant(shape, "full", "single", 1, level="selective", compiled=True),
        Variant(shape, "lora", "single", 1, compiled=True),
        Variant(shape, "lora", "single", 1),
        Variant(shape, "lora", "single", 1, level="full"),
        Variant(shape, "lora", "single", 4, level="selective", compiled=True),
        Variant(shape, "lora", "single", 4, level="full", compiled=True),
        Variant(shape, "lora", "single", 2, compiled=True),
        Variant(shape, "lora", "single", 2, level="selective"),
        Variant(shape, "full", "single", 1, compiled=True),
        Variant(shape, "full", "single", 2, level="full", compiled=True),
        Variant(shape, "full", "single", 1, level="full"),
    ]


def pair(shape: str) -> list[Variant]:
    """Two GPUs, and what one of them does, of which data parallelism should reach twice as much."""
    return [
        Variant(shape, "lora", "single", 4, compiled=True),
        Variant(shape, "lora", "ddp2", 4, compiled=True),
        Variant(shape, "lora", "fsdp2", 4, compiled=True),
        Variant(shape, "lora", "tp2sp", 4, compiled=True),
        Variant(shape, "lora", "tp2", 4, compiled=True),
        Variant(shape, "lora", "pp2", 1, 8, compiled=True),
        Variant(shape, "lora", "fsdp2", 2),
        Variant(shape, "lora", "tp2", 2),
        Variant(shape, "lora", "pp2", 1, 8),
        Variant(shape, "full", "fsdp2", 2, level="selective", compiled=True),
        Variant(shape, "full", "fsdp2", 2, level="selective"),
        Variant(shape, "full", "ddp2", 1, level="full"),
        Variant(shape, "full", "tp2sp", 2, level="selective", compiled=True),
        Variant(shape, "full", "tp2", 2, level="selective"),
        Variant(shape, "full", "pp2", 1, 8, level="selective"),
    ]


def four_bit(shape: str) -> list[Variant]:
    """QLoRA on one GPU and on two."""
    return [
        Variant(shape, "qlora", "single", 4),
        Variant(shape, "qlora", "ddp2", 4),
        Variant(shape, "qlora", "fsdp2", 4),
        Variant(shape, "qlora", "tp2sp", 4),
        Variant(shape, "qlora", "pp2", 1, 8),
        Variant(shape, "qlora", "single", 4, compiled=True),
        Variant(shape, "qlora", "ddp2", 4, compiled=True),
        Variant(shape, "qlora", "fsdp2", 4, compiled=True),
        Variant(shape, "qlora", "tp2sp", 4, compiled=True),
        Variant(shape, "qlora", "pp2", 1, 8, compiled=True),
        Variant(shape, "qlora", "single", 1, 1, "full"),
        Variant(shape, "qlora", "single", 1),
    ]


def zero(shape: str) -> list[Variant]:
    """DeepSpeed over two GPUs beside FSDP2, on the same rows; then what the host holds."""
    return [
        Variant(shape, "full", "fsdp2", 1, 4, "selective"),
        Variant(shape, "full", "zero3dp2", 1, 4, "selective"),
        Variant(shape, "full", "zero2dp2", 1, 4, "selective"),
        Variant(shape, "full", "zero3dp2+cpu", 1, 4, "selective"),
        Variant(shape, "full", "zero3dp2+cpu+params", 1, 4, "selective"),
        Variant(shape, "full", "zero3dp2+nvme", 1, 4, "selective"),
        Variant(shape, "lora", "ddp2", 1, 4, "selective"),
        Variant(shape, "lora", "zero2dp2", 1, 4, "selective"),
        Variant(shape, "lora", "zero3dp2", 1, 4, "selective"),
    ]


def data_parallel(shape: str) -> list[Variant]:
    """torch's DataParallel beside DDP, and one GPU."""
    layouts = ("single", "ddp2", "dataparallel2")
    return [Variant(shape, "lora", layout, 2) for layout in layouts]


SETS = {"single": single, "pair": pair, "qlora": four_bit, "zero": zero, "dataparallel": data_parallel}


@dataclass(frozen=True)
class Agreement:
    """A layout to hold against one process: all train the same ROWS rows a step."""

    layout: str
    micro: int
    accumulation: int
    precision: Precision = "bfloat16"
    compiled: bool = False

    @property
    def name(self) -> str:
        said = f"{self.layout} {self.micro}x{self.accumulation}"
        said += "" if self.precision == "bfloat16" else f" {self.precision}"
        return said + (" compiled" if self.compiled else "")


ROWS = 4
# The first is what all are held against. The next two say what bfloat16 itself is worth: other micro-batches, which
# round other sums, and float32. A layout that differs no more than these differs by rounding alone.
AGREEMENTS = (
    Agreement("single", 4, 1),
    Agreement("single", 1, 4),
    Agreement("single", 4, 1, precision="float32"),
    Agreement("ddp2", 2, 1),
    Agreement("fsdp2", 2, 1),
    Agreement("tp2", 4, 1),
    Agreement("tp2sp", 4, 1),
    Agreement("pp2", 1, 4),
    Agreement("single", 4, 1, compiled=True),
    Agreement("ddp2", 2, 1, compiled=True),
)
