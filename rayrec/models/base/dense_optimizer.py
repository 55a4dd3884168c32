"""Settings of the optimizer of dense weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rayrec.platform.schedule import RateSchedule

Decayed = Literal["all", "matrices", "linear"]
"""Which weights decay: all; those with two dimensions or more, so no norms and biases; or of these, those
that are no rows of an embedding, which would shrink where no batch touches them."""


@dataclass(frozen=True)
class DenseOptimizerSettings:
    """AdamW of the dense weights."""

    learning_rate: float
    weight_decay: float
    schedule: RateSchedule
    max_grad_norm: float | None
    fused: bool
    decayed: Decayed = "all"
