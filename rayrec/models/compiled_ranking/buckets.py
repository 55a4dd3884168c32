"""Few shapes for all batches: sizes grow geometrically, and a batch is padded to the next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of one program."""

    num_rows: int
    length: int
    """Events of a row, those that are only left out of its answer included."""
    width: int
    """Items that are ranked: beams, or the best of all scores."""

    def num_read(self, max_length: int) -> int:
        """Events of a row that the model reads."""
        return min(self.length, max_length)

    def __str__(self) -> str:
        return f"{self.num_rows} rows of {self.length} events, {self.width} items"


class Buckets:
    """The sizes that there are."""

    def __init__(self, row_counts: Sequence[int], lengths: Sequence[int]) -> None:
        """
        Raises:
            ValueError: no size, or one below 1.
        """
        for name, sizes in (("row_counts", row_counts), ("lengths", lengths)):
            if not sizes or min(sizes) < 1:
                raise ValueError(f"{name} of buckets must be at least one number from 1, got {list(sizes)}")
        self.row_counts = sorted(set(row_counts))
        self.lengths = sorted(set(lengths))

    def of(self, num_rows: int, longest: int, width: int) -> Bucket | None:
        """The smallest bucket that holds such a batch; None where all are too small."""
        row_place, length_place = bisect_left(self.row_counts, num_rows), bisect_left(self.lengths, longest)
        if row_place == len(self.row_counts) or length_place == len(self.lengths):
            return None
        return Bucket(self.row_counts[row_place], self.lengths[length_place], width)


def geometric(first: int, last: int, factor: int = 2) -> list[int]:
    """Sizes from `first` on, each `factor` times the one before; the last one is `last`.

    Raises:
        ValueError: a factor below 2, or a first size below 1.
    """
    if factor < 2 or first < 1:
        raise ValueError(f"sizes grow from at least 1 by a factor of at least 2, got {first} and {factor}")
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return [*sizes, last]
