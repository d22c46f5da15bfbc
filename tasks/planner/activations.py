"""Bytes a forward pass keeps for its backward pass: decoder layers, logits, vision tower."""

from __future__ import annotations

from tasks.contracts import ModelSpec, Plan, Precision
from tasks.planner.families import FAMILIES
from tasks.planner.model_spec import lora_shapes
from tasks.planner.workload import ELASTANE, SavedBytes, Software, Workload, uses_block_mask

FLOAT32 = 4
COMPUTE_BYTES: dict[Precision, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# There is no flash attention in float32 on CUDA: the scores are kept (seen in benchmarks/results/planner-gpu.json).
FLOAT32_SCORES = 4
# transformers' BLOOM adds its bias to scores that it computes one by one: their softmax is kept in float32, and the
# cast of it. llama_alibi has its bias in a mask, and what kernels that take one keep is no more than flash attention's.
STEPWISE = frozenset({"bloom"})
MASKED = frozenset({"llama_alibi"})
# Matrices whose inputs tensor parallelism cuts; it cuts the outputs of all others.
ROWWISE = ("o_proj", "down_proj", "dense", "dense_4h_to_h", "c_proj")
MEASURED_TYPES = {"full": "full", "lora": "lora", "qlora": "lora"}

# Counted with torch's saved-tensor hooks on the transformers 5.24 decoders under autocast (the test
# counts again). For h-wide queries in half precision this is 30h + 8f: the published closed form
# s b (20h + 8f) for SwiGLU and flash attention, plus float32 norms and residuals. LoRA is counted with
# adapters on every linear; with fewer a little less is kept.
SAVED: dict[tuple[str, int], SavedBytes] = {
    ("full", 4): SavedBytes(hidden=24, ffn=16, query=8, key=8, norm=8),
    ("full", 2): SavedBytes(hidden=26, ffn=8, query=4, key=4, norm=6),
    ("lora", 4): SavedBytes(hidden=16, ffn=16, query=8, key=8, norm=4),
    ("lora", 2): SavedBytes(hidden=18, ffn=8, query=6, key=4, norm=4),  # PEFT casts an adapter's inputs
}


def layer_bytes_per_token(
    spec: ModelSpec, work: Workload, software: Software = ELASTANE, sequence: int = 0
) -> float:
    """What one decoder layer keeps for its backward pass without recomputation, bytes a token (see `SAVED`)."""
    compute = COMPUTE_BYTES[work.precision]
    saved = _saved_of(work, software)
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    ffn = active_ffn(spec) * (1.0 if spec.gated_mlp else 0.5)
    total = (
        (saved.hidden + saved.norm * _more_norms(spec)) * spec.hidden
        + saved.ffn * ffn
        + saved.query * query
        + saved.key * key
    )
    if spec.query_key_norm:
        total += saved.norm * (query + key)
    if work.method != "full":
        adapted = {name for name, _, _ in lora_shapes(spec, work.lora_targets)}
        total += compute * work.lora_rank * len(adapted)
        # bitsandbytes' MatMul4Bit keeps its input (seen in its source), this project's own product does not.
        if work.method == "lora" or software.scales_whole:
            total -= compute * _inputs_not_kept(spec, adapted, active_ffn(spec))
    return total + software.scores * spec.heads * sequence


def _more_norms(spec: ModelSpec) -> int:
    """Norms of a layer beyond the two that `SAVED` was counted with."""
    family = FAMILIES.get(spec.family)
    return max(0, family.norms - 2) if family else 0


def _saved_of(work: Workload, software: Software) -> SavedBytes:
    key = (MEASURED_TYPES[work.method], COMPUTE_BYTES[work.precision])
    return software.saved.get(key) or SAVED[key]


def _inputs_not_kept(spec: ModelSpec, adapted: set[str], ffn: float) -> float:
    """Entries a token that frozen linears without an adapter need not keep: the MLP's input and its product."""
    ups = {"gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "c_fc", "fc1"}
    downs = {"down_proj", "dense_4h_to_h", "fc2"}
    names = {name for name, _, _ in spec.linear_shapes}
    free = 0.0
    if names & ups and not adapted & ups:
        free += spec.hidden
    if names & downs and not adapted & downs:
        free += ffn
    return free


def layer_bytes(spec: ModelSpec, plan: Plan, work: Workload, software: Software) -> tuple[float, float]:
    """Bytes a token of one layer on one rank: (its whole working set, what is kept until its backward pass).

    Tensor parallelism divides what lies inside attention and MLP, and with sequence parallelism the rest too;
    without, 10 of Korthikanti et al.'s 34 bytes a hidden entry stay whole (arXiv:2205.05198, equations 2 to 4), and
    with this project's own trainer all that are hidden wide. Full checkpointing keeps a layer's input; selective
    keeps the outputs of its matrix products, but those of adapters' second ones.
    """
    compute = COMPUTE_BYTES[work.precision]
    whole = layer_bytes_per_token(spec, work, software, work.sequence)
    whole += _scores(spec, plan, work, software) * spec.heads * work.sequence
    if plan.device == "cuda" and uses_block_mask(work, plan.device):
        whole += FLOAT32 * work.sequence  # kernels are given a block mask as numbers, anew in each layer
    if plan.tp > 1:
        stays = _not_divided(spec, plan, work, software, whole)
        whole = stays + (whole - stays) / plan.tp
        if not software.native and plan.pp == 1:
            whole += software.gathered_inputs * spec.hidden
    if plan.activation_checkpointing == "none":
        return whole, whole
    residual = hidden_state_bytes(work, software) * spec.hidden
    if plan.tp > 1 and plan.sequence_parallel:
        residual /= plan.tp
    if plan.activation_checkpointing == "full":
        return whole, residual
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    ups = 2 if spec.gated_mlp else 1
    # Before they are summed over ranks, the outputs of a layer's two rowwise matrices are as wide as hidden.
    out = 2.0 * spec.hidden * (plan.tp if software.native else 1)
    products = query + 2 * key + ups * active_ffn(spec) + out
    if work.method != "full":
        products += work.lora_rank * len(lora_shapes(spec, work.lora_targets))
    matmuls = compute * (query + software.selective * products) / plan.tp
    return whole, min(whole, residual + matmuls)


def _scores(spec: ModelSpec, plan: Plan, work: Workload, software: Software) -> float:
    """Bytes a head and pair of positions beside `software.scores`, where no kernel hides them."""
    compute = COMPUTE_BYTES[work.precision]
    if software.native and spec.family in STEPWISE:
        return max(FLOAT32, compute) + (compute if compute < FLOAT32 else 0)
    cuda_float32 = work.precision == "float32" and plan.device == "cuda"
    return FLOAT32_SCORES if cuda_float32 and not software.scores else 0.0


def mask_bytes(spec: ModelSpec, plan: Plan, work: Workload, software: Software) -> float:
    """A mask of every head's bias (heads, sequence, sequence), which all layers of a stage and all rows share."""
    if not software.native or spec.family not in MASKED:
        return 0.0
    return COMPUTE_BYTES[work.precision] * spec.heads / plan.tp * work.sequence**2


def _not_divided(spec: ModelSpec, plan: Plan, work: Workload, software: Software, whole: float) -> float:
    """Bytes a token of a layer's `whole` that every tensor-parallel rank has.

    Those of the native trainer were counted on two ranks as `SAVED` was: what is hidden wide, or with sequence
    parallelism the inputs of attention and MLP, which autocast casts for each matrix of a fully tuned layer; and the
    rank-wide outputs of adapters.
    """
    compute = COMPUTE_BYTES[work.precision]
    if not software.native:
        return 0.0 if plan.sequence_parallel else min(5.0 * compute * spec.hidden, 0.6 * whole)
    adapters = 0 if work.method == "full" else len(lora_shapes(spec, work.lora_targets))
    saved = _saved_of(work, software)
    hidden = saved.hidden + saved.norm * _more_norms(spec)
    if plan.sequence_parallel:
        casts = sum(not name.endswith(ROWWISE) for name, _, _ in spec.linear_shapes)
        hidden = compute * (casts if work.method == "full" and compute < FLOAT32 else 2.0)
    return min(whole, hidden * spec.hidden + compute * work.lora_rank * adapters)


def hidden_state_bytes(work: Workload, software: Software) -> float:
    """Bytes an entry of what a layer hands the next: what full checkpointing keeps and a pipeline sends."""
    if software.residual is not None:
        return software.residual
    return FLOAT32 if software.native and work.method == "full" else COMPUTE_BYTES[work.precision]


def active_ffn(spec: ModelSpec) -> float:
    """Width of the MLP that a token passes, averaged over layers with experts and layers without."""
    if spec.moe is None:
        return spec.ffn
    dense = spec.moe.dense_layers / spec.layers
    return dense * spec.ffn + (1 - dense) * (spec.moe.active * spec.moe.ffn + spec.moe.shared_ffn)


def logit_bytes(precision: Precision, plan: Plan, software: Software = ELASTANE) -> float:
    """Bytes a token and vocabulary entry: float32 logits, log-probabilities and gradient, and the logits
    before the upcast. Taken as if every token were learnt; the loss leaves out those that are not.
    """
    compute = COMPUTE_BYTES[precision]
    if fuses_loss(plan, software):
        return 2 * compute
    return 3 * FLOAT32 if compute >= FLOAT32 else software.logits


def fuses_loss(plan: Plan, software: Software) -> bool:
    """Whether the loss keeps the logits alone, and its backward pass their gradient beside them."""
    return software.fused_loss and plan.tp == 1


def vision_bytes(spec: ModelSpec, plan: Plan, work: Workload) -> float:
    """The tower's activations: of one layer when it is frozen, of all when it is trained (34 bytes a hidden entry
    and patch, arXiv:2205.05198 equation 1 without the scores), and the image features.
    """
    vision = spec.vision
    if vision is None or not work.longest_tiles:
        return 0.0
    compute = COMPUTE_BYTES[work.precision]
    patches = plan.micro_batch * work.longest_tiles * vision.patches
    layer = 17.0 * compute * vision.hidden
    layers = vision.layers if work.train_tower and plan.activation_checkpointing == "none" else 1
    features = 2 * compute * (vision.hidden + spec.hidden)
    return patches * (layer * layers + features)
