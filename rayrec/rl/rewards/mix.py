"""Several rewards in one number per candidate.

    lists ─► each part: reward ─► usable? ─► (normalized by all that came so far) ─► times its weight ─► sum
                          │           └ RewardError, and nothing was counted
                          └ figures, as it is

A place without a candidate is no sample: it counts in no moment and in no figure. What stands there is what
its rewards come to, 0 of most parts, normalized like any other; whoever learns gives it no weight.

Axes: U users, G candidates of a user, N candidates that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

import numpy as np

from rayrec.platform.arrays import BoolArray
from rayrec.platform.errors import InputError
from rayrec.rl.rewards.candidates import CandidateLists, Reward, RewardArray
from rayrec.rl.rewards.errors import RewardError
from rayrec.rl.rewards.moments import Moments

Normalize = Literal["none", "standard"]

TOTAL = "total"
"""Name of the sum among the figures."""

LARGEST = 1e100
"""Of a reward, as it is and with its weight. Larger ones are finite still, but their squares are not, nor may
be their sum: moments that had met one would make all rewards after it 0."""


@dataclass(frozen=True)
class WeightedReward:
    """A part of a mix."""

    name: str
    reward: Reward
    weight: float = 1.0
    by_scenario: Mapping[str, float] = field(default_factory=dict)
    """Scenario -> the weight there; in others, and where nobody says which, `weight`."""
    normalize: Normalize = "none"
    """`standard`: less the mean of all candidates so far, this batch included, and divided by their standard
    deviation. Candidates that have all been alike are worth 0."""

    @property
    def counts(self) -> bool:
        """Whether it has a weight anywhere. What has none is computed for its figures."""
        return any(weight != 0 for weight in (self.weight, *self.by_scenario.values()))


@dataclass(frozen=True)
class MixedRewards:
    """What a batch of lists is worth."""

    total_UG: RewardArray
    """[U, G] sum of the weighted parts."""
    parts: Mapping[str, RewardArray]
    """Name -> [U, G] reward as it is."""
    weighted: Mapping[str, RewardArray]
    """Name -> [U, G] what it adds to the total, of the parts that count."""
    is_item_UG: BoolArray
    figures: Mapping[str, float]
    """`hit.mean`, `hit.std`, ... of every part as it is, and of `total`; 0 if there is no candidate."""


class RewardMix:
    """Weighs rewards; keeps the running moments of those that are normalized. Not thread-safe."""

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
        """What these lists are worth.

        Args:
            normalizes: False takes every part as it is, times its weight: for lists that are compared over
                time, since what parts are normalized by moves with the policy.
            learns: whether they count in the running moments. Without, they are measured by what came before:
                for lists that stand beside the policy's own, such as those of the logged items, and for
                evaluation.

        Raises:
            RewardError: a part failed, has the wrong shape, or is not finite or beyond `LARGEST` somewhere.
                The running moments are as they were.
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
            with np.errstate(over="ignore"):  # what overflows is refused by name
                if normalizes and part.name in moments:
                    reward_UG = _standardized(reward_UG, moments[part.name])
                weighted[part.name] = _weights(part, lists)[:, None] * reward_UG
            _check_usable(part.name, weighted[part.name], lists, "with its weight, it is")
        total_UG = np.sum(list(weighted.values()), axis=0)
        self._moments = moments
        return MixedRewards(
            total_UG, parts, weighted, is_item_UG, _figures({**parts, TOTAL: total_UG}, is_item_UG)
        )

    def state(self) -> dict[str, float]:
        """The running moments: a mix that has them loaded goes on as this one would."""
        return {
            f"{name}.{key}": value
            for name, moments in self._moments.items()
            for key, value in asdict(moments).items()
        }

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from a `state`.

        Raises:
            InputError: it is that of other parts.
        """
        expected = set(self.state())
        if set(state) != expected:
            differing = ", ".join(sorted(set(state) ^ expected))
            raise InputError(
                f"the state of the rewards is one of other parts with normalize: standard (it differs in "
                f"{differing}); go on with the rewards that it was kept with, or begin anew"
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


def _figures(rewards: Mapping[str, RewardArray], is_item_UG: BoolArray) -> dict[str, float]:
    figures = {}
    for name, reward_UG in rewards.items():
        reward_N = reward_UG[is_item_UG]
        figures[f"{name}.mean"] = float(reward_N.mean()) if len(reward_N) else 0.0
        figures[f"{name}.std"] = float(reward_N.std()) if len(reward_N) else 0.0
    return figures


def _computed(part: WeightedReward, lists: CandidateLists) -> RewardArray:
    """[U, G] what a part gives, in memory of its own.

    Raises:
        RewardError: it is not that.
    """
    try:
        reward_UG = np.array(part.reward(lists), dtype=np.float64)
    # Whatever it is: the code may be a user's.
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
    users_K, places_K = np.nonzero(~(np.abs(reward_UG) <= LARGEST))  # nor is NaN
    if not len(users_K):
        return
    user, place = int(users_K[0]), int(places_K[0])
    raise RewardError(
        name,
        f"{what} {reward_UG[user, place]}, and nothing can be learned from that",
        lists.user_keys[user],
        place,
        int(lists.items_UG[user, place]),
    )


def _first_user_that_fails(reward: Callable[[CandidateLists], object], lists: CandidateLists) -> int | None:
    """The user whose list alone makes a reward fail; None if it takes several.

    It halves the users, so it asks few times: what failed may be a service that takes its time to.
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
