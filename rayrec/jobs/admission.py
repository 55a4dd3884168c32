"""Which job starts next, where, and why the others wait.

    waiting, by queue: priority, age ─► the first of each ─► least fair share ─► room at once? ──► Start
                                             │ no                                 within its guarantee:
                                             ▼                                    others give back ──► Reserve
                           a reservation of the first one that is blocked
                                             │
    the others of each queue ─► end before it, or use nothing that it needs ─► Start, as one that passes

Every queue has two lines: jobs that fit in its guarantee, and jobs that can only run on what is borrowed, so that
the first of these does not hold up those. Backfill is EASY (Lifka, The ANL/IBM SP Scheduling System, JSSPP '95):
one reservation, for the first blocked job, by expected times. A job that was passed often enough, or has waited
for long enough, is passed no more: nothing starts on what it needs, unless it is guaranteed that.

In a queue with cells, what passes a blocked job gets no cells, so that the cells are used in order, as in a
cluster of the queue's own; it gives its room back as borrowers do.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from pydantic import Field

from rayrec.jobs.cells import check_guarantees
from rayrec.jobs.job import (
    Decision,
    Grow,
    Job,
    Placed,
    Plan,
    Refuse,
    Reserve,
    Running,
    Shrink,
    Size,
    Start,
    Stop,
    Wait,
    Waiting,
)
from rayrec.jobs.queues import QueuesConfig
from rayrec.jobs.quota import UNITS, Candidate
from rayrec.jobs.reclaim import Found, find_room, penalty_until
from rayrec.jobs.room import apart, fits_in
from rayrec.jobs.state import ClusterState, Run
from rayrec.pipelines.cluster.placement import Node, NoNodeError, assign
from rayrec.pipelines.cluster.placement_check import check_possible
from rayrec.platform.arrays import Int64Array
from rayrec.platform.config import Config
from rayrec.platform.devices import ACCELERATOR_RESOURCES
from rayrec.platform.errors import InputError

SHAPES_TRIED = 2
"""Waiting jobs of one shape that are looked at behind a blocked one, since only their times differ."""
MOST_REMEMBERED = 4096
"""Attempts in vain that are not repeated while nothing changes."""
SHOWN_NODES = 3
"""That a reason lists."""


class SchedulingConfig(Config):
    """How the queue admits, passes, reclaims and grows."""

    grace_s: float = Field(default=60.0, ge=0)
    """Time in which a job that is told to gives its room back; a reservation's room is asked for so much before."""
    max_passes: int = Field(default=100, ge=0)
    """Later jobs that may start before a blocked one on room that it needs."""
    max_wait_s: float = Field(default=24 * 3600.0, gt=0)
    """After so much time, a waiting job is the first of its queue, whatever its priority, and is not passed."""
    grow_pause_s: float = Field(default=600.0, ge=0)
    """Time for which a job keeps its size before it grows; doubled each time that it was shrunk."""
    failure_pause_s: float = Field(default=600.0, gt=0)
    """Time for which a job that failed fast takes no room from others; doubled with every such failure in a row."""
    most_failure_pause_s: float = Field(default=24 * 3600.0, gt=0)
    max_candidates: int = Field(default=64, ge=1)
    """Jobs behind blocked ones, and running ones that would grow, that are looked at in one go."""


@dataclass
class _Line:
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
class _Entry:
    """A waiting job, and where it stands."""

    waiting: Waiting
    line: _Line
    shape: int
    key: tuple[float, float, str]
    num_passed: int = 0
    job: Job = field(init=False)

    def __post_init__(self) -> None:
        self.job = self.waiting.job
        self.num_passed = self.waiting.num_passed


@dataclass
class _Reservation:
    """When a blocked job has room, and what others may use then."""

    entry: _Entry
    time: float
    """Infinite: some of those who are in its way end at no known time."""
    spare_NR: Int64Array
    is_closed: bool
    """Not even what ends before may pass."""
    made_at: float
    num_releases: int


class Scheduler:
    """Queues with what waits and runs in them; told what happens, it says what is to be done.

    Nothing but `decide` looks at the time.
    """

    def __init__(
        self,
        config: QueuesConfig,
        nodes: Sequence[Node],
        settings: SchedulingConfig | None = None,
        running: Sequence[Running] = (),
        planned: Sequence[Waiting] = (),
    ) -> None:
        """
        Args:
            planned: jobs that will be submitted again, of which some have their room planned.
        """
        self.settings = settings or SchedulingConfig()
        for job in (*(each.job for each in running), *(each.job for each in planned)):
            config.queue(job.queue)
        self.state = ClusterState(config, nodes, running, planned, self.settings.max_wait_s)
        self._nodes = list(nodes)
        self._lines = {
            (queue.name, borrows): _Line(queue.name, borrows)
            for queue in config.queues
            for borrows in (False, True)
        }
        self._entries: dict[str, _Entry] = {}
        self._planned: dict[str, _Entry] = {}
        self._shapes: dict[tuple[object, ...], int] = {}
        self._impossible: dict[int, str | None] = {}
        """By shape, why no cluster of these nodes could run it."""
        self._checked: dict[tuple[str, int], bool | str] = {}
        self._failed: dict[tuple[str, bool], tuple[int, int]] = {}
        """By job and whether it was behind, at which generation it was last tried in vain."""
        self._no_room: dict[tuple[int, int], int] = {}
        """By shape and size, at which number of releases there was no room for it."""
        self._room: dict[tuple[int, int], int] = {}
        """By shape and size, at which number of releases there was room for it by counts."""
        self._no_reclaim: dict[tuple[str, int, int, int], int] = {}
        """By queue, shape, size and priority, at which number of releases nothing could be taken for it."""
        self._no_plan: dict[tuple[object, ...], tuple[int, int]] = {}
        self._num_remade = 0
        self._by_age: list[tuple[float, str]] = []
        self._blocked: dict[str, _Entry] = {}
        self._reservations: dict[str, _Reservation] = {}

    # What happens

    def submit(self, waiting: Waiting) -> Refuse | None:
        """Queue a job, or one that was stopped.

        Raises:
            InputError: unknown queue, or sizes that are no way down.
        """
        job = waiting.job
        config = self.state.config.queue(job.queue)
        job.check()
        sizes = tuple(size.key for size in job.sizes)
        shape = self._shapes.setdefault((sizes, job.within, job.may_stop), len(self._shapes))
        if (config.name, shape) not in self._checked:
            self._checked[config.name, shape] = self._check(job, shape)
        borrows = self._checked[config.name, shape]
        if isinstance(borrows, str):
            return Refuse(job.id, borrows)
        line = self._lines[job.queue, borrows]
        key = job.order if job.not_before is None else (-math.inf, job.not_before, job.id)
        entry = _Entry(waiting, line, shape, key)
        if waiting.plan is not None and job.id in self.state.runs:
            self._planned[job.id] = entry
            return None
        entry.waiting = replace(waiting, plan=None)
        self._entries[job.id] = entry
        line.add(key, shape)
        bisect.insort(self._by_age, (job.submitted_at, job.id))
        return None

    def ended(self, job_id: str) -> None:
        """A job has ended, failed or was withdrawn: its room is free."""
        if (run := self.state.runs.get(job_id)) is not None:
            self.state.end(run)
            self._planned.pop(job_id, None)
        elif job_id in self._entries:
            self._take_out(self._entries[job_id])

    def done(self, job_id: str, now: float, ends_at: float | None = None) -> None:
        """A job has shrunk or stopped as it was told, and its room is free."""
        self.state.done(self.state.runs[job_id], now, ends_at)

    @property
    def waiting(self) -> list[Waiting]:
        return [
            replace(entry.waiting, num_passed=entry.num_passed)
            for entry in (*self._planned.values(), *self._entries.values())
        ]

    @property
    def running(self) -> list[Running]:
        return [run.running for run in self.state.runs.values() if not run.is_planned]

    def _check(self, job: Job, shape: int) -> bool | str:
        """Whether a job can only run on borrowed room; or why it could never run."""
        state, tree = self.state, self.state.tree
        fitting = [size for size in job.sizes if tree.could_fit(job.queue, state.counted(job.queue, size))]
        if not fitting:
            return _beyond_quota(state, job)
        if shape not in self._impossible:
            try:
                check_possible(job.sizes[-1].groups, self._nodes)
                self._impossible[shape] = None
            except InputError as error:
                self._impossible[shape] = str(error)
        if (why := self._impossible[shape]) is not None:
            return why
        if not any(state.could_place(size, job.within) for size in fitting):
            within = f" with one value of {job.within!r}" if job.within else ""
            return f"its actors fit on no set of the cluster's nodes{within}, even if no other job were there"
        firm = [size for size in fitting if self._could_be_firm(job, size)]
        if not firm and not job.may_stop and not state.could_lend_for_good(job.queue, job.sizes[-1]):
            return (
                f"it may not be stopped, so it can have no more than the guarantee of queue {job.queue!r} "
                f"({_amounts_in_words(tree.nominal(job.queue))}), and its least size asks for "
                f"{_amounts_in_words(state.counted(job.queue, job.sizes[-1]))}; ask for less, or let it be stopped"
            )
        return not firm

    def _could_be_firm(self, job: Job, size: Size) -> bool:
        state = self.state
        nominal = state.tree.nominal(job.queue)
        amounts = state.counted(job.queue, size)
        if any(amount > nominal.get(name, 0) for name, amount in amounts.items()):
            return False
        guarantees = state.guarantees
        return not guarantees.has(job.queue) or guarantees.could_hold(job.queue, size, job.within)

    # What is to be done

    def decide(self, now: float) -> list[Decision]:
        """Start, reserve, reclaim and grow what can be, in this order."""
        decisions: list[Decision] = []
        self._start_planned(now, decisions)
        self._secure(decisions)
        self._put_first_who_waited(now)
        self._refresh(now)
        self._admit_first_ones(now, decisions)
        self._admit_others(now, decisions)
        self._settle(now, decisions)
        return decisions

    def _start_planned(self, now: float, decisions: list[Decision]) -> None:
        order = sorted(self._planned, key=lambda job_id: (self.state.runs[job_id].since, job_id))
        for job_id in order:
            entry, run = self._planned[job_id], self.state.runs[job_id]
            early = entry.job.not_before is not None and now < entry.job.not_before
            if early or not self.state.may_arrive(run):
                continue
            ends_at = entry.waiting.ends_at(now, run.running.size)
            self.state.arrive(run, now, ends_at)
            del self._planned[job_id]
            decisions.append(self._start(run, "the room that was given back for it is free", ends_at))

    def _start(self, run: Run, why: str, ends_at: float | None) -> Start:
        running = run.running
        borrows = self.state.tree.borrows(run.job.queue, dict.fromkeys(run.amounts, 0))
        return Start(
            run.job.id,
            f"starts on {_names(running.placed, self.state)}: {why}",
            running.size,
            running.placed,
            running.cells,
            borrows,
            ends_at,
        )

    @property
    def _generation(self) -> tuple[int, int]:
        """What did not fit fits no better until this changes: nothing was given back since."""
        return self.state.num_releases, self._num_remade

    def _put_first_who_waited(self, now: float) -> None:
        while self._by_age and self._by_age[0][0] <= now - self.settings.max_wait_s:
            _, job_id = self._by_age.pop(0)
            entry = self._entries.get(job_id)
            if entry is None:
                continue
            entry.line.remove(entry.key, entry.shape)
            entry.key = (-math.inf, entry.job.submitted_at, job_id)
            entry.line.add(entry.key, entry.shape)

    def _admit_first_ones(self, now: float, decisions: list[Decision]) -> None:
        self._blocked = {}
        heads: dict[tuple[str, bool], _Entry] = {}
        changed = list(self._lines)
        while True:
            hopeless: list[_Entry] = []
            for key in changed:
                entry = self._head(self._lines[key], now)
                if entry is None:
                    heads.pop(key, None)
                elif self._is_hopeless(entry, now):
                    heads.pop(key, None)
                    hopeless.append(entry)
                else:
                    heads[key] = entry
            for entry in sorted(hopeless, key=lambda entry: entry.job.order):
                self._block(entry, now)
            if not heads:
                break
            entry = self._next(heads)
            key, num_releases = (entry.line.queue, entry.line.borrows), self.state.num_releases
            changed = [key]
            if not self._admit(entry, now, decisions):
                self._block(entry, now)
                del heads[key]
                changed = []
            elif self.state.num_releases != num_releases:  # others were told to give back
                changed = list(self._lines)
            else:
                changed += [each for each in heads if each != key]

    def _is_hopeless(self, entry: _Entry, now: float) -> bool:
        """Whether counts alone rule out every size of a job, so that its share need not be compared."""
        state, job = self.state, entry.job
        if job.not_before is not None:
            return False
        free_NR = state.free_and_left()
        for number, size in enumerate(job.sizes):
            amounts = state.counted(job.queue, size)
            if self._may_fit(entry, number, free_NR) and state.tree.fits(job.queue, amounts):
                return False
            if self._may_reclaim(entry, number):
                return False
        return True

    def _next(self, heads: dict[tuple[str, bool], _Entry]) -> _Entry:
        """Of those of least share, and of one queue that which needs not borrow."""
        state = self.state
        by_queue = {queue: heads[queue, borrows] for queue, borrows in sorted(heads, reverse=True)}
        if len(by_queue) == 1:
            return next(iter(by_queue.values()))
        candidates = [
            Candidate(
                queue, state.counted(queue, entry.job.sizes[0]), entry.job.priority, entry.job.submitted_at
            )
            for queue, entry in by_queue.items()
        ]
        return by_queue[state.tree.next_of(candidates).queue]

    def _head(self, line: _Line, now: float) -> _Entry | None:
        """The first job of a line that may start now, if it was not tried in vain."""
        for key in line.keys:
            entry = self._entries[key[2]]
            if entry.job.not_before is not None and now < entry.job.not_before - self.settings.grace_s:
                self._block(entry, now)
                continue
            if self._failed.get((entry.job.id, False)) == self._generation:
                self._block(entry, now)
                return None
            return entry
        return None

    def _block(self, entry: _Entry, now: float) -> None:
        """It waits: some of what it needs is kept for it."""
        job = entry.job
        if job.id not in self._blocked:
            self._blocked[job.id] = entry
        if self._has_cells(entry):
            return  # whoever is there will leave
        is_closed = self._is_closed(entry, now)
        is_timed = job.not_before is not None and now < job.not_before
        known = self._reservations.get(job.id)
        others = [each for each in self._reservations.values() if not each.is_closed and each is not known]
        if known is None and others and not is_closed and not is_timed:
            return
        if known is None or known.is_closed != is_closed or (known.time <= now and self._is_old(known, now)):
            self._reserve(entry, now, is_closed)

    def _is_old(self, known: _Reservation, now: float) -> bool:
        return known.made_at + self.settings.grace_s <= now and known.num_releases != self.state.num_releases

    def _has_cells(self, entry: _Entry) -> bool:
        """It gets its room by right, and needs no reservation."""
        state = self.state
        return (
            not entry.line.borrows
            and state.guarantees.has(entry.job.queue)
            and state.config.queue(entry.job.queue).preemption.reclaim_within_cohort == "Any"
        )

    def _is_closed(self, entry: _Entry, now: float) -> bool:
        settings = self.settings
        return entry.num_passed >= settings.max_passes or now - entry.job.submitted_at >= settings.max_wait_s

    def _reserve(self, entry: _Entry, now: float, is_closed: bool) -> None:
        """When and where a blocked job has room, if all others end as expected."""
        state, job = self.state, entry.job
        size = job.sizes[-1]
        amounts = state.counted(job.queue, size)
        gang = state.room.gang(size, job.within)
        assert gang is not None, "it was checked"
        ends = sorted(
            ((math.inf if run.running.ends_at is None else max(now, run.running.ends_at)), number, run)
            for number, run in enumerate(state.runs.values())
        )
        left_NR, time, gone = state.left_NR.copy(), now, list[Run]()
        least = now if job.not_before is None else max(now, job.not_before)
        placed: Placed | None = None
        by_quota = not state.tree.fits(job.queue, amounts)
        try:
            for place in range(len(ends) + 1):
                following = ends[place][0] if place < len(ends) else math.inf
                # All that end at one time are gone together.
                if (
                    (max(time, least) < following or place == len(ends))
                    and (not by_quota or state.tree.fits(job.queue, amounts))
                    and state.room.may_fit(gang, left_NR)
                    and (placed := state.room.place(size, job.within, left_NR)) is not None
                ):
                    break
                if place < len(ends):
                    time, _, run = ends[place]
                    apart(left_NR, run.kept, 1)
                    if by_quota:
                        state.tree.remove(run.job.queue, run.amounts)
                        gone.append(run)
        finally:
            for run in gone:
                state.tree.add(run.job.queue, run.amounts)
        self._drop_reservation(job.id)
        if placed is not None:
            apart(left_NR, state.room.held(size.groups, placed))
            self._reservations[job.id] = _Reservation(
                entry, max(time, least), left_NR, is_closed, now, state.num_releases
            )
            self._num_remade += 1

    def _drop_reservation(self, job_id: str) -> None:
        if self._reservations.pop(job_id, None) is not None:
            self._num_remade += 1

    def _kept_for_others(self, entry: _Entry, within: bool, ends_at: float | None) -> list[_Reservation]:
        """Reservations that a job has to leave room for, should it start now."""
        kept: list[_Reservation] = []
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

    def _refresh(self, now: float) -> None:
        """Reservations of before what was given back since, once in a while."""
        for known in list(self._reservations.values()):
            if self._is_old(known, now):
                self._reserve(known.entry, now, known.is_closed)

    def _admit(self, entry: _Entry, now: float, decisions: list[Decision], is_behind: bool = False) -> bool:
        """Give a waiting job its room, at once or as soon as others have left it."""
        with self.state.set_aside(entry.job):
            return self._try_to_admit(entry, now, decisions, is_behind)

    def _try_to_admit(self, entry: _Entry, now: float, decisions: list[Decision], is_behind: bool) -> bool:
        state, job = self.state, entry.job
        early = job.not_before is not None and now < job.not_before
        may_reclaim = not is_behind or not state.guarantees.has(job.queue)
        penalty = penalty_until(
            entry.waiting, self.settings.failure_pause_s, self.settings.most_failure_pause_s
        )
        if now < penalty:
            may_reclaim = False
        free_NR = state.free_and_left()
        for number, size in enumerate(job.sizes):
            amounts = state.counted(job.queue, size)
            within = state.is_within(job, size)
            if not early and self._may_fit(entry, number, free_NR) and state.tree.fits(job.queue, amounts):
                ends_at = entry.waiting.ends_at(now, number)
                kept = self._kept_for_others(entry, within, ends_at)
                may_be_firm = within and not is_behind
                # Jobs of one queue and shape that have to leave the same room fit or do not fit alike.
                alike = (job.queue, entry.shape, number, may_be_firm, *(known.entry.job.id for known in kept))
                plan = None
                if self._no_plan.get(alike) != self._generation:
                    plan = self._free_plan(entry, number, may_be_firm, free_NR, kept, now)
                    if len(self._no_plan) > MOST_REMEMBERED:
                        self._no_plan.clear()
                    self._no_plan[alike] = self._generation
                if plan is None and not kept and not may_be_firm and job.may_stop:
                    self._no_room[entry.shape, number] = state.num_releases
                if plan is not None:
                    del self._no_plan[alike]
                    self._give(entry, plan, now, ends_at, within, kept, decisions)
                    return True
            if may_reclaim and self._may_reclaim(entry, number):
                least = number if job.may_stop else len(job.sizes) - 1
                found = find_room(state, job, least, now)
                if found is not None and self._leaves_reservations(entry, found, within, now):
                    self._reclaim(entry, found, now, decisions)
                    return True
                self._no_reclaim[job.queue, entry.shape, number, job.priority] = state.num_releases
        if now >= penalty and not early:
            self._failed[job.id, is_behind] = self._generation
        return False

    def _leaves_reservations(self, entry: _Entry, found: Found, within: bool, now: float) -> bool:
        """Whether room that others give back is not what a reservation is for.

        Where somebody has to leave, only those of its own queue count: a guarantee does not wait for others'.
        """
        state, job = self.state, entry.job
        if found.plan.cells is not None:
            return True  # cells are used in the order of their queue
        held = state.room.held(job.sizes[found.plan.size].groups, found.plan.placed)
        for known in self._kept_for_others(entry, within, entry.waiting.ends_at(now, found.plan.size)):
            if found.steps and known.entry.job.queue != job.queue:
                continue
            spare_NR = known.spare_NR.copy()
            for run, number in found.steps:
                apart(spare_NR, run.held, 1)
                if number is not None:
                    apart(spare_NR, state.room.held(run.job.sizes[number].groups, run.running.placed))
            if not fits_in(held, spare_NR):
                return False
        return True

    def _may_fit(self, entry: _Entry, number: int, free_NR: Int64Array) -> bool:
        """By counts, which are the same for all jobs of one shape until something is given back."""
        state, job = self.state, entry.job
        key = entry.shape, number
        if self._no_room.get(key) == state.num_releases:
            return False
        if self._room.get(key) == state.num_releases:
            return True  # or not any more, which is found out where it is looked for a place
        gang = state.room.gang(job.sizes[number if job.may_stop else -1], job.within)
        if gang is not None and state.room.may_fit(gang, free_NR):
            self._room[key] = state.num_releases
            return True
        self._no_room[key] = state.num_releases
        return False

    def _may_reclaim(self, entry: _Entry, number: int) -> bool:
        """Whether others may have to give room back for one size of a job; not yet, whether that is enough."""
        state, job = self.state, entry.job
        if self._no_reclaim.get((job.queue, entry.shape, number, job.priority)) == state.num_releases:
            return False
        size = job.sizes[number]
        if not state.is_within(job, size):
            policy = state.config.queue(job.queue).preemption
            return state.may_take_own(job) or (entry.line.borrows and policy.borrow_within_cohort != "Never")
        guarantees = state.guarantees
        return not guarantees.has(job.queue) or guarantees.could_hold(job.queue, size, job.within)

    def _free_plan(
        self,
        entry: _Entry,
        number: int,
        may_be_firm: bool,
        free_NR: Int64Array,
        kept: Sequence[_Reservation],
        now: float,
    ) -> Plan | None:
        """Room that is free now: in the queue's cells if they can be brought there, else anywhere."""
        state, job = self.state, entry.job
        size = job.sizes[number]
        if may_be_firm and state.guarantees.has(job.queue) and job.may_stop:
            found = state.guarantees.place(job.queue, size, job.within, free_NR)
            if found is not None:
                return Plan(number, found[0], now, found[1])
        for known in kept:
            free_NR = np.minimum(free_NR, known.spare_NR)
        if not job.may_stop:
            return self._plan_for_good(entry, number, may_be_firm, free_NR, now)
        if may_be_firm and state.guarantees and not state.guarantees.has(job.queue):
            placed = state.firm_place(job, size, free_NR)
            if placed is not None:
                return Plan(number, placed, now)
        placed = state.room.place(size, job.within, free_NR)
        return None if placed is None else Plan(number, placed, now)

    def _plan_for_good(
        self, entry: _Entry, number: int, may_be_firm: bool, free_NR: Int64Array, now: float
    ) -> Plan | None:
        """Of a job that may not be stopped: its least size for good, and what more there is on borrowed terms."""
        state, job = self.state, entry.job
        least = len(job.sizes) - 1
        size = job.sizes[least]
        amounts = state.counted(job.queue, size)
        within = state.is_within(job, size)
        cells: Placed | None = None
        if within and state.guarantees.has(job.queue):
            found = state.guarantees.place(job.queue, size, job.within, free_NR) if may_be_firm else None
            if found is None:
                return None
            placed, cells = found
        else:
            if not within and not state.can_lend_for_good(job.queue, amounts):
                return None
            free = state.firm_place(job, size, free_NR)
            if free is None:
                return None
            placed = free
        if number < least:
            free_NR = free_NR.copy()
            apart(free_NR, state.room.held(size.groups, placed))
            more = state.extended(job, least, number, placed, free_NR)
            if more is None:
                return None
            placed = more
        return Plan(number, placed, now, cells, least if cells else None)

    def _give(
        self,
        entry: _Entry,
        plan: Plan,
        now: float,
        ends_at: float | None,
        within: bool,
        kept: Sequence[_Reservation],
        decisions: list[Decision],
    ) -> None:
        state, job = self.state, entry.job
        self._take_out(entry)
        run = state.give(job, plan, now, ends_at)
        for known in kept:
            apart(known.spare_NR, run.kept)
        self._count_passes(entry, run)
        own = f"within the guarantee of queue {job.queue!r}"
        why = own if within else f"on what queue {job.queue!r} borrows"
        if plan.size:
            why += f", as size {plan.size + 1} of {len(job.sizes)}"
        decisions.append(self._start(run, why, ends_at))

    def _reclaim(self, entry: _Entry, found: Found, now: float, decisions: list[Decision]) -> None:
        """Others give back; the job has their room planned."""
        state, job = self.state, entry.job
        self._take_out(entry)
        for run, number in found.steps:
            step = state.tell(run, number, job.id)
            if run.job.queue == job.queue:
                why = f"its queue's job {job.id} has the higher priority"
            else:
                why = f"queue {job.queue!r} is guaranteed this room, for job {job.id}"
            if number is None:
                decisions.append(Stop(run.job.id, f"stops at a snapshot: {why}", job.id))
            else:
                reason = f"goes on as size {number + 1} of {len(run.job.sizes)}: {why}"
                decisions.append(Shrink(run.job.id, reason, number, step.placed, step.cells, job.id))
        run = state.give(job, found.plan, now, None, is_planned=True)
        self._count_passes(entry, run)
        entry.waiting = replace(entry.waiting, plan=found.plan)
        early = job.not_before is not None and now < job.not_before
        if not early and state.may_arrive(run):
            ends_at = entry.waiting.ends_at(now, found.plan.size)
            state.arrive(run, now, ends_at)
            decisions.append(self._start(run, f"within the guarantee of queue {job.queue!r}", ends_at))
            return
        self._planned[job.id] = entry
        decisions.append(Reserve(job.id, self._planned_reason(run), found.plan))

    def _planned_reason(self, run: Run) -> str:
        names = _names(run.running.placed, self.state)
        leaving = sorted(
            other.job.id
            for other in self.state.runs.values()
            if other.running.step is not None and set(other.held) & set(run.kept)
        )
        who = f"{', '.join(leaving[:SHOWN_NODES])}" if leaving else "those who are there"
        more = f" and {len(leaving) - SHOWN_NODES} more" if len(leaving) > SHOWN_NODES else ""
        return f"has its room on {names}, and waits until {who}{more} have given it back"

    def _take_out(self, entry: _Entry) -> None:
        job = entry.job
        entry.line.remove(entry.key, entry.shape)
        del self._entries[job.id]
        self._blocked.pop(job.id, None)
        self._drop_reservation(job.id)
        for is_behind in (False, True):
            self._failed.pop((job.id, is_behind), None)
        place = bisect.bisect_left(self._by_age, (job.submitted_at, job.id))
        if place < len(self._by_age) and self._by_age[place][1] == job.id:
            del self._by_age[place]

    def _count_passes(self, entry: _Entry, run: Run) -> None:
        """Of blocked jobs that come before this one, and could use what it has."""
        job = entry.job
        for blocked in self._blocked.values():
            other = blocked.job
            if (
                other.submitted_at < job.submitted_at
                and other.priority <= job.priority
                and not (other.priority < job.priority and other.queue == job.queue)
                and not (run.firm is not None and other.queue != job.queue)
                and not (blocked.line.borrows and not entry.line.borrows)
                and not self._has_cells(blocked)
                and any(name in ACCELERATOR_RESOURCES for name in other.sizes[-1].amounts)
                == any(name in ACCELERATOR_RESOURCES for name in job.sizes[-1].amounts)
            ):
                blocked.num_passed += 1

    def _admit_others(self, now: float, decisions: list[Decision]) -> None:
        """Behind the blocked ones of each line: one or a few of each shape."""
        num_left = self.settings.max_candidates
        lines = sorted(
            (line for line in self._lines.values() if len(line.keys) > 1),
            key=lambda line: (line.borrows, self.state.tree.share(line.queue), line.queue),
        )
        for line in lines:
            for entry in self._behind(line, now):
                if num_left <= 0:
                    return
                num_left -= 1
                self._admit(entry, now, decisions, is_behind=True)

    def _behind(self, line: _Line, now: float) -> Iterator[_Entry]:
        """A few jobs of each shape for which there may be room or a right to it, without the first of all."""
        first, state = line.keys[0], self.state
        for shape in list(line.shapes):
            keys = line.shapes[shape]
            first_of = self._entries[keys[0][2]].job
            sizes = range(len(first_of.sizes))
            if all(self._no_room.get((shape, number)) == state.num_releases for number in sizes) and (
                state.guarantees.has(line.queue)
                or all(
                    self._no_reclaim.get((line.queue, shape, number, first_of.priority)) == state.num_releases
                    for number in sizes
                )
            ):
                continue
            for key in keys[: SHAPES_TRIED + 1]:
                entry = self._entries[key[2]]
                if (
                    key != first
                    and self._failed.get((key[2], True)) != self._generation
                    and (entry.job.not_before is None or now >= entry.job.not_before)
                ):
                    yield entry

    def _secure(self, decisions: list[Decision]) -> None:
        """Into the guarantee that has become free, who runs outside of it and comes before all who wait for it."""
        state = self.state
        if not state.guarantees:
            return
        for queue in sorted(state.softened):
            keys = self._lines[queue, False].keys
            for run in state.runs_outside(queue):
                if keys and keys[0] < run.job.order:
                    break
                if state.firm_up(run) and run.running.cells:
                    running = run.running
                    reason = f"is within the guarantee of queue {queue!r} now"
                    decisions.append(Grow(run.job.id, reason, running.size, running.placed, running.cells))

    def _settle(self, now: float, decisions: list[Decision]) -> None:
        """Where nobody waits: into the guarantee who is outside of it, and larger who is below what it wished."""
        state, settings = self.state, self.settings
        self._secure(decisions)
        state.softened.clear()
        waits_for_cards = any(line.keys for line in self._lines.values())
        if waits_for_cards or self._planned:
            return
        small = [
            run
            for job_id in state.below_wish
            if (run := state.runs[job_id]).running.step is None
            and not run.is_planned
            and self._may_grow(run, now)
        ]
        small.sort(key=lambda run: run.job.order)
        free_NR = state.free_and_left()
        for run in small[: settings.max_candidates]:
            job, running = run.job, run.running
            for number in range(running.size):
                more = {
                    name: amount - run.amounts.get(name, 0)
                    for name, amount in state.counted(job.queue, job.sizes[number]).items()
                }
                if not state.tree.fits(job.queue, more):
                    continue
                placed = state.extended(job, running.size, number, running.placed, free_NR)
                if placed is None:
                    continue
                ends_at = None
                if running.ends_at is not None:
                    faster = job.sizes[number].speed / job.sizes[running.size].speed
                    ends_at = now + max(0.0, running.ends_at - now) / faster
                state.grow(run, number, placed, now, ends_at)
                free_NR = state.free_and_left()
                reason = f"goes on as size {number + 1} of {len(job.sizes)}: there is room, and nobody waits for it"
                decisions.append(Grow(job.id, reason, number, placed, run.running.cells))
                break

    def _may_grow(self, run: Run, now: float) -> bool:
        since = run.running.started_at if run.running.changed_at is None else run.running.changed_at
        return now >= since + self.settings.grow_pause_s * 2.0 ** min(run.running.num_shrunk, 30)

    @property
    def next_change_at(self) -> float | None:
        """When `decide` may say something new although nothing happens: a reservation's time."""
        times = [
            entry.job.not_before - grace
            for entry in (*self._entries.values(), *self._planned.values())
            if entry.job.not_before is not None
            for grace in (0.0, self.settings.grace_s)
        ]
        return min(times, default=None)

    # What is said of those who wait

    def waits(self, now: float, num_expected: int = 200) -> list[Wait]:
        """Every waiting job in the order of its line: for what, why, and when it would start.

        Args:
            num_expected: of how many jobs the time of their start is computed.
        """
        expected = self._expected_starts(now, num_expected)
        found: list[Wait] = []
        for entry in self._planned.values():
            run = self.state.runs[entry.job.id]
            found.append(
                Wait(
                    entry.job.id,
                    self._planned_reason(run),
                    now + self.settings.grace_s,
                    entry.num_passed,
                )
            )
        for line in self._lines.values():
            for place, key in enumerate(line.keys):
                entry = self._entries[key[2]]
                reason = self._why_waits(entry, place, now)
                found.append(Wait(entry.job.id, reason, expected.get(entry.job.id), entry.num_passed))
        return found

    def _why_waits(self, entry: _Entry, place: int, now: float) -> str:
        state, job = self.state, entry.job
        size = job.sizes[-1]
        amounts = state.counted(job.queue, size)
        if job.not_before is not None and now < job.not_before:
            return f"is reserved for a time in {job.not_before - now:.0f} s"
        ahead = f"; {place} of its queue are before it" if place else ""
        penalty = penalty_until(
            entry.waiting, self.settings.failure_pause_s, self.settings.most_failure_pause_s
        )
        if now < penalty and not entry.line.borrows:
            return (
                f"failed {entry.waiting.num_fast_failures} times soon after it started, so it takes no room from "
                f"others for {penalty - now:.0f} s{ahead}"
            )
        if not state.tree.fits(job.queue, amounts):
            missing = [
                name for name, amount in amounts.items() if state.tree.available(job.queue, name) < amount
            ]
            which = ", ".join(
                f"{amounts[name] / UNITS:g} {name} of which queue {job.queue!r} may use "
                f"{state.tree.available(job.queue, name) / UNITS:g} more now"
                for name in missing
            )
            return (
                f"asks for {which}; waits until jobs of its cohort end or give back what they borrow{ahead}"
            )
        try:
            assign(size.groups, state.free_nodes())
        except NoNodeError as error:
            whose = ""
            if state.guarantees.has(job.queue) and not entry.line.borrows:
                whose = "; the cells of its queue are in use by its own jobs"
            return f"{error}; waits until other jobs end{whose}{ahead}"
        if job.within and state.room.place(size, job.within, state.free_and_left()) is None:
            return f"there is not room for all of its actors with one value of {job.within!r}{ahead}"
        holding = [each for each in self._reservations.values() if each.entry is not entry]
        if holding:
            first = min(holding, key=lambda each: each.time)
            when = "" if math.isinf(first.time) else f" in {first.time - now:.0f} s"
            return f"would delay job {first.entry.job.id}, which is to have this room{when}{ahead}"
        return f"is looked at again when the next job ends{ahead}"

    def _expected_starts(self, now: float, most: int) -> dict[str, float]:
        """If all jobs end as expected and start in order; without those behind one of which that is not known."""
        state = self.state
        left_NR = state.left_NR.copy()
        ends = sorted(
            (max(now, run.running.ends_at), number, run.kept)
            for number, run in enumerate(state.runs.values())
            if run.running.ends_at is not None and not run.is_planned
        )
        order = sorted(
            self._entries.values(),
            key=lambda entry: (
                entry.line.borrows,
                entry.key if math.isinf(entry.key[0]) else entry.job.order,
            ),
        )
        expected: dict[str, float] = {}
        time, number = now, len(state.runs)
        for entry in order[:most]:
            job = entry.job
            size = job.sizes[-1]
            gang = state.room.gang(size, job.within)
            assert gang is not None
            time = max(time, job.not_before or time)
            placed: Placed | None = None
            while True:
                while ends and ends[0][0] <= time:
                    apart(left_NR, ends.pop(0)[2], 1)
                if state.room.may_fit(gang, left_NR):
                    placed = state.room.place(size, job.within, left_NR)
                if placed is not None or not ends:
                    break
                time = ends[0][0]
            if placed is None:
                break
            expected[job.id] = time
            held = state.room.held(size.groups, placed)
            apart(left_NR, held)
            if (ends_at := entry.waiting.ends_at(time, len(job.sizes) - 1)) is not None:
                number += 1
                bisect.insort(ends, (ends_at, number, held), key=lambda end: end[:2])
        return expected


def decide(
    config: QueuesConfig,
    nodes: Sequence[Node],
    running: Sequence[Running],
    waiting: Sequence[Waiting],
    now: float,
    settings: SchedulingConfig | None = None,
) -> list[Decision]:
    """What is to be done now about all jobs: in order, and a `Wait` for each about which nothing is done.

    Args:
        nodes: all that are alive, with what Ray says is free.

    Raises:
        InputError: a job's queue is unknown, or its sizes are no way down.
    """
    scheduler = Scheduler(config, nodes, settings, running, waiting)
    refused: list[Decision] = []
    for each in sorted(waiting, key=lambda each: each.job.order):
        if (refusal := scheduler.submit(each)) is not None:
            refused.append(refusal)
    decisions = scheduler.decide(now)
    reserved = {each.job_id for each in decisions if isinstance(each, Reserve)}
    waits = [each for each in scheduler.waits(now) if each.job_id not in reserved]
    return [*refused, *decisions, *waits]


def check_change(config: QueuesConfig, nodes: Sequence[Node], running: Sequence[Running]) -> None:
    """Refuse settings of queues that what runs does not agree with.

    Raises:
        InputError: guarantees that cannot all be had at once, a queue that is gone and has jobs, or a quota below
            what runs.
    """
    check_guarantees(config, nodes)
    for each in running:
        config.queue(each.job.queue)
    ClusterState(config, nodes, running).tree.check_holds()


def _beyond_quota(state: ClusterState, job: Job) -> str:
    amounts = state.counted(job.queue, job.sizes[-1])
    for name, amount in sorted(amounts.items()):
        most = state.tree.potential(job.queue, name)
        if name not in state.config.queue(job.queue).all_quotas:
            return (
                f"it asks for {amount / UNITS:g} {name}, of which queue {job.queue!r} has no quota; submit it to "
                "another queue, or give this one a quota of it"
            )
        if amount > most:
            return (
                f"it asks for {amount / UNITS:g} {name} at least, and queue {job.queue!r} may use {most / UNITS:g} "
                "at most, all that it can borrow included; ask for less, or raise its quota or borrowing limit"
            )
    raise AssertionError("one of them does not fit")


def _amounts_in_words(amounts: dict[str, int]) -> str:
    return ", ".join(f"{amount / UNITS:g} {name}" for name, amount in sorted(amounts.items())) or "nothing"


def _names(placed: Placed, state: ClusterState) -> str:
    nodes = list(dict.fromkeys(node for members in placed.values() for node in members))
    index = state.room.index
    shown = [state.room.nodes[index[node]].name if node in index else node for node in nodes[:SHOWN_NODES]]
    more = len(nodes) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
