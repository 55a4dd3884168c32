"""Lists of candidates for tests of rewards, and rewards that say what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from rayrec.rl.rewards.base import CandidateLists, RewardArray

CODES_IL = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [2, 0]])
"""Of five items. The first two share their first code, as do the two after them."""
NUM_ITEMS = len(CODES_IL)


def lists_of(
    items: Sequence[Sequence[int]],
    log_probs: Sequence[Sequence[float]] | None = None,
    targets: Sequence[int] | None = None,
    **others: Any,
) -> CandidateLists:
    """Lists in the order of their log-probabilities, unless these are given; no target is known."""
    items_UG = np.array(items, dtype=np.int64)
    in_order_UG = np.broadcast_to(-np.arange(1.0, items_UG.shape[1] + 1.0), items_UG.shape)
    return CandidateLists(
        items_UG,
        np.where(items_UG >= 0, in_order_UG if log_probs is None else np.array(log_probs), -np.inf),
        np.full(len(items), -1) if targets is None else np.array(targets, dtype=np.int64),
        [f"u{user}" for user in range(len(items))],
        **others,
    )


def permuted(lists: CandidateLists, order_U: np.ndarray) -> CandidateLists:
    """The same users in another order."""
    return CandidateLists(
        lists.items_UG[order_U],
        lists.log_probs_UG[order_U],
        lists.targets_U[order_U],
        [lists.user_keys[user] for user in order_U],
        None if lists.scenario_U is None else [lists.scenario_U[user] for user in order_U],
    )


@st.composite
def some_lists(draw: st.DrawFn, known_targets: bool = False) -> CandidateLists:
    """Of 1 to 6 users with 1 to 5 candidates, with repeated and missing items."""
    num_users, size = draw(st.integers(1, 6)), draw(st.integers(1, 5))

    def rows(values: st.SearchStrategy[Any]) -> list[list[Any]]:
        return draw(
            st.lists(st.lists(values, min_size=size, max_size=size), min_size=num_users, max_size=num_users)
        )

    # An item has one probability in a list, however often it was sampled.
    items = rows(st.integers(-1, NUM_ITEMS - 1))
    of_item = draw(st.lists(st.integers(-5, -1), min_size=NUM_ITEMS + 1, max_size=NUM_ITEMS + 1))
    targets = st.integers(0 if known_targets else -1, NUM_ITEMS - 1)
    return lists_of(
        items,
        [[float(of_item[item]) for item in row] for row in items],
        draw(st.lists(targets, min_size=num_users, max_size=num_users)),
        scenario_U=draw(
            st.lists(st.sampled_from(("home", "search")), min_size=num_users, max_size=num_users)
        ),
    )


class Told:
    """Gives what it was told last."""

    def __init__(self, reward: Any = None) -> None:
        self.reward = reward

    def __call__(self, lists: CandidateLists) -> RewardArray:
        if isinstance(self.reward, Exception):
            raise self.reward
        told: RewardArray = np.array(self.reward, dtype=np.float64)
        return told
