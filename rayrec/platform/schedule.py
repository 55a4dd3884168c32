"""Learning-rate schedules; the dense and the sparse part follow the same one."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RateSchedule:
    """Linear warm-up, then constant, or along a cosine to zero (Loshchilov & Hutter, ICLR 2017)."""

    warmup_steps: int = 0
    cosine_steps: int | None = None
    """Step at which the cosine reaches zero; None keeps the rate."""

    def factor(self, step: int) -> float:
        """Factor of the learning rate at `step`, counted from 0."""
        warmup = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        if self.cosine_steps is None:
            return warmup
        return warmup * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / self.cosine_steps)))
