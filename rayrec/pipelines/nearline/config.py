"""Settings of the near-line layer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from rayrec.platform.config import Config
from rayrec.platform.functions import FunctionName

KindName = Literal["summaries", "candidates", "neighbors", "instructions"]
MOST_EVENTS = 16_384
"""Newest events of a user that products stand for, wherever they are computed or read. A user with more has a
window that moves with each event, and products that are good until the next one."""


class NearlineConfig(Config):
    """What a worker computes of which users, and when."""

    products: tuple[KindName, ...] = ("candidates",)
    """Kinds of products: `summaries` of chunks of old events; `candidates`, the best of the whole catalog;
    `neighbors` of the history; `instructions`, by a function."""
    candidates: int = Field(1000, ge=1)
    """Items kept of `candidates` and of `neighbors`."""
    search: int | None = Field(None, ge=1)
    """Beams of `candidates` at least; None: as many as there are items, so that each item has its exact
    probability."""
    function: FunctionName | None = None
    """Of `instructions`: `module:function`, called with a list of user keys and one of queries; returns for
    each user a mapping of parts of an instruction (`scenario`, `behavior`, `trigger_item`), or None."""
    debounce_events: int = Field(16, ge=1)
    """A user with so many new events is due at once."""
    debounce_s: float = Field(5.0, ge=0)
    """A user with fewer is due so long after the first of them."""
    batch_users: int = Field(64, ge=1)
    """Users computed together, and written in one transaction."""
    active_s: float | None = Field(None, gt=0)
    """Where all users are looked at, as for a new version, those whose newest event is older are left out;
    None: nobody is."""

    @field_validator("products")
    @classmethod
    def _there_are_some(cls, value: tuple[KindName, ...]) -> tuple[KindName, ...]:
        if not value or len(set(value)) < len(value):
            raise ValueError(f"products: {list(value)}; name at least one kind, and each once")
        return value
