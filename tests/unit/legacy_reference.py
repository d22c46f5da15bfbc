"""What Qwen-1, Baichuan and ChatGLM2/3 make of token ids, written from their descriptions alone."""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softmax

from tests.unit.legacy_cases import FFN, GROUPS, HEAD, HEADS, LAYERS, Weights


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * weight


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: list[float] | None = None
) -> torch.Tensor:
    """(heads, tokens, head) each; every token sees itself and those before it, less a head's slope a token away."""
    scores = q @ k.transpose(1, 2) / HEAD**0.5
    places = torch.arange(q.shape[1])
    for head, slope in enumerate(slopes or ()):
        scores[head] -= slope * (places[:, None] - places)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    mixed = softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v
    return mixed.transpose(0, 1).reshape(q.shape[1], -1)


def turned(x: torch.Tensor, width: int, base: float, neighbours: bool) -> torch.Tensor:
    """Rotates pairs of the first `width` numbers of a head: neighbours, or number i with number i + width / 2."""
    x = x.clone()
    for position in range(x.shape[1]):
        for pair in range(width // 2):
            one, other = (2 * pair, 2 * pair + 1) if neighbours else (pair, pair + width // 2)
            angle = torch.tensor(position * base ** (-2 * pair / width))
            a, b = x[:, position, one].clone(), x[:, position, other].clone()
            x[:, position, one] = a * angle.cos() - b * angle.sin()
            x[:, position, other] = b * angle.cos() + a * angle.sin()
    return x


def slopes(count: int) -> list[float]:
    """ALiBi's: a geometric series that ends at 2^-8, filled up with every other number of one twice as long."""
    if count & (count - 1) == 0:
        ratio = 2 ** (-8 / count)
        return [ratio ** (head + 1) for head in range(count)]
    less = 1 << (count.bit_length() - 1)
    return slopes(less) + slopes(2 * less)[0::2][: count - less]


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], -1, HEAD).transpose(0, 1)


def qwen(w: Weights, ids: torch.Tensor) -> torch.Tensor:
    x = w["transformer.wte.weight"][ids]
    for n in range(LAYERS):
        at = f"transformer.h.{n}."
        packed = norm(x, w[at + "ln_1.weight"]) @ w[at + "attn.c_attn.weight"].T + w[at + "attn.c_attn.bias"]
        q, k, v = (heads(part) for part in packed.chunk(3, -1))
        q, k = turned(q, HEAD, 500, False), turned(k, HEAD, 500, False)
        x = x + attend(q, k, v) @ w[at + "attn.c_proj.weight"].T
        y = norm(x, w[at + "ln_2.weight"])
        x = (
            x
            + ((y @ w[at + "mlp.w1.weight"].T) * silu(y @ w[at + "mlp.w2.weight"].T))
            @ w[at + "mlp.c_proj.weight"].T
        )
    return norm(x, w["transformer.ln_f.weight"]) @ w["lm_head.weight"].T


def baichuan(w: Weights, ids: torch.Tensor, unit_head: bool, alibi: bool) -> torch.Tensor:
    x = w["model.embed_tokens.weight"][ids]
    for n in range(LAYERS):
        at = f"model.layers.{n}."
        packed = norm(x, w[at + "input_layernorm.weight"]) @ w[at + "self_attn.W_pack.weight"].T
        q, k, v = (heads(part) for part in packed.chunk(3, -1))
        if not alibi:
            q, k = turned(q, HEAD, 10000, False), turned(k, HEAD, 10000, False)
        seen = attend(q, k, v, slopes(len(q)) if alibi else None)
        x = x + seen @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, w[at + "post_attention_layernorm.weight"])
        gate, up = y @ w[at + "mlp.gate_proj.weight"].T, y @ w[at + "mlp.up_proj.weight"].T
        x = x + (silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    head = w["lm_head.weight"]
    if unit_head:
        head = head / (head * head).sum(1, keepdim=True).sqrt()
    return norm(x, w["model.norm.weight"]) @ head.T


def chatglm(w: Weights, ids: torch.Tensor, base: float) -> torch.Tensor:
    x = w["transformer.embedding.word_embeddings.weight"][ids]
    for n in range(LAYERS):
        at = f"transformer.encoder.layers.{n}."
        own = at + "self_attention."
        packed = norm(x, w[at + "input_layernorm.weight"]) @ w[own + "query_key_value.weight"].T
        packed = packed + w[own + "query_key_value.bias"]
        q, k, v = (heads(part) for part in packed.split([HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD], -1))
        q, k = turned(q, HEAD // 2, base, True), turned(k, HEAD // 2, base, True)
        # Query heads 0 and 1 read the first group, 2 and 3 the second.
        k, v = (part[[0, 0, 1, 1]] for part in (k, v))
        x = x + attend(q, k, v) @ w[own + "dense.weight"].T
        y = norm(x, w[at + "post_attention_layernorm.weight"]) @ w[at + "mlp.dense_h_to_4h.weight"].T
        x = x + (silu(y[:, :FFN]) * y[:, FFN:]) @ w[at + "mlp.dense_4h_to_h.weight"].T
    return norm(x, w["transformer.encoder.final_layernorm.weight"]) @ w["transformer.output_layer.weight"].T


def reference(kind: str, w: Weights, ids: torch.Tensor) -> torch.Tensor:
    """Logits (tokens, vocabulary) of one row of ids."""
    if kind == "qwen":
        return qwen(w, ids)
    if kind.startswith("baichuan"):
        return baichuan(w, ids, unit_head="baichuan2" in kind, alibi="13b" in kind)
    return chatglm(w, ids, base=500000 if kind == "chatglm3-long" else 10000)
