"""How to make the columns of impressions from a request: user, items and time.

A layout that can do so names the functions that made its impressions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from rayrec.samples.impressions.history_rule import HistoryRule
from rayrec.samples.impressions.layouts.histories import PastEvents

Columns = dict[str, pa.Array]
"""Columns by name, keys in them as the source writes them."""


def _nothing(known: object) -> Columns:
    return {}


@dataclass(frozen=True)
class QueryColumns:
    """Columns that can be made for a request, by what they are made of; others are unknown there."""

    rule: HistoryRule
    user: tuple[str, ...] = ()
    """Columns that are the user's key."""
    item: tuple[str, ...] = ()
    """Columns that are the item's key."""
    history: tuple[str, ...] = ()
    """Columns that are lists of keys of items: the history, by the rule."""
    of_users: Callable[[pa.Table], Columns] = _nothing
    """Of the source's table of users, row by row."""
    of_items: Callable[[pa.Table], Columns] = _nothing
    """Of the source's table of items, row by row."""
    of_pasts: Callable[[PastEvents], Columns] = _nothing
    """Of what users did before, event by event, beside the history itself."""
    of_times: Callable[[pa.TimestampArray], Columns] = _nothing
    """Of the times of events."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Why others cannot be made, and what to do."""
