"""huggingface/transformers#12878: evaluation kept the logits of all rows until its end, and ran out of memory."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from tasks.data.prepared import Split

ROWS, TOKENS, VOCABULARY, BATCH = 200, 128, 32_000, 8
LOGITS = BATCH * TOKENS * VOCABULARY * 4  # bytes of one batch


def write_rows(prepared: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=draw).tolist()
    tokens = pa.array(ids, pa.list_(pa.int32()))
    columns: dict[str, Any] = {
        "input_ids": tokens,
        "labels": tokens,
        "id": [f"{row:04x}" for row in range(ROWS)],
    }
    table = pa.table({**columns, "prompt": ["[]"] * ROWS, "reference": [""] * ROWS})
    prepared.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_file(prepared / "validation.arrow", table.schema) as writer:
        writer.write_table(table)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def scored(prepared: str, told: Any) -> None:
    """Tells the loss, the peak at the fifth batch and that at the end."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tasks.trainer.inference import score

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape)).eval()
    peaks: list[int] = []
    model.register_forward_hook(lambda *_: peaks.append(peak()))
    found = score(model, Split.open(Path(prepared), "validation"), range(ROWS), BATCH, "tiny")
    told.put((found.loss, found.target_tokens, peaks[4], peak(), len(peaks)))


def test_memory_stays_flat_over_the_rows_of_an_evaluation(tmp_path: Path) -> None:
    write_rows(tmp_path)
    spawn = multiprocessing.get_context("spawn")  # what this process once held is no peak of the other's
    told = spawn.Queue()
    child = spawn.Process(target=scored, args=(str(tmp_path), told))
    child.start()
    loss, targets, early, late, batches = told.get(timeout=120)
    child.join()
    assert batches == ROWS // BATCH and targets == ROWS * (TOKENS - 1) and 10 < loss < 11
    assert late - early < LOGITS / 2, f"{(late - early) / 2**20:.0f} MiB more than at the fifth batch"
