"""How the tokens of an answer are chosen."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """At temperature 0 a token is the likeliest; else it is drawn from the likeliest that make up `top_p`.

    Raises:
        UserError: a value outside its range, or `top_p` where nothing is drawn.
    """

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"--temperature {self.temperature} is no temperature; give 0 (the likeliest) or more"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(
                f"--top-p {self.top_p} is no share of probability; give a number above 0, at most 1"
            )
        if self.top_p < 1 and not self.temperature:
            raise UserError(
                f"--top-p {self.top_p} is of drawn tokens, and --temperature 0 takes the likeliest; set --temperature"
            )


GREEDY = Sampling()
