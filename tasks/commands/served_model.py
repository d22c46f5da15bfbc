"""How MLflow loads a registered version: `mlflow.pyfunc.load_model("models:/elastane/1").predict(["question"])`.

The base weights are not copied into the registry; they come from `data/base/` of the workspace the
model is loaded in, and the adapter's manifest says which base that must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tasks.commands.generate import as_learnt
from tasks.params import read_params
from tasks.paths import Paths


class ServedModel:
    """Answers prompts in order, greedily."""

    def __init__(self, folder: Path) -> None:
        from tasks.trainer.loading import load_tuned

        self._paths = Paths.here()
        self._length = read_params(self._paths.params).evaluate.max_new_tokens
        self._model, self._tokenizer = load_tuned(self._paths, folder)

    def predict(self, model_input: Sequence[str], params: object = None) -> list[str]:
        """One answer a prompt; a pandas frame's first column counts as the prompts."""
        from tasks.trainer.inference import generate

        prompts = model_input.iloc[:, 0] if hasattr(model_input, "iloc") else model_input
        asked = as_learnt(self._paths, self._tokenizer, [str(prompt) for prompt in prompts])
        return generate(self._model, self._tokenizer, asked, self._length)


def _load_pyfunc(path: str) -> ServedModel:
    """Called by MLflow with the folder of the logged data."""
    return ServedModel(Path(path))
