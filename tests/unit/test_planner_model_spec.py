"""The counts of model_spec against the real transformers models on the meta device."""

from __future__ import annotations

import pytest
import torch

from tasks.errors import UserError
from tasks.planner.families import FAMILIES
from tasks.planner.model_spec import (
    active_parameters,
    lora_parameters,
    lora_shapes,
    matmul_parameters,
    model_spec,
)
from tests.unit.model_cases import EXPERTS, GPT, LATENT, QWEN2_TEXT, TINY, TOWER, VARIANTS, real_model
from tests.unit.published_configs import IN_TRANSFORMERS, OWN_CODE, published

DEFAULTS = [{"model_type": name} for name in FAMILIES if name not in ("qwen", "baichuan", "chatglm")]
PUBLISHED = [published(name) for name in IN_TRANSFORMERS]


def count(modules: torch.nn.Module, *parts: str) -> int:
    return sum(
        p.numel()
        for name, p in modules.named_parameters()
        if not parts or any(part in name for part in parts)
    )


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    decoder = getattr(model.model, "language_model", model) if hasattr(model, "model") else model
    return next(module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList))


def linears(layer: torch.nn.Module) -> list[tuple[str, int, int]]:
    """Names and widths of a layer's linear modules; GPT-2's Conv1D keeps its weight as (in, out)."""
    found = []
    for name, module in layer.named_modules():
        if isinstance(module, torch.nn.Linear):
            found.append((name.rsplit(".", 1)[-1], module.in_features, module.out_features))
        elif type(module).__name__ == "Conv1D":
            found.append((name.rsplit(".", 1)[-1], *module.weight.shape))
    return sorted(found)


@pytest.mark.parametrize(
    "config", VARIANTS + DEFAULTS + PUBLISHED, ids=lambda config: f"{config['model_type']}-{len(config)}"
)
def test_spec_equals_the_real_model(config):
    model = real_model(config)
    spec = model_spec(config)
    text = model.config.get_text_config()
    layers = decoder_layers(model)
    assert spec.parameters == count(model)
    assert spec.embedding_parameters == model.get_input_embeddings().weight.numel()
    assert (spec.layers, spec.hidden) == (len(layers), text.hidden_size)
    assert spec.layer_parameters == count(layers) // len(layers)
    assert sorted(spec.linear_shapes) == linears(layers[-1 if spec.family == "deepseek_v3" else 1])
    assert spec.query_key_norm == any(
        "q_norm" in name or "q_layernorm" in name for name, _ in layers.named_modules()
    )
    assert (spec.position == "learned") == (count(model, "wpe", "embed_positions") > 0)
    assert spec.heads == text.num_attention_heads
    if hasattr(text, "max_position_embeddings"):
        assert spec.max_positions == text.max_position_embeddings
    out = model.get_output_embeddings().weight
    assert spec.tied_embeddings == (out is model.get_input_embeddings().weight)
    experts = count(layers, ".mlp.experts.")
    assert (spec.moe.parameters if spec.moe else 0) == experts


@pytest.mark.parametrize("name", IN_TRANSFORMERS | OWN_CODE)
def test_published_totals(name):
    assert model_spec(published(name)).parameters == (IN_TRANSFORMERS | OWN_CODE)[name]


@pytest.mark.parametrize("config", [c for c in VARIANTS + PUBLISHED if c["model_type"].startswith("llava")])
def test_tower_and_projector_equal_the_real_ones(config):
    model = real_model(config)
    vision = model_spec(config).vision
    tower = model.config.vision_config
    assert vision.tower_parameters == count(model.model.vision_tower)
    assert vision.projector_parameters == count(model, "multi_modal_projector", "image_newline")
    assert vision.patches == model.model.vision_tower.embeddings.num_positions
    assert (vision.layers, vision.hidden, vision.heads) == (
        tower.num_hidden_layers,
        tower.hidden_size,
        tower.num_attention_heads,
    )
    pinpoints = getattr(model.config, "image_grid_pinpoints", [])
    assert list(vision.grid_pinpoints) == [tuple(pair) for pair in pinpoints]


def test_layers_that_run_before_the_projector():
    base = {"model_type": "llava", "text_config": TINY, "vision_config": TOWER}
    assert model_spec(base).vision.feature_layers == 2  # -2: all but the last of three
    assert model_spec({**base, "vision_feature_layer": 1}).vision.feature_layers == 1
    assert model_spec({**base, "vision_feature_layer": [0, -1]}).vision.feature_layers == 3
    with pytest.raises(
        UserError, match=r"vision_feature_layer=4 must be one or several of the tower's 3 layers"
    ):
        model_spec({**base, "vision_feature_layer": 4})


def test_key_and_value_heads():
    def heads(family, **config):
        return model_spec({**config, "model_type": family}).kv_heads

    assert heads("falcon", **TINY) == 1
    assert heads("falcon", **{**TINY, "multi_query": False}) == 4
    assert heads("falcon", **{**TINY, "new_decoder_architecture": True, "num_kv_heads": 2}) == 2
    assert heads("chatglm", num_attention_heads=4, multi_query_group_num=2) == 4
    assert heads("chatglm", num_attention_heads=4, multi_query_attention=True) == 1
    assert model_spec(published("chatglm3-6b")).kv_heads == 2


def test_a_window_counts_only_where_every_layer_has_it():
    assert model_spec({"model_type": "mistral"}).sliding_window == 4096
    assert model_spec({"model_type": "mistral", "sliding_window": None}).sliding_window is None
    assert model_spec({"model_type": "phi3", "sliding_window": 2047}).sliding_window == 2047
    for mixed in ("gemma2", "gemma3_text", "qwen2", "qwen2_moe"):
        assert model_spec({"model_type": mixed, "sliding_window": 512}).sliding_window is None


def test_baichuan_has_rotary_positions_in_7b_and_alibi_in_13b():
    small, large = (model_spec(published(name)) for name in ("baichuan-7b", "baichuan2-13b"))
    assert (small.position, large.position) == ("rope", "alibi")
    assert (small.max_positions, large.max_positions) == (4096, 4096)
    assert large.fused_qkv
    assert large.linear_shapes[0] == ("W_pack", 5120, 15360)


def test_options_of_families_with_their_own_code():
    config = {**published("chatglm3-6b"), "num_layers": 1}
    plain = model_spec(config).parameters
    hidden, ffn = 4096, 13696
    assert model_spec({**config, "rmsnorm": False}).parameters - plain == 3 * hidden
    assert model_spec({**config, "add_bias_linear": True}).parameters - plain == 2 * hidden + 2 * ffn
    assert plain - model_spec({**config, "post_layer_norm": False}).parameters == hidden
    qwen = {**published("qwen-7b"), "num_hidden_layers": 1}
    more = model_spec({**qwen, "no_bias": False}).parameters - model_spec(qwen).parameters
    assert more == 2 * 4096 + 2 * 11008
    assert model_spec(qwen).ffn == 11008


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
@pytest.mark.parametrize(
    "config",
    [QWEN2_TEXT, {"model_type": "qwen2_moe", **EXPERTS, "mlp_only_layers": [0]}],
    ids=["dense", "experts"],
)
def test_lora_count_equals_pefts(config, targets):
    assert lora_parameters(model_spec(config), 3, targets) == peft_count(config, targets)


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        ({"model_type": "gpt2", **GPT}, "all-linear"),
        ({"model_type": "gpt2", **GPT}, ["c_proj"]),
        ({"model_type": "phi3", **TINY, "pad_token_id": 0}, ["qkv_proj", "gate_up_proj"]),
        ({"model_type": "gpt_neox", **TINY}, ["dense", "dense_4h_to_h"]),
        (
            {"model_type": "mixtral", **TINY, "num_key_value_heads": 2},
            ["q_proj", "k_proj", "v_proj", "o_proj"],
        ),
        (
            {"model_type": "deepseek_v3", **LATENT},
            ["q_a_proj", "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa"],
        ),
    ],
)
def test_lora_targets_are_the_modules_peft_finds(config, targets):
    assert lora_parameters(model_spec(config), 3, targets) == peft_count(config, targets)


def peft_count(config: dict, targets: str | list[str]) -> int:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(real_model(config), LoraConfig(r=3, target_modules=targets))
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_matmul_parameters_leave_out_only_an_untied_input_table():
    config = published("smollm2-135m")
    tied = model_spec(config)
    untied = model_spec({**config, "tie_word_embeddings": False})
    assert matmul_parameters(tied) == matmul_parameters(untied) == tied.parameters


def test_active_parameters_are_what_one_token_meets():
    def active(name):
        return active_parameters(model_spec(published(name)))

    # Mixtral: 2 of 8 experts; its authors say 13 B active, input table included (arXiv:2401.04088).
    mixtral = model_spec(published("mixtral-8x7b"))
    six_experts = mixtral.layers * 6 * 3 * 4096 * 14336
    assert active("mixtral-8x7b") == mixtral.parameters - six_experts - 32000 * 4096
    # Qwen3-30B-A3B: 3.3 B active, input table included (its model card).
    assert active("qwen3-30b-a3b") + 151936 * 2048 == pytest.approx(3.3e9, rel=0.02)
    # GPT-2's positions are looked up, its tied table is the head.
    assert active("gpt2") == 124_439_808 - 1024 * 768
    vicuna = model_spec({"model_type": "llama", "vocab_size": 32064})
    assert active("llava-v1.6-vicuna-7b") == active_parameters(vicuna)


def test_unknown_type_names_it_and_the_supported():
    with pytest.raises(
        UserError, match=r"model_type='mamba'.*llama, mistral, qwen2, qwen3.*llava, llava_next"
    ):
        model_spec({"model_type": "mamba"})
    with pytest.raises(UserError, match="model_type=None"):
        model_spec({})
    with pytest.raises(UserError, match=r"text_config\.model_type='mamba'"):
        model_spec({"model_type": "llava", "text_config": {"model_type": "mamba"}})
    with pytest.raises(UserError, match=r"vision_config\.model_type='siglip_vision_model' cannot be planned"):
        model_spec({"model_type": "llava", "vision_config": {"model_type": "siglip_vision_model"}})


@pytest.mark.parametrize("value", [0, -4, "64", 2.5, True])
def test_a_size_that_is_none_is_refused(value):
    with pytest.raises(UserError, match=rf"hidden_size={value!r} must be a whole number of at least 1"):
        model_spec({"model_type": "llama", "hidden_size": value})
    with pytest.raises(UserError, match=rf"n_layer={value!r} must be a whole number of at least 1"):
        model_spec({"model_type": "gpt2", "n_layer": value})
    with pytest.raises(UserError, match=rf"vision_config\.patch_size={value!r} must be a whole number"):
        model_spec({"model_type": "llava", "vision_config": {"patch_size": value}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "llama", **TINY, "num_key_value_heads": 3},
            "num_key_value_heads=3 does not divide num_att",
        ),
        (
            {"model_type": "gpt2", "n_embd": 25, "n_head": 4},
            "num_attention_heads=4 does not divide hidden_size=25",
        ),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9},
            "num_experts_per_tok=9 is more than the 8 experts",
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers=3 must be a list"),
        (
            {"model_type": "opt", "word_embed_proj_dim": 512},
            "word_embed_proj_dim=512 differs from hidden_size",
        ),
        (
            {"model_type": "chatglm", "inner_hidden_size": 16384},
            "inner_hidden_size belongs to the first ChatGLM",
        ),
        ({"model_type": "qwen", "visual": {"width": 1664}}, "visual adds a vision tower to qwen"),
        ({"model_type": "llava", "text_config": 7}, "text_config=7 must be a mapping"),
        (
            {"model_type": "llava", "vision_feature_select_strategy": "cls"},
            "strategy='cls' must be default or full",
        ),
        (
            {"model_type": "llava_next", "image_grid_pinpoints": [336]},
            r"image_grid_pinpoints=\[336\] must be a list",
        ),
        (
            {"model_type": "llava", "vision_config": {"image_size": 14}},
            "image_size=14 is less than one patch of 32",
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        model_spec(config)


def test_unknown_lora_target_names_the_modules():
    spec = model_spec({"model_type": "llama", **TINY})
    assert [name for name, _, _ in lora_shapes(spec, ["self_attn.q_proj"])] == ["q_proj"]
    with pytest.raises(UserError, match=r"names 'c_attn'.*q_proj, k_proj"):
        lora_shapes(spec, ["c_attn"])
    with pytest.raises(UserError, match=r"names 'c_attn'.*q_proj, k_proj"):
        lora_parameters(spec, 3, ["c_attn"])
