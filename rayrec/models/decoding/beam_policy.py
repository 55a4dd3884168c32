"""How many prefixes a row keeps on its way down the trie: as many at every level, fewer or more with depth,
or those alone that are nearly as probable as the best.

    fixed        64              as many after every level
    scheduled    (64, 32, 16)    a width per level; the last one holds for the levels after it
    by margin    8.0             besides: prefixes whose log-probability is more than 8 below that of the
                                 row's best are dropped. The last level is spared: there, it would take items
                                 from the answer and save nothing

Rows of different policies are searched together, and each finds what it would find alone.

Axes: B rows, L levels, W beams of the row that has the most.

Source: the three policies are those of NVIDIA's SID-GR, github.com/NVIDIA/recsys-examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BeamPolicy:
    """Of one row.

    Raises:
        ValueError: no width, one below 1, or a margin that is not positive.
    """

    widths: tuple[int, ...]
    """Prefixes that are kept after each level; the last one is that of all further levels."""
    margin: float | None = None
    """How much less the log-probability of a prefix may be than that of the row's best; None: any."""

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(
                f"a beam policy needs widths of at least 1, got {list(self.widths)}: a row without a prefix "
                "finds no item"
            )
        if self.margin is not None and not self.margin > 0.0:
            raise ValueError(f"the margin of a beam policy must be positive, got {self.margin}")

    @property
    def widest(self) -> int:
        """Prefixes that are kept at most."""
        return max(self.widths)

    def at(self, level: int) -> int:
        """Prefixes that are kept after a level, from 0."""
        return self.widths[min(level, len(self.widths) - 1)]

    def within(self, k: int, max_beams: int | None = None) -> BeamPolicy:
        """A policy that finds k items and otherwise keeps at most `max_beams`, as `beams_for` has it.

        No level keeps fewer than k: two prefixes may lead to four items, whatever is kept below them. With a
        margin, fewer than k may be found all the same.
        """
        widths = self.widths if max_beams is None else tuple(min(each, max_beams) for each in self.widths)
        return BeamPolicy(tuple(max(each, k) for each in widths), self.margin)

    @property
    def beams(self) -> Beams:
        """The same as a number, where that says all of it."""
        is_fixed = self.margin is None and len(set(self.widths)) == 1
        return self.widths[0] if is_fixed else self


Beams = int | BeamPolicy
"""A number: so many after every level."""


def policy_of(beams: Beams) -> BeamPolicy:
    return BeamPolicy((beams,)) if isinstance(beams, int) else beams


def widest(beams: Beams) -> int:
    """Prefixes that are kept at most; 0 for 0, which is no policy."""
    return beams if isinstance(beams, int) else beams.widest


def by_level(beams_B: Sequence[Beams]) -> list[tuple[int, ...]]:
    """Widths of each row, of as many levels as the longest schedule has."""
    num_levels = max((1 if isinstance(each, int) else len(each.widths) for each in beams_B), default=1)
    return [
        (each,) * num_levels if isinstance(each, int) else tuple(map(each.at, range(num_levels)))
        for each in beams_B
    ]


@dataclass(frozen=True)
class RowBeams:
    """The policies of a search's rows, as tensors."""

    most_L: tuple[int, ...]
    """By level, of the row that keeps the most."""
    widths_BL: Tensor | None
    """None: all rows keep as many."""
    margin_B1: Tensor | None
    """None: no row has one; infinite for a row without."""

    @staticmethod
    def of(beams_B: Sequence[Beams], num_levels: int, device: torch.device) -> RowBeams:
        """
        Raises:
            ValueError: a width below 1.
        """
        policies = [policy_of(each) for each in beams_B]
        rows = [tuple(map(each.at, range(num_levels))) for each in policies]
        most_L = tuple(max(widths) for widths in zip(*rows, strict=True))
        margins = [math.inf if each.margin is None else each.margin for each in policies]
        return RowBeams(
            most_L,
            torch.tensor(rows, device=device) if len(set(rows)) > 1 else None,
            torch.tensor(margins, device=device)[:, None] if min(margins) < math.inf else None,
        )
