"""Requests that wait while the device computes go to it together, as soon as it is free.

    submit ─► waiting, by priority and deadline ─► one thread: compute(as many as pay) ─► futures
       └ too many, or too late by then: refused      └ past its deadline: refused, not computed

No timer holds a request back: one that finds the device idle is computed alone, at once, and batches grow
with the load by themselves. Requests that cannot meet their deadline, or would make others miss theirs, are
rejected immediately: under load they would otherwise be rejected when the time is over. So nobody starves:
one of a higher priority is rejected too, where it would make one that waits miss its deadline. The batcher
knows nothing of models, HTTP or Ray.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from rayrec.serve.engine.batch_costs import BatchCosts, CostsByWidth
from rayrec.serve.engine.batch_load import BatcherLoad, LoadWindow
from rayrec.serve.engine.inference_statistics import StatisticsCounter

logger = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""After which a thread has to give the interpreter to another one that waits. The model's gives it away with
every operation, hundreds of times for a batch, and under overload the one that reads requests never does by
itself: with the 5 ms of a process that sets nothing, a batch took a second then."""

Request = TypeVar("Request")
Answer = TypeVar("Answer")


Compute = Callable[[Sequence[Request]], Sequence[Answer | Exception]]


class TooManyWaitingError(RuntimeError):
    """As many requests are in flight as may."""


class DeadlineError(RuntimeError):
    """The time in which the answer was wanted is over, or would be before it is computed."""


DEFAULT_PRIORITY = 2
"""Of requests that name none; 1 comes before them."""


@dataclass(order=True)
class _Waiting(Generic[Request, Answer]):
    priority: int
    deadline: float
    number: int
    came_at: float = field(compare=False)
    request: Request = field(compare=False)
    group: Hashable = field(compare=False)
    width: int = field(compare=False)
    compute: Compute[Request, Answer] = field(compare=False)
    future: Future[Answer] = field(compare=False)
    follows: bool = field(default=False, compare=False)


class Batcher(Generic[Request, Answer]):
    """Computes answers on a thread of its own."""

    def __init__(
        self,
        compute: Compute[Request, Answer],
        costs: BatchCosts,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
        on_batch: Callable[[int, float], None] = lambda num_requests, seconds: None,
        before_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            costs: as they were measured.
            on_batch: called after each batch that was computed, on its thread, with its size and seconds.
            before_batch: called before each batch, on its thread, also where requests bring a `compute` of
                their own.
            compute: answers of requests of one group; an exception instead of an answer is that
                request's alone. One that it raises is that of all.
            max_waiting: requests in flight at most, those being computed included.
        """
        self.costs = CostsByWidth(costs)
        self.max_waiting = max_waiting
        self.statistics = StatisticsCounter()
        self._compute = compute
        self._clock = clock
        self._load = LoadWindow(clock)
        self._on_batch, self._before_batch = on_batch, before_batch
        self._waiting: list[_Waiting[Request, Answer]] = []
        self._num_computing = 0
        self._widths_computing: Counter[int] = Counter()
        self._free_at = float("-inf")
        """When the batch that is being computed is likely to be done."""
        self._num_submitted = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Requests that wait or are being computed."""
        with self._changed:  # between the two, a batch that is just being taken would be in neither
            return len(self._waiting) + self._num_computing

    def wait_s(self, num_coming: int = 0) -> float:
        """Seconds, by what batches take, until all that is in flight is answered, if what is of one width
        were one group.

        Args:
            num_coming: requests that are about to be submitted.
        """
        with self._changed:
            in_flight = Counter(each.width for each in self._waiting)
            in_flight += self._widths_computing
        in_flight[self.costs.measured_width] += num_coming
        seconds = 0.0
        for width, num_requests in in_flight.items():
            costs = self.costs.at(width)
            size = costs.best_size(max(num_requests, 1), float("inf"))
            seconds += num_requests / size * costs.of(size)
        return seconds

    @property
    def load(self) -> BatcherLoad:
        """What it was asked of late, and how it kept up."""
        return self._load.read(self.wait_s())

    def refused(self, count: int) -> None:
        """So many requests did not come here, since there was no room for them."""
        self._load.came(count * self.costs.at(self.costs.measured_width).least_s)

    def spared(self, width: int) -> None:
        """A request of a width got an answer of before, since there is little room."""
        self._load.came(self.costs.at(width).least_s)

    def submit(
        self,
        request: Request,
        group: Hashable = None,
        timeout_s: float = float("inf"),
        compute: Compute[Request, Answer] | None = None,
        width: int | None = None,
        priority: int = DEFAULT_PRIORITY,
        follows: bool = False,
        asked_width: int | None = None,
    ) -> Future[Answer]:
        """Hand a request to the thread that computes.

        Args:
            group: requests of different groups are not computed together.
            width: of the request, see `CostsByWidth`; None: that whose costs were measured.
            timeout_s: time in which the answer is of use.
            priority: lower ones are computed first.
            compute: for this request, instead of the batcher's; it is computed with others of the same alone.
            follows: it came together with the one before, for which it may wait: more replicas change
                nothing of that, and so the load counts its work alone.
            asked_width: of what was asked for, where less is computed since there is little room: so much
                work came, and with enough replicas it would be done; None: `width`.

        Returns:
            The answer, its own exception, or a `DeadlineError`. One that is cancelled before its turn is not
            computed, and takes no slot any more.

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
            width = self.costs.measured_width if width is None else width
            deadline, number = now + timeout_s, self._num_submitted
            self._load.came(self.costs.at(width if asked_width is None else asked_width).least_s)
            new = _Waiting(priority, deadline, number, now, request, group, width, compute, future, follows)
            self._check_room(new, now)
            insort(self._waiting, new)
            self._changed.notify()
        # By its number: a future keeps its callbacks, and with the entry, which has the future and the
        # model's method, it would be a cycle that keeps a replaced model until the collector looks for it.
        future.add_done_callback(partial(self._left, new.number))
        return future

    def _left(self, number: int, future: Future[Answer]) -> None:
        """One that is cancelled takes no slot of a batch any more, and no other request is refused for it."""
        if not future.cancelled():
            return
        with self._changed:
            self._waiting = [each for each in self._waiting if each.number != number]

    def check_room(self, timeout_s: float) -> None:
        """Say what `submit` would of a request that goes together with what waits; takes nothing.

        Raises:
            TooManyWaitingError, DeadlineError: as `submit`.
        """
        with self._changed:
            now = self._clock()
            group, width, compute = None, self.costs.measured_width, self._compute
            if self._waiting:
                last = self._waiting[-1]
                group, width, compute = last.group, last.width, last.compute
            deadline, number, future = now + timeout_s, self._num_submitted + 1, Future[Answer]()
            new: _Waiting[Any, Answer] = _Waiting(
                DEFAULT_PRIORITY, deadline, number, now, None, group, width, compute, future
            )
            try:
                self._check_room(new, now)
            except (TooManyWaitingError, DeadlineError):
                self.refused(1)
                raise

    def _check_room(self, new: _Waiting[Any, Answer], now: float) -> None:
        in_flight = self.in_flight
        if in_flight >= self.max_waiting:
            raise TooManyWaitingError(f"{in_flight} requests are waiting already")
        if in_flight and self._makes_late(new, now):
            raise DeadlineError(
                f"{in_flight} requests are in flight, too many for another one to be answered in time"
            )

    def close(self) -> None:
        """Answer what waits, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._run_once():
            pass

    def _run_once(self) -> bool:
        """Answer one batch, when there is one; False: the batcher is closed.

        A call of its own: while the thread waits, no frame keeps the last batch, and the model that answered.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return False
            late, batch = self._next_batch()
            others_wait = any(not each.follows for each in self._waiting)
            self._num_computing = len(late) + len(batch)
            if batch:
                self._widths_computing = Counter(each.width for each in batch)
                self._free_at = self._clock() + self._cautious_s(batch)
        for each in late:
            each.future.set_exception(DeadlineError("the time in which the answer was wanted is over"))
        began = self._clock()
        answers, seconds = self._computed(batch)
        with self._changed:
            self._num_computing = 0
            self._widths_computing = Counter()
        # Before the batch is counted: callers that wait for an answer wake up meanwhile.
        for each, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                each.future.set_exception(answer)
            else:
                each.future.set_result(answer)
        if seconds is not None:
            self._count(batch, began, seconds, others_wait)
        return True

    def _next_batch(self) -> tuple[list[_Waiting[Request, Answer]], list[_Waiting[Request, Answer]]]:
        """Takes from those that wait: such as are too late, and what is computed next."""
        now = self._clock()
        least_s = {width: self.costs.at(width).of(1) for width in {each.width for each in self._waiting}}
        there = [each for each in self._waiting if each.deadline >= now + least_s[each.width]]
        late = [each for each in self._waiting if each.deadline < now + least_s[each.width]]
        if not there and (last := max(late, key=lambda each: each.deadline)).deadline > now:
            # Computed all the same: costs that are too high by now would otherwise never be seen to fall.
            there.append(late.pop(late.index(last)))
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
        widths = [each.width for each in same]
        # The first deadline bounds the size: all answers of a batch come together, when it is done.
        budget_s = (first.deadline - now) / self.costs.caution(widths)
        taken = same[: self.costs.best_size(widths, budget_s)]
        numbers = {each.number for each in taken}
        return taken, [each for each in waiting if each.number not in numbers]

    def _makes_late(self, new: _Waiting[Request, Answer], now: float) -> bool:
        """Whether the new one, or one that is in time without it, would be too late with it."""
        # Both queues are simulated: requests that are late without the new one are no reason to refuse it.
        waiting = self._waiting.copy()
        insort(waiting, new)
        late = self._late(waiting, now)
        return bool(late) and (new.number in late or not late <= self._late(self._waiting, now))

    def _late(self, waiting: list[_Waiting[Request, Answer]], now: float) -> set[int]:
        """Numbers of those that would be answered too late, if nothing else came."""
        if all(each.deadline == float("inf") for each in waiting):
            return set()
        late: set[int] = set()
        done_at = max(now, self._free_at)
        while waiting:
            taken, waiting = self._divided(waiting, done_at)
            done_at += self._cautious_s(taken)
            late |= {each.number for each in taken if each.deadline < done_at}
        return late

    def _cautious_s(self, batch: list[_Waiting[Request, Answer]]) -> float:
        """In which such a batch is nearly always done."""
        widths = [each.width for each in batch]
        return self.costs.caution(widths) * self.costs.of(widths)

    def _computed(
        self, batch: list[_Waiting[Request, Answer]]
    ) -> tuple[Sequence[Answer | Exception], float | None]:
        """(An answer for each, seconds that it took; None where nothing was computed)."""
        if not batch:
            return [], None
        began = self._clock()
        try:
            self._before_batch()
            answers = batch[0].compute([each.request for each in batch])
            if len(answers) != len(batch):
                raise ValueError(f"{len(answers)} answers to {len(batch)} requests")
        except Exception as error:
            return [error] * len(batch), None
        return answers, self._clock() - began

    def _count(
        self, batch: list[_Waiting[Request, Answer]], began: float, seconds: float, others_wait: bool
    ) -> None:
        try:
            waited_s = [max(began - each.came_at, 0.0) for each in batch]
            widths = [each.width for each in batch]
            self.statistics.batch(waited_s, seconds, time.time())
            firsts_s = [wait_s for wait_s, each in zip(waited_s, batch, strict=True) if not each.follows]
            full_size = self.costs.at(max(widths)).full_size
            # Where batches do not pay, one that takes all that waits is as large as it can be, and not full.
            self._load.computed(firsts_s, others_wait and 1 < full_size <= len(batch))
            self.costs.observe_batch(widths, seconds)
            self._on_batch(len(batch), seconds)
        except Exception:  # a metric that fails must not end the thread
            logger.exception("a batch of %d is not counted", len(batch))
