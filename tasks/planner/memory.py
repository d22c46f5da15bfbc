"""Bytes of one rank by term, in closed form.

The trainer keeps weights to be trained in float32 with float32 gradients and float32 AdamW moments
(4 + 4 + 4 + 4 = 16 bytes a parameter; ZeRO, arXiv:1910.02054, section 3.1, counts the same states) and
computes under autocast. Frozen weights are kept in the compute precision and have neither gradient nor
optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.contracts import ModelSpec, Plan, Precision
from tasks.params import TrainParams
from tasks.planner.model_spec import lora_parameters, lora_shapes, matmul_parameters

GIB = 2**30
FLOAT32 = 4
COMPUTE_BYTES: dict[Precision, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

# CUDA context of torch >= 1.13 on an A100: 0.9 GiB (stas00/ml-engineering, training/performance), and
# cuBLAS workspaces. NCCL adds buffers a communicator. A CPU process with torch, transformers and peft
# loaded has 0.4 GiB resident (measured).
FIXED_CUDA = 1.0
FIXED_NCCL = 0.4
FIXED_CPU = 0.5


@dataclass(frozen=True)
class SavedBytes:
    """Bytes a token and layer that the forward pass keeps for the backward pass, by width.

    hidden, ffn, query (heads x head_dim) and key (kv_heads x head_dim, key and value together) are
    factors of those widths; `norm` is what a query and key norm (qwen3) adds to query and key.
    """

    hidden: int
    ffn: int
    query: int
    key: int
    norm: int


# Counted with torch's saved-tensor hooks on the transformers 5.24 decoders under autocast (the test
# counts again). For h-wide queries in half precision this is 30h + 8f: the published closed form
# s b (20h + 8f) for SwiGLU and flash attention, plus float32 norms and residuals. LoRA is counted with
# adapters on every linear; with fewer a little less is kept.
SAVED: dict[tuple[str, int], SavedBytes] = {
    ("full", 4): SavedBytes(hidden=24, ffn=16, query=8, key=8, norm=8),
    ("full", 2): SavedBytes(hidden=26, ffn=8, query=4, key=4, norm=6),
    ("lora", 4): SavedBytes(hidden=16, ffn=16, query=8, key=8, norm=4),
    ("lora", 2): SavedBytes(hidden=18, ffn=8, query=6, key=4, norm=4),
}


def trainable_parameters(spec: ModelSpec, train: TrainParams) -> int:
    """Parameters that get a gradient."""
    if train.finetuning_type == "full":
        return spec.parameters
    return lora_parameters(spec, train.lora.rank, train.lora.targets)


def memory(
    spec: ModelSpec, plan: Plan, train: TrainParams, precision: Precision, sequence: int
) -> dict[str, int]:
    """Peak bytes of one rank by term, at the start of a backward pass with gradients already there.

    Args:
        sequence: tokens of the longest row; every row of the micro-batch is taken to be so long.
    """
    compute = COMPUTE_BYTES[precision]
    trainable = trainable_parameters(spec, train)
    full = train.finetuning_type == "full"
    frozen = 0 if full else spec.parameters
    tokens = plan.micro_batch * sequence
    return {
        "weights": FLOAT32 * trainable + compute * frozen,
        # Autocast keeps its half-precision copy of every trained matrix from the forward to the backward pass.
        "casts": compute * (matmul_parameters(spec) if full else trainable) if compute < FLOAT32 else 0,
        "gradients": FLOAT32 * trainable,
        # DDP's buckets are as large as the gradients and stand beside them while accumulating without sync.
        "buckets": FLOAT32 * trainable if plan.data_parallel > 1 else 0,
        "optimizer": 2 * FLOAT32 * trainable,
        "activations": tokens * _activations_per_token(spec, plan, train, compute),
        "logits": tokens * spec.vocab * _logit_bytes(compute),
        "fixed": _fixed(plan),
    }


def layer_bytes_per_token(spec: ModelSpec, train: TrainParams, compute: int) -> int:
    """What one decoder layer keeps for its backward pass, bytes a token (see `SAVED`)."""
    saved = SAVED[train.finetuning_type, compute]
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    total = saved.hidden * spec.hidden + saved.ffn * spec.ffn + saved.query * query + saved.key * key
    if spec.query_key_norm:
        total += saved.norm * (query + key)
    if train.finetuning_type == "lora":
        total += compute * train.lora.rank * len(lora_shapes(spec, train.lora.targets))
    return total


def _activations_per_token(spec: ModelSpec, plan: Plan, train: TrainParams, compute: int) -> int:
    """All layers, or with full checkpointing their inputs and one layer's working set.

    Full checkpointing keeps 2sbh a layer in half precision (Korthikanti et al., arXiv:2205.05198); here
    the residual stream of a float32 model stays float32 under autocast.
    """
    layer = layer_bytes_per_token(spec, train, compute)
    if plan.activation_checkpointing == "none":
        return spec.layers * layer
    residual = FLOAT32 if train.finetuning_type == "full" else compute
    return spec.layers * residual * spec.hidden + layer


def _logit_bytes(compute: int) -> int:
    """Bytes a token and vocabulary entry: float32 logits, log-probabilities and gradient, and the logits
    before the upcast. Taken as if every token were learnt; the loss leaves out those that are not.
    """
    return 3 * FLOAT32 + (compute if compute < FLOAT32 else 0)


def _fixed(plan: Plan) -> int:
    if plan.device == "cpu":
        return int(FIXED_CPU * GIB)
    return int((FIXED_CUDA + (FIXED_NCCL if plan.world_size > 1 else 0)) * GIB)
