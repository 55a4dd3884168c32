"""Who gives room back to a job that is guaranteed it, and how, with the least work lost.

    candidates ── steps in order ──► taken until the job fits ──► given back in reverse while it still fits

In the order of Kueue's classical preemption (`pkg/scheduler/preemption`): jobs of other queues that borrow
before those of its own, low priorities first; then the least lost work instead of the newest admission. A
step makes a job smaller before another one stops it: a training goes on from a snapshot with fewer
trainers, a service with fewer replicas. A job that is in its own queue's guarantee is asked for nothing by
another queue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.jobs.job import Job, Placed, Plan, Waiting
from rayrec.jobs.quota import ReclaimRight
from rayrec.jobs.room import apart, fits_in
from rayrec.jobs.state import ClusterState, Run
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.devices import ACCELERATOR_RESOURCES

MOST_DOUBLINGS = 1000
"""Of a pause: a number does not hold many more, and retries have no bound."""


@dataclass(frozen=True)
class Found:
    """How a job gets its room."""

    plan: Plan
    steps: tuple[tuple[Run, int | None], ...]
    """Each job that gives some back, with the size that is left to it; None: it stops."""


@dataclass(frozen=True)
class _Step:
    run: Run
    number: int | None
    lost: float
    """Seconds of work, times its cards."""
    right: ReclaimRight | None
    """None: it is not by the sums of quotas that it is taken."""
    is_borrowed: bool
    """Its queue uses more than its guarantee."""

    def order(self, queue: str) -> tuple[object, ...]:
        job = self.run.job
        level = len(job.sizes) if self.number is None else self.number
        return (
            job.queue == queue,
            not self.is_borrowed,
            job.priority,
            self.number is None,
            self.lost,
            -self.run.since,
            job.id,
            level,
        )


def penalty_until(waiting: Waiting, pause_s: float, most_s: float) -> float:
    """Until when a job takes no room from others, since its attempts failed soon after they had it.

    The pause doubles with every failure in a row: large jobs that fail fast would otherwise stop small ones
    again and again. Source: Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research
    Clusters, arXiv:2410.21680.
    """
    if not waiting.num_fast_failures or waiting.failed_at is None:
        return float("-inf")
    doublings = min(waiting.num_fast_failures - 1, MOST_DOUBLINGS)
    return waiting.failed_at + min(most_s, pause_s * 2.0**doublings)


def find_room(state: ClusterState, job: Job, number: int, now: float) -> Found | None:
    """Room for one size of a job, and the least that others have to give back for it.

    The state is as before when it returns, but for free cells, which may be bound elsewhere.
    """
    size = job.sizes[number]
    return _Search(state, job, number, now).find() if state.room.gang(size, job.within) else None


class _Search:
    """For one size of one job."""

    def __init__(self, state: ClusterState, job: Job, number: int, now: float) -> None:
        self._state, self._job, self._number, self._now = state, job, number, now
        self._size = job.sizes[number]
        self._amounts = state.counted(job.queue, self._size)
        available = {name: state.tree.available(job.queue, name) for name in self._amounts}
        self._missing = [name for name, amount in self._amounts.items() if amount > available[name]]
        """Of which there is no quota now."""
        cards = [name for name in self._amounts if name in ACCELERATOR_RESOURCES]
        self._resources = list(dict.fromkeys([*cards, *self._missing])) if cards else list(self._amounts)
        """Who has borrowed of these may have to give back."""
        self._left_NR = state.left_NR.copy()
        self._level: dict[str, int | None] = {}
        """By job, the size that it is asked to have."""
        self._taken: list[_Step] = []

    def find(self) -> Found | None:
        state, job = self._state, self._job
        self._is_within = state.is_within(job, self._size)
        in_cells = self._is_within and state.guarantees.has(job.queue)
        try:
            placed = self._in_own_cells() if in_cells else None
            if placed is None and (not in_cells or state.may_take_own(job)):
                placed = self._in_order()
            if placed is None:
                return None
            self._give_back(placed)
            asked = {step.run.job.id: step.run for step in self._taken if step.run.job.id in self._level}
            return Found(
                Plan(self._number, placed[0], self._now, placed[1]),
                tuple((run, self._level[job_id]) for job_id, run in asked.items()),
            )
        finally:
            self._undo()

    def _undo(self) -> None:
        for step in self._taken:
            if step.run.job.id in self._level:
                self._take(step.run, step.run.number, is_undone=True)
        self._taken = []

    def _in_order(self) -> tuple[Placed, Placed | None] | None:
        """Take from one after the other, wherever they are, until the job fits."""
        state, job = self._state, self._job
        if state.guarantees and not state.guarantees.has(job.queue):
            most_NR = np.minimum(state.room.total_NR, state.guarantees.promisable())
            if state.room.place(self._size, job.within, most_NR) is None:
                return None
        placed = self._fit()
        if placed is not None:
            return placed
        steps = self._candidates()
        if not self._would_fit(steps):
            return None
        for step in steps:
            if self._is_valid(step):
                self._take(step.run, step.number)
                self._taken.append(step)
                if (placed := self._fit()) is not None:
                    return placed
        self._undo()
        return None

    def _would_fit(self, steps: Sequence[_Step]) -> bool:
        """Whether there were room, had all of them given all that they can be asked for."""
        state, job = self._state, self._job
        left_NR = self._left_with(steps)
        if state.guarantees and not state.guarantees.has(job.queue):
            left_NR = np.minimum(left_NR, state.guarantees.promisable())
        return state.room.place(self._size, job.within, left_NR) is not None

    def _left_with(self, steps: Sequence[_Step]) -> Int64Array:
        """[N, R] what would be left, had all of them given all that they have."""
        left_NR = self._left_NR.copy()
        for run in {step.run.job.id: step.run for step in steps}.values():
            apart(left_NR, run.kept, 1)
        return left_NR

    def _in_own_cells(self) -> tuple[Placed, Placed | None] | None:
        """As in a cluster of its queue's own, with each cell on the node where the least is lost."""
        state, job = self._state, self._job
        guarantees = state.guarantees
        chosen = guarantees.choose(job.queue, self._size, job.within)
        if chosen is None:
            return None
        steps = self._candidates()
        there: dict[int, list[_Step]] = {}
        for step in steps:
            for node in step.run.kept:
                there.setdefault(node, []).append(step)
        most_NR = self._left_with(steps)
        reserved: dict[int, Int64Array] = {}
        with guarantees.held_still() as hold:
            for cell_id, need_R in guarantees.needs(job.queue, self._size, chosen):
                spots = guarantees.spots(job.queue, cell_id, job.within)
                found = self._cheapest(spots, cell_id, need_R, there, most_NR)
                if found is None:
                    self._put_back(reserved)
                    self._undo()
                    return None
                node, way = found
                for step in way:
                    self._take(step.run, step.number)
                    self._taken.append(step)
                self._left_NR[node] -= need_R
                most_NR[node] -= need_R
                reserved[node] = reserved.get(node, 0) + need_R
                hold(job.queue, cell_id)
        self._put_back(reserved)
        placed = guarantees.nodes_of(job.queue, chosen)
        for step in steps:  # there is enough room, and the sums of its cohort may still be used by others
            if state.tree.fits(job.queue, self._amounts):
                break
            if self._is_valid(step):
                self._take(step.run, step.number)
                self._taken.append(step)
        if state.tree.fits(job.queue, self._amounts) and guarantees.labels_fit(self._size, placed):
            return placed, chosen
        self._undo()
        return None

    def _cheapest(
        self,
        spots: Sequence[int],
        cell_id: str,
        need_R: Int64Array,
        there: Mapping[int, Sequence[_Step]],
        most_NR: Int64Array,
    ) -> tuple[int, list[_Step]] | None:
        """The node that a cell is brought to, and what is asked for there; None: there is none.

        Args:
            there: by node, what could be asked for.
            most_NR: what would be left, had all of that been given.
        """
        guarantees, queue = self._state.guarantees, self._job.queue
        is_free_N: BoolArray = np.all(self._left_NR >= need_R, axis=1)
        for node in spots:
            if is_free_N[node] and guarantees.bring(queue, cell_id, node):
                return node, []
        ways: list[tuple[tuple[object, ...], int, int, list[_Step]]] = []
        could_be_N: BoolArray = np.all(most_NR >= need_R, axis=1) & ~is_free_N
        for place, node in enumerate(spots):
            if could_be_N[node] and (way := self._clear(node, need_R, there.get(node, ()))) is not None:
                ways.append((_cost(way), place, node, way))
        for _, _, node, way in sorted(ways, key=lambda each: each[:2]):
            if guarantees.bring(queue, cell_id, node):
                return node, way
        return None

    def _put_back(self, reserved: Mapping[int, Int64Array]) -> None:
        apart(self._left_NR, reserved, 1)

    def _clear(self, node: int, need_R: Int64Array, steps: Sequence[_Step]) -> list[_Step] | None:
        """The first steps that leave so much room on a node; None: not all of them together do."""
        missing_R = need_R - self._left_NR[node]
        way: list[_Step] = []
        level: dict[str, int | None] = {}
        for step in steps:
            if (missing_R <= 0).all():
                break
            run = step.run
            before = level.get(run.job.id, self._level.get(run.job.id, run.number))
            if before is None or (step.number is not None and step.number <= before):
                continue
            gained_R = _kept(self._state, run, before).get(node, 0 * need_R) - _kept(
                self._state, run, step.number
            ).get(node, 0 * need_R)
            if (gained_R[missing_R > 0] > 0).any():
                missing_R = missing_R - gained_R
                level[run.job.id] = step.number
                way.append(step)
        return way if (missing_R <= 0).all() else None

    def _fit(self) -> tuple[Placed, Placed | None] | None:
        """Where the job is, with what was taken so far: nodes, and cells of its queue."""
        state, job = self._state, self._job
        if not state.tree.fits(job.queue, self._amounts):
            return None
        gang = state.room.gang(self._size, job.within)
        if gang is None or not state.room.may_fit(gang, self._left_NR):
            return None
        if state.guarantees and not state.is_within(job, self._size):
            return None  # it would have planned room that somebody is guaranteed, and could not give it back
        if state.guarantees.has(job.queue):
            return state.guarantees.place(job.queue, self._size, job.within, self._left_NR)
        placed = state.firm_place(job, self._size, self._left_NR)
        return None if placed is None else (placed, None)

    def _take(self, run: Run, number: int | None, is_undone: bool = False) -> None:
        """Change the sums as if a job had another size than it was given or asked to have last."""
        state, job = self._state, run.job
        before = self._level.get(job.id, run.number)
        state.tree.remove(job.queue, _amounts(state, run, before))
        state.tree.add(job.queue, _amounts(state, run, number))
        apart(self._left_NR, _kept(state, run, before), 1)
        apart(self._left_NR, _kept(state, run, number))
        if run.firm is not None and run.running.cells:
            firmly = job.sizes[run.firm]
            was_in, is_in = _is_firm(run, before), _is_firm(run, number)
            if was_in != is_in:
                state.guarantees.lend(job.queue, firmly, run.running.cells, back=is_in)
        if is_undone or number == run.number:
            self._level.pop(job.id, None)
        else:
            self._level[job.id] = number

    def _give_back(self, placed: tuple[Placed, Placed | None]) -> None:
        """What is not needed, the last one taken first; each job by as much as can be."""
        state, job = self._state, self._job
        held = state.room.held(self._size.groups, placed[0])
        cells = placed[1]
        for run in dict.fromkeys(step.run.job.id for step in reversed(self._taken)):
            victim = state.runs[run]
            asked = self._level[run]
            steps = [victim.number, *(step.number for step in self._taken if step.run is victim)]
            for number in steps:  # from all that it had downwards
                if number == asked:
                    break
                self._take(victim, number)
                if (
                    fits_in(held, self._left_NR)
                    and state.tree.fits(job.queue, self._amounts)
                    and (cells is None or state.guarantees.is_left(job.queue, self._size, cells))
                ):
                    break
                self._take(victim, asked)

    def _candidates(self) -> list[_Step]:
        state, job = self._state, self._job
        missing = self._missing
        policy = state.config.queue(job.queue).preemption
        borrows = not self._is_within
        in_cells = self._is_within and state.guarantees.has(job.queue)
        rights = {
            right.queue: right
            for right in state.tree.reclaim_rights(job.queue, self._amounts, self._resources)
        }
        asks_cards = any(name in ACCELERATOR_RESOURCES for name in self._size.amounts)
        steps: list[_Step] = []
        for run in state.runs.values():
            other = run.job
            if run.number is None or run.is_planned:
                continue
            has_cards = any(name in ACCELERATOR_RESOURCES for name in other.sizes[0].amounts)
            # On a cell's node, whatever somebody holds may be in the way; elsewhere, only a lack of quota is
            # a reason to stop who has no cards for who wants some.
            if asks_cards and not has_cards and not in_cells:
                held = [name for name in missing if name in run.amounts]
                is_own = other.queue == job.queue
                if not held or not (is_own or state.tree.borrows_any_of(other.queue, held)):
                    continue
            right = rights.get(other.queue)
            if other.queue == job.queue:
                if not (in_cells and run.firm is None) and not state.may_take(job, run):
                    continue
                right = None
            elif policy.reclaim_within_cohort == "Never" or (
                policy.reclaim_within_cohort == "LowerPriority" and other.priority >= job.priority
            ):
                continue
            elif state.guarantees and (borrows or run.firm == run.number):
                continue  # what is in a guarantee stays, whatever its queue's sums are
            elif state.guarantees.has(job.queue):
                right = None
            elif right is None:
                continue
            elif borrows and not right.by_tree:
                limit = policy.max_priority_threshold
                if (
                    policy.borrow_within_cohort == "Never"
                    or other.priority >= job.priority
                    or (limit is not None and other.priority > limit)
                ):
                    continue
            steps += _steps(run, right, other.queue == job.queue, other.queue in rights)
        return sorted(steps, key=lambda step: step.order(job.queue))

    def _is_valid(self, step: _Step) -> bool:
        """A step is not taken when another queue has nothing borrowed any more."""
        number = self._level.get(step.run.job.id, step.run.number)
        if number is None or (step.number is not None and step.number <= number):
            return False
        if step.right is None:
            return True
        return self._state.tree.still_borrows(step.right, self._resources)


def _cost(way: Sequence[_Step]) -> tuple[object, ...]:
    """Of all that is asked for one cell: whose it is, then the highest priority, then the lost work."""
    return (
        max(((not step.is_borrowed, step.run.job.priority) for step in way), default=(False, -math.inf)),
        sum(step.lost for step in way),
        sum(step.number is None for step in way),
        len(way),
    )


def _steps(run: Run, right: ReclaimRight | None, is_own: bool, is_borrowed: bool) -> list[_Step]:
    """All that a job can be asked for, from the least loss on; also beyond what it is just doing."""
    job, running = run.job, run.running
    lost = running.lost_s * job.sizes[running.size].weight
    firm = None if is_own else run.firm
    last = len(job.sizes) - 1 if firm is None else firm
    shrunk_lost = 0.0 if job.kind == "service" else lost
    steps = [
        _Step(run, number, shrunk_lost, right, is_borrowed)
        for number in range((run.number or 0) + 1, last + 1)
        if job.sizes[number].amounts != job.sizes[running.size].amounts
    ]
    if job.may_stop and firm is None:
        steps.append(_Step(run, None, lost, right, is_borrowed))
    return steps


def _is_firm(run: Run, number: int | None) -> bool:
    return run.firm is not None and number is not None and number <= run.firm


def _amounts(state: ClusterState, run: Run, number: int | None) -> Mapping[str, int]:
    return {} if number is None else state.counted(run.job.queue, run.job.sizes[number])


def _kept(state: ClusterState, run: Run, number: int | None) -> Mapping[int, Int64Array]:
    """What a job has at a size: the first members of every stage."""
    if number is None:
        return {}
    if number == run.number:
        return run.kept
    return state.room.held(run.job.sizes[number].groups, run.running.placed)
