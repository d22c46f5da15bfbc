"""Generation and scoring with a loaded model, one process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tasks.contracts import Score
from tasks.data.order import MicroBatch
from tasks.data.prepared import Split
from tasks.data.row_prompt import Prompt, prompt_ids
from tasks.errors import UserError
from tasks.sampling import GREEDY, Sampling
from tasks.stage import lively
from tasks.trainer.loop import collate
from tasks.trainer.placement import device

Asked = Prompt | list[dict[str, str]]  # messages alone are a conversation without tools
BATCH = 16  # prompts at once


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Asked],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
) -> list[str]:
    """The model's answers, in order. They end at an end-of-turn token, or with the model's context at the latest.

    Batched with padding on the left, whatever the tokenizer's own side is; a prompt near the end of the context, whose
    answer must be shorter than the others', goes alone. So a greedy answer is the same alone and in a batch.

    Raises:
        UserError: a prompt leaves no room for an answer in the model's context, or holds a token that the model lacks.
    """
    prompts = encoded(tokenizer, asked)
    rooms = [min(max_new_tokens, _room(model, ids)) for ids in prompts]
    for number, (ids, room) in enumerate(zip(prompts, rooms, strict=True), 1):
        if room < 1:
            raise UserError(f"prompt {number} of {len(prompts)} {_why_not(model, tokenizer, ids)}")
    together = [index for index, room in enumerate(rooms) if room == max_new_tokens]
    batches = [together[start : start + BATCH] for start in range(0, len(together), BATCH)]
    batches += [[index] for index, room in enumerate(rooms) if room < max_new_tokens]
    answers: dict[int, str] = {}
    for batch in batches:
        told = _generate(model, tokenizer, [prompts[index] for index in batch], rooms[batch[0]], sampling)
        answers.update(zip(batch, told, strict=True))
    return [answers[index] for index in range(len(prompts))]


def answer_what_fits(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Asked],
    max_new_tokens: int,
) -> list[str]:
    """As `generate`; where it would refuse a prompt, the answer is empty."""
    fits = [_room(model, ids) > 0 for ids in encoded(tokenizer, asked)]
    kept = [one for one, fit in zip(asked, fits, strict=True) if fit]
    answers = iter(generate(model, tokenizer, kept, max_new_tokens))
    return [next(answers) if fit else "" for fit in fits]


def encoded(tokenizer: PreTrainedTokenizerBase, asked: Sequence[Asked]) -> list[list[int]]:
    """Token ids of each prompt or conversation up to where its answer begins."""
    return prompt_ids(tokenizer, [one if isinstance(one, Prompt) else Prompt(one) for one in asked])


def _room(model: PreTrainedModel, ids: list[int]) -> int:
    """Tokens that an answer to a prompt may have."""
    if max(ids, default=0) >= _rows(model):
        return 0
    limit = context_length(model)
    return sys.maxsize if limit is None else max(limit - len(ids), 0)


def _why_not(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    if max(ids, default=0) >= _rows(model):
        token = tokenizer.convert_ids_to_tokens(max(ids))
        return f"holds {token}, for which the model has no row, as no row of the data held it; leave it out"
    return (
        f"has {len(ids)} tokens and the context of the model {context_length(model)}, so there is no room for an "
        "answer; shorten it"
    )


def _rows(model: PreTrainedModel) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def context_length(model: PreTrainedModel) -> int | None:
    """Tokens that the model has positions for; None where its config names no number, as with ALiBi."""
    config = model.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None) or 0
    rope = getattr(config, "rope_parameters", None) or {}
    if (
        "original_max_position_embeddings" in rope
    ):  # stretched, as by YaRN, whether or not the first number says so
        length = max(length, int(rope["original_max_position_embeddings"] * rope.get("factor", 1.0)))
    return length or None


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
) -> list[str]:
    longest = max(len(ids) for ids in prompts)
    inputs = torch.zeros(len(prompts), longest, dtype=torch.long)  # any id will do where the mask is 0
    mask = torch.zeros_like(inputs)
    for line, ids in enumerate(prompts):
        inputs[line, longest - len(ids) :] = torch.tensor(ids)
        mask[line, longest - len(ids) :] = 1
    stops = stop_ids(model, tokenizer)
    with _configured(model, _generation(stops, max_new_tokens, sampling)), torch.no_grad():
        output = model.generate(input_ids=inputs.to(device()), attention_mask=mask.to(device()))
    answers = [_until(row, stops) for row in output[:, longest:].tolist()]
    return [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


def _generation(stops: Collection[int], max_new_tokens: int, sampling: Sampling) -> GenerationConfig:
    """Nothing of the model's own settings but where to stop: a penalty on repetition, say, counts padding as text."""
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=sampling.temperature > 0,
        eos_token_id=sorted(stops) or None,
        pad_token_id=min(stops, default=0),
        **(drawn if sampling.temperature > 0 else {}),
    )


@contextlib.contextmanager
def _configured(model: PreTrainedModel, wanted: GenerationConfig) -> Iterator[None]:
    own = model.generation_config
    model.generation_config = wanted
    try:
        yield
    finally:
        model.generation_config = own


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that end an answer: those that the tokenizer names and the model's generation config, which is that of
    `data/base/` and there names the end mark of the chat template, too (`ensure_template`).
    """
    named = model.generation_config.eos_token_id
    found = {*named} if isinstance(named, list) else {named}
    return {token for token in (*found, tokenizer.eos_token_id) if token is not None}


def _until(ids: list[int], stops: Collection[int]) -> list[int]:
    end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
    return ids[:end]


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
        ids, labels = batch.input_ids.to(device()), batch.labels.to(device())
        with lively(bar), torch.no_grad():
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
