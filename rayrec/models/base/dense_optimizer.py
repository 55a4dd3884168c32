"""Settings of the optimizer of dense weights."""

from __future__ import annotations

from dataclasses import dataclass

from rayrec.platform.schedule import RateSchedule


@dataclass(frozen=True)
class DenseOptimizerSettings:
    """AdamW of the dense weights."""

    learning_rate: float
    weight_decay: float
    schedule: RateSchedule
    max_grad_norm: float | None
    fused: bool
