"""What batches take, by their size and by how wide their search is.

    measured when a replica starts, at one width ─► CostsByWidth ─► BatchCosts of each width that was seen
                                                        └ of others: at most what the next wider one takes

A search for 1000 items takes many times as long as one for ten, and in one table each would be taken for the
other: requests for ten items would be refused as too late, and requests for 1000 would make others late.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

_LEAST_OF_GUESS, _MOST_OF_GUESS = 1e-3, 2.0
"""Times what was guessed of a width, as which its first batch counts: it may have been stalled."""


class BatchCosts:
    """Seconds that a batch takes by its size: measured at some sizes, then as batches are seen to take."""

    _WEIGHT_OF_NEW = 0.1
    _MOST_AT_ONCE = 2.0
    """Times a cost: a batch that takes longer was stalled, and counts as one that takes so long."""
    _OVERRUN_SHARE = 0.9
    _NUM_OVERRUNS = 50
    _PART_OF_PARTS = 0.95
    """Of what a batch's parts take one after the other: less than all of it, so that it is tried again."""

    def __init__(self, seconds_by_size: dict[int, float], width: int = 1) -> None:
        """
        Args:
            seconds_by_size: at least of size 1; the largest is the most that a batch may have.
            width: of the requests, see `CostsByWidth`.
        """
        if 1 not in seconds_by_size:
            raise ValueError("the cost of a single request is not among those measured")
        self.width = width
        self._sizes = np.array(sorted(seconds_by_size))
        self._seconds = np.array([seconds_by_size[size] for size in self._sizes.tolist()])
        self._overruns: deque[float] = deque(maxlen=self._NUM_OVERRUNS)
        """Times what was expected of them, what the last batches have taken."""
        self._caution = 1.0
        self._table = self._made_table()

    def _made_table(self) -> _Table:
        """Replaced as a whole after each change: others read it, for every request that comes."""
        sizes = np.arange(1, self.max_size + 1)
        seconds = np.interp(sizes, self._sizes, self._seconds)
        # Of equally good sizes the larger one, which leaves fewer waiting.
        rates, best = (sizes / seconds).tolist(), [1]
        for size in range(2, len(rates) + 1):
            best.append(size if rates[size - 1] >= rates[best[-1] - 1] else best[-1])
        least_s = float((self._seconds / self._sizes).min())
        return _Table([0.0, *seconds.tolist()], [1, *best], bool((np.diff(seconds) >= 0).all()), least_s)

    @property
    def table(self) -> list[float]:
        """Of every size up to the largest, from 0 on; not to be changed."""
        return self._table.seconds

    @property
    def seconds_by_size(self) -> dict[int, float]:
        """At the sizes that were measured."""
        return dict(zip(self._sizes.tolist(), self._seconds.tolist(), strict=True))

    @property
    def max_size(self) -> int:
        return int(self._sizes[-1])

    def of(self, size: int) -> float:
        """Between sizes that were measured, on a straight line; of more, that of the largest."""
        seconds = self._table.seconds
        return seconds[min(max(size, 1), len(seconds) - 1)]

    @property
    def least_s(self) -> float:
        """Seconds of a request in a batch of the size that pays most."""
        return self._table.least_s

    @property
    def full_size(self) -> int:
        """The size that pays most."""
        return self._table.best[-1]

    @property
    def caution(self) -> float:
        """Times what a batch is expected to take, in which nearly all are done; at least 1."""
        return self._caution

    def observe(self, size: int, seconds: float) -> None:
        """Move the costs of the measured sizes next to `size` towards what a batch has just taken.

        Sizes that are not computed any more are not seen either. So a larger batch never takes less than this
        one, nor a smaller one more, and one that would take longer than its parts comes to be tried again.
        """
        expected = self.of(size)
        seconds = min(seconds, self._MOST_AT_ONCE * expected)
        self._overruns.append(seconds / expected)
        # Sorted rather than by NumPy, which takes longer than all else here while an answer waits.
        index = math.ceil(self._OVERRUN_SHARE * (len(self._overruns) - 1))
        self._caution = max(sorted(self._overruns)[index], 1.0)
        right = int(np.searchsorted(self._sizes, size))
        indices = [right] if self._sizes[right] == size else [right - 1, right]
        for index in indices:
            changed = self._seconds[index] + self._WEIGHT_OF_NEW * (seconds - expected)
            self._seconds[index] = max(changed, 0.1 * self._seconds[index])  # no cost is ever 0 or below
        first, last = indices[0], indices[-1]
        np.minimum(self._seconds[:first], self._seconds[first], out=self._seconds[:first])
        above = self._seconds[last + 1 :]
        np.maximum(above, self._seconds[last], out=above)
        of_parts = self._PART_OF_PARTS * self._seconds[last] * self._sizes[last + 1 :] / self._sizes[last]
        above -= self._WEIGHT_OF_NEW * np.maximum(above - of_parts, 0.0)
        self._table = self._made_table()

    def best_size(self, most: int, budget_s: float) -> int:
        """The size of most requests per second that is done within the budget; 1 where none is.

        Args:
            most: requests that wait.
        """
        table = self._table
        most = min(most, len(table.seconds) - 1)
        if table.is_rising:
            return table.best[min(most, bisect_right(table.seconds, budget_s) - 1)] if budget_s >= 0 else 1
        in_time = [size for size in range(1, most + 1) if table.seconds[size] <= budget_s]
        return max(in_time, key=lambda size: (size / table.seconds[size], size), default=1)


class _Table(NamedTuple):
    """Of each size, from 0 on."""

    seconds: list[float]
    best: list[int]
    """The size of most requests per second, of those up to this one."""
    is_rising: bool
    """No batch takes less than a smaller one."""
    least_s: float
    """Of a request in a batch of the size that pays most."""


class CostsByWidth:
    """Costs of batches of every width. One thread observes, any thread asks.

    A width is a number that the work of a request grows with, such as its beams, in few steps; 0 where the
    model is not asked.
    """

    def __init__(self, measured: BatchCosts) -> None:
        self.measured_width = measured.width
        self._seen = {measured.width: measured}
        self._guessed: dict[int, BatchCosts] = {}
        """Of widths that were not seen, until something else is seen."""

    def at(self, width: int) -> BatchCosts:
        """Of a width that was not seen: at most as many times those of the next narrower one as it is wider,
        and no more than those of the next wider one."""
        if (costs := self._seen.get(width)) is not None:
            return costs
        guessed = self._guessed
        if (costs := guessed.get(width)) is None:
            costs = guessed[width] = self._guess(width)
        return costs

    def _guess(self, width: int) -> BatchCosts:
        seen = self._seen
        bounds: list[tuple[BatchCosts, float]] = []
        if narrower := [each for each in seen if 0 < each < width]:
            bounds.append((seen[max(narrower)], width / max(narrower)))
        if wider := [each for each in seen if each > width]:
            bounds.append((seen[min(wider)], 1.0))
        sizes = seen[self.measured_width].seconds_by_size
        return BatchCosts(
            {size: min(times * costs.of(size) for costs, times in bounds) for size in sizes}, width
        )

    def of(self, widths: Sequence[int]) -> float:
        """Seconds of a batch, from the widths of its requests: those of one width take as long as alone, and
        all together no longer than if all were of the widest."""
        counts = Counter(widths)
        seconds = sum(self.at(width).of(size) for width, size in counts.items())
        if len(counts) == 1:
            return seconds
        widest = self.at(max(counts))
        return min(seconds, widest.of(len(widths))) if len(widths) <= widest.max_size else seconds

    def caution(self, widths: Iterable[int]) -> float:
        """Times what such a batch is expected to take, in which nearly all are done."""
        return max(self.at(width).caution for width in set(widths))

    def best_size(self, widths: Sequence[int], budget_s: float) -> int:
        """How many of the first requests make the batch of most requests per second that is done within the
        budget; 1 where none is.

        Args:
            widths: of the requests that wait, in order.
        """
        different = set(widths)
        if len(different) == 1:
            return self.at(widths[0]).best_size(len(widths), budget_s)
        costs_of = {width: self.at(width) for width in different}
        most = min(len(widths), *(costs.max_size for costs in costs_of.values()))
        tables = {width: costs.table for width, costs in costs_of.items()}
        counts = dict.fromkeys(different, 0)
        of_parts, widest, best, best_rate = 0.0, widths[0], 1, 0.0
        for size, width in enumerate(widths[:most], start=1):
            table, count = tables[width], counts[width]
            of_parts += table[count + 1] - table[count]
            counts[width] = count + 1
            widest = max(widest, width)
            seconds = min(of_parts, tables[widest][size])
            if seconds <= budget_s and size / seconds >= best_rate:
                best, best_rate = size, size / seconds
        return best

    def observe_batch(self, widths: Sequence[int], seconds: float) -> None:
        """Move the costs towards what a batch has just taken, of several widths each by its expected part."""
        sizes = Counter(widths)
        parts_s = {width: self.at(width).of(size) for width, size in sizes.items()}
        expected_s = sum(parts_s.values())
        for width, size in sizes.items():
            self.observe(width, size, seconds if len(sizes) == 1 else parts_s[width] / expected_s * seconds)

    def observe(self, width: int, size: int, seconds: float) -> None:
        """Move the costs of a width towards what a batch of it has just taken."""
        if (costs := self._seen.get(width)) is not None:
            costs.observe(size, seconds)
            self._guessed = {}
            return
        # Replaced as a whole: others read it.
        self._seen = self._seen | {width: _first_seen(self.at(width), size, seconds)}
        self._guessed = {}


def _first_seen(guessed: BatchCosts, size: int, seconds: float) -> BatchCosts:
    """Costs that were guessed, and most likely too high, after the first batch.

    Of larger ones it says that they take no longer than their parts, one after the other.
    """
    times = min(max(seconds / guessed.of(size), _LEAST_OF_GUESS), _MOST_OF_GUESS)
    seconds = times * guessed.of(size)
    found = {
        each: times * guess if each <= size else min(max(times, 1.0) * guess, each / size * seconds)
        for each, guess in guessed.seconds_by_size.items()
    }
    return BatchCosts(found, guessed.width)
