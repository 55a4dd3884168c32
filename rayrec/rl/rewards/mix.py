"""The weighted sum of several rewards: one number per candidate.

    lists ─► each part: reward ─► check ─► (normalized by the running moments) ─► times its weight ─► sum
                          │         └ RewardError, and no state is updated
                          └ metrics, before normalization

A position without a candidate counts in no moment and in no metric. Its total is meaningless, and learners
give it weight 0.

Axes: U users, G candidates of a user, N candidates that are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

import numpy as np

from rayrec.platform.arrays import BoolArray
from rayrec.platform.errors import InputError
from rayrec.rl.rewards.base import CandidateLists, Normalize, Reward, RewardArray, RewardError

TOTAL = "total"
"""Name of the sum among the metrics."""

LARGEST = 1e100
"""Largest absolute reward, with and without its weight. Larger ones are finite, but their squares may
overflow, and such moments would make all later rewards 0."""


_ROUNDING = 1e-9
"""Standard deviations below this share of the mean are rounding errors of equal numbers."""


@dataclass(frozen=True)
class Moments:
    """Running mean and standard deviation of numbers that come in batches.

    Source: Welford, Technometrics 1962; for batches, Chan, Golub and LeVeque, COMPSTAT 1982, eq. 2.1.
    """

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of the squared distances to the mean."""

    def with_batch(self, values_N: RewardArray) -> Moments:
        """Return the moments of all numbers, these included."""
        if not len(values_N):
            return self
        of_batch, mean_of_batch = float(len(values_N)), float(values_N.mean())
        count = self.count + of_batch
        distance = mean_of_batch - self.mean
        return Moments(
            count,
            self.mean + distance * of_batch / count,
            self.squares
            + float(((values_N - mean_of_batch) ** 2).sum())
            + distance**2 * self.count * of_batch / count,
        )

    @property
    def std(self) -> float:
        """Population standard deviation; 0 before there are numbers, and where they are equal up to
        rounding."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        return std if std > _ROUNDING * abs(self.mean) else 0.0


@dataclass(frozen=True)
class WeightedReward:
    """A part of a mix."""

    name: str
    reward: Reward
    weight: float = 1.0
    by_scenario: Mapping[str, float] = field(default_factory=dict)
    """Scenario -> the weight there; `weight` applies in others, and where the scenario is unknown."""
    normalize: Normalize = "none"
    """`standard`: subtract the mean of all candidates so far, this batch included, and divide by their
    standard deviation. While all candidates have been equal, the result is 0."""

    @property
    def counts(self) -> bool:
        """Whether it has a weight anywhere. Without one, it is computed for its metrics alone."""
        return any(weight != 0 for weight in (self.weight, *self.by_scenario.values()))


@dataclass(frozen=True)
class MixedRewards:
    """Rewards of a batch of lists."""

    total_UG: RewardArray
    """[U, G] sum of the weighted parts."""
    parts: Mapping[str, RewardArray]
    """Name -> [U, G] reward, neither normalized nor weighted."""
    weighted: Mapping[str, RewardArray]
    """Name -> [U, G] contribution to the total, of the parts that count."""
    is_item_UG: BoolArray
    metrics: Mapping[str, float]
    """`hit.mean`, `hit.std`, ... of every part, not normalized, and of `total`; 0 if there is no
    candidate."""


class RewardMix:
    """Adds up weighted rewards; keeps the running moments of those that are normalized. Not thread-safe."""

    def __init__(self, parts: Sequence[WeightedReward]) -> None:
        """
        Raises:
            ValueError: no part counts, or two have one name.
        """
        names = [part.name for part in parts]
        if not any(part.counts for part in parts):
            raise ValueError(
                f"a mix of rewards needs at least one part with a weight other than 0, got {len(names)} "
                "without: every list would be worth the same"
            )
        if len({*names, TOTAL}) <= len(names):
            raise ValueError(
                f"names of rewards must differ from each other and from {TOTAL!r}, got {', '.join(names)}"
            )
        self.parts = tuple(parts)
        self._moments = {part.name: Moments() for part in parts if part.normalize == "standard"}

    def mix(self, lists: CandidateLists, learns: bool = True, normalizes: bool = True) -> MixedRewards:
        """Score lists.

        Args:
            learns: whether these lists update the running moments; False for lists that are not samples of
                the policy, such as those with the logged items, and for evaluation.
            normalizes: False takes every part without normalization, times its weight: for lists that are
                compared over time, since the moments change with the policy.

        Raises:
            RewardError: a part failed, has the wrong shape, or is not finite or beyond `LARGEST` somewhere.
                The running moments are unchanged.
        """
        is_item_UG = lists.is_item_UG
        parts = {part.name: _computed(part, lists) for part in self.parts}
        moments = dict(self._moments)
        if learns:
            for name, before in self._moments.items():
                moments[name] = before.with_batch(parts[name][is_item_UG])
        weighted = {}
        for part in self.parts:
            if not part.counts:
                continue
            reward_UG = parts[part.name]
            with np.errstate(over="ignore"):  # an overflow is reported by `_check_usable`
                if normalizes and part.name in moments:
                    reward_UG = _standardized(reward_UG, moments[part.name])
                weighted[part.name] = _weights(part, lists)[:, None] * reward_UG
            _check_usable(part.name, weighted[part.name], lists, "with its weight, it is")
        total_UG = np.sum(list(weighted.values()), axis=0)
        self._moments = moments
        return MixedRewards(
            total_UG, parts, weighted, is_item_UG, _metrics({**parts, TOTAL: total_UG}, is_item_UG)
        )

    def state(self) -> dict[str, float]:
        """Return the running moments, from which another mix can continue."""
        return {
            f"{name}.{key}": value
            for name, moments in self._moments.items()
            for key, value in asdict(moments).items()
        }

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from a `state`.

        Raises:
            InputError: it is the state of other parts.
        """
        expected = set(self.state())
        if set(state) != expected:
            differing = ", ".join(sorted(set(state) ^ expected))
            raise InputError(
                f"the saved state belongs to other rewards with normalize: standard (it differs in "
                f"{differing}); resume with the rewards that it was saved with, or start a new run"
            )
        self._moments = {
            name: Moments(**{each.name: float(state[f"{name}.{each.name}"]) for each in fields(Moments)})
            for name in self._moments
        }


def _weights(part: WeightedReward, lists: CandidateLists) -> RewardArray:
    """[U]"""
    scenario_U = lists.scenario_U
    if scenario_U is None or not part.by_scenario:
        return np.full(lists.num_users, part.weight)
    return np.array(
        [part.by_scenario.get(scenario, part.weight) for scenario in scenario_U], dtype=np.float64
    )


def _standardized(reward_UG: RewardArray, moments: Moments) -> RewardArray:
    return (reward_UG - moments.mean) / (moments.std or 1.0)


def _metrics(rewards: Mapping[str, RewardArray], is_item_UG: BoolArray) -> dict[str, float]:
    metrics = {}
    for name, reward_UG in rewards.items():
        reward_N = reward_UG[is_item_UG]
        metrics[f"{name}.mean"] = float(reward_N.mean()) if len(reward_N) else 0.0
        metrics[f"{name}.std"] = float(reward_N.std()) if len(reward_N) else 0.0
    return metrics


def _computed(part: WeightedReward, lists: CandidateLists) -> RewardArray:
    """Compute the [U, G] rewards of a part, in memory of its own.

    Raises:
        RewardError: it raised, or returned another shape or unusable numbers.
    """
    try:
        reward_UG = np.array(part.reward(lists), dtype=np.float64)
    # Any exception: the code may be a user's.
    except Exception as error:
        user = _first_user_that_fails(part.reward, lists)
        user_key = None if user is None else lists.user_keys[user]
        raise RewardError(part.name, f"{type(error).__name__}: {error}", user_key) from error
    if reward_UG.shape != lists.items_UG.shape:
        raise RewardError(
            part.name,
            f"it has the shape {reward_UG.shape}, and the lists of {lists.num_users} users with "
            f"{lists.items_UG.shape[1]} candidates need {lists.items_UG.shape}",
        )
    _check_usable(part.name, reward_UG, lists, "it is")
    return reward_UG


def _check_usable(name: str, reward_UG: RewardArray, lists: CandidateLists, what: str) -> None:
    users_K, positions_K = np.nonzero(~(np.abs(reward_UG) <= LARGEST))  # nor is NaN
    if not len(users_K):
        return
    user, position = int(users_K[0]), int(positions_K[0])
    raise RewardError(
        name,
        f"{what} {reward_UG[user, position]}, and nothing can be learned from that",
        lists.user_keys[user],
        position,
        int(lists.items_UG[user, position]),
    )


def _first_user_that_fails(reward: Callable[[CandidateLists], object], lists: CandidateLists) -> int | None:
    """Find the user whose list alone makes a reward fail; None if it takes several.

    By bisection, since a reward may be a slow service.
    """
    start, stop = 0, lists.num_users
    while stop - start > 1:
        middle = (start + stop) // 2
        if _fails(reward, lists.of_users(start, middle)):
            stop = middle
        else:
            start = middle
    return start if stop > start and _fails(reward, lists.of_users(start, stop)) else None


def _fails(reward: Callable[[CandidateLists], object], lists: CandidateLists) -> bool:
    try:
        reward(lists)
    except Exception:
        return True
    return False
