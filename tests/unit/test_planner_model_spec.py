"""The counts of model_spec against the real transformers models on the meta device."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tasks.errors import UserError
from tasks.planner.model_spec import lora_parameters, lora_shapes, matmul_parameters, model_spec

TINY = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 101,
}

# Shapes of published models, written as their config.json writes them.
SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
QWEN2_0_5B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "attention_bias": False,
    "tie_word_embeddings": True,
}

CONFIGS = [
    {"model_type": "llama", **TINY},
    {"model_type": "llama", **TINY, "num_key_value_heads": None, "head_dim": None},
    {"model_type": "llama", **TINY, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", **TINY, "head_dim": 10, "tie_word_embeddings": True},
    {"model_type": "llama", **SMOLLM2_135M},
    {"model_type": "llama"},
    {"model_type": "mistral", **TINY, "num_key_value_heads": 1},
    {"model_type": "mistral", **TINY, "num_key_value_heads": 2, "head_dim": 16},
    {"model_type": "mistral"},
    {"model_type": "qwen2", **TINY, "num_key_value_heads": 2},
    {"model_type": "qwen2", **QWEN2_0_5B},
    {"model_type": "qwen3", **TINY, "num_key_value_heads": 2, "head_dim": 8},
    {"model_type": "qwen3", **TINY, "num_key_value_heads": 2, "attention_bias": True},
    {"model_type": "qwen3", **QWEN3_4B},
]


def real_model(config: dict) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config['model_type']}-{len(config)}")
def test_counts_equal_the_real_model(config):
    model = real_model(config)
    spec = model_spec(config)
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert spec.embedding_parameters == model.get_input_embeddings().weight.numel()
    layers = model.model.layers
    assert spec.layers == len(layers)
    real_linears = {
        (name.rsplit(".", 1)[-1], module.in_features, module.out_features)
        for name, module in layers[0].named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert set(spec.linear_shapes) == real_linears
    assert spec.max_positions == model.config.max_position_embeddings
    assert spec.tied_embeddings == model.config.tie_word_embeddings


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_lora_count_equals_pefts(targets):
    from peft import LoraConfig, get_peft_model

    config = {"model_type": "qwen2", **TINY, "num_key_value_heads": 2}
    model = get_peft_model(real_model(config), LoraConfig(r=3, target_modules=targets))
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert lora_parameters(model_spec(config), 3, targets) == trainable


def test_matmul_parameters_leave_out_only_an_untied_input_table():
    tied = model_spec({"model_type": "llama", **SMOLLM2_135M})
    untied = model_spec({"model_type": "llama", **SMOLLM2_135M, "tie_word_embeddings": False})
    assert tied.parameters == 134_515_008
    assert matmul_parameters(tied) == matmul_parameters(untied) == tied.parameters


def test_unknown_type_names_it_and_the_supported():
    with pytest.raises(UserError, match=r"model_type='mamba'.*llama, mistral, qwen2, qwen3"):
        model_spec({"model_type": "mamba"})
    with pytest.raises(UserError, match="model_type=None"):
        model_spec({})


@pytest.mark.parametrize("value", [0, -4, "64", 2.5, True])
def test_a_size_that_is_none_is_refused(value):
    with pytest.raises(UserError, match=rf"hidden_size={value!r} must be a whole number"):
        model_spec({"model_type": "llama", "hidden_size": value})


def test_heads_that_cannot_share_keys_are_refused():
    with pytest.raises(UserError, match="num_key_value_heads=3 does not divide num_attention_heads=4"):
        model_spec({"model_type": "llama", **TINY, "num_key_value_heads": 3})


def test_unknown_lora_target_names_the_modules():
    spec = model_spec({"model_type": "llama", **TINY})
    assert [name for name, _, _ in lora_shapes(spec, ["self_attn.q_proj"])] == ["q_proj"]
    with pytest.raises(UserError, match=r"names 'c_attn'.*q_proj, k_proj"):
        lora_shapes(spec, ["c_attn"])
