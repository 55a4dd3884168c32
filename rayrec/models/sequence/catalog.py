"""What a network has to know about the items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rayrec.platform.event_labels import Label


@dataclass(frozen=True)
class Catalog:
    """The items, by catalog position."""

    num_items: int
    codes_IL: np.ndarray | None = None
    """Semantic IDs, where the model generates them."""
    level_sizes: tuple[int, ...] = ()
    """Number of codes of each level that is learned: all but one that only numbers the items of a tuple."""
    known_I: np.ndarray | None = None
    """Which items a model was trained on, where the catalog has grown since; None: all of them."""
    trained_I: np.ndarray | None = None
    """Which items training has events of, given for training alone; None: all of them, or it is not known."""
    negative_log_q_I: np.ndarray | None = None
    """Log-probability of sampling each item as a negative, where negatives are sampled."""
    labels: Mapping[Label, tuple[str, ...]] = field(default_factory=dict)
    """Names of the codes of each label of events."""

    @property
    def learned_codes(self) -> Tensor:
        """[I, L] codes without a level that only numbers the items of a tuple."""
        assert self.codes_IL is not None, "the model generates semantic IDs, and there are none"
        return torch.tensor(self.codes_IL[:, : len(self.level_sizes)])
