"""The table of rewards, the settings of their weighted sum, and how it is built.

rewards:
  parts:
    - {kind: hit}
    - {kind: rank_position, penalty: true}
    - {kind: business_value, path: margins.csv, column: margin, weight: 0.1, normalize: standard}
    - {kind: novelty, weight: 0.0, by_scenario: {discover: 0.5}}

A new reward is a subclass of `RewardSettings` and a line in `REWARDS`, or an entry point of another package
in the group `rayrec.rewards`: docs/guides/add-a-reward.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.registry import Registry, settings_union
from rayrec.rl.rewards.base import RewardContext, RewardSettings
from rayrec.rl.rewards.guard import GuardConfig
from rayrec.rl.rewards.mix import TOTAL, RewardMix, WeightedReward

REWARDS: Registry[type[RewardSettings]] = Registry(
    "rayrec.rewards",
    "reward",
    {
        "validity": "rayrec.rl.rewards.list_quality:ValidityConfig",
        "hit": "rayrec.rl.rewards.logged_targets:HitConfig",
        "prefix_match": "rayrec.rl.rewards.logged_targets:PrefixMatchConfig",
        "rank_position": "rayrec.rl.rewards.logged_targets:RankPositionConfig",
        "diversity": "rayrec.rl.rewards.list_quality:DiversityConfig",
        "novelty": "rayrec.rl.rewards.item_facts:NoveltyConfig",
        "business_value": "rayrec.rl.rewards.item_facts:BusinessValueConfig",
        "ranker": "rayrec.rl.rewards.external:RankerConfig",
        "expected_value": "rayrec.rl.rewards.external:ExpectedValueConfig",
        "simulator": "rayrec.rl.rewards.simulator:SimulatorConfig",
        "function": "rayrec.rl.rewards.external:FunctionConfig",
    },
)

if TYPE_CHECKING:
    RewardConfig = RewardSettings
else:
    RewardConfig = settings_union(REWARDS, RewardSettings, "kind")
"""One of the rewards, chosen by `kind`."""


class RewardsConfig(Config):
    """Rewards of candidate lists: a weighted sum of parts."""

    parts: tuple[RewardConfig, ...] = Field(min_length=1)
    guard: GuardConfig = GuardConfig()

    @property
    def needs_queries(self) -> bool:
        """Whether a reward reads the histories of users."""
        return any(part.needs_queries for part in self.parts)

    @model_validator(mode="after")
    def _names_differ(self) -> RewardsConfig:
        names = [part.label for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"rewards.parts has {names.count(name)} rewards of the name {name!r}; give each a name "
                    "of its own with name, or their metrics would be mixed up"
                )
        if TOTAL in names:
            raise ValueError(f"rewards.parts has a reward of the name {TOTAL!r}, which is that of the sum")
        return self

    @model_validator(mode="after")
    def _something_counts(self) -> RewardsConfig:
        if not any(weight for part in self.parts for weight in (part.weight, *part.by_scenario.values())):
            raise ValueError(
                "rewards.parts has no weight other than 0: every candidate would have the same reward, and "
                "nothing would be learned"
            )
        return self


def build_rewards(config: RewardsConfig, context: RewardContext) -> RewardMix:
    """Make the weighted sum of rewards for a data set.

    Raises:
        InputError: there is no such scenario, file, column, module or function, or a file's values cannot be
            used.
    """
    parts = []
    for part in config.parts:
        _check_scenarios(part, context.scenarios)
        reward = part.build(context)
        parts.append(WeightedReward(part.label, reward, part.weight, part.by_scenario, part.normalize))
    return RewardMix(parts)


def _check_scenarios(part: RewardSettings, known: tuple[str, ...]) -> None:
    if unknown := [scenario for scenario in part.by_scenario if scenario not in known]:
        there_are = f"has {', '.join(known)}" if known else "has none"
        raise InputError(
            f"the reward {part.label!r} has a weight by_scenario for {unknown[0]!r}, but the data set "
            f"{there_are}; the weight would never apply"
        )
