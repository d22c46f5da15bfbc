"""A published row's dims -> ModelSpec."""

from __future__ import annotations

from benchmarks.planner_accuracy.measured import Row, number
from tasks.contracts import ModelSpec, VisionSpec


def spec_of(row: Row) -> ModelSpec:
    hidden, layers = int(number(row, "hidden", 0)), int(number(row, "layers", 0))
    heads = int(number(row, "heads", hidden // 128))
    kv_heads = int(number(row, "kv_heads", heads))
    ffn, vocab = int(number(row, "ffn", 4 * hidden)), int(number(row, "vocab", 50257))
    tied = number(row, "tied_emb", 0) == 1
    head = hidden // heads
    tables = vocab * hidden * (1 if tied else 2)
    stated = number(row, "params_b", 0) * 1e9
    attention = hidden * hidden * 2 + 2 * hidden * kv_heads * head
    gated = _is_gated(stated - tables, layers, attention, hidden * ffn) if stated else ffn != 4 * hidden
    shapes = [
        ("q_proj", hidden, heads * head),
        ("k_proj", hidden, kv_heads * head),
        ("v_proj", hidden, kv_heads * head),
        ("o_proj", heads * head, hidden),
        ("up_proj", hidden, ffn),
        ("down_proj", ffn, hidden),
    ]
    if gated:
        shapes.insert(4, ("gate_proj", hidden, ffn))
    layer = sum(d_in * d_out for _, d_in, d_out in shapes) + 2 * hidden
    text = layers * layer + tables + hidden
    vision = _tower(int(stated - text)) if "VL" in row["model"] and stated > text else None
    return ModelSpec(
        family="published",
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head,
        vocab=vocab,
        max_positions=1,
        tied_embeddings=tied,
        gated_mlp=gated,
        fused_qkv=False,
        query_key_norm=False,
        position="rope",
        sliding_window=None,
        parameters=text + (vision.tower_parameters if vision else 0),
        layer_parameters=layer,
        embedding_parameters=vocab * hidden,
        linear_shapes=tuple(shapes),
        moe=None,
        vision=vision,
    )


def _is_gated(stated: float, layers: int, attention: int, matrix: int) -> bool:
    """Whether three MLP matrices a layer come nearer to the stated parameters (tables left out) than two."""
    return abs(layers * (attention + 3 * matrix) - stated) < abs(layers * (attention + 2 * matrix) - stated)


def _tower(parameters: int) -> VisionSpec:
    """Qwen-VL's ViT-bigG: 448 pixels, patches of 14, 1,024 of them (arXiv:2308.12966, section 2.1)."""
    return VisionSpec(
        layers=48,
        feature_layers=48,
        hidden=1664,
        ffn=8192,
        heads=16,
        image_size=448,
        patch_size=14,
        patches=1024,
        tile_tokens=256,
        grid_pinpoints=(),
        tower_parameters=parameters,
        projector_parameters=0,
    )
