"""What is said of jobs that wait or are refused, and when they would start."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable

from rayrec.jobs.job import Job, Placed
from rayrec.jobs.lines import Entry
from rayrec.jobs.quota import UNITS
from rayrec.jobs.room import apart
from rayrec.jobs.state import ClusterState, Run
from rayrec.pipelines.cluster.placement import NoNodeError, assign

SHOWN_NODES = 3
"""That a reason lists."""


class Lack:
    """What is missing on the nodes, of room that is free now, for jobs of each shape."""

    def __init__(self, state: ClusterState) -> None:
        self._nodes = state.free_nodes()
        num_out = len(state.room.nodes) - len(self._nodes)
        self._beside = f" beside {num_out} draining or quarantined nodes" if num_out else ""
        self._known: dict[int, str | None] = {}

    def of(self, entry: Entry) -> str | None:
        """None: the least size of the job has room."""
        if entry.shape not in self._known:
            try:
                assign(entry.job.sizes[-1].groups, self._nodes)
                self._known[entry.shape] = None
            except NoNodeError as error:
                self._known[entry.shape] = f"{error}{self._beside}"
        return self._known[entry.shape]


def why_waits(
    state: ClusterState,
    entry: Entry,
    lack: str | None,
    place: int,
    penalty: float,
    kept: tuple[str, float] | None,
    now: float,
) -> str:
    """For what a job waits, and why.

    Args:
        lack: what is missing on the nodes for its least size.
        place: how many of its queue are before it.
        penalty: until when it takes no room from others.
        kept: a job for which room is kept, and when it has it.
    """
    job = entry.job
    size = job.sizes[-1]
    amounts = state.counted(job.queue, size)
    if job.not_before is not None and now < job.not_before:
        return f"is reserved for a time in {job.not_before - now:.0f} s"
    ahead = f"; {place} of its queue are before it" if place else ""
    if now < penalty and not entry.line.borrows:
        return (
            f"failed {entry.waiting.num_fast_failures} times soon after it started, so it takes no room from "
            f"others for {penalty - now:.0f} s{ahead}"
        )
    if not state.tree.fits(job.queue, amounts):
        missing = [name for name, amount in amounts.items() if state.tree.available(job.queue, name) < amount]
        which = ", ".join(
            f"{amounts[name] / UNITS:g} {name} of which queue {job.queue!r} may use "
            f"{state.tree.available(job.queue, name) / UNITS:g} more now"
            for name in missing
        )
        return f"asks for {which}; waits until jobs of its cohort end or give back what they borrow{ahead}"
    if lack is not None:
        whose = ""
        if state.guarantees.has(job.queue) and not entry.line.borrows:
            whose = "; the cells of its queue are in use by its own jobs"
        return f"{lack}; waits until other jobs end{whose}{ahead}"
    if job.within and state.room.place(size, job.within, state.free_and_left()) is None:
        return f"there is not room for all of its actors with one value of {job.within!r}{ahead}"
    if kept is not None:
        first, time = kept
        when = "" if math.isinf(time) else f" in {time - now:.0f} s"
        return f"would delay job {first}, which is to have this room{when}{ahead}"
    return f"is looked at again when the next job ends{ahead}"


def why_planned(state: ClusterState, run: Run, now: float) -> str:
    """Who has to leave before a planned job starts, or when its time comes."""
    names = names_of(run.running.placed, state)
    leaving = sorted(
        other.job.id
        for other in state.runs.values()
        if other.running.step is not None and set(other.held) & set(run.kept)
    )
    if not leaving and run.job.not_before is not None and now < run.job.not_before:
        return f"has its room on {names}, and starts at its time, in {run.job.not_before - now:.0f} s"
    who = f"{', '.join(leaving[:SHOWN_NODES])}" if leaving else "those who are there"
    more = f" and {len(leaving) - SHOWN_NODES} more" if len(leaving) > SHOWN_NODES else ""
    return f"has its room on {names}, and waits until {who}{more} have given it back"


def expected_starts(state: ClusterState, entries: Iterable[Entry], now: float, most: int) -> dict[str, float]:
    """If all jobs end as expected and start in order; without those of which it is not known.

    A queue of which the first job has no known start says nothing of those behind it. Jobs whose time has not
    come are left out: their room is kept for then, and others do not wait for it.
    """
    tree, queues = state.tree, [queue.name for queue in state.config.queues]
    usage = {name: tree.usage(name) for name in queues}
    ends = sorted(
        (max(now, run.running.ends_at), number, run.kept, run.job.queue, run.amounts)
        for number, run in enumerate(state.runs.values())
        if run.running.ends_at is not None and not run.is_planned
    )
    due = [entry for entry in entries if entry.job.not_before is None or entry.job.not_before <= now]
    order = sorted(due, key=lambda entry: (entry.line.borrows, entry.key))
    left_NR, time, number = state.left_NR.copy(), now, len(state.runs)
    expected: dict[str, float] = {}
    unknown: set[str] = set()
    try:
        for entry in order[:most]:
            job = entry.job
            if job.queue in unknown:
                continue
            size = job.sizes[-1]
            amounts = state.counted(job.queue, size)
            gang = state.room.gang(size, job.within)
            assert gang is not None
            placed: Placed | None = None
            at, later_NR, gone = time, left_NR.copy(), 0
            while True:
                while gone < len(ends) and ends[gone][0] <= at:
                    apart(later_NR, ends[gone][2], 1)
                    tree.remove(*ends[gone][3:])
                    gone += 1
                if tree.fits(job.queue, amounts) and state.room.may_fit(gang, later_NR):
                    placed = state.room.place(size, job.within, later_NR)
                if placed is not None or gone == len(ends):
                    break
                at = ends[gone][0]
            if placed is None:
                for *_, queue, given in ends[:gone]:
                    tree.add(queue, given)
                unknown.add(job.queue)
                continue
            del ends[:gone]
            expected[job.id] = time = at
            held = state.room.held(size.groups, placed)
            left_NR = later_NR
            apart(left_NR, held)
            tree.add(job.queue, amounts)
            if (ends_at := entry.waiting.ends_at(time, len(job.sizes) - 1)) is not None:
                number += 1
                bisect.insort(ends, (ends_at, number, held, job.queue, amounts), key=lambda end: end[:2])
    finally:
        for name in queues:
            tree.remove(name, tree.usage(name))
            tree.add(name, usage[name])
    return expected


def why_beyond_quota(state: ClusterState, job: Job) -> str:
    """Why not even the least size of a job is within what its queue may ever use."""
    amounts = state.counted(job.queue, job.sizes[-1])
    for name, amount in sorted(amounts.items()):
        most = state.tree.potential(job.queue, name)
        if name not in state.config.queue(job.queue).all_quotas:
            return (
                f"it asks for {amount / UNITS:g} {name}, of which queue {job.queue!r} has no quota; submit "
                "it to another queue, or give this one a quota of it"
            )
        if amount > most:
            return (
                f"it asks for {amount / UNITS:g} {name} at least, and queue {job.queue!r} may use "
                f"{most / UNITS:g} at most, all that it can borrow included; ask for less, or raise its "
                "quota or borrowing limit"
            )
    raise AssertionError("one of them does not fit")


def amounts_in_words(amounts: dict[str, int]) -> str:
    return ", ".join(f"{amount / UNITS:g} {name}" for name, amount in sorted(amounts.items())) or "nothing"


def names_of(placed: Placed, state: ClusterState) -> str:
    nodes = list(dict.fromkeys(node for members in placed.values() for node in members))
    index = state.room.index
    shown = [state.room.nodes[index[node]].name if node in index else node for node in nodes[:SHOWN_NODES]]
    more = len(nodes) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
