"""What batches take, by their size and by how wide their search is.

    measured when a replica starts, at one width ─► CostsByWidth ─► BatchCosts of each width that was seen
                                                        └ of others: at most what the next wider one takes

A search for 1000 items takes many times as long as one for ten, and in one table each would be taken for the
other: requests for ten items would be refused as too late, and requests for 1000 would make others late.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import numpy as np

from rayrec.platform.arrays import Float64Array, Int64Array

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

    @property
    def seconds_by_size(self) -> dict[int, float]:
        """At the sizes that were measured."""
        return dict(zip(self._sizes.tolist(), self._seconds.tolist(), strict=True))

    @property
    def max_size(self) -> int:
        return int(self._sizes[-1])

    def of(self, size: int) -> float:
        """Between sizes that were measured, on a straight line."""
        return float(np.interp(size, self._sizes, self._seconds))

    def of_sizes(self, sizes_N: Int64Array) -> Float64Array:
        """[N] the same of several sizes."""
        return np.interp(sizes_N, self._sizes, self._seconds)

    @property
    def least_s(self) -> float:
        """Seconds of a request in a batch of the size that pays most."""
        return float((self._seconds / self._sizes).min())

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

    def best_size(self, most: int, budget_s: float) -> int:
        """The size of most requests per second that is done within the budget; 1 where none is.

        Args:
            most: requests that wait.
        """
        sizes = np.arange(1, min(most, self.max_size) + 1)
        seconds = np.interp(sizes, self._sizes, self._seconds)
        in_time = seconds <= budget_s
        if not in_time.any():
            return 1
        # Of equally good sizes the larger one, which leaves fewer waiting.
        rates = np.where(in_time, sizes / seconds, 0.0)
        return int(sizes[len(rates) - 1 - int(np.argmax(rates[::-1]))])


class CostsByWidth:
    """Costs of batches of every width. One thread observes, any thread asks.

    A width is a number that the work of a request grows with, such as its beams, in few steps; 0 where the
    model is not asked.
    """

    def __init__(self, measured: BatchCosts) -> None:
        self.measured_width = measured.width
        self._seen = {measured.width: measured}

    def at(self, width: int) -> BatchCosts:
        """Of a width that was not seen: at most as many times those of the next narrower one as it is wider,
        and no more than those of the next wider one."""
        if (costs := self._seen.get(width)) is not None:
            return costs
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
        """Seconds of a batch, from the widths of its requests: those of one width take as long as alone."""
        return sum(self.at(width).of(size) for width, size in Counter(widths).items())

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
        width_N = np.array(widths[:most])
        seconds_N = np.zeros(most)
        for width, costs in costs_of.items():
            count_N = np.cumsum(width_N == width)
            seconds_N += np.where(count_N, costs.of_sizes(count_N), 0.0)
        sizes_N = np.arange(1, most + 1)
        rate_N = np.where(seconds_N <= budget_s, sizes_N / seconds_N, 0.0)
        return int(most - np.argmax(rate_N[::-1])) if rate_N.any() else 1

    def observe_batch(self, widths: Sequence[int], seconds: float) -> None:
        """Move the costs towards what a batch has just taken, of several widths each by its expected part."""
        expected_s, sizes = self.of(widths), Counter(widths)
        for width, size in sizes.items():
            part = self.at(width).of(size) / expected_s if len(sizes) > 1 else 1.0
            self.observe(width, size, part * seconds)

    def observe(self, width: int, size: int, seconds: float) -> None:
        """Move the costs of a width towards what a batch of it has just taken."""
        if (costs := self._seen.get(width)) is not None:
            costs.observe(size, seconds)
            return
        # Replaced as a whole: others read it.
        self._seen = self._seen | {width: _first_seen(self.at(width), size, seconds)}


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
