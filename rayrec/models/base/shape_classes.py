"""Sizes that are near each other, as one: what is measured or compiled for one holds for the others."""

from __future__ import annotations


def power_of_two(size: int) -> int:
    """The smallest that is not less; 1 for no size at all."""
    return 1 << max(size - 1, 0).bit_length()
