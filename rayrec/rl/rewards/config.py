"""Settings of rewards.

rewards:
  parts:
    - {kind: hit}
    - {kind: rank_position, penalty: true}
    - {kind: business_value, path: margins.csv, column: margin, weight: 0.1, normalize: standard}
    - {kind: novelty, weight: 0.0, by_scenario: {discover: 0.5}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.platform.config import Config
from rayrec.platform.remote_files import absolute
from rayrec.rl.rewards.mix import TOTAL, Normalize

_Share = Annotated[float, Field(ge=0, le=1)]


class RewardSettings(Config):
    """What every reward has."""

    RENAMED: ClassVar[Mapping[str, str]] = {"normalise": "normalize"}

    name: str | None = Field(default=None, min_length=1)
    """Of its figures; None: its kind. No two have the same."""
    weight: float = 1.0
    """In the sum of rewards; below 0, it is a cost. One with no weight is computed for its figures alone."""
    by_scenario: dict[str, float] = Field(default_factory=dict)
    """Weights in scenarios of the data set; in those not named it is `weight`."""
    normalize: Normalize = "none"
    """`standard`: less the mean of all candidates so far, and divided by their standard deviation, so that
    weights compare rewards of different units."""

    def with_absolute_paths(self) -> Self:
        """The same reward, to be understood from any working directory."""
        return self


class ValidityConfig(RewardSettings):
    """1 for an item, 0 for none."""

    kind: Literal["validity"] = "validity"


class HitConfig(RewardSettings):
    """1 for the logged next item."""

    kind: Literal["hit"] = "hit"


class PrefixMatchConfig(RewardSettings):
    """Share of the logged item's leading codes that a candidate has."""

    kind: Literal["prefix_match"] = "prefix_match"


class RankPositionConfig(RewardSettings):
    """1 / log2(2 + p) for the logged item at position p by probability."""

    kind: Literal["rank_position"] = "rank_position"
    penalty: bool = False
    """Instead: 0 for the logged item, and for every other one a cost, the higher the likelier it is. To stand
    beside `hit`."""
    only_with_hit: bool = False
    """With `penalty`: 0 for all in lists without the logged item."""

    @model_validator(mode="after")
    def _there_is_a_penalty_to_restrict(self) -> RankPositionConfig:
        if self.only_with_hit and not self.penalty:
            raise ValueError(
                "rank_position.only_with_hit is true and penalty false: it says which lists are penalized, "
                "and none is; set penalty to true, or leave it out"
            )
        return self


class DiversityConfig(RewardSettings):
    """1 less the mean share of leading codes in common with the others of the list."""

    kind: Literal["diversity"] = "diversity"


class NoveltyConfig(RewardSettings):
    """How few of the training events an item has, from 0 to 1."""

    kind: Literal["novelty"] = "novelty"


class BusinessValueConfig(RewardSettings):
    """A number per item from a table; 0 for items that it does not have."""

    kind: Literal["business_value"] = "business_value"
    path: str = Field(min_length=1)
    """A Parquet, CSV or TSV file, or a folder of such."""
    key_column: str = "item_id"
    """Has the item's key as the source of the data writes it."""
    column: str
    """Has the numbers."""

    def with_absolute_paths(self) -> Self:
        return self.model_copy(update={"path": absolute(self.path)})


class RankerConfig(RewardSettings):
    """What a ranking model says that showing a candidate is worth."""

    kind: Literal["ranker"] = "ranker"
    ranking: RankingConfig
    """Which model, and by what of its labels. The number of candidates and the recommender's own score have
    no say here."""

    def with_absolute_paths(self) -> Self:
        ranking, data = self.ranking, self.ranking.data
        found = {"run": absolute(ranking.run), "data": None if data is None else absolute(data)}
        return self.model_copy(update={"ranking": ranking.model_copy(update=found)})


class FunctionConfig(RewardSettings):
    """A function of yours: it takes `CandidateLists` and gives [U, G] numbers."""

    kind: Literal["function"] = "function"
    function: str
    """`module:function`."""
    folder: Path | None = None
    """Where its module is, if Python does not find it by itself."""

    def with_absolute_paths(self) -> Self:
        return self if self.folder is None else self.model_copy(update={"folder": self.folder.resolve()})

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        if not re.fullmatch(r"[\w.]+:\w+", value):
            raise ValueError(f"the function of a reward must be 'module:function', got {value!r}")
        return value


RewardConfig = Annotated[
    ValidityConfig
    | HitConfig
    | PrefixMatchConfig
    | RankPositionConfig
    | DiversityConfig
    | NoveltyConfig
    | BusinessValueConfig
    | RankerConfig
    | FunctionConfig,
    Field(discriminator="kind"),
]


class GuardConfig(Config):
    """When a mix is said to teach nothing, or but one thing."""

    max_share: _Share = 0.9
    """Of the variance of the total within groups that one of several rewards may have."""
    max_flat: _Share = 0.5
    """Share of groups whose candidates may all have the same total."""
    window: int = Field(default=20, ge=1)
    """Chunks of users (`rollout.chunk_users`) that are judged together; a batch has several."""


class RewardsConfig(Config):
    """What lists are worth: a weighted sum."""

    parts: tuple[RewardConfig, ...] = Field(min_length=1)
    guard: GuardConfig = GuardConfig()

    @property
    def named(self) -> dict[str, RewardConfig]:
        """Name -> reward, in order."""
        return {part.name or part.kind: part for part in self.parts}

    @model_validator(mode="after")
    def _names_differ(self) -> RewardsConfig:
        names = [part.name or part.kind for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"rewards.parts has {names.count(name)} rewards of the name {name!r}; give them names of "
                    "their own with name, or their figures would be one"
                )
        if TOTAL in names:
            raise ValueError(f"rewards.parts has a reward of the name {TOTAL!r}, which is that of the sum")
        return self

    @model_validator(mode="after")
    def _something_counts(self) -> RewardsConfig:
        if not any(weight for part in self.parts for weight in (part.weight, *part.by_scenario.values())):
            raise ValueError(
                "rewards.parts has no weight other than 0: every candidate would be worth the same, and "
                "nothing would be learned"
            )
        return self
