"""The loss: summed token losses, divided elsewhere by the targets of the whole global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from tasks.contracts import Precision
from tasks.trainer import collectives
from tasks.trainer.families import FAMILIES
from tasks.trainer.isolation import Documents, Isolation, of_micro_batch
from tasks.trainer.loading import DTYPES
from tasks.trainer.tensor_parallel import TensorParts

# Families whose logits are the output embedding of the decoder's last state and nothing more. Only they can be cut
# over ranks or stages (`split_families` of tasks/planner/capabilities.py is the same set).
PLAIN_HEADS = frozenset(FAMILIES)

TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def learnt_positions(labels: torch.Tensor) -> torch.Tensor:
    """Flat positions in (rows, tokens) whose next token is learnt, from labels of that shape. No device waits."""
    ahead = functional.pad(labels[:, 1:], (0, 1), value=-100)
    return (ahead != -100).flatten().nonzero().squeeze(1)


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy in float32 (float64 for such logits); logits (tokens, vocabulary), targets (tokens,)."""
    return functional.cross_entropy(at_least_float32(logits), targets, reduction="sum")


class TokenLossSum(torch.nn.Module):
    """Wraps a causal language model, or one pipeline stage of it: token ids or hidden states in, the sum of token
    losses (last stage) or hidden states out.

    No attention mask is passed: rows are padded on the right, where a causal model never looks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner: PreTrainedModel,
        precision: Precision,
        parts: TensorParts | None = None,
        first: bool = True,
        last: bool = True,
        token_loss: TokenLoss = token_loss,
    ) -> None:
        super().__init__()
        self.model = model
        # A class that came with the model may do more in its head than its family's does.
        own_code = not type(inner).__module__.startswith(("transformers.", "tasks."))
        self.plain_head = inner.config.model_type in PLAIN_HEADS and not own_code
        assert self.plain_head or (first and last and parts is None), "the plan's rules let a family pass"
        self.first, self.last = first, last
        frozen = (weight.dtype for weight in inner.parameters() if not weight.requires_grad)
        self.width = inner.config.hidden_size
        self.dtype = next((dtype for dtype in frozen if dtype.is_floating_point), inner.dtype)
        self.loss_dtype = torch.float64 if precision == "float64" else torch.float32
        # A trained table beside frozen layers is in float32, and these pass on what they are in.
        table = next(inner.get_input_embeddings().parameters(), None) if first else None
        self._wider_table = table is not None and table.dtype != self.dtype
        self._inner, self._parts, self._token_loss = [inner], parts, token_loss
        self._mixed = None if precision in ("float32", "float64") else DTYPES[precision]
        self.isolation = Isolation(inner, half=self._mixed is not None)

    @property
    def inner(self) -> PreTrainedModel:
        """The language model without what is wrapped around it; no submodule, so that names are counted once."""
        return self._inner[0]

    def reads(self, inner: PreTrainedModel) -> None:
        """For a copy of this module: its own language model."""
        self._inner, self.isolation = [inner], self.isolation.of_copy(inner)

    def forward(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        learnt: torch.Tensor | None = None,
        documents: Documents | tuple[Documents, ...] | None = None,
        number: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum over learnt tokens of -log p(token | tokens before), a float32 scalar; a stage before the last gives
        hidden states.

        Args:
            inputs: token ids (rows, tokens), or after the first stage hidden states (rows, tokens, width).
            labels: (rows, tokens), -100 where nothing is learnt; not shifted.
            learnt: `learnt_positions(labels)`, if known: finding out on a GPU makes the host wait for it.
            documents: where several lie in one row; in a pipeline those of all micro-batches, and `number` says which.
        """
        told = self.isolation.arguments(of_micro_batch(documents, number))
        with torch.autocast(inputs.device.type, self._mixed, enabled=self._mixed is not None):
            if not self.plain_head:
                return self._loss_of_logits(inputs, labels, told)
            states = self._states(inputs, told)
            if not self.last:
                return states
            where = learnt_positions(labels) if learnt is None else learnt
            return self._loss(states, labels, where)

    def _states(self, inputs: torch.Tensor, told: dict[str, Any]) -> torch.Tensor:
        decoder = self._inner[0].get_decoder()
        if self.first and self._wider_table:
            inputs = decoder.get_input_embeddings()(inputs).to(self.dtype)
        elif self.first:
            return decoder(input_ids=inputs, use_cache=False, **told).last_hidden_state
        return decoder(inputs_embeds=inputs, use_cache=False, **told).last_hidden_state

    def _loss(self, states: torch.Tensor, labels: torch.Tensor, learnt: torch.Tensor) -> torch.Tensor:
        chosen = states.flatten(0, 1).index_select(0, learnt)
        targets = labels.flatten().index_select(0, learnt + 1)
        parts = self._parts
        if parts is not None and not parts.sequence:
            chosen = collectives.whole_to_parts(chosen, parts.group)
        logits = self._inner[0].get_output_embeddings()(chosen)
        # A micro-batch without a target still takes part in the backward pass, with gradient zero.
        if not len(logits):
            return at_least_float32(logits.sum())
        if parts is None:
            return self._token_loss(logits, targets)
        return collectives.vocabulary_loss(at_least_float32(logits), targets, parts.first_logit, parts.group)

    def _loss_of_logits(self, ids: torch.Tensor, labels: torch.Tensor, told: dict[str, Any]) -> torch.Tensor:
        targets = labels[:, 1:]
        learnt = targets != -100
        logits = self.model(input_ids=ids, use_cache=False, **told).logits[:, :-1][learnt]
        return self._token_loss(logits, targets[learnt]) if len(logits) else at_least_float32(logits.sum())
