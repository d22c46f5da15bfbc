"""Dynamic loss scaling for float16, decided on the one gradient norm that all ranks and stages share."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.errors import UserError

# As torch.amp.GradScaler.
START = 2.0**16
GROWTH_INTERVAL = 2000
# A loss that overflows at this scale has gradients that are no numbers at all: 26 steps in a row after the start.
LEAST = 2.0**-10


@dataclass
class LossScale:
    """What the loss is multiplied by before the backward pass: 1 unless `enabled`."""

    enabled: bool
    scale: float = START
    good_steps: int = 0

    @property
    def value(self) -> float:
        return self.scale if self.enabled else 1.0

    def update(self, finite: bool) -> None:
        """Halves the scale after an overflow, doubles it after 2,000 steps without.

        Raises:
            UserError: steps overflow at any scale, so nothing is trained.
        """
        if not self.enabled:
            return
        if not finite:
            self.scale, self.good_steps = self.scale / 2, 0
            if self.scale < LEAST:
                raise UserError(
                    f"train.precision=float16: gradients overflow at every step, even at a loss scale of "
                    f"{self.scale:g}, and none is taken; use bfloat16 or float32, or a lower train.learning_rate"
                )
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
