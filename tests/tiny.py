"""A model, a tokenizer and rows small enough for a CPU test, made from nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tasks.contracts import HardwareProfile, Plan
from tasks.params import Params, parse_params

REPOSITORY = Path(__file__).parents[1]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<pad>", "<|im_start|>", "<|im_end|>"]


def raw_params(**changes: Any) -> dict[str, Any]:
    """The shipped params.yaml with changes by dotted key: raw_params(**{"train.learning_rate": 0.01})."""
    raw: dict[str, Any] = YAML(typ="safe").load((REPOSITORY / "params.yaml").read_text(encoding="utf-8"))
    for key, value in changes.items():
        *sections, last = key.split(".")
        place = raw
        for section in sections:
            place = place[section]
        place[last] = value
    return raw


def params(**changes: Any) -> Params:
    return parse_params(raw_params(**changes), "params.yaml")


def write_params(folder: Path, **changes: Any) -> None:
    with (folder / "params.yaml").open("w", encoding="utf-8") as file:
        YAML(typ="safe").dump(raw_params(**changes), file)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer (one token a byte) with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)


def write_model(
    folder: Path,
    layers: int = 2,
    hidden: int = 32,
    tied: bool = False,
    seed: int = 0,
    family: str = "llama",
    half: bool = False,
) -> Path:
    """A random Llama (or other decoder) in Hugging Face's layout with the byte tokenizer, in float16 if `half`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import tasks.trainer.llama_alibi  # noqa: F401 (which makes the class known to transformers)

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    own: dict[str, object] = {} if family == "bloom" else {"intermediate_size": 2 * hidden}
    if family in ("glm", "glm4"):  # whose heads are 128 wide unless they are told to be less
        own["head_dim"] = hidden // 4
    config = AutoConfig.for_model(
        family,
        vocab_size=len(SPECIALS) + 256,
        hidden_size=hidden,
        **own,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    (model.half() if half else model).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_rows(path: Path, rows: int = 60, seed: int = 0) -> Path:
    """Alpaca-style rows with answers that a model can learn: the question's words backwards."""
    draw = random.Random(seed)
    words = [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "omega",
    ]
    content = []
    for number in range(rows):
        said = draw.sample(words, draw.randint(2, 6))
        content.append(
            {
                "instruction": f"Say backwards, number {number}: {' '.join(said)}",
                "input": "",
                "output": " ".join(reversed(said)),
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def cpu_hardware(cores: int = 2) -> HardwareProfile:
    return HardwareProfile(
        device="cpu",
        gpus=(),
        links=(),
        driver=None,
        cpu_name="test",
        cpu_cores=cores,
        host_memory_bytes=8 << 30,
        host_memory_source="physical",
        shm_bytes=1 << 30,
        notes=(),
    )


def cpu_plan(
    degree: int = 1,
    micro_batch: int = 2,
    accumulation: int = 2,
    checkpointing: str = "none",
    shards: int = 1,
    **more: object,
) -> Plan:
    """`degree` copies of the model (DDP, or HSDP where each is spread over `shards` ranks); `more`: other fields."""
    fields = {
        "engine": "torch",
        "device": "cpu",
        "backend": "gloo",
        "dp_replicate": degree,
        "dp_shard": shards,
        "sharding": "fsdp2" if shards > 1 else "none",
        "tp": 1,
        "pp": 1,
        "schedule": "none",
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "activation_checkpointing": checkpointing,
        "offload": "none",
    }
    return Plan.model_validate(fields | more)
