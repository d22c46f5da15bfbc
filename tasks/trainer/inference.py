"""Generation and scoring with a loaded model, one process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tasks.contracts import Score
from tasks.data.order import MicroBatch
from tasks.data.prepared import Split
from tasks.stage import lively
from tasks.trainer.loop import collate

Messages = list[dict[str, str]]


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Messages],
    max_new_tokens: int,
) -> list[str]:
    """The model's own greedy answers, one batch padded on the left."""
    texts = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in conversations
    ]
    tokenizer.padding_side = "left"
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
    with torch.inference_mode():
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=tokenizer.pad_token_id,
        )
    answers = output[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


def score(model: PreTrainedModel, split: Split, rows: Sequence[int], batch_size: int, label: str) -> Score:
    """Token-weighted loss over `rows`: the sum of all token losses over the number of learnt tokens."""
    lengths = split.lengths()
    ordered = sorted(rows, key=lambda row: (int(lengths[row]), row))
    total, count = 0.0, 0
    bar = tqdm(
        range(0, len(ordered), batch_size),
        desc=f"evaluate {label}",
        unit="batch",
        mininterval=0.5 if sys.stderr.isatty() else 2,
    )
    for start in bar:
        batch = collate(split, MicroBatch(tuple(ordered[start : start + batch_size]), True))
        ids, labels = batch.input_ids.to(model.device), batch.labels.to(model.device)
        with lively(bar), torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        targets = labels[:, 1:]
        learnt = targets != -100
        losses = functional.cross_entropy(logits[learnt].float(), targets[learnt], reduction="none")
        total += float(losses.double().sum())
        count += int(learnt.sum())
    loss = total / count
    return Score(
        loss=loss, perplexity=float(torch.tensor(loss, dtype=torch.float64).exp()), target_tokens=count
    )


@contextlib.contextmanager
def as_base(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """An adapter model with its adapter switched off."""
    with model.disable_adapter():
        yield model
