"""Settings of a ranking stage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rayrec.platform.config import Config

Weight = Annotated[float, Field(allow_inf_nan=False)]


class RankingConfig(Config):
    """Which model ranks, how much, and by what."""

    run: str
    """Folder of a run of a ranking model."""
    snapshot: str = "best"
    """Of the run: `best`, `last`, `previous`, or the name of one."""
    data: str | None = None
    """Where the run's data set of impressions lies now, if it was moved."""
    candidates: int = Field(100, ge=1)
    """Items that the recommender gives for each query; as many as are asked for, if that is more."""
    objective: dict[str, Weight] = Field(default_factory=dict)
    """By label, its weight; one that is not named counts nothing. Empty: the only label."""
    combine: Literal["sum", "product"] = "sum"
    """`sum`: weights times probabilities; `product`: probabilities to the power of weights, of which the
    logarithm is taken."""
    generator_weight: Weight = 0.0
    """How much the recommender's own score is added: a log-probability of generative models (with softmax
    `hybrid`, an inner product besides). With `combine: product` both are logarithms."""
