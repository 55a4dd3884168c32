"""Which job starts next, where, and why the others wait.

    waiting, by queue: priority, age ─► the first of each ─► least fair share ─► room at once? ──► Start
                                             │ no                                 within its guarantee:
                                             ▼                                    others give back ──► Reserve
                           a reservation of the first one that is blocked
                                             │
    the others of each queue ─► end before it, or use nothing that it needs ─► Start, as one that passes

Every queue has two lines: jobs that fit in its guarantee, and jobs that can only run on what is borrowed, so
that the first of these does not hold up those. A job that was passed often enough, or has waited for long
enough, is passed no more: nothing starts on what it needs, unless it is guaranteed that.

In a queue with cells, what passes a blocked job gets no cells, so that the cells are used in order, as in a
cluster of the queue's own; it gives its room back as borrowers do.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

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
from rayrec.jobs.lines import Entry, Line, Reservation, Reservations
from rayrec.jobs.queues import QueuesConfig
from rayrec.jobs.quota import Candidate
from rayrec.jobs.reasons import (
    Lack,
    amounts_in_words,
    expected_starts,
    names_of,
    why_beyond_quota,
    why_planned,
    why_waits,
)
from rayrec.jobs.reclaim import Found, find_room, penalty_until
from rayrec.jobs.room import apart, fits_in
from rayrec.jobs.state import ClusterState, Run
from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.cluster.placement_check import check_possible
from rayrec.platform.arrays import Int64Array
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError

SHAPES_TRIED = 2
"""Waiting jobs of one shape that are looked at behind a blocked one, since only their times differ."""
TRIED_AGAIN = 5
"""Grace periods until it is tried again to bring cells to where a job runs."""
AT_A_TIME, WAITED_FOR_LONG = -math.inf, -sys.float_info.max
"""First in a line, in this order, in place of a priority: what is reserved has to be known before others
start."""
MOST_REMEMBERED = 4096
"""Attempts in vain that are not repeated while nothing changes."""


class SchedulingConfig(Config):
    """How the queue admits, passes, reclaims and grows."""

    grace_s: float = Field(default=60.0, ge=0)
    """Time in which a job gives its room back when told to; a reservation asks for its own so long before."""
    max_passes: int = Field(default=100, ge=0)
    """Later jobs that may start before a blocked one on room that it needs."""
    max_wait_s: float = Field(default=24 * 3600.0, gt=0)
    """After so much waiting, without the time in which it ran, a job is the first of its queue but for those
    that have their time, whatever its priority, and is passed no more."""
    grow_pause_s: float = Field(default=600.0, ge=0)
    """Time for which a job keeps its size before it grows; doubled each time that it was shrunk."""
    failure_pause_s: float = Field(default=600.0, gt=0)
    """Time for which a job that failed fast takes no room from others; doubled with each failure in a row."""
    most_failure_pause_s: float = Field(default=24 * 3600.0, gt=0)
    max_candidates: int = Field(default=8, ge=1)
    """Jobs behind blocked ones, and running ones that would grow, that are looked at in one go."""


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
            (queue.name, borrows): Line(queue.name, borrows)
            for queue in config.queues
            for borrows in (False, True)
        }
        self._entries: dict[str, Entry] = {}
        self._planned: dict[str, Entry] = {}
        self._shapes: dict[tuple[object, ...], int] = {}
        self._impossible: dict[int, str | None] = {}
        """By shape, why no cluster of these nodes could run it."""
        self._checked: dict[tuple[str, int], bool | str] = {}
        self._failed: dict[tuple[str, bool], tuple[int, ...]] = {}
        """By job and whether it was behind, at which generation it was last tried in vain."""
        self._no_room: dict[tuple[int, int], int] = {}
        """By shape and size, at which number of releases there was no room for it."""
        self._room: dict[tuple[int, int], int] = {}
        """By shape and size, at which number of releases there was room for it by counts."""
        self._no_reclaim: dict[tuple[str, int, int, int], tuple[tuple[int, int], float]] = {}
        """By queue, shape, size and priority, at which number of releases and when nothing could be taken."""
        self._now = 0.0
        self._no_plan: dict[tuple[object, ...], tuple[int, ...]] = {}
        settings = self.settings
        self._kept = Reservations(self.state, settings.grace_s, settings.max_passes, settings.max_wait_s)
        self._by_age: list[tuple[float, str]] = []

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
        key = job.order if job.not_before is None else (AT_A_TIME, job.not_before, job.id)
        entry = Entry(waiting, line, shape, key)
        if waiting.plan is not None and job.id in self.state.runs:
            self._planned[job.id] = entry
            return None
        entry.waiting = replace(waiting, plan=None)
        self._entries[job.id] = entry
        line.add(key, shape)
        if job.not_before is None:
            bisect.insort(self._by_age, (waiting.since, job.id))
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
    def planned(self) -> list[Waiting]:
        """Those of them whose room is about to be given back."""
        return [entry.waiting for entry in self._planned.values()]

    @property
    def running(self) -> list[Running]:
        return [run.running for run in self.state.runs.values() if not run.is_planned]

    def _check(self, job: Job, shape: int) -> bool | str:
        """Whether a job can only run on borrowed room; or why it could never run."""
        state, tree = self.state, self.state.tree
        fitting = [size for size in job.sizes if tree.could_fit(job.queue, state.counted(job.queue, size))]
        if not fitting:
            return why_beyond_quota(state, job)
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
                f"({amounts_in_words(tree.nominal(job.queue))}), and its least size asks for "
                f"{amounts_in_words(state.counted(job.queue, job.sizes[-1]))}; ask for less, or let it be "
                "stopped"
            )
        if not job.may_stop and not state.could_keep(job, job.sizes[-1]):
            return (
                "it may not be stopped, and its least size finds no room beside the cells that queues are "
                "guaranteed, even if no other job were there; ask for less, or let it be stopped"
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
        self._now = now
        self._start_planned(now, decisions)
        self._secure(now, decisions)
        self._put_first_who_waited(now)
        self._kept.refresh(now)
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
            is_timed = entry.job.not_before is not None
            why = "its time has come" if is_timed else "the room that was given back for it is free"
            decisions.append(self._start(run, why, ends_at))

    def _start(self, run: Run, why: str, ends_at: float | None) -> Start:
        running = run.running
        borrows = self.state.tree.borrows(run.job.queue, dict.fromkeys(run.amounts, 0))
        return Start(
            run.job.id,
            f"starts on {names_of(running.placed, self.state)}: {why}",
            running.size,
            running.placed,
            running.cells,
            borrows,
            ends_at,
        )

    @property
    def _generation(self) -> tuple[int, int]:
        """What did not fit fits no better until this changes: nothing was given back since."""
        return self.state.num_releases, self._kept.num_remade

    def _tried_at(self, entry: Entry) -> tuple[int, ...]:
        """What a job was tried in vain with: it is not tried again before some of it changes."""
        return *self._generation, self.state.guarantees.version(entry.job.queue)

    def _put_first_who_waited(self, now: float) -> None:
        while self._by_age and self._by_age[0][0] <= now - self.settings.max_wait_s:
            _, job_id = self._by_age.pop(0)
            entry = self._entries.get(job_id)
            if entry is None:
                continue
            entry.line.remove(entry.key, entry.shape)
            entry.key = (WAITED_FOR_LONG, entry.job.submitted_at, job_id)
            entry.line.add(entry.key, entry.shape)

    def _admit_first_ones(self, now: float, decisions: list[Decision]) -> None:
        self._kept.blocked.clear()
        heads: dict[tuple[str, bool], Entry] = {}
        changed = list(self._lines)
        while True:
            hopeless: list[Entry] = []
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
                self._kept.block(entry, now)
            if not heads:
                break
            entry = self._next(heads)
            key, num_releases = (entry.line.queue, entry.line.borrows), self.state.num_releases
            changed = [key]
            if not self._admit(entry, now, decisions):
                self._kept.block(entry, now)
                del heads[key]
                changed = []
            elif self.state.num_releases != num_releases:  # others were told to give back
                changed = list(self._lines)
            else:
                changed += [each for each in heads if each != key]

    def _is_hopeless(self, entry: Entry, now: float) -> bool:
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

    def _next(self, heads: dict[tuple[str, bool], Entry]) -> Entry:
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

    def _head(self, line: Line, now: float) -> Entry | None:
        """The first job of a line that may start now, if it was not tried in vain."""
        for key in line.keys:
            entry = self._entries[key[2]]
            if entry.job.not_before is not None and now < entry.job.not_before - self.settings.grace_s:
                self._kept.block(entry, now)
                continue
            if self._failed.get((entry.job.id, False)) == self._tried_at(entry):
                self._kept.block(entry, now)
                return None
            return entry
        return None

    def _admit(self, entry: Entry, now: float, decisions: list[Decision], is_behind: bool = False) -> bool:
        """Give a waiting job its room, at once or as soon as others have left it."""
        if is_behind and self.state.guarantees.has(entry.job.queue):
            return self._try_to_admit(entry, now, decisions, is_behind)  # it gets no cells
        with self.state.set_aside(entry.job):
            return self._try_to_admit(entry, now, decisions, is_behind)

    def _try_to_admit(self, entry: Entry, now: float, decisions: list[Decision], is_behind: bool) -> bool:
        state, job = self.state, entry.job
        early = job.not_before is not None and now < job.not_before
        may_reclaim = not is_behind or not state.guarantees
        penalty = self._penalty(entry)
        if now < penalty:
            may_reclaim = False
        free_NR = state.free_and_left()
        for number, size in enumerate(job.sizes):
            amounts = state.counted(job.queue, size)
            # What passes in a queue with cells gets none of them.
            within = not (is_behind and state.guarantees.has(job.queue)) and state.is_within(job, size)
            if not early and self._may_fit(entry, number, free_NR) and state.tree.fits(job.queue, amounts):
                ends_at = entry.waiting.ends_at(now, number)
                kept = self._kept.kept_for_others(entry, within, ends_at)
                may_be_firm = within and not is_behind
                # Jobs of one queue and shape that have to leave the same room fit or do not fit alike.
                alike = (job.queue, entry.shape, number, may_be_firm, *(known.entry.job.id for known in kept))
                plan = None
                if self._no_plan.get(alike) != self._tried_at(entry):
                    plan = self._free_plan(entry, number, may_be_firm, free_NR, kept, now)
                    if len(self._no_plan) > MOST_REMEMBERED:
                        self._no_plan.clear()
                    self._no_plan[alike] = self._tried_at(entry)
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
                self._no_reclaim[self._reclaim_key(entry, number)] = self._reclaim_state(job.queue), now
        if now >= penalty and not early:
            self._failed[job.id, is_behind] = self._tried_at(entry)
        return False

    def _leaves_reservations(self, entry: Entry, found: Found, within: bool, now: float) -> bool:
        """Whether room that others give back is not what a reservation is for.

        Where somebody has to leave, only those of its own queue count: a guarantee does not wait for others'.
        """
        state, job = self.state, entry.job
        if found.plan.cells is not None:
            return True  # cells are used in the order of their queue
        held = state.room.held(job.sizes[found.plan.size].groups, found.plan.placed)
        for known in self._kept.kept_for_others(entry, within, entry.waiting.ends_at(now, found.plan.size)):
            if found.steps and known.entry.job.queue != job.queue:
                continue
            spare_NR = known.spare_NR.copy()
            for run, number in found.steps:
                apart(spare_NR, run.kept, 1)
                if number is not None:
                    apart(spare_NR, state.room.held(run.job.sizes[number].groups, run.running.placed))
            if not fits_in(held, spare_NR):
                return False
        return True

    def _penalty(self, entry: Entry) -> float:
        settings = self.settings
        return penalty_until(entry.waiting, settings.failure_pause_s, settings.most_failure_pause_s)

    def _may_fit(self, entry: Entry, number: int, free_NR: Int64Array) -> bool:
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

    def _reclaim_key(self, entry: Entry, number: int) -> tuple[str, int, int, int]:
        return entry.job.queue, entry.shape, number, entry.job.priority

    def _reclaim_state(self, queue: str) -> tuple[int, int]:
        return self.state.num_releases, self.state.guarantees.version(queue)

    def _took_nothing(self, key: tuple[str, int, int, int]) -> bool:
        """Whether it was looked in vain for who could give back, and it would be again.

        Where the guarantee is a number, it may be in vain for long, and is not tried whenever a job ends.
        """
        known = self._no_reclaim.get(key)
        if known is None:
            return False
        pause_s = 0.0 if self.state.guarantees.has(key[0]) else self.settings.grace_s / 2
        return known[0] == self._reclaim_state(key[0]) or self._now < known[1] + pause_s

    def _may_reclaim(self, entry: Entry, number: int) -> bool:
        """Whether others may have to give room back for one size; not, whether that is enough."""
        state, job = self.state, entry.job
        if self._took_nothing(self._reclaim_key(entry, number)):
            return False
        size = job.sizes[number]
        if not state.is_within(job, size):
            if entry.line.borrows and state.guarantees:
                return False  # room that is only borrowed is waited for
            policy = state.config.queue(job.queue).preemption
            return state.may_take_own(job) or (entry.line.borrows and policy.borrow_within_cohort != "Never")
        guarantees = state.guarantees
        return not guarantees.has(job.queue) or guarantees.could_hold(job.queue, size, job.within)

    def _free_plan(
        self,
        entry: Entry,
        number: int,
        may_be_firm: bool,
        free_NR: Int64Array,
        kept: Sequence[Reservation],
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
        self, entry: Entry, number: int, may_be_firm: bool, free_NR: Int64Array, now: float
    ) -> Plan | None:
        """Of a job that may not be stopped: its least size for good, and more on borrowed terms."""
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
        entry: Entry,
        plan: Plan,
        now: float,
        ends_at: float | None,
        within: bool,
        kept: Sequence[Reservation],
        decisions: list[Decision],
    ) -> None:
        state, job = self.state, entry.job
        self._take_out(entry)
        run = state.give(job, plan, now, ends_at, ran_s=entry.waiting.ran_s)
        for known in kept:
            apart(known.spare_NR, run.kept)
        self._kept.count_passes(entry, run)
        own = f"within the guarantee of queue {job.queue!r}"
        why = own if within else f"on what queue {job.queue!r} borrows"
        if plan.size:
            why += f", as size {plan.size + 1} of {len(job.sizes)}"
        decisions.append(self._start(run, why, ends_at))

    def _reclaim(self, entry: Entry, found: Found, now: float, decisions: list[Decision]) -> None:
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
                how = "stops at a snapshot" if run.job.kind == "train" else "stops"
                decisions.append(Stop(run.job.id, f"{how}: {why}", job.id))
            else:
                reason = f"goes on as size {number + 1} of {len(run.job.sizes)}: {why}"
                decisions.append(Shrink(run.job.id, reason, number, step.placed, step.cells, job.id))
        run = state.give(job, found.plan, now, None, is_planned=True, ran_s=entry.waiting.ran_s)
        self._kept.count_passes(entry, run)
        entry.waiting = replace(entry.waiting, plan=found.plan)
        early = job.not_before is not None and now < job.not_before
        if not early and state.may_arrive(run):
            ends_at = entry.waiting.ends_at(now, found.plan.size)
            state.arrive(run, now, ends_at)
            decisions.append(self._start(run, f"within the guarantee of queue {job.queue!r}", ends_at))
            return
        self._planned[job.id] = entry
        decisions.append(Reserve(job.id, why_planned(self.state, run, now), found.plan))

    def _take_out(self, entry: Entry) -> None:
        job = entry.job
        entry.line.remove(entry.key, entry.shape)
        del self._entries[job.id]
        self._kept.drop(job.id)
        for is_behind in (False, True):
            self._failed.pop((job.id, is_behind), None)
        place = bisect.bisect_left(self._by_age, (entry.waiting.since, job.id))
        if place < len(self._by_age) and self._by_age[place][1] == job.id:
            del self._by_age[place]

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

    def _behind(self, line: Line, now: float) -> Iterator[Entry]:
        """A few jobs of each shape for which there may be room or a right to it, without the first of all."""
        first, state = line.keys[0], self.state
        for shape in list(line.shapes):
            keys = line.shapes[shape]
            first_of = self._entries[keys[0][2]].job
            sizes = range(len(first_of.sizes))
            if all(self._no_room.get((shape, number)) == state.num_releases for number in sizes) and (
                state.guarantees
                or all(self._took_nothing((line.queue, shape, number, first_of.priority)) for number in sizes)
            ):
                continue
            for key in keys[: SHAPES_TRIED + 1]:
                entry = self._entries[key[2]]
                if (
                    key != first
                    and self._failed.get((key[2], True)) != self._tried_at(entry)
                    and (entry.job.not_before is None or now >= entry.job.not_before)
                ):
                    yield entry

    def _secure(self, now: float, decisions: list[Decision]) -> None:
        """Into a guarantee that has become free, who runs outside of it and comes before all who wait."""
        state = self.state
        if not state.guarantees:
            return
        for queue in sorted(state.softened):
            keys = self._lines[queue, False].keys
            state.softened.discard(queue)
            for run in state.runs_outside(queue):
                if keys and keys[0] < run.job.order:
                    state.softened.add(queue)  # it may come when those who wait do not any more
                    break
                if now < run.tried_at + TRIED_AGAIN * self.settings.grace_s:
                    continue  # what keeps cells from where it is changes slowly
                run.tried_at = now
                with state.set_aside(run.job):
                    is_in = state.firm_up(run)
                if is_in and run.running.cells:
                    running = run.running
                    reason = f"is within the guarantee of queue {queue!r} now"
                    decisions.append(Grow(run.job.id, reason, running.size, running.placed, running.cells))

    def _settle(self, now: float, decisions: list[Decision]) -> None:
        """Larger, who is below what it wished for, where nobody waits for that."""
        state, settings = self.state, self.settings
        self._secure(now, decisions)
        if self._planned:
            return
        small = [
            run
            for job_id in state.below_wish
            if (run := state.runs[job_id]).running.step is None
            and not run.is_planned
            and self._may_grow(run, now)
        ]
        small.sort(key=lambda run: run.job.order)
        free_NR = self._kept.spare(state.free_and_left())
        for run in small[: settings.max_candidates]:
            job, running = run.job, run.running
            for number in range(running.size):
                more = {
                    name: amount - run.amounts.get(name, 0)
                    for name, amount in state.counted(job.queue, job.sizes[number]).items()
                }
                more = {name: amount for name, amount in more.items() if amount > 0}
                if not state.tree.fits(job.queue, more) or self._is_wanted(job.queue, more, now):
                    continue
                placed = state.extended(job, running.size, number, running.placed, free_NR)
                if placed is None:
                    continue
                ends_at = None
                if running.ends_at is not None:
                    faster = job.sizes[number].speed / job.sizes[running.size].speed
                    ends_at = now + max(0.0, running.ends_at - now) / faster
                state.grow(run, number, placed, now, ends_at)
                free_NR = self._kept.spare(state.free_and_left())
                which = f"size {number + 1} of {len(job.sizes)}"
                reason = f"goes on as {which}: there is room, and nobody else is to have it"
                decisions.append(Grow(job.id, reason, number, placed, run.running.cells))
                break

    def _is_wanted(self, queue: str, more: Mapping[str, int], now: float) -> bool:
        """Whether somebody waits, and not for a time, for what a job of a queue would have in addition.

        Others than its own queue are not asked where that is within its guarantee, nor are those that would
        have no quota for it even if all others gave back.
        """
        tree = self.state.tree
        is_own = not tree.borrows(queue, more)
        for line in self._lines.values():
            if is_own and line.queue != queue:
                continue
            for keys in line.shapes.values():
                job = self._entries[keys[-1][2]].job
                if job.not_before is not None and now < job.not_before:
                    continue  # and so are all of this shape: those with a time are the first of their line
                amounts = self.state.counted(job.queue, job.sizes[-1])
                if not more.keys().isdisjoint(amounts) and tree.could_fit_beside(job.queue, amounts):
                    return True
        return False

    def _may_grow(self, run: Run, now: float) -> bool:
        since = run.running.started_at if run.running.changed_at is None else run.running.changed_at
        return now >= since + self.settings.grow_pause_s * 2.0 ** min(run.running.num_shrunk, 30)

    def held_up(self, queue: str) -> Job | None:
        """The first job that waits for a queue's guarantee, if it fits in what is free of it.

        After `decide` there is none, but for jobs that have to wait for a time, or that failed fast.
        """
        keys = self._lines[queue, False].keys
        if not keys:
            return None
        job = self._entries[keys[0][2]].job
        with self.state.set_aside(job):
            return job if self.state.is_within(job, job.sizes[0]) else None

    # What is said of those who wait

    def waits(self, now: float, num_expected: int = 200) -> list[Wait]:
        """Every waiting job in the order of its line: for what, why, and when it would start.

        Args:
            num_expected: of how many jobs the time of their start is computed.
        """
        expected = expected_starts(self.state, self._entries.values(), now, num_expected)
        lack = Lack(self.state)
        found: list[Wait] = []
        for entry in self._planned.values():
            run = self.state.runs[entry.job.id]
            found.append(
                Wait(
                    entry.job.id,
                    why_planned(self.state, run, now),
                    max(now + self.settings.grace_s, entry.job.not_before or now),
                    entry.num_passed,
                )
            )
        for line in self._lines.values():
            for place, key in enumerate(line.keys):
                entry = self._entries[key[2]]
                kept = self._kept.next_time(entry)
                penalty = self._penalty(entry)
                reason = why_waits(self.state, entry, lack.of(entry), place, penalty, kept, now)
                is_early = entry.job.not_before is not None and now < entry.job.not_before
                starts_at = self._kept.time_of(entry) if is_early else expected.get(entry.job.id)
                found.append(Wait(entry.job.id, reason, starts_at, entry.num_passed))
        return found


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
    hopeless: list[Decision] = []
    for each in sorted(waiting, key=lambda each: each.job.order):
        # It was possible when it was submitted: nodes come back, and so does what they have.
        if (refusal := scheduler.submit(each)) is not None:
            reason = f"could not run on the nodes that there are: {refusal.reason}"
            hopeless.append(Wait(each.job.id, reason, None, each.num_passed))
    decisions = scheduler.decide(now)
    reserved = {each.job_id for each in decisions if isinstance(each, Reserve)}
    waits = [each for each in scheduler.waits(now) if each.job_id not in reserved]
    return [*hopeless, *decisions, *waits]


def lacking_cells(config: QueuesConfig, nodes: Sequence[Node], running: Sequence[Running]) -> list[str]:
    """Sentences on guaranteed cells for which no node is left, since some are gone or quarantined."""
    return ClusterState(config, nodes, running).lacking_cells


def check_change(
    config: QueuesConfig,
    nodes: Sequence[Node],
    running: Sequence[Running],
    before: QueuesConfig | None = None,
) -> None:
    """Refuse settings of queues that what runs does not agree with.

    Args:
        before: settings that these change; None: there were none.

    Raises:
        InputError: guarantees that cannot all be had at once, a queue that is gone and has jobs, or a quota
            below what runs.
    """
    check_guarantees(config, nodes, before)
    for each in running:
        config.queue(each.job.queue)
    ClusterState(config, nodes, running).tree.check_holds()
