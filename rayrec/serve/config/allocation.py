"""Settings of computing power by value: what may be computed of a request, and what it is worth."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rayrec.platform.config import Config
from rayrec.serve.config.actions import ActionConfig, check_actions

VALUE_HEADER = "X-Request-Value"


class ValueConfig(Config):
    """What a request is worth: what its header says, else its user's segment, else what the user's last
    answers promised, else `default`."""

    header: str | None = Field(VALUE_HEADER, min_length=1)
    """Header with a number that is not negative. Any client can send any number: let a gateway set it."""
    segments: str | None = None
    """Table with the columns `user_key` and `value`: CSV, TSV or Parquet."""
    items: str | None = None
    """Table with the columns `item_key` and `value`, such as margins. A user's requests are worth what the
    items of the last answers are worth, by the probabilities that the model gave them."""
    default: float = Field(1.0, gt=0, allow_inf_nan=False)
    most: float = Field(1e9, gt=0, allow_inf_nan=False)
    """A header that says more says nothing."""


class AllocateConfig(Config):
    """Which requests computing power goes to while there is too little of it."""

    actions: tuple[ActionConfig, ...] = Field(min_length=2, max_length=8)
    """The first one computes everything."""
    curves: str
    """File of `rayrec value-curves`: what each action finds."""
    value: ValueConfig = ValueConfig()
    busy: float = Field(0.85, gt=0, le=1)
    """Share of the time that the model's device may be busy, if batches are as large as pays most."""
    floor_every: int = Field(10, ge=0)
    """Of a user's requests, one in so many is computed as a whole, whatever it is worth; 0: none."""
    explore: float = Field(0.01, ge=0, le=0.5)
    """Share of requests that get an action at random while power is short; with the propensities in the
    request log, off-policy estimates say what other settings would have earned."""

    @model_validator(mode="after")
    def _actions_can_be_told_apart(self) -> Self:
        check_actions(self.actions, "allocate.actions")
        if not (first := self.actions[0]).is_full:
            raise ValueError(
                f"allocate.actions: the first, {first.name!r}, has to compute everything: it is what "
                "requests get while there is no lack; give it nothing but a name"
            )
        return self
