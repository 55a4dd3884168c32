"""Settings of computing power by value: what may be computed of a request, and what it is worth."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rayrec.platform.config import Config

VALUE_HEADER = "X-Request-Value"


class ActionConfig(Config):
    """How much may be computed of an answer."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)
    """Of the action in metrics and logs."""
    max_beams: int | None = Field(None, ge=1)
    """Beams at most, as far as the items asked for allow; None: as the model's config says."""
    max_events: int | None = Field(None, ge=1)
    """Newest events that are read; None: as many as the model reads."""
    rank: bool = True
    """Whether a ranking stage ranks."""
    near_line: bool = False
    """Whether an answer that was computed before will do; without one, the rest of the action holds."""
    popular: bool = False
    """Give popular items and compute nothing. It finds nothing of the mass that the model gives."""

    @property
    def is_full(self) -> bool:
        """Nothing is left out."""
        return self == ActionConfig(name=self.name)

    @model_validator(mode="after")
    def _popular_items_need_nothing(self) -> Self:
        if self.popular and (self.max_beams or self.max_events or self.near_line):
            raise ValueError(
                f"allocate.actions: {self.name!r} gives popular items and computes nothing; leave out its "
                "max_beams, max_events and near_line"
            )
        return self


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
        names = [action.name for action in self.actions]
        if len(set(names)) < len(names):
            raise ValueError(f"allocate.actions: names have to differ, got {', '.join(names)}")
        if not self.actions[0].is_full:
            raise ValueError(
                f"allocate.actions: the first, {names[0]!r}, has to compute everything: it is what requests "
                "get while there is no lack; give it nothing but a name"
            )
        return self
