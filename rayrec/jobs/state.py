"""What is given to whom on the cluster now, and what of it is about to be given back.

A job that is told to leave still sits on its room (`free_NR` does not have it), and that room is promised to
somebody else already (`left_NR` has it, less what the other has planned). A job starts on what is both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from rayrec.jobs.cells import Guarantees
from rayrec.jobs.job import Job, Placed, Plan, Running, Size, Step, Waiting
from rayrec.jobs.queues import QueuesConfig
from rayrec.jobs.quota import UNITS, QuotaTree
from rayrec.jobs.room import Room, apart, fits_in
from rayrec.pipelines.cluster.placement import NODE_ID_LABEL, Node
from rayrec.platform.arrays import Int64Array

Held = Mapping[int, Int64Array]
"""By index of the node, what is held of it."""


@dataclass
class Run:
    """A job that has room, or has planned it."""

    running: Running
    held: Held
    """What it sits on now; nothing, while it is planned."""
    kept: Held
    """What it has after what it was told to do."""
    amounts: Mapping[str, int]
    """What its queue counts of it then."""
    is_planned: bool = False
    promised: Held = field(default_factory=dict)
    """Room that is set apart for it without cells."""
    firm: int | None = None
    """The size at which it is in its queue's guarantee, or may not be asked for less; None: at no size."""
    since: float = 0.0
    tried_at: float = -math.inf
    """When it was last tried to bring it into its queue's guarantee."""
    job: Job = field(init=False)

    def __post_init__(self) -> None:
        self.job = self.running.job

    @property
    def number(self) -> int | None:
        """The size that it has or will have; None: it is to stop."""
        step = self.running.step
        return self.running.size if step is None else step.size


class ClusterState:
    """Queues, nodes and jobs with all their sums, changed one job at a time."""

    def __init__(
        self,
        config: QueuesConfig,
        nodes: Sequence[Node],
        running: Sequence[Running] = (),
        planned: Sequence[Waiting] = (),
        patience_s: float = math.inf,
    ) -> None:
        """
        Args:
            planned: waiting jobs of which some have their room planned.
            patience_s: a job that waited for so long before it started is stopped for none of its own queue.
        """
        self._patience_s = patience_s
        self.config = config
        self.tree = QuotaTree(config)
        self.room = Room(nodes)
        self.left_NR = self.room.total_NR.copy()
        self.free_NR = self.room.total_NR.copy()
        self.guarantees = Guarantees(config, self.room)
        self.runs: dict[str, Run] = {}
        self._promised: dict[str, Counter[str]] = {queue.name: Counter() for queue in config.queues}
        """By queue, what of its nominal quota is set apart without cells."""
        self._of_queue: dict[str, dict[str, Run]] = {queue.name: {} for queue in config.queues}
        self._priorities: dict[str, Counter[int]] = {queue.name: Counter() for queue in config.queues}
        self._outside: dict[str, list[Run]] = {}
        self.below_wish: dict[str, None] = {}
        """Jobs that have not their first size, in a fixed order."""
        self.softened = {queue.name for queue in config.queues}
        """Queues of which some guarantee has become free, for others of their jobs."""
        self.num_changes = 0
        """Times at which anything was given or given back."""
        self.planned_NR = np.zeros_like(self.left_NR)
        """[N, R] what is planned: of what is free, too, so that nobody who comes later takes it meanwhile."""
        self._least_NR = self.left_NR
        self._least_at = -1
        self.num_releases = 0
        """Times at which something was given back: what did not fit before may fit after that."""
        self._counted: dict[tuple[str, int], tuple[Size, dict[str, int]]] = {}
        self._alone: ClusterState | None = None
        """The same queues and nodes without any job, made when it is asked for."""
        self._take_out_foreign(running)
        restored = sorted(running, key=lambda each: (each.job.order, each.started_at))
        for each in restored:
            self._restore(each)
        for waiting in sorted(planned, key=lambda each: each.job.order):
            if waiting.plan is not None:
                self._restore_plan(waiting.job, waiting.plan, waiting.ran_s)
        self.lacking_cells = self.guarantees.bind_rest()
        for run in self.runs.values():
            if run.firm is None and run.running.cells is None:
                self._promise(run)

    def _take_out_foreign(self, running: Sequence[Running]) -> None:
        """What others than our jobs hold, by what Ray says is free."""
        ours_NR = np.zeros_like(self.left_NR)
        for each in running:
            apart(ours_NR, self.room.held(each.job.sizes[each.size].groups, each.placed), 1)
        for place, node in enumerate(self.room.nodes):
            if not self.room.usable_N[place]:
                continue
            foreign_R = np.maximum(
                self.room.total_NR[place] - self.room.vector(node.free) - ours_NR[place], 0
            )
            self.left_NR[place] -= foreign_R
            self.free_NR[place] -= foreign_R

    def _restore(self, running: Running) -> None:
        job, step = running.job, running.step
        held = self.room.held(job.sizes[running.size].groups, running.placed)
        number = running.size if step is None else step.size
        kept = held if step is None else {}
        if step is not None and step.size is not None:
            kept = self.room.held(job.sizes[step.size].groups, step.placed)
        amounts = {} if number is None else self.counted(job.queue, job.sizes[number])
        run = Run(running, held, kept, amounts, since=running.started_at)
        self.runs[job.id] = run
        self._note_size(run)
        apart(self.free_NR, held)
        apart(self.left_NR, kept)
        self.tree.add(job.queue, amounts)
        cells = running.cells if step is None else step.cells
        if cells:
            firm = firm_number(job, cells)
            if firm is not None and self.guarantees.pin(job.queue, job.sizes[firm], running.placed, cells):
                run.firm = firm
                self._outside.pop(job.queue, None)
            else:
                run.running = replace(
                    running, cells=None, step=None if step is None else replace(step, cells=None)
                )

    def _restore_plan(self, job: Job, plan: Plan, ran_s: float) -> None:
        """A plan of before, unless a node or a cell of it is gone."""
        there = plan.size < len(job.sizes) and all(
            node in self.room.index and self.room.usable_N[self.room.index[node]]
            for members in plan.placed.values()
            for node in members
        )
        if not there:
            return
        size = job.sizes[plan.size]
        firm = None if plan.cells is None else plan.size if plan.firm_size is None else plan.firm_size
        if firm is not None:
            assert plan.cells is not None
            if not self.guarantees.pin(job.queue, job.sizes[firm], plan.placed, plan.cells):
                return
        kept, amounts = self.room.held(size.groups, plan.placed), self.counted(job.queue, size)
        running = Running(job, plan.size, plan.placed, plan.since, plan.cells, ran_s=ran_s)
        run = Run(running, {}, kept, amounts, is_planned=True, firm=firm, since=plan.since)
        self.runs[job.id] = run
        self._note_size(run)
        apart(self.left_NR, kept)
        apart(self.planned_NR, kept, 1)
        self.tree.add(job.queue, amounts)

    def counted(self, queue: str, size: Size) -> dict[str, int]:
        """What a queue counts of a size."""
        key = (queue, id(size))
        if key not in self._counted:
            # The size itself is kept beside it, so that no other gets its id.
            self._counted[key] = size, self.tree.counted(queue, size.amounts)
        return self._counted[key][1]

    def free_and_left(self) -> Int64Array:
        """[N, R] what a job can have at once; not to be changed."""
        if self._least_at != self.num_changes:
            self._least_NR = np.minimum(self.free_NR - self.planned_NR, self.left_NR)
            self._least_NR.flags.writeable = False
            self._least_at = self.num_changes
        return self._least_NR

    def firm_place(self, job: Job, size: Size, free_NR: Int64Array) -> Placed | None:
        """Room that the cells of no queue need; where there are no cells, any room."""
        if not self.guarantees:
            return self.room.place(size, job.within, free_NR)
        placed = self.room.place(size, job.within, np.minimum(free_NR, self.guarantees.promisable()))
        if placed is None:
            return None
        held = self.room.held(size.groups, placed)
        if self.guarantees.promise(held):
            self.guarantees.unpromise(held)
            return placed
        return self.room.place(size, job.within, np.minimum(free_NR, self.guarantees.slack_NR))

    def _promise(self, run: Run) -> None:
        """Into the guarantee of numbers, if its queue has that left and no cells need the room.

        A job that may not be stopped is asked for no less than its least size, guaranteed or not.
        """
        if not self.guarantees or run.firm is not None or run.number is None:
            return
        job = run.job
        least = len(job.sizes) - 1
        has_cells = self.guarantees.has(job.queue)
        if has_cells and job.may_stop:
            return
        firm = run.number if job.may_stop else least
        amounts = self.counted(job.queue, job.sizes[firm])
        nominal, promised = self.tree.nominal(job.queue), self._promised[job.queue]
        if job.may_stop and any(
            promised[name] + amount > nominal.get(name, 0) for name, amount in amounts.items()
        ):
            return
        held = self.room.held(job.sizes[firm].groups, run.running.placed)
        if self.guarantees.promise(held):
            run.promised, run.firm = held, firm
            self._outside.pop(job.queue, None)
            if not has_cells:
                promised.update(amounts)

    def could_place(self, size: Size, within: str | None) -> bool:
        """Whether a size fits on nodes with no other job, those that are not used just now included."""
        whole = Room([replace(node, free=node.total) for node in self.room.nodes])
        for place, node in enumerate(whole.nodes):
            whole.usable_N[place] = True
            whole.total_NR[place] = whole.vector(node.total)
        return whole.place(size, within, whole.total_NR) is not None

    def could_keep(self, job: Job, size: Size) -> bool:
        """Whether a job that may not be stopped could have a size: with no other job, and with the nodes that
        are not used just now.

        Places are found greedily, so also with each kind of node left out in turn: others may do instead of
        what cells need. An exact answer would try all sets of nodes.
        """
        if not self.guarantees:
            return True  # there is room, and no cells are in the way
        if self._alone is None:
            nodes = [
                replace(node, free=node.total, quarantined=None, is_draining=False)
                for node in self.room.nodes
            ]
            self._alone = ClusterState(self.config, nodes)
        alone = self._alone
        if alone.is_within(job, size) and alone.guarantees.has(job.queue):
            return alone.guarantees.place(job.queue, size, job.within, alone.room.total_NR) is not None
        total_NR = alone.room.total_NR
        if alone.firm_place(job, size, total_NR) is not None:
            return True
        tried: set[tuple[bytes, str]] = set()
        for place, node in enumerate(alone.room.nodes):
            labels = sorted((key, value) for key, value in node.labels.items() if key != NODE_ID_LABEL)
            kind = total_NR[place].tobytes(), repr(labels)
            if kind in tried:
                continue
            tried.add(kind)
            without_NR = total_NR.copy()
            without_NR[place] = 0
            if alone.firm_place(job, size, without_NR) is not None:
                return True
        return False

    def could_lend_for_good(self, queue: str, size: Size) -> bool:
        """Whether a job that may not be stopped could ever have a size beyond its queue's guarantee."""
        return self._fits_beside_guarantees(queue, self.counted(queue, size), {})

    def can_lend_for_good(self, queue: str, amounts: Mapping[str, int]) -> bool:
        """Whether what is borrowed leaves all guarantees of others, without being given back."""
        lent: dict[str, Counter[str]] = {}
        for run in self.runs.values():
            if not run.job.may_stop and run.number is not None:
                least = self.counted(run.job.queue, run.job.sizes[-1])
                lent.setdefault(run.job.queue, Counter()).update(least)
        return self._fits_beside_guarantees(queue, amounts, lent)

    def _fits_beside_guarantees(
        self, queue: str, amounts: Mapping[str, int], lent: Mapping[str, Mapping[str, int]]
    ) -> bool:
        """With every other queue using all that it is guaranteed, and at least what it has for good."""
        tree = QuotaTree(self.config)
        for each in self.config.queues:
            own = lent.get(each.name, {})
            if each.name == queue:
                tree.add(queue, own)
                continue
            nominal = tree.nominal(each.name)
            tree.add(each.name, {name: max(amount, own.get(name, 0)) for name, amount in nominal.items()})
        return tree.fits(queue, amounts)

    def extended(
        self, job: Job, number: int, larger: int, placed: Placed, free_NR: Int64Array
    ) -> Placed | None:
        """Room for the further actors of a larger size; those who are there stay, and come first."""
        if any(node not in self.room.index for members in placed.values() for node in members):
            return None  # a node of it is gone, and it starts again or has its replicas elsewhere
        counts = job.sizes[number].counts()
        groups = tuple(
            replace(group, count=group.count - counts.get(group.stage, 0))
            for group in job.sizes[larger].groups
            if group.count > counts.get(group.stage, 0)
        )
        if any(group.strategy.startswith("STRICT") for group in groups):
            return None  # which nodes they may be on depends on the others of their group
        if job.within is not None:
            there = next(node for members in placed.values() for node in members)
            value = self.room.nodes[self.room.index[there]].labels.get(job.within)
            outside = [node.labels.get(job.within) != value for node in self.room.nodes]
            free_NR = np.where(np.array(outside)[:, None], 0, free_NR)
        if not groups:
            return placed
        more = self.room.place(Size(groups), None, free_NR)
        if more is None:
            return None
        stages = job.sizes[larger].counts()
        return {stage: (*placed.get(stage, ()), *more.get(stage, ())) for stage in stages}

    def free_nodes(self) -> list[Node]:
        """The nodes with what a job can have at once."""
        free_NR = self.free_and_left()
        return [
            replace(
                node,
                free={
                    name: int(free_NR[place, column]) / UNITS for name, column in self.room.columns.items()
                },
            )
            for place, node in enumerate(self.room.nodes)
            if self.room.usable_N[place]
        ]

    def give(
        self,
        job: Job,
        plan: Plan,
        now: float,
        ends_at: float | None,
        is_planned: bool = False,
        num_shrunk: int = 0,
        ran_s: float = 0.0,
    ) -> Run:
        """Give a job its room: at once, or as soon as others have left it.

        Args:
            ran_s: as of `Waiting`.
        """
        size = job.sizes[plan.size]
        kept = self.room.held(size.groups, plan.placed)
        self.num_changes += 1
        running = Running(
            job,
            plan.size,
            plan.placed,
            now,
            plan.cells,
            ends_at,
            changed_at=now,
            num_shrunk=num_shrunk,
            ran_s=ran_s,
        )
        amounts = self.counted(job.queue, size)
        run = Run(running, {} if is_planned else kept, kept, amounts, is_planned, since=now)
        self.runs[job.id] = run
        self._note_size(run)
        apart(self.left_NR, kept)
        if is_planned:
            apart(self.planned_NR, kept, 1)
        else:
            apart(self.free_NR, kept)
        self.tree.add(job.queue, amounts)
        if plan.cells:
            run.firm = plan.size if plan.firm_size is None else plan.firm_size
            self._outside.pop(job.queue, None)
            self.guarantees.hold(job.queue, job.sizes[run.firm], plan.cells)
        else:
            self._promise(run)
        return run

    def may_arrive(self, run: Run) -> bool:
        """Whether the room of a planned job is free, beside what was planned before."""
        free_NR = self.free_NR.copy()
        for other in self.runs.values():
            if other.is_planned and (other.since, other.job.id) < (run.since, run.job.id):
                apart(free_NR, other.kept)
        return fits_in(run.kept, free_NR)

    def arrive(self, run: Run, now: float, ends_at: float | None) -> None:
        """A planned job starts on its room."""
        self.num_changes += 1
        apart(self.planned_NR, run.kept)
        run.is_planned, run.held, run.since = False, run.kept, now
        run.running = replace(run.running, started_at=now, changed_at=now, ends_at=ends_at)
        apart(self.free_NR, run.kept)

    def tell(self, run: Run, number: int | None, for_job: str) -> Step:
        """A job is to shrink to a smaller size, or to stop: others may plan with the rest at once."""
        job = run.job
        placed: Placed = {}
        if number is not None:
            placed = {
                stage: run.running.placed.get(stage, ())[:count]
                for stage, count in job.sizes[number].counts().items()
            }
        cells = run.running.cells
        if number is None or (run.firm is not None and number > run.firm):
            self._soften(run)
            cells = None
        self._keep(run, {} if number is None else self.room.held(job.sizes[number].groups, placed))
        self._count(run, {} if number is None else self.counted(job.queue, job.sizes[number]))
        step = Step(number, placed, for_job, cells)
        run.running = replace(run.running, step=step)
        self.num_changes += 1
        self.num_releases += 1
        return step

    def _soften(self, run: Run) -> None:
        """Out of the guarantee."""
        if run.firm is not None:
            self.softened.add(run.job.queue)
        if run.firm is not None and run.running.cells:
            self.guarantees.release(run.job.queue, run.job.sizes[run.firm], run.running.cells)
        if run.promised:
            assert run.firm is not None
            self.guarantees.unpromise(run.promised)
            if not self.guarantees.has(run.job.queue):
                self._promised[run.job.queue].subtract(self.counted(run.job.queue, run.job.sizes[run.firm]))
        run.firm, run.promised = None, {}
        self._outside.pop(run.job.queue, None)
        run.running = replace(run.running, cells=None)

    def _keep(self, run: Run, kept: Held) -> None:
        apart(self.left_NR, run.kept, 1)
        run.kept = kept
        apart(self.left_NR, kept)

    def _count(self, run: Run, amounts: Mapping[str, int]) -> None:
        self.tree.remove(run.job.queue, run.amounts)
        run.amounts = amounts
        self.tree.add(run.job.queue, amounts)

    def done(self, run: Run, now: float, ends_at: float | None = None) -> None:
        """A job has done what it was told: its room is free."""
        step = run.running.step
        assert step is not None, "it was told something"
        apart(self.free_NR, run.held, 1)
        apart(self.free_NR, run.kept)
        run.held = run.kept
        self.num_changes += 1
        self.num_releases += 1
        if step.size is None:
            self._forget(run)
            return
        run.running = replace(
            run.running,
            size=step.size,
            placed=step.placed,
            cells=step.cells,
            step=None,
            ends_at=ends_at,
            changed_at=now,
            num_shrunk=run.running.num_shrunk + 1,
        )
        self._note_size(run)
        self.firm_up(run)

    def runs_outside(self, queue: str) -> list[Run]:
        """Jobs of a queue that run on borrowed terms, in its order."""
        if queue not in self._outside:
            outside = [run for run in self._of_queue[queue].values() if run.firm is None]
            self._outside[queue] = sorted(outside, key=lambda run: run.job.order)
        return self._outside[queue]

    @contextmanager
    def set_aside(self, job: Job) -> Iterator[None]:
        """Inside the block, free cells are kept for jobs of its queue that come before it and run outside.

        In a cluster of the queue's own they would be in them, and when they have to leave they will be.
        """
        sizes: list[tuple[Size, str | None]] = []
        if self.guarantees.has(job.queue):
            for run in self.runs_outside(job.queue):
                if run.job.order < job.order:
                    number = run.running.size if run.number is None else run.number
                    sizes.append((run.job.sizes[number], run.job.within))
        if not sizes:
            yield
            return
        with self.guarantees.lent(job.queue, sizes):
            yield

    def is_within(self, job: Job, size: Size) -> bool:
        """Whether a size would be in the guarantee of its queue: in its free cells, or by the sum of its
        quotas."""
        if self.guarantees.has(job.queue):
            return self.guarantees.choose(job.queue, size, job.within) is not None
        return not self.tree.borrows(job.queue, self.counted(job.queue, size))

    def may_take_own(self, job: Job) -> bool:
        """Whether some job of its own queue may have to make room for it."""
        if self.config.queue(job.queue).preemption.within_queue == "Never":
            return False
        priorities, newer = self._priorities[job.queue], self.config.queue(job.queue).preemption.within_queue
        lowest = min(priorities, default=job.priority)
        if lowest > job.priority or (lowest == job.priority and newer == "LowerPriority"):
            return False
        return any(self.may_take(job, run) for run in self._of_queue[job.queue].values())

    def may_take(self, job: Job, run: Run) -> bool:
        """Whether their queue's policy lets a job have the room of another one of that queue."""
        policy, other = self.config.queue(job.queue).preemption.within_queue, run.job
        if policy == "Never" or run.running.waited_s >= self._patience_s:
            return False
        if other.priority != job.priority:
            return other.priority < job.priority
        return policy == "LowerOrNewerEqualPriority" and other.submitted_at > job.submitted_at

    def _note_size(self, run: Run) -> None:
        if run.job.id not in self._of_queue[run.job.queue]:
            self._of_queue[run.job.queue][run.job.id] = run
            self._priorities[run.job.queue][run.job.priority] += 1
            self._outside.pop(run.job.queue, None)
        if run.running.size:
            self.below_wish[run.job.id] = None
        else:
            self.below_wish.pop(run.job.id, None)

    def _forget(self, run: Run) -> None:
        del self.runs[run.job.id], self._of_queue[run.job.queue][run.job.id]
        self._outside.pop(run.job.queue, None)
        priorities = self._priorities[run.job.queue]
        priorities[run.job.priority] -= 1
        if not priorities[run.job.priority]:
            del priorities[run.job.priority]
        self.below_wish.pop(run.job.id, None)

    def end(self, run: Run) -> None:
        """A job is gone, or gives up its plan."""
        if run.is_planned:
            apart(self.planned_NR, run.kept)
        self._soften(run)
        apart(self.left_NR, run.kept, 1)
        apart(self.free_NR, run.held, 1)
        self.tree.remove(run.job.queue, run.amounts)
        self._forget(run)
        self.num_changes += 1
        self.num_releases += 1

    def firm_up(self, run: Run) -> bool:
        """Bring a job that runs on borrowed terms into its queue's guarantee, where it is, if there is left.

        Returns:
            Whether it is in it now.
        """
        job, number = run.job, run.number
        if run.firm is not None or number is None or run.running.step is not None or run.is_planned:
            return run.firm is not None
        if self.guarantees.has(job.queue):
            cells = self.guarantees.cover(job.queue, job.sizes[number], run.running.placed)
            if cells is not None:
                self.guarantees.hold(job.queue, job.sizes[number], cells)
                run.firm, run.running = number, replace(run.running, cells=cells)
                self._outside.pop(job.queue, None)
        else:
            self._promise(run)
        return run.firm is not None

    def grow(self, run: Run, number: int, placed: Placed, now: float, ends_at: float | None) -> None:
        """Give a running job more room beside what it has."""
        size = run.job.sizes[number]
        self.num_changes += 1
        apart(self.left_NR, run.kept, 1)
        apart(self.free_NR, run.held, 1)
        run.held = run.kept = self.room.held(size.groups, placed)
        apart(self.left_NR, run.kept)
        apart(self.free_NR, run.held)
        self._count(run, self.counted(run.job.queue, size))
        run.running = replace(run.running, size=number, placed=placed, changed_at=now, ends_at=ends_at)
        self._note_size(run)


def firm_number(job: Job, cells: Placed) -> int | None:
    """The size that cells are for."""
    for number, size in enumerate(job.sizes):
        if all(len(cells.get(stage, ())) == count for stage, count in size.counts().items()):
            return number
    return None
