"""The reward `long_tail`: 1 for items with few training events, 0 for popular ones.

Axes: U users, G candidates of a user, I items of the catalog.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from rayrec import InputError
from rayrec.rl import CandidateLists, RewardContext, RewardSettings


class LongTailConfig(RewardSettings):
    """1 for items with at most `max_events` training events."""

    kind: Literal["long_tail"] = "long_tail"
    max_events: int = Field(default=10, ge=0)

    def build(self, context: RewardContext) -> "LongTail":
        is_rare_I = context.train_counts_I <= self.max_events
        if not is_rare_I.any():
            raise InputError(
                f"the reward {self.label!r}: every item has more than max_events = {self.max_events} "
                "training events, so the reward would always be 0; raise max_events"
            )
        return LongTail(is_rare_I)


class LongTail:
    def __init__(self, is_rare_I: np.ndarray) -> None:
        self.is_rare_I = is_rare_I

    def __call__(self, lists: CandidateLists) -> np.ndarray:
        # items_UG is -1 where a list has no candidate; the reward there has no effect, but must be finite.
        return np.where(lists.is_item_UG, self.is_rare_I[lists.items_UG], 0.0)
