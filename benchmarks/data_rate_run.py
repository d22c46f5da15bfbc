"""Prepares one file of chat rows with one program, between the lines "begin" and "end" on stdout.

Run by path with the Python of the program's own environment, so nothing of this repository but elastane's own runner
is imported: python data_rate_run.py {elastane|trl|llamafactory} ROWS MODEL WORK PROCESSES MAX_LENGTH
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

# SmolLM2's own template with the marks that TRL needs to tell answers.
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


def ended() -> None:
    """Waits for the one who measures; what comes after is no part of the work."""
    say("end")
    sys.stdin.readline()


def elastane(rows: Path, model: Path, work: Path, processes: int, max_length: int) -> None:
    import pandas  # noqa: F401
    from ruamel.yaml import YAML
    from transformers import AutoTokenizer, LlamaConfig  # noqa: F401

    from tasks.data import crew
    from tasks.data.packing import best_fit
    from tasks.data.prepared import Split
    from tasks.params import parse_params
    from tasks.paths import Paths
    from tasks.prepare_data import prepare_data
    from tasks.trainer import base_model, model_source  # noqa: F401

    crew.cores = lambda: processes
    raw: dict[str, Any] = YAML(typ="safe").load((Path(__file__).parents[1] / "params.yaml").read_text())
    raw["prepare_data"] |= {"source": str(rows), "max_length": max_length, "on_bad_row": "reject"}
    raw["model"]["name_or_path"] = str(model)
    params = parse_params(raw, "params.yaml")
    (work / "params.yaml").write_text("")
    say("begin", version="this repository")
    manifest = prepare_data(params, Paths(work))
    ended()
    lengths = Split.open(Paths(work).prepared, "train").lengths()
    say(
        "counted",
        packing_fill=float(lengths.sum()) / (len(best_fit(lengths, max_length)) * max_length),
        rows=manifest.train.rows + manifest.validation.rows,
        tokens=manifest.train.tokens + manifest.validation.tokens,
        target_tokens=manifest.train.target_tokens + manifest.validation.target_tokens,
        rejected=manifest.rejected,
    )


def trl(rows: Path, model: Path, work: Path, processes: int, max_length: int) -> None:
    import torch
    from datasets import load_dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    say("begin", version=importlib.metadata.version("trl"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = MARKED
    # The trainer wants a model; what it prepares depends on the tokenizer alone.
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    tiny = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    options = SFTConfig(
        output_dir=str(work / "out"),
        max_length=max_length,
        dataset_num_proc=processes,
        assistant_only_loss=True,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    )
    found = load_dataset("json", data_files=str(rows), split="train", cache_dir=str(work / "cache"))
    trainer = SFTTrainer(tiny, options, train_dataset=found, processing_class=tokenizer)
    done: Any = trainer.train_dataset
    ended()
    counted(done)


def llamafactory(rows: Path, model: Path, work: Path, processes: int, max_length: int) -> None:
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    stand_in = False
    try:
        import torchaudio  # noqa: F401
    except ImportError:  # imported at the top, used for sound alone
        module = types.ModuleType("torchaudio")
        module.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = module
        stand_in = True
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from transformers import AutoTokenizer

    described = {
        "rows": {
            "file_name": str(rows),
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {
                "role_tag": "role",
                "content_tag": "content",
                "user_tag": "user",
                "assistant_tag": "assistant",
                "system_tag": "system",
            },
        }
    }
    (work / "dataset_info.json").write_text(json.dumps(described))
    options = get_train_args(
        {
            "stage": "sft",
            "do_train": True,
            "model_name_or_path": str(model),
            "dataset": "rows",
            "dataset_dir": str(work),
            "template": "smollm2",
            "cutoff_len": max_length,
            "preprocessing_num_workers": processes,
            "output_dir": str(work / "out"),
            "cache_dir": str(work / "cache"),
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
        }
    )
    model_args, data_args, training_args = options[:3]
    note = "torchaudio, imported for sound alone, is an empty stand-in" if stand_in else ""
    say("begin", version=importlib.metadata.version("llamafactory"), note=note)
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    stdout, sys.stdout = sys.stdout, sys.stderr  # it prints an example
    done = get_dataset(template, model_args, data_args, training_args, stage="sft", tokenizer=tokenizer)
    sys.stdout = stdout
    ended()
    counted(done["train_dataset"])


def counted(table: Any) -> None:
    """Says what a peer's data set holds, by the same rule as elastane's manifest."""
    tokens = target_tokens = 0
    for batch in table.select_columns(["input_ids", "labels"]).iter(batch_size=1000):
        tokens += sum(map(len, batch["input_ids"]))
        target_tokens += sum(sum(label != -100 for label in labels[1:]) for labels in batch["labels"])
    say("counted", rows=len(table), tokens=tokens, target_tokens=target_tokens)


if __name__ == "__main__":
    name, source, base, folder, cores, longest = sys.argv[1:]
    run = {"elastane": elastane, "trl": trl, "llamafactory": llamafactory}[name]
    run(Path(source), Path(base), Path(folder), int(cores), int(longest))
