"""Jobs that wait, in the order of their queues, and what is kept for those that are blocked.

    line of a queue:  first ── second ── third …        priority, age
                        │ blocked
                        ▼
                   reservation: a time, room on nodes, and what others may use of them then

Backfill is EASY (Lifka, The ANL/IBM SP Scheduling System, JSSPP '95): one reservation, for the first job that
is blocked, by expected times; another one for each job that is passed no more.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rayrec.jobs.job import Job, Placed, Waiting
from rayrec.jobs.room import Gang, apart
from rayrec.jobs.state import ClusterState, Run
from rayrec.platform.arrays import Int64Array
from rayrec.platform.devices import ACCELERATOR_RESOURCES


@dataclass
class Line:
    """Jobs of one queue in their order."""

    queue: str
    borrows: bool
    """They can run on borrowed room only."""
    keys: list[tuple[float, float, str]] = field(default_factory=list)
    shapes: dict[int, list[tuple[float, float, str]]] = field(default_factory=dict)

    def add(self, key: tuple[float, float, str], shape: int) -> None:
        bisect.insort(self.keys, key)
        bisect.insort(self.shapes.setdefault(shape, []), key)

    def remove(self, key: tuple[float, float, str], shape: int) -> None:
        for keys in (self.keys, self.shapes[shape]):
            place = bisect.bisect_left(keys, key)
            assert keys[place] == key
            del keys[place]
        if not self.shapes[shape]:
            del self.shapes[shape]


@dataclass
class Entry:
    """A waiting job, and where it stands."""

    waiting: Waiting
    line: Line
    shape: int
    key: tuple[float, float, str]
    num_passed: int = 0
    job: Job = field(init=False)

    def __post_init__(self) -> None:
        self.job = self.waiting.job
        self.num_passed = self.waiting.num_passed


@dataclass
class Reservation:
    """When a blocked job has room, and what others may use then."""

    entry: Entry
    time: float
    """Infinite: some of those who are in its way end at no known time."""
    spare_NR: Int64Array
    is_closed: bool
    """Not even what ends before may pass."""
    made_at: float
    num_releases: int


class _Later:
    """What is left when the first of those who run have ended."""

    def __init__(self, state: ClusterState, groups: Sequence[Sequence[Run]], by_quota: bool) -> None:
        """
        Args:
            groups: of jobs that end at one time, in order.
            by_quota: quotas are looked at; there is enough of them now, else.
        """
        self._state, self._groups, self._by_quota = state, groups, by_quota
        self.left_NR = state.left_NR.copy()
        self._num_gone = 0

    def go_to(self, num_gone: int) -> None:
        """So many groups have ended. The state's quotas are as then, until it is 0 again."""
        tree = self._state.tree
        is_back = num_gone < self._num_gone
        first, last = sorted((num_gone, self._num_gone))
        for group in self._groups[first:last]:
            for run in group:
                apart(self.left_NR, run.kept, -1 if is_back else 1)
                if self._by_quota:
                    (tree.add if is_back else tree.remove)(run.job.queue, run.amounts)
        self._num_gone = num_gone

    def may_fit(self, job: Job, amounts: Mapping[str, int], gang: Gang) -> bool:
        """By counts alone."""
        state = self._state
        return (not self._by_quota or state.tree.fits(job.queue, amounts)) and state.room.may_fit(
            gang, self.left_NR
        )


class Reservations:
    """Who is blocked, and what is kept for them."""

    def __init__(self, state: ClusterState, grace_s: float, max_passes: int, max_wait_s: float) -> None:
        """
        Args:
            grace_s: the least time between two looks at what is kept for a job.
            max_passes, max_wait_s: after so many jobs before it, or so much time, a job is passed no more.
        """
        self._state, self._grace_s = state, grace_s
        self._max_passes, self._max_wait_s = max_passes, max_wait_s
        self._reservations: dict[str, Reservation] = {}
        self.blocked: dict[str, Entry] = {}
        """Since the last round began."""
        self.num_remade = 0
        """Changes after which others may fit that did not."""

    def block(self, entry: Entry, now: float) -> None:
        """It waits: some of what it needs is kept for it."""
        job = entry.job
        if job.id not in self.blocked:
            self.blocked[job.id] = entry
        if self._has_cells(entry):
            return  # jobs that are there will leave
        is_closed = self._is_closed(entry, now)
        is_timed = job.not_before is not None and now < job.not_before
        known = self._reservations.get(job.id)
        others = [
            each
            for each in self._reservations.values()
            # One for a time is no reason against one for a job that is blocked now.
            if not each.is_closed and each is not known and each.entry.job.not_before is None
        ]
        if known is None and others and not is_closed and not is_timed:
            return
        if known is None or known.is_closed != is_closed or (known.time <= now and self._is_old(known, now)):
            self._reserve(entry, now, is_closed)

    def _is_old(self, known: Reservation, now: float) -> bool:
        return known.made_at + self._grace_s <= now and known.num_releases != self._state.num_releases

    def _has_cells(self, entry: Entry) -> bool:
        """It gets its room by right, and needs no reservation."""
        state = self._state
        return (
            not entry.line.borrows
            and state.guarantees.has(entry.job.queue)
            and state.config.queue(entry.job.queue).preemption.reclaim_within_cohort == "Any"
        )

    def _is_closed(self, entry: Entry, now: float) -> bool:
        waited_s = now - entry.waiting.since
        # A job that ends before this one's time takes nothing from it, and the room would stand idle.
        return waited_s >= 0 and (entry.num_passed >= self._max_passes or waited_s >= self._max_wait_s)

    def _reserve(self, entry: Entry, now: float, is_closed: bool) -> None:
        """When and where a blocked job has room, if all others end as expected."""
        state, job = self._state, entry.job
        size = job.sizes[-1]
        amounts = state.counted(job.queue, size)
        gang = state.room.gang(size, job.within)
        assert gang is not None, "it was checked"
        ends: dict[float, list[Run]] = {}
        for run in state.runs.values():
            at = math.inf if run.running.ends_at is None else max(now, run.running.ends_at)
            ends.setdefault(at, []).append(run)
        times = sorted(ends)
        least = now if job.not_before is None else max(now, job.not_before)
        later = _Later(state, [ends[time] for time in times], not state.tree.fits(job.queue, amounts))
        placed: Placed | None = None
        try:
            # All that end at one time are gone together. Counts only rise with that, so the first time at
            # which they are enough is found by halves; which nodes are free may rule it out still.
            first, last = bisect.bisect_right(times, least), len(times)
            while first < last:
                later.go_to(middle := (first + last) // 2)
                if later.may_fit(job, amounts, gang):
                    last = middle
                else:
                    first = middle + 1
            for place in range(first, len(times) + 1):
                later.go_to(place)
                if later.may_fit(job, amounts, gang):
                    placed = state.room.place(size, job.within, later.left_NR)
                if placed is not None:
                    break
            time, left_NR = (times[place - 1] if place else now), later.left_NR.copy()
        finally:
            later.go_to(0)
        self.drop(job.id)
        if placed is not None:
            apart(left_NR, state.room.held(size.groups, placed))
            self._reservations[job.id] = Reservation(
                entry, max(time, least), left_NR, is_closed, now, state.num_releases
            )
            self.num_remade += 1

    def drop(self, job_id: str) -> None:
        if self._reservations.pop(job_id, None) is not None:
            self.num_remade += 1

    def kept_for_others(self, entry: Entry, within: bool, ends_at: float | None) -> list[Reservation]:
        """Reservations that a job has to leave room for, should it start now."""
        kept: list[Reservation] = []
        for known in self._reservations.values():
            other = known.entry
            if other is entry or (
                # What is guaranteed goes before what is borrowed.
                within and other.line.borrows and other.job.queue != entry.job.queue
            ):
                continue
            if known.is_closed or ends_at is None or ends_at > known.time:
                kept.append(known)
        return kept

    def spare(self, free_NR: Int64Array) -> Int64Array:
        """What of room is left by all that is kept."""
        for known in self._reservations.values():
            free_NR = np.minimum(free_NR, known.spare_NR)
        return free_NR

    def refresh(self, now: float) -> None:
        """Reservations of before what was given back since, once in a while."""
        for known in list(self._reservations.values()):
            if self._is_old(known, now):
                self._reserve(known.entry, now, known.is_closed)

    def count_passes(self, entry: Entry, run: Run) -> None:
        """Of blocked jobs that come before this one, and could use what it has."""
        job = entry.job
        for blocked in self.blocked.values():
            other = blocked.job
            if (
                other.submitted_at < job.submitted_at
                and other.waits_since <= run.since
                and other.priority <= job.priority
                and not (other.priority < job.priority and other.queue == job.queue)
                and not (run.firm is not None and other.queue != job.queue)
                and not (blocked.line.borrows and not entry.line.borrows)
                and not self._has_cells(blocked)
                and any(name in ACCELERATOR_RESOURCES for name in other.sizes[-1].amounts)
                == any(name in ACCELERATOR_RESOURCES for name in job.sizes[-1].amounts)
            ):
                blocked.num_passed += 1

    def time_of(self, entry: Entry) -> float | None:
        """When a job has its room whose time has not come; None: not known."""
        known = self._reservations.get(entry.job.id)
        if known is None:
            return entry.job.not_before if self._has_cells(entry) else None
        return None if math.isinf(known.time) else known.time

    def next_time(self, entry: Entry) -> tuple[str, float] | None:
        """Of those for whom something is kept, other than this job: the first, and when it has its room."""
        others = [known for known in self._reservations.values() if known.entry is not entry]
        first = min(others, key=lambda known: known.time, default=None)
        return None if first is None else (first.entry.job.id, first.time)
