"""Dynamic loss scaling for float16, decided on the one gradient norm that all ranks and stages share."""

from __future__ import annotations

from dataclasses import dataclass

# As torch.amp.GradScaler.
START = 2.0**16
GROWTH_INTERVAL = 2000


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
        """Halves the scale after an overflow, doubles it after 2,000 steps without."""
        if not self.enabled:
            return
        if not finite:
            self.scale, self.good_steps = self.scale / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
