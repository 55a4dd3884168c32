"""From settings to rewards.

Axes: I items of the catalog, L code levels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.rl.rewards.candidates import Reward
from rayrec.rl.rewards.config import (
    BusinessValueConfig,
    DiversityConfig,
    FunctionConfig,
    GuardConfig,
    HitConfig,
    NoveltyConfig,
    PrefixMatchConfig,
    RankerConfig,
    RankPositionConfig,
    RewardsConfig,
    RewardSettings,
    ValidityConfig,
)
from rayrec.rl.rewards.guard import RewardGuard
from rayrec.rl.rewards.item_facts import BusinessValue, Novelty
from rayrec.rl.rewards.list_quality import Diversity, Validity
from rayrec.rl.rewards.logged_targets import Hit, PrefixMatch, RankPosition
from rayrec.rl.rewards.mix import RewardMix, WeightedReward
from rayrec.rl.rewards.ranker import LearnedRanker, Ranker
from rayrec.rl.rewards.user_function import imported

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CatalogFacts:
    """What rewards know of the items; arrays are in catalog order."""

    codes_IL: np.ndarray
    """[I, L] semantic IDs."""
    train_counts_I: Int64Array
    """Training events of each item."""
    item_keys: pd.Index
    """[I] strings, as the source of the data writes them."""
    scenarios: tuple[str, ...] = ()
    """Names that the data set has; empty if it has none."""


@dataclass(frozen=True)
class _Given:
    """What a reward may be made of beside its settings."""

    name: str
    catalog: CatalogFacts
    rankers: Mapping[str, Ranker] = field(default_factory=dict)


def build_rewards(
    config: RewardsConfig, catalog: CatalogFacts, rankers: Mapping[str, Ranker] | None = None
) -> RewardMix:
    """
    Args:
        rankers: what learned rankers call, by the name of the reward.

    Raises:
        InputError: there is no such scenario, file, column, module or function, or a file's values cannot be
            used.
        ValueError: a learned ranker has nothing to call.
    """
    parts = []
    for name, part in config.named.items():
        _check_scenarios(name, part, catalog.scenarios)
        reward = _BUILDERS[type(part)](part, _Given(name, catalog, rankers or {}))
        parts.append(WeightedReward(name, reward, part.weight, part.by_scenario, part.normalize))
    return RewardMix(parts)


def build_guard(config: GuardConfig) -> RewardGuard:
    return RewardGuard(config.max_share, config.max_flat, config.window)


def _check_scenarios(name: str, part: RewardSettings, known: tuple[str, ...]) -> None:
    if unknown := [scenario for scenario in part.by_scenario if scenario not in known]:
        there_are = f"has {', '.join(known)}" if known else "has none"
        raise InputError(
            f"the reward {name!r} has a weight by_scenario for {unknown[0]!r}, but the data set {there_are}; "
            "the weight would never apply"
        )


def _rank_position(part: RankPositionConfig, given: _Given) -> Reward:
    return RankPosition(part.penalty, part.only_with_hit)


def _business_value(part: BusinessValueConfig, given: _Given) -> Reward:
    item_keys = given.catalog.item_keys
    reward = BusinessValue.read(part.path, part.key_column, part.column, item_keys)
    if reward.num_unknown:
        logger.warning(
            "the reward %r is 0 for %d of %d items, which %s has no %s of",
            given.name,
            reward.num_unknown,
            len(item_keys),
            part.path,
            part.column,
        )
    return reward


def _ranker(part: RankerConfig, given: _Given) -> Reward:
    if given.name not in given.rankers:
        raise ValueError(
            f"the reward {given.name!r} needs a ranker to call; got rankers for "
            f"{', '.join(given.rankers) or 'none'}"
        )
    return LearnedRanker(given.rankers[given.name])


def _function(part: FunctionConfig, given: _Given) -> Reward:
    return imported(part.function, part.folder)


_BUILDERS: dict[type[RewardSettings], Callable[..., Reward]] = {
    ValidityConfig: lambda part, given: Validity(),
    HitConfig: lambda part, given: Hit(),
    PrefixMatchConfig: lambda part, given: PrefixMatch(given.catalog.codes_IL),
    RankPositionConfig: _rank_position,
    DiversityConfig: lambda part, given: Diversity(given.catalog.codes_IL),
    NoveltyConfig: lambda part, given: Novelty(given.catalog.train_counts_I),
    BusinessValueConfig: _business_value,
    RankerConfig: _ranker,
    FunctionConfig: _function,
}
