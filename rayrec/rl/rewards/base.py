"""What a reward is, what it is given, and what its settings have in common.

Axes: U users, G candidates of a user, I items of the catalog, L code levels. A catalog position of -1 stands
where a list has no candidate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, Self

import numpy as np
import pandas as pd
from pydantic import Field

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.platform.arrays import BoolArray, Float64Array, Int64Array
from rayrec.platform.config import Config

if TYPE_CHECKING:
    from rayrec.pipelines.inference.answers import Query

RewardArray = Float64Array
Normalize = Literal["none", "standard"]
Ranker = Callable[["Sequence[Query]", Int64Array], np.ndarray]
"""Queries of U users and [U, G] items -> [U, G] what showing each is worth, NaN at -1."""


@dataclass(frozen=True)
class CandidateLists:
    """A list of candidates for each user, and what is known about the user. The arrays cannot be written.

    Raises:
        ValueError: the shapes do not belong together.
    """

    items_UG: Int64Array
    """[U, G] catalog positions; -1 where there is no candidate."""
    log_probs_UG: np.ndarray
    """[U, G] log-probability by the policy that sampled them, -inf at -1. A list is ordered by these,
    descending."""
    targets_U: Int64Array
    """[U] the logged next item of each user; -1 where it is unknown."""
    user_keys: Sequence[str]
    """Names of the users, for messages."""
    scenario_U: Sequence[str] | None = None
    """Scenario of each user; None: the data set has none."""
    queries: Sequence[Query] | None = None
    """Histories of the users; None unless a reward sets `needs_queries`."""

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
        # They are those of the rollouts: a reward that sorted them in place would change what is learned.
        for name in ("items_UG", "log_probs_UG", "targets_U"):
            read_only = getattr(self, name).view()
            read_only.flags.writeable = False
            object.__setattr__(self, name, read_only)

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
        """Append the logged next item to each list: [U, G + 1].

        Args:
            log_probs_U: of these items, by the policy that sampled the lists; they decide its position.
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
        """Select the lists of the users from `start` to `stop` (exclusive)."""
        return CandidateLists(
            self.items_UG[start:stop],
            self.log_probs_UG[start:stop],
            self.targets_U[start:stop],
            self.user_keys[start:stop],
            None if self.scenario_U is None else self.scenario_U[start:stop],
            None if self.queries is None else self.queries[start:stop],
        )


class Reward(Protocol):
    """Scores one aspect of candidate lists."""

    def __call__(self, lists: CandidateLists) -> RewardArray:
        """[U, G] the reward of each candidate, and a finite number where there is none.

        The reward of a user's list may not depend on other users.
        """
        ...


@dataclass(frozen=True)
class RewardContext:
    """What rewards know about the data set; arrays are in catalog order."""

    codes_IL: np.ndarray
    """[I, L] semantic IDs."""
    train_counts_I: Int64Array
    """Training events of each item."""
    item_keys: pd.Index
    """[I] strings, as the source of the data writes them."""
    scenarios: tuple[str, ...] = ()
    """Names of scenarios; empty if the data set has none."""
    load_ranker: Callable[[RankingConfig], Ranker] | None = None
    """Loads a ranking model that fits the data set."""
    item_positions: Callable[[Int64Array], Int64Array] | None = None
    """Item ids, as queries have them -> catalog positions, -1 where the catalog lacks an item."""


class RewardSettings(Config, ABC):
    """Base of every reward's settings; `kind` says which reward it is."""

    RENAMED: ClassVar[Mapping[str, str]] = {"normalise": "normalize"}

    needs_queries: ClassVar[bool] = False
    """Whether the reward reads `CandidateLists.queries`, the histories of the users."""

    kind: str
    name: str | None = Field(default=None, min_length=1)
    """Name in metrics (default: the kind). No two rewards may have the same."""
    weight: float = 1.0
    """Weight in the sum of rewards; negative for a cost, 0 to report the reward without learning from it."""
    by_scenario: dict[str, float] = Field(default_factory=dict)
    """Weights in scenarios of the data set; `weight` applies in those not named."""
    normalize: Normalize = "none"
    """`standard`: subtract the running mean of all candidates so far and divide by their standard deviation,
    so that weights compare rewards of different units."""

    @property
    def label(self) -> str:
        """Name in metrics and messages."""
        return self.name or self.kind

    @abstractmethod
    def build(self, context: RewardContext) -> Reward:
        """Make the reward for a data set.

        Raises:
            InputError: the settings do not fit the data set, or a file cannot be used.
        """

    def with_absolute_paths(self) -> Self:
        """Return the same settings, with paths that hold in any working directory."""
        return self


class RewardError(RuntimeError):
    """A reward failed, or returned something that cannot be learned from. No state was updated.

    Can be pickled, so it crosses processes unchanged.
    """

    def __init__(
        self,
        reward: str,
        reason: str,
        user_key: str | None = None,
        position: int | None = None,
        item: int = -1,
    ) -> None:
        """
        Args:
            reward: name of the reward.
            user_key: the first user that it fails for; None: unknown.
            position: of the first candidate that it fails for, in that user's list; None: no single one.
            item: catalog position of that candidate, -1 where the list has none.
        """
        super().__init__(reward, reason, user_key, position, item)
        self.reward, self.reason = reward, reason
        self.user_key, self.position, self.item = user_key, position, item

    def __str__(self) -> str:
        return f"the reward {self.reward!r}{self._where()}: {self.reason}"

    def _where(self) -> str:
        if self.user_key is None:
            return ""
        if self.position is None:
            return f" of user {self.user_key!r}"
        what = f"catalog item {self.item}" if self.item >= 0 else "no item"
        return f" of user {self.user_key!r}, {what} at position {self.position} of the list"
