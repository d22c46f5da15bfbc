"""The loss: summed token losses, divided elsewhere by the targets of the whole global batch."""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers import PreTrainedModel

# Families whose logits are the output embedding of the decoder's last state and nothing more.
PLAIN_HEADS = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class TokenLossSum(torch.nn.Module):
    """Wraps a causal language model; its forward is the sum of its token losses.

    No attention mask is passed: rows are padded on the right, where a causal model never looks.
    """

    def __init__(self, model: torch.nn.Module, inner: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        # A class that came with the model may do more in its head than its family's does.
        own_code = not type(inner).__module__.startswith("transformers.")
        self.plain_head = inner.config.model_type in PLAIN_HEADS and not own_code
        self._inner = [inner]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Sum over learnt tokens of -log p(token | tokens before), as a float32 scalar.

        Args:
            input_ids: (rows, tokens).
            labels: (rows, tokens), -100 where nothing is learnt.
        """
        targets = labels[:, 1:]
        learnt = targets != -100
        if self.plain_head:
            inner = self._inner[0]
            states = inner.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
            logits = inner.get_output_embeddings()(states[:, :-1][learnt])
        else:
            logits = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1][learnt]
        # A micro-batch without a target still takes part in the backward pass, with gradient zero.
        if not len(logits):
            return logits.sum().float()
        return functional.cross_entropy(logits.float(), targets[learnt], reduction="sum")
