"""A figure with its interval."""

from __future__ import annotations

from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean over users or rows with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float
