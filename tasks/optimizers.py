"""The optimizers that a recipe may name, and what each needs: the one table of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tasks.errors import UserError

Optim = Literal["adamw_torch", "lion", "adafactor", "adamw_8bit"]
Unit = Literal["number", "block", "matrix"]

BLOCK = 256  # numbers of a parameter that share a scale in bitsandbytes' 8-bit state
UNUSED = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
}  # what a key that serves nothing must say


@dataclass(frozen=True)
class Needs:
    """What one optimizer needs, beside a float32 weight and its float32 gradient.

    `unit`: what the arithmetic of one number looks at. A "number" alone may be cut in any way; a "block" of 256 and a
    "matrix" must be those of the whole parameter, so a rank has to hold its parameters whole. `state`: bytes a trained
    parameter (of "matrix": a row or column). `moved`: bytes a trained parameter that a step reads and writes, the
    weight and gradient too. `unused`: keys of `train` that say nothing to it. `deepspeed`: what a ds_config.json calls
    it, in lower case.
    """

    unit: Unit
    state: float
    moved: float
    unused: tuple[str, ...] = ()
    deepspeed: tuple[str, ...] = ()

    @property
    def any_cut(self) -> bool:
        """Whether it learns the same however parameters are cut; offloading cuts them too."""
        return self.unit == "number"


# AdamW reads weight, gradient and two moments and writes three; torch does it in one kernel. Lion (arXiv:2302.06675,
# algorithm 2) has one moment, in five passes over a bucket. torch's Adafactor (arXiv:1804.04235, algorithm 4) keeps a
# number a row and a column, and passes some nine times over a matrix; bitsandbytes' AdamW (arXiv:2110.02861) keeps two
# moments of a byte and two float32 scales a block, in one kernel.
OPTIMIZERS: Mapping[Optim, Needs] = {
    "adamw_torch": Needs("number", 8, 28, deepspeed=("adamw",)),
    "lion": Needs("number", 4, 52, ("adam_epsilon",), deepspeed=("lion",)),
    "adafactor": Needs("matrix", 4, 68, tuple(UNUSED), deepspeed=("adafactor",)),
    "adamw_8bit": Needs("block", 2 + 8 / BLOCK, 16, deepspeed=("adamw8bit",)),
}


def refuse_unused(optim: Optim, said: Mapping[str, float]) -> None:
    """A key that an optimizer does not read must say what it is shipped with, or it would seem to count.

    Raises:
        UserError: it says something else.
    """
    for key in OPTIMIZERS[optim].unused:
        if said[key] != UNUSED[key]:
            raise UserError(
                f"train.{key}={said[key]:g} is not read by train.optim={optim}; set it back to {UNUSED[key]:g}, or use "
                "adamw_torch"
            )
