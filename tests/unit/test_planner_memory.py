"""The memory formula against what torch really keeps."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.planner.activations import layer_bytes_per_token
from tasks.planner.memory import memory, trainable_parameters
from tasks.planner.model_spec import model_spec
from tasks.planner.workload import Workload
from tests.unit.planner_cases import LLAMA_7B, SMOL, gpus, plans, strategy_params

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
}


def bytes_kept(model_type: str, method: str, precision: str, layers: int, tokens: int) -> int:
    """Bytes of the distinct tensors that a decoder's forward pass saves, its parameters apart."""
    config = AutoConfig.for_model(model_type, **SHAPES, num_hidden_layers=layers)
    half = DTYPES[precision]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if method == "full" else half)
    decoder = model.model
    if method == "lora":
        get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
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
def test_activations_of_a_layer_are_those_torch_saves(model_type, method, precision):
    def layer(tokens: int) -> int:
        return bytes_kept(model_type, method, precision, 2, tokens) - bytes_kept(
            model_type, method, precision, 1, tokens
        )

    real = (layer(128) - layer(64)) / 64  # casts of weights do not grow with tokens and drop out
    spec = model_spec({"model_type": model_type, **SHAPES})
    predicted = layer_bytes_per_token(spec, work(method, precision))
    assert predicted == pytest.approx(real, rel=0.03)


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
