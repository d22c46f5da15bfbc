"""Published models: configs/NAME.json is their config.json (what says sizes), and here is their number of parameters.

Where transformers has the class, a test builds the model and counts. Where it has none, the total is worked out
here by hand, from the layer layout of the code that comes with the weights:

qwen-7b: vocabulary 2 x 151936 x 4096; a layer 4096 x 12288 + 12288 (c_attn with bias) + 4096^2 (c_proj)
    + 3 x 4096 x 11008 (w1, w2, c_proj; the config's 22016 counts w1 and w2) + 2 x 4096 (norms); final norm 4096.
baichuan-7b: vocabulary 2 x 64000 x 4096; a layer 4 x 4096^2 (W_pack, o_proj) + 3 x 4096 x 11008 + 2 x 4096; 4096.
baichuan2-13b: vocabulary 2 x 125696 x 5120; a layer 4 x 5120^2 + 3 x 5120 x 13696 + 2 x 5120; 5120.
chatglm3-6b: vocabulary 2 x 65024 x 4096; a layer 4096 x 4608 + 4608 (32 query and 2 + 2 key-value heads of 128)
    + 4096^2 + 4096 x 27392 + 13696 x 4096 + 2 x 4096; 4096.
"""

from __future__ import annotations

import json
from pathlib import Path

IN_TRANSFORMERS = {
    "llama-3.1-8b": 8_030_261_248,
    "smollm2-135m": 134_515_008,
    "mistral-7b-v0.1": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2-0.5b": 494_032_768,
    "qwen3-4b": 4_022_468_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "phi-2": 2_779_683_840,
    "phi-3-mini-4k": 3_821_079_552,
    "glm-4-9b": 9_399_951_360,
    "glm-4-9b-0414": 9_400_279_040,
    "bloom-560m": 559_214_592,
    "gpt2": 124_439_808,
    "pythia-6.9b": 6_857_302_016,
    "mpt-7b": 6_649_286_656,
    "opt-1.3b": 1_315_758_080,
    "falcon-7b": 6_921_720_704,
    "stablelm-3b-4e1t": 2_795_443_200,
    "llava-1.5-7b": 7_063_427_072,
    "llava-v1.6-vicuna-7b": 7_063_431_168,
    "llava-v1.6-mistral-7b": 7_566_747_648,
}
OWN_CODE = {
    "qwen-7b": 7_721_324_544,
    "baichuan-7b": 7_000_559_616,
    "baichuan2-13b": 13_896_668_160,
    "chatglm3-6b": 6_243_584_000,
    "glm-4-9b-own-code": 9_399_951_360,
}
# deepseek-v3 is counted without its multi-token-prediction layer, which transformers leaves out.
# glm-4-9b-own-code has the weights of glm-4-9b in their first packaging.


def published(name: str) -> dict:
    return json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())
