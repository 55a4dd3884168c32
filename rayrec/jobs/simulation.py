"""Jobs over time on nodes that do not exist, decided by the code that decides about real ones.

    arrivals, ends, room given back ──► Scheduler ──► decisions ──► ends, room given back after a while

Only time is simulated: a job lasts as long as it expects, unless `lasts` says otherwise; a job that is told
to shrink or stop sits on its room for the grace period. There are two clusters to compare with: one in which
jobs start in the order in which they came, without queues, and a queue's own, which has its cells alone.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rayrec.jobs.admission import Scheduler, SchedulingConfig
from rayrec.jobs.cells import Guarantees
from rayrec.jobs.job import Decision, Grow, Job, Placed, Reserve, Shrink, Size, Start, Stop, Waiting
from rayrec.jobs.queues import QueuesConfig
from rayrec.jobs.room import Room, apart
from rayrec.pipelines.cluster.placement import Node
from rayrec.platform.arrays import Int64Array

_ARRIVES, _GIVES_BACK, _ENDS, _LOOK = range(4)


@dataclass
class Record:
    """What became of a job."""

    job: Job
    started_at: float | None = None
    """For the first time."""
    ended_at: float | None = None
    num_stops: int = 0
    num_shrinks: int = 0
    num_grows: int = 0
    num_passed: int = 0
    used: float = 0.0
    """Card-seconds, or CPU-seconds without cards, that it had room for."""

    @property
    def waited_s(self) -> float:
        return math.inf if self.started_at is None else self.started_at - self.job.waits_since


@dataclass
class _Life:
    """A job's progress."""

    record: Record
    left_s: float
    """Of work, at the first size."""
    size: int | None = None
    since: float = 0.0
    version: int = 0
    """Of its expected end: older events are of no use."""
    ran_s: float = 0.0

    def go_on(self, now: float) -> None:
        """Count what was done since."""
        if self.size is not None:
            job = self.record.job
            self.left_s -= (now - self.since) * job.sizes[self.size].speed
            self.record.used += (now - self.since) * job.sizes[self.size].weight
            self.ran_s += now - self.since
        self.since = now


@dataclass
class Outcome:
    """All jobs' records, and what went on."""

    records: dict[str, Record] = field(default_factory=dict)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    num_decisions: int = 0
    refused: list[str] = field(default_factory=list)
    used_by: list[tuple[float, int]] = field(default_factory=list)
    """Changes of how many units of cards are in use, in order."""

    def used(self, until: float) -> float:
        """Card-units times seconds that were in use before a time."""
        total, now, since = 0.0, 0, 0.0
        for time, change in self.used_by:
            time = min(time, until)
            total += now * (time - since)
            since, now = time, now + change
        return total + now * max(0.0, until - since)


class Simulation:
    """One run of a trace of jobs."""

    def __init__(
        self,
        config: QueuesConfig,
        nodes: Sequence[Node],
        jobs: Sequence[Job],
        settings: SchedulingConfig | None = None,
        lasts: dict[str, float] | None = None,
        keeps_decisions: bool = False,
        look_s: float = 0.0,
    ) -> None:
        """
        Args:
            look_s: time between two looks, at which all is seen that happened since; 0: at once.
            lasts: by job, how long it takes at its first size, where that is not what it expects.
        """
        self.settings = settings or SchedulingConfig()
        self.scheduler = Scheduler(config, nodes, self.settings)
        self.outcome = Outcome({job.id: Record(job) for job in jobs})
        self._keeps = keeps_decisions
        self._look_s = look_s
        self._lives: dict[str, _Life] = {}
        self._events: list[tuple[float, int, int, str, int]] = []
        self._number = 0
        for job in jobs:
            time = (lasts or {}).get(job.id, job.expected_s)
            assert time is not None, f"job {job.id} has to last for some time"
            self._lives[job.id] = _Life(self.outcome.records[job.id], time)
            self._at(job.submitted_at, _ARRIVES, job.id)
            if job.not_before is not None:
                for before in (self.settings.grace_s, 0.0):
                    self._at(max(job.submitted_at, job.not_before - before), _LOOK, job.id)

    def _at(self, time: float, kind: int, job_id: str, version: int = 0) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, kind, self._number, job_id, version))

    def run(self) -> Outcome:
        """Until nothing happens any more."""
        for _ in self.steps():
            pass
        return self.outcome

    def steps(self) -> Iterator[float]:
        """One time after the other at which something happens, after it was decided about."""
        while self._events:
            now = self._events[0][0]
            if self._look_s:
                # Rounding may make it a little earlier than what happened, which would never be seen.
                now = max(now, math.ceil(now / self._look_s) * self._look_s)
            while self._events and self._events[0][0] <= now:
                time, kind, _, job_id, version = heapq.heappop(self._events)
                self._happens(kind, job_id, version, now, time)
            for decision in self.scheduler.decide(now):
                self._do(decision, now)
            yield now

    def _happens(self, kind: int, job_id: str, version: int, now: float, time: float) -> None:
        """It happened at `time`, and is seen now."""
        life = self._lives[job_id]
        record = life.record
        if kind == _ARRIVES:
            refusal = self.scheduler.submit(Waiting(record.job))
            if refusal is not None:
                self.outcome.refused.append(job_id)
                self._keep(refusal, now)
        elif kind == _ENDS and version == life.version:
            self._use(life, None, time)
            record.ended_at = time
            self.scheduler.ended(job_id)
        elif kind == _GIVES_BACK and version == life.version:
            run = self.scheduler.state.runs[job_id]
            step = run.running.step
            assert step is not None
            self._use(life, step.size, now)
            if step.size is None:
                self.scheduler.done(job_id, now)
                expects = record.job.expected_s
                left_s = None if expects is None else max(0.0, life.left_s)
                self.scheduler.submit(Waiting(record.job, left_s=left_s, ran_s=life.ran_s))
            else:
                ends_at = now + max(0.0, life.left_s) / record.job.sizes[step.size].speed
                self.scheduler.done(job_id, now, None if record.job.expected_s is None else ends_at)

    def _use(self, life: _Life, size: int | None, now: float) -> None:
        """From now on, a job runs at this size, or not."""
        before = life.size
        life.go_on(now)
        life.size = size
        life.version += 1
        weights = [0 if each is None else life.record.job.sizes[each].weight for each in (before, size)]
        if weights[0] != weights[1]:
            self.outcome.used_by.append((now, weights[1] - weights[0]))
        if size is not None:
            ends_at = now + max(0.0, life.left_s) / life.record.job.sizes[size].speed
            self._at(ends_at, _ENDS, life.record.job.id, life.version)

    def _do(self, decision: Decision, now: float) -> None:
        life, self.outcome.num_decisions = self._lives[decision.job_id], self.outcome.num_decisions + 1
        record = life.record
        self._keep(decision, now)
        if isinstance(decision, Start):
            if record.started_at is None:
                record.started_at = now
            self._use(life, decision.size, now)
        elif isinstance(decision, Grow):
            if decision.size != life.size:  # else it is in its queue's guarantee from now on
                record.num_grows += 1
                self._use(life, decision.size, now)
        elif isinstance(decision, Shrink | Stop):
            record.num_shrinks += isinstance(decision, Shrink)
            record.num_stops += isinstance(decision, Stop)
            self._at(now + self.settings.grace_s, _GIVES_BACK, decision.job_id, life.version)
        else:
            assert isinstance(decision, Reserve)

    def _keep(self, decision: Decision, now: float) -> None:
        if self._keeps:
            self.outcome.decisions.append((now, decision))


def first_come_first_served(
    nodes: Sequence[Node], jobs: Sequence[Job], start_s: float = 0.0, skips_impossible: bool = True
) -> Outcome:
    """Jobs in the order of their priority and age, nobody before another, at their first size.

    Args:
        start_s: how long each job holds its room before it starts.
        skips_impossible: what fits on no nodes is left out, not waited for.
    """
    room = Room(nodes)
    left_NR = room.total_NR.copy()
    outcome = Outcome({job.id: Record(job) for job in jobs})
    arrivals = sorted(jobs, key=lambda job: (job.submitted_at, job.order))
    waiting: list[tuple[tuple[float, float, str], Job]] = []
    ends: list[tuple[float, str, Job, dict[int, Int64Array]]] = []
    now, place = 0.0, 0
    while place < len(arrivals) or ends:
        now = min(
            arrivals[place].submitted_at if place < len(arrivals) else math.inf,
            ends[0][0] if ends else math.inf,
        )
        while ends and ends[0][0] <= now:
            _, _, job, held = heapq.heappop(ends)
            apart(left_NR, held, 1)
            outcome.records[job.id].ended_at = now
            outcome.used_by.append((now, -job.sizes[0].weight))
        while place < len(arrivals) and arrivals[place].submitted_at <= now:
            job = arrivals[place]
            place += 1
            if skips_impossible and room.place(job.sizes[0], job.within, room.total_NR) is None:
                outcome.refused.append(job.id)
                continue
            heapq.heappush(waiting, (job.order, job))
        while waiting:
            job = waiting[0][1]
            size: Size = job.sizes[0]
            placed: Placed | None = room.place(size, job.within, left_NR)
            if placed is None:
                break
            heapq.heappop(waiting)
            held = room.held(size.groups, placed)
            apart(left_NR, held)
            assert job.expected_s is not None, "it has to last for some time"
            outcome.records[job.id].started_at = now + start_s
            outcome.used_by.append((now, size.weight))
            heapq.heappush(ends, (now + start_s + job.expected_s, job.id, job, held))
    return outcome


def own_cluster(config: QueuesConfig, nodes: Sequence[Node], queue: str) -> list[Node]:
    """The cluster that a queue's cells would be, if it had nothing else: a node for each."""
    guarantees = Guarantees(config, Room(nodes))
    guarantees.bind_rest()
    return guarantees.own_nodes(queue)


def check_no_card_twice(scheduler: Scheduler) -> None:
    """
    Raises:
        AssertionError: jobs hold, or are promised, more of a node than it has; or the sums do not add up.
    """
    state = scheduler.state
    left_NR, free_NR = state.room.total_NR.copy(), state.room.total_NR.copy()
    for run in state.runs.values():
        apart(left_NR, run.kept)
        apart(free_NR, run.held)
    assert (left_NR >= 0).all(), "more is given than there is"
    assert (free_NR >= 0).all(), "more is in use than there is"
    assert np.array_equal(left_NR, state.left_NR)
    assert np.array_equal(free_NR, state.free_NR)
    if state.guarantees:
        assert (state.guarantees.slack_NR >= 0).all(), "more is guaranteed than there is"
