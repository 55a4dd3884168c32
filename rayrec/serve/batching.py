"""Requests that wait while the device computes go to it together, as soon as it is free.

    submit ─► waiting, earliest deadline first ─► one thread: compute(as many as pay) ─► futures
       └ too many, or too late by then: refused      └ past its deadline: refused, not computed

No timer holds a request back: one that finds the device idle is computed alone, at once, and batches grow
with the load by themselves. Whoever would be too late, or make another too late, behind what is in hand is
told at once: under load it would else be told when the time is over. It knows nothing of models, HTTP or Ray.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Answer = TypeVar("Answer")


Compute = Callable[[Sequence[Request]], Sequence[Answer | Exception]]


class TooManyWaitingError(RuntimeError):
    """As many requests are in hand as may."""


class DeadlineError(RuntimeError):
    """The time in which the answer was wanted is over, or would be before it is computed."""


class BatchCosts:
    """Seconds that a batch takes by its size: measured at some sizes, then as batches are seen to take."""

    _WEIGHT_OF_NEW = 0.1
    _MOST_AT_ONCE = 2.0
    """Times a cost: a batch that takes longer was stalled, and counts as one that takes so long."""
    _OVERRUN_SHARE = 0.9
    _NUM_OVERRUNS = 50
    _PART_OF_PARTS = 0.95
    """Of what a batch's parts take one after the other: less than all of it, so that it is tried again."""

    def __init__(self, seconds_by_size: dict[int, float]) -> None:
        """
        Args:
            seconds_by_size: at least of size 1; the largest is the most that a batch may have.
        """
        if 1 not in seconds_by_size:
            raise ValueError("the cost of a single request is not among those measured")
        self._sizes = np.array(sorted(seconds_by_size))
        self._seconds = np.array([seconds_by_size[size] for size in self._sizes.tolist()])
        self._overruns: deque[float] = deque(maxlen=self._NUM_OVERRUNS)
        """Times what was expected of them, what the last batches have taken."""
        self._caution = 1.0

    @property
    def max_size(self) -> int:
        return int(self._sizes[-1])

    def of(self, size: int) -> float:
        """Between sizes that were measured, on a straight line."""
        return float(np.interp(size, self._sizes, self._seconds))

    @property
    def caution(self) -> float:
        """Times what a batch is expected to take, in which nearly all are done; at least 1."""
        return self._caution

    def observe(self, size: int, seconds: float) -> None:
        """Move the costs of the measured sizes beside `size` towards what a batch has just taken.

        Sizes that are not computed any more are not seen either. So a larger batch never takes less than this
        one, nor a smaller one more, and one that would take longer than its parts comes to be tried again.
        """
        expected = self.of(size)
        seconds = min(seconds, self._MOST_AT_ONCE * expected)
        self._overruns.append(seconds / expected)
        # Sorted rather than by NumPy, which takes longer than all else here while an answer waits.
        place = math.ceil(self._OVERRUN_SHARE * (len(self._overruns) - 1))
        self._caution = max(sorted(self._overruns)[place], 1.0)
        right = int(np.searchsorted(self._sizes, size))
        places = [right] if self._sizes[right] == size else [right - 1, right]
        for place in places:
            changed = self._seconds[place] + self._WEIGHT_OF_NEW * (seconds - expected)
            self._seconds[place] = max(changed, 0.1 * self._seconds[place])  # no cost is ever 0 or below
        first, last = places[0], places[-1]
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


@dataclass(order=True)
class _Waiting(Generic[Request, Answer]):
    deadline: float
    number: int
    request: Request = field(compare=False)
    group: Hashable = field(compare=False)
    compute: Compute[Request, Answer] = field(compare=False)
    future: Future[Answer] = field(compare=False)


class Batcher(Generic[Request, Answer]):
    """Computes answers on a thread of its own."""

    def __init__(
        self,
        compute: Compute[Request, Answer],
        costs: BatchCosts,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
        on_batch: Callable[[int, float], None] = lambda num_requests, seconds: None,
    ) -> None:
        """
        Args:
            on_batch: called after each batch that was computed, on its thread, with its size and seconds.
            compute: answers of requests of one group; an exception in the place of an answer is that
                request's alone. One that it raises is that of all.
            max_waiting: requests in hand at most, those being computed included.
        """
        self.costs = costs
        self.max_waiting = max_waiting
        self._compute = compute
        self._clock = clock
        self._on_batch = on_batch
        self._waiting: list[_Waiting[Request, Answer]] = []
        self._num_computing = 0
        self._free_at = float("-inf")
        """When the batch that is being computed is likely to be done."""
        self._num_submitted = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def in_hand(self) -> int:
        """Requests that wait or are being computed."""
        with self._changed:  # between the two, a batch that is just being taken would be in neither
            return len(self._waiting) + self._num_computing

    def wait_s(self) -> float:
        """Seconds, by what batches take, until all that is in hand would be answered if it were one group."""
        in_hand = self.in_hand
        size = self.costs.best_size(in_hand, float("inf")) if in_hand else 1
        return in_hand / size * self.costs.of(size)

    def submit(
        self,
        request: Request,
        group: Hashable = None,
        timeout_s: float = float("inf"),
        compute: Compute[Request, Answer] | None = None,
    ) -> Future[Answer]:
        """
        Args:
            group: requests of different groups are not computed together.
            timeout_s: time in which the answer is of use.
            compute: for this request, instead of the batcher's; it is computed with others of the same alone.

        Returns:
            The answer, its own exception, or a `DeadlineError`. One that is cancelled before its turn is not
            computed, and takes no place any more.

        Raises:
            TooManyWaitingError: nothing was done.
            DeadlineError: it would be answered too late, or another one that waits; nothing was done.
        """
        future: Future[Answer] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the batcher is closed")
            self._num_submitted += 1
            now = self._clock()
            compute = compute or self._compute
            new = _Waiting(now + timeout_s, self._num_submitted, request, group, compute, future)
            self._check_room(new, now)
            insort(self._waiting, new)
            self._changed.notify()
        future.add_done_callback(partial(self._left, new))
        return future

    def _left(self, gone: _Waiting[Request, Answer], future: Future[Answer]) -> None:
        """One that is cancelled gives its place to others: it would else be refused, or computed, with them."""
        if not future.cancelled():
            return
        with self._changed:
            place = bisect_left(self._waiting, gone)
            if place < len(self._waiting) and self._waiting[place].number == gone.number:
                del self._waiting[place]

    def check_room(self, timeout_s: float) -> None:
        """Say what `submit` would of a request that goes together with what waits; takes nothing.

        Raises:
            TooManyWaitingError, DeadlineError: as `submit`.
        """
        with self._changed:
            now = self._clock()
            number, group, compute = self._num_submitted + 1, None, self._compute
            if self._waiting:
                group, compute = self._waiting[-1].group, self._waiting[-1].compute
            self._check_room(_Waiting(now + timeout_s, number, None, group, compute, Future()), now)

    def _check_room(self, new: _Waiting[Any, Answer], now: float) -> None:
        in_hand = self.in_hand
        if in_hand >= self.max_waiting:
            raise TooManyWaitingError(f"{in_hand} requests are waiting already")
        if in_hand and self._makes_late(new, now):
            raise DeadlineError(
                f"{in_hand} requests are in hand, too many for another one to be answered in time"
            )

    def close(self) -> None:
        """Answer what waits, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                late, batch = self._next_batch()
                self._num_computing = len(late) + len(batch)
                self._free_at = self._clock() + self.costs.caution * self.costs.of(len(batch))
            for each in late:
                each.future.set_exception(DeadlineError("the time in which the answer was wanted is over"))
            if batch:
                self._answer(batch)
            with self._changed:
                self._num_computing = 0

    def _next_batch(self) -> tuple[list[_Waiting[Request, Answer]], list[_Waiting[Request, Answer]]]:
        """Takes from those that wait: such as are too late, and what is computed next."""
        now = self._clock()
        least_s = self.costs.of(1)
        there = [each for each in self._waiting if each.deadline >= now + least_s]
        late = [each for each in self._waiting if each.deadline < now + least_s]
        if not there and late[-1].deadline > now:
            # Computed all the same: costs that are too high by now would otherwise never be seen to fall.
            there.append(late.pop())
        late = [each for each in late if each.future.set_running_or_notify_cancel()]
        if not there:
            self._waiting = []
            return late, []
        taken, self._waiting = self._divided(there, now)
        return late, [each for each in taken if each.future.set_running_or_notify_cancel()]

    def _divided(
        self, waiting: list[_Waiting[Request, Answer]], now: float
    ) -> tuple[list[_Waiting[Request, Answer]], list[_Waiting[Request, Answer]]]:
        """Those that go together first, if the device is free, and the others."""
        first = waiting[0]
        same = [each for each in waiting if (each.group, each.compute) == (first.group, first.compute)]
        budget_s = (first.deadline - now) / self.costs.caution
        taken = same[: self.costs.best_size(len(same), budget_s)]
        numbers = {each.number for each in taken}
        return taken, [each for each in waiting if each.number not in numbers]

    def _makes_late(self, new: _Waiting[Request, Answer], now: float) -> bool:
        """Whether the new one, or one that is in time without it, would be too late with it."""
        late = self._late(sorted([*self._waiting, new]), now)
        return bool(late) and (new.number in late or not late <= self._late(self._waiting, now))

    def _late(self, waiting: list[_Waiting[Request, Answer]], now: float) -> set[int]:
        """Numbers of those that would be answered too late, if nothing else came."""
        if not waiting or waiting[0].deadline == float("inf"):
            return set()
        late: set[int] = set()
        done_at = max(now, self._free_at)
        while waiting:
            taken, waiting = self._divided(waiting, done_at)
            done_at += self.costs.caution * self.costs.of(len(taken))
            late |= {each.number for each in taken if each.deadline < done_at}
        return late

    def _answer(self, batch: list[_Waiting[Request, Answer]]) -> None:
        began = self._clock()
        try:
            answers = batch[0].compute([each.request for each in batch])
            answered = list(zip(batch, answers, strict=True))
        except Exception as error:
            for each in batch:
                each.future.set_exception(error)
            return
        seconds = self._clock() - began
        try:
            self.costs.observe(len(batch), seconds)
            self._on_batch(len(batch), seconds)
        except Exception:  # who watches must not keep answers back, nor end the thread
            logger.exception("a batch of %d is not counted", len(batch))
        for each, answer in answered:
            if isinstance(answer, Exception):
                each.future.set_exception(answer)
            else:
                each.future.set_result(answer)
