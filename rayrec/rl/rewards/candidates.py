"""What rewards are given, and what a reward is.

Axes: U users, G candidates of a user. A catalog position of -1 is a place of a list without a candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rayrec.platform.arrays import BoolArray, Float64Array, Int64Array

if TYPE_CHECKING:
    from rayrec.pipelines.inference.recommender import Query

RewardArray = Float64Array


@dataclass(frozen=True)
class CandidateLists:
    """A list of candidates for each user, and what is known of the user.

    Raises:
        ValueError: the shapes do not belong together.
    """

    items_UG: Int64Array
    """[U, G] catalog positions; -1 where there is no candidate."""
    log_probs_UG: np.ndarray
    """[U, G] by the policy that drew them, -inf at -1. The order of a list is the descending one of these."""
    targets_U: Int64Array
    """[U] the logged next item of each user; -1 where it is unknown."""
    user_keys: Sequence[str]
    """Names of the users, for messages."""
    scenario_U: Sequence[str] | None = None
    """Where each user is; None: nobody says."""
    queries: Sequence[Query] | None = None
    """What a learned ranker reads of each user; None: there is no such reward."""

    def __post_init__(self) -> None:
        if self.items_UG.ndim != 2 or not self.items_UG.shape[1]:
            raise ValueError(
                f"items_UG must have users by at least one candidate, got the shape {self.items_UG.shape}"
            )
        if self.log_probs_UG.shape != self.items_UG.shape:
            raise ValueError(
                f"log_probs_UG must have the shape {self.items_UG.shape} of the items, got "
                f"{self.log_probs_UG.shape}"
            )
        if self.targets_U.ndim != 1:
            raise ValueError(f"targets_U must have one item of each user, got shape {self.targets_U.shape}")
        of_users: dict[str, Sequence[object] | Int64Array | None] = {
            "targets_U": self.targets_U,
            "user_keys": self.user_keys,
            "scenario_U": self.scenario_U,
            "queries": self.queries,
        }
        for name, values in of_users.items():
            if values is not None and len(values) != self.num_users:
                raise ValueError(f"{name} has {len(values)} entries for the lists of {self.num_users} users")

    @property
    def num_users(self) -> int:
        return len(self.items_UG)

    @property
    def is_item_UG(self) -> BoolArray:
        is_item_UG: BoolArray = self.items_UG >= 0
        return is_item_UG

    @property
    def is_hit_UG(self) -> BoolArray:
        """Candidates that are the logged next item of their user."""
        is_hit_UG: BoolArray = self.is_item_UG & (self.items_UG == self.targets_U[:, None])
        return is_hit_UG

    def with_targets(self, log_probs_U: np.ndarray) -> CandidateLists:
        """[U, G + 1] the same lists, with the logged next item behind the candidates of each.

        Args:
            log_probs_U: of these items, by the policy that drew the lists; its place in the list is by them.
        """
        is_known_U = (self.targets_U >= 0) & (log_probs_U > -np.inf)
        targets_U1 = np.where(is_known_U, self.targets_U, -1)[:, None]
        return replace(
            self,
            items_UG=np.concatenate([self.items_UG, targets_U1], axis=1),
            log_probs_UG=np.concatenate(
                [self.log_probs_UG, np.where(is_known_U, log_probs_U, -np.inf)[:, None]], axis=1
            ),
        )

    def of_users(self, start: int, stop: int) -> CandidateLists:
        """The lists of the users from `start` to `stop` (exclusive)."""
        return CandidateLists(
            self.items_UG[start:stop],
            self.log_probs_UG[start:stop],
            self.targets_U[start:stop],
            self.user_keys[start:stop],
            None if self.scenario_U is None else self.scenario_U[start:stop],
            None if self.queries is None else self.queries[start:stop],
        )


class Reward(Protocol):
    """What one aspect of a list is worth."""

    def __call__(self, lists: CandidateLists) -> RewardArray:
        """[U, G] the reward of each candidate, and a finite number where there is none.

        Users do not matter to each other.
        """
        ...
