"""The memory formula against what torch really keeps."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.contracts import DataManifest, SplitCounts
from tasks.planner.activations import layer_bytes, layer_bytes_per_token
from tasks.planner.memory import memory, trainable_parameters
from tasks.planner.model_spec import model_spec
from tasks.planner.workload import ELASTANE, Software, Workload, workload
from tasks.trainer.adapters import stay_in_half
from tasks.trainer.tensor_parallel import cut_over_ranks
from tests.tiny import cpu_plan, params
from tests.unit.planner_cases import LLAMA_7B, SMOL, gpus, plans, strategy_params

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "pad_token_id": 0,
}


def bytes_kept(
    model_type: str,
    method: str,
    precision: str,
    layers: int,
    tokens: int,
    cut=None,
    own=True,
    key_value_heads: int = 2,
) -> int:
    """Bytes of the distinct tensors that a decoder's forward pass saves, its parameters apart; `cut` comes first.

    `own`: with adapters as this project's trainer runs them, else as PEFT does.
    """
    shapes = {key: SHAPES[key] for key in ("hidden_size", "num_attention_heads", "vocab_size")}
    shapes = shapes if model_type == "bloom" else SHAPES | {"num_key_value_heads": key_value_heads}
    config = AutoConfig.for_model(model_type, **shapes, num_hidden_layers=layers)
    half = DTYPES[precision]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if method == "full" else half)
    decoder, whole = model.get_decoder(), model
    if method == "lora":
        whole = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    if own:
        stay_in_half(whole, precision)
    if cut is not None:
        cut(whole, model)
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        # The tensor is held too, or a later one could take its address and not be counted.
        kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", half, enabled=precision != "float32"),
    ):
        decoder(input_ids=torch.zeros(2, tokens // 2, dtype=torch.long), use_cache=False)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for address, (size, _) in kept.items() if address not in weights)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("software", [ELASTANE, Software("peft")], ids=lambda software: software.name)
def test_activations_of_a_layer_are_those_torch_saves(software, model_type, method, precision):
    def layer(tokens: int) -> int:
        two, one = (
            bytes_kept(model_type, method, precision, layers, tokens, own=software is ELASTANE)
            for layers in (2, 1)
        )
        return two - one

    real = (layer(128) - layer(64)) / 64  # casts of weights do not grow with tokens and drop out
    spec = model_spec({"model_type": model_type, **SHAPES})
    predicted = layer_bytes_per_token(spec, work(method, precision), software)
    assert predicted == pytest.approx(real, rel=0.03)


@pytest.mark.parametrize(
    ("method", "precision"),
    [
        ("full", "bfloat16"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("full", "float32"), ("lora", "float32"), ("lora", "bfloat16"))
        ),
    ],
)
def test_two_more_norms_in_a_layer_keep_more(method, precision):
    """glm4 is glm with a norm behind attention and one behind the MLP."""

    def real(family: str) -> float:
        def layer(tokens: int) -> int:
            two, one = (bytes_kept(family, method, precision, layers, tokens) for layers in (2, 1))
            return two - one

        return (layer(128) - layer(64)) / 64

    def predicted(family: str) -> float:
        spec = model_spec({"model_type": family, **SHAPES})
        return layer_bytes_per_token(spec, work(method, precision), ELASTANE)

    assert predicted("glm4") - predicted("glm") == pytest.approx(real("glm4") - real("glm"), rel=0.03)
    assert predicted("glm4") == pytest.approx(real("glm4"), rel=0.07)


def work(method: str = "lora", precision: str = "bfloat16", longest: int = 512, **changes) -> Workload:
    return Workload(method, precision, longest, longest / 2, **changes)


def plan_of(**changes):
    chosen = plans(gpus(8), strategy=strategy_params(data_parallel_degree=1))[0].plan
    # With accumulation the gradients of earlier micro-batches are there at the peak.
    return chosen.model_copy(update={"micro_batch": 1, "accumulation": 16, **changes})


def test_state_bytes_of_full_tuning_are_16_a_parameter():
    terms = memory(SMOL, plan_of(), work("full", "float32"))
    assert terms["weights"] + terms["gradients"] + terms["optimizer"] == pytest.approx(
        16 * SMOL.parameters, rel=1e-3
    )
    assert terms["casts"] == terms.get("buckets", 0) == 0


def test_lora_keeps_the_base_in_the_compute_precision_and_16_bytes_an_adapter_parameter():
    adapters = trainable_parameters(SMOL, work())
    for precision, size in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        terms = memory(SMOL, plan_of(), work("lora", precision))
        states = terms["weights"] + terms["gradients"] + terms["optimizer"]
        assert states == pytest.approx(size * SMOL.parameters + 16 * adapters, rel=1e-3)


def test_trained_tables_take_their_states():
    """Beside them a frozen copy is counted, as PEFT keeps one (this trainer does not)."""
    recipe = params(**{"train.lora.train_embeddings": True}).train
    split = SplitCounts(rows=2, tokens=9, target_tokens=2, longest=8)
    assert workload(recipe, DataManifest.model_construct(train=split), "bfloat16").train_embeddings
    plain, tables = (memory(LLAMA_7B, plan_of(), work(train_embeddings=on)) for on in (False, True))
    count = 2 * LLAMA_7B.embedding_parameters
    for term, size in (("weights", 4), ("gradients", 4), ("optimizer", 8)):
        assert tables[term] - plain[term] == pytest.approx(size * count, rel=1e-6), term


def test_ddp_adds_a_bucket_as_large_as_the_gradients():
    terms = memory(SMOL, plan_of(dp_replicate=2), work("full"))
    assert terms["buckets"] == terms["gradients"] == pytest.approx(4 * SMOL.parameters, rel=1e-3)


def test_checkpointing_and_smaller_micro_batches_need_less():
    def total(**changes) -> int:
        return sum(memory(LLAMA_7B, plan_of(**changes), work(longest=2048)).values())

    plain, kept = total(micro_batch=4), total(micro_batch=4, activation_checkpointing="full")
    assert kept < 0.5 * plain
    assert total(micro_batch=1) < total(micro_batch=2) < plain


# Lightning-AI/litgpt, tutorials/resource-tables.md: LoRA (r=8, q and v) in bfloat16 without checkpointing, longest
# row 1,304 tokens, max_memory_allocated in GB, which leaves the CUDA context out.
@pytest.mark.parametrize(("micro_batch", "published"), [(1, 21.3), (2, 29.07)])
def test_lora_of_llama_2_7b_is_near_litgpts_measurement(micro_batch, published):
    recipe = work(longest=1304, lora_rank=8, lora_targets=("q_proj", "v_proj"))
    plan = plan_of(micro_batch=micro_batch, activation_checkpointing="none")
    terms = memory(LLAMA_7B, plan, recipe)
    assert (sum(terms.values()) - terms["fixed"]) / 1e9 == pytest.approx(published, rel=0.12)


@pytest.fixture
def two_ranks():
    """A group of two of which only the first is here: what it sends arrives nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("method", "precision"),
    [("full", "bfloat16"), ("full", "float32"), ("lora", "float32"), ("lora", "bfloat16")],
)
def test_activations_under_tensor_parallelism_are_those_torch_saves(
    two_ranks, method, precision, sequence_parallel
):
    def cut(model, decoder_of) -> None:
        cut_over_ranks(model, decoder_of, two_ranks, sequence_parallel)

    def layer(tokens: int) -> int:
        two, one = (bytes_kept("llama", method, precision, layers, tokens, cut) for layers in (2, 1))
        return two - one

    real = (layer(128) - layer(64)) / 64
    spec = model_spec({"model_type": "llama", **SHAPES})
    plan = cpu_plan(tp=2, sequence_parallel=sequence_parallel)
    assert layer_bytes(spec, plan, work(method, precision), ELASTANE)[0] == pytest.approx(real, rel=0.03)


def test_sharding_divides_what_it_shares_out():
    """ZeRO, arXiv:1910.02054, figure 1: optimizer state, then gradients, then weights by the number of ranks."""

    def states(sharding: str) -> dict[str, int]:
        return memory(LLAMA_7B, plan_of(sharding=sharding, dp_shard=8), work("full"))

    whole = memory(LLAMA_7B, plan_of(), work("full"))
    for sharding, shared in (
        ("zero1", {"optimizer"}),
        ("zero2", {"optimizer", "gradients"}),
        ("zero3", {"optimizer", "gradients", "weights"}),
        ("fsdp2", {"optimizer", "gradients", "weights"}),
    ):
        terms = states(sharding)
        for name in ("weights", "gradients", "optimizer"):
            expected = whole[name] / (8 if name in shared else 1)
            assert terms[name] == pytest.approx(expected, rel=0.01), (sharding, name)


def test_tensor_and_pipeline_parallelism_divide_states_and_offload_takes_the_optimizer_away():
    whole, recipe = memory(LLAMA_7B, plan_of(), work("full")), work("full")
    cut = memory(LLAMA_7B, plan_of(tp=4, sequence_parallel=True), recipe)
    assert cut["weights"] == pytest.approx(whole["weights"] / 4, rel=0.02)
    staged = memory(LLAMA_7B, plan_of(pp=4, schedule="1f1b"), recipe)
    assert staged["weights"] < 0.35 * whole["weights"]
    away = memory(LLAMA_7B, plan_of(sharding="zero2", engine="deepspeed", offload="cpu"), recipe)
    assert away["optimizer"] == 0


def test_qlora_keeps_linear_weights_in_four_bits():
    lora, qlora = (memory(LLAMA_7B, plan_of(), work(method))["weights"] for method in ("lora", "qlora"))
    assert 0.25 < qlora / lora < 0.35  # NF4 a quarter of bfloat16; embedding and head stay


# --- compiled layers -----------------------------------------------------------------------------


def test_compiled_layers_and_losses_keep_less():
    plain, compiled = (memory(LLAMA_7B, plan_of(compiled=each), work()) for each in (False, True))
    assert compiled["activations"] < 0.85 * plain["activations"]
    assert compiled["logits"] == 512 * LLAMA_7B.vocab * 2 * 2  # logits and their gradient, in bfloat16
    assert compiled["weights"] == plain["weights"]
    # Where the vocabulary is cut over ranks the loss is not compiled.
    plain, compiled = (memory(LLAMA_7B, plan_of(compiled=each, tp=2), work()) for each in (False, True))
    assert compiled["logits"] == plain["logits"]


def test_the_heads_gradient_stands_beside_fused_logits():
    lora, full = (
        memory(LLAMA_7B, plan_of(compiled=True), work(method))["logits"] for method in ("lora", "full")
    )
    assert full - lora == pytest.approx(2 * LLAMA_7B.embedding_parameters, rel=1e-6)


# --- beside tensor and pipeline parallelism -----------------------------------------------------


def test_fsdp2_beside_a_pipeline_keeps_weights_gathered_and_gradients_whole():
    recipe = work("full")
    staged = {"pp": 2, "schedule": "1f1b"}
    alone = memory(LLAMA_7B, plan_of(**staged), recipe)
    shared = memory(LLAMA_7B, plan_of(**staged, sharding="fsdp2", dp_shard=4), recipe)
    for name in ("weights", "optimizer"):
        assert shared[name] == pytest.approx(alone[name] / 4, rel=1e-3)
    assert shared["gradients"] == alone["gradients"]
    half = alone["weights"] / 2  # float32 -> bfloat16; the embedding is gathered in float32
    assert half < shared["gathered"] <= half + 2 * LLAMA_7B.embedding_parameters
    # Without stages two layers are gathered at a time, and gradients scattered each micro-batch.
    flat = memory(LLAMA_7B, plan_of(sharding="fsdp2", dp_shard=4), recipe)
    assert flat["gathered"] < shared["gathered"] and flat["gradients"] < shared["gradients"]


def test_copies_beside_tensor_parallelism_have_no_buckets():
    recipe = work("full")
    copies = memory(LLAMA_7B, plan_of(tp=2, sequence_parallel=True, dp_replicate=2), recipe)
    assert copies.get("buckets", 0) == 0
    assert copies == memory(LLAMA_7B, plan_of(tp=2, sequence_parallel=True), recipe)


def test_zero_bubble_has_embedding_and_head_on_one_rank():
    staged = {"pp": 2, "accumulation": 8}
    recipe = work("full", "float32", longest=64)
    forth = memory(LLAMA_7B, plan_of(**staged, schedule="1f1b"), recipe)
    back = memory(LLAMA_7B, plan_of(**staged, schedule="zerobubble", virtual_stages=2), recipe)
    assert back["weights"] - forth["weights"] == pytest.approx(4 * LLAMA_7B.embedding_parameters, rel=1e-3)
    assert back["logits"] > 0


def test_each_micro_batch_in_flight_has_its_own_casts_and_gpipes_losses_wait():
    recipe = work("full", longest=64)
    staged = {"pp": 2, "accumulation": 8}
    one = memory(LLAMA_7B, plan_of(**staged, schedule="1f1b"), recipe)
    all_at_once = memory(LLAMA_7B, plan_of(**staged, schedule="gpipe"), recipe)
    assert all_at_once["casts"] > 3.5 * one["casts"]
    assert all_at_once["logits"] == pytest.approx((14 + 7 * 4) * 64 * LLAMA_7B.vocab)


def test_powersgd_keeps_what_it_left_out():
    plan = plan_of(dp_replicate=2)
    plain, hook = (memory(SMOL, plan, work("full", communication_hook=name)) for name in ("fp16", "powersgd"))
    assert hook["buckets"] - plain["buckets"] == pytest.approx(4 * SMOL.parameters, rel=1e-3)


def test_selective_checkpointing_lies_between_none_and_full():
    for method in ("lora", "full"):
        kept = [
            memory(LLAMA_7B, plan_of(activation_checkpointing=level), work(method))["activations"]
            for level in ("full", "selective", "none")
        ]
        assert kept[0] < 0.8 * kept[1] < 0.8 * kept[2]
