"""What the queue knows of a job, and what it decides about it.

Waiting ──Start──► Running ──Shrink, Grow──► Running ──Stop──► Waiting, from its snapshot
   │ ▲                ▲
   │ └ Wait           │ the room is free
   ├──Reserve─────────┘ its room is known, and others leave it
   └──Refuse
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rayrec.jobs.quota import in_units
from rayrec.pipelines.cluster.placement import ActorGroup
from rayrec.platform.devices import ACCELERATOR_RESOURCES
from rayrec.platform.errors import InputError

JobKind = Literal["train", "service", "other"]

Placed = Mapping[str, tuple[str, ...]]
"""By stage, the node id of every member; or, as a guarantee, the id of the cell."""


@dataclass(frozen=True)
class Size:
    """One way to run a job: a gang, all of which is there or nothing."""

    groups: tuple[ActorGroup, ...]
    speed: float = 1.0
    """Of the job's progress, where the first size has 1."""

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The same for all sizes that ask for the same."""
        return tuple(
            (
                group.stage,
                group.count,
                tuple(sorted(group.resources.items())),
                tuple(sorted(group.labels.items())),
                group.strategy,
            )
            for group in self.groups
        )

    @cached_property
    def amounts(self) -> dict[str, int]:
        """What all actors ask for together, in units."""
        sums: Counter[str] = Counter()
        for group in self.groups:
            for name, amount in in_units(group.resources).items():
                sums[name] += amount * group.count
        return {name: amount for name, amount in sums.items() if amount}

    @cached_property
    def weight(self) -> int:
        """Its cards, or its CPUs if it asks for none, in units."""
        cards = sum(amount for name, amount in self.amounts.items() if name in ACCELERATOR_RESOURCES)
        return cards or self.amounts.get("CPU", 0)

    def members(self) -> Iterator[tuple[ActorGroup, int]]:
        for group in self.groups:
            for member in range(group.count):
                yield group, member

    def counts(self) -> dict[str, int]:
        return {group.stage: group.count for group in self.groups}


@dataclass(frozen=True)
class Job:
    """What was submitted."""

    id: str
    queue: str
    sizes: tuple[Size, ...]
    """From what is wished for down to the least: each has no more actors of any stage than the one before."""
    submitted_at: float
    """Seconds, of the clock of all other times here."""
    priority: int = 0
    kind: JobKind = "other"
    expected_s: float | None = None
    """Declared or measured, at the first size; None: unknown."""
    may_stop: bool = True
    """It goes on from a snapshot later. A service that has to answer is only made smaller."""
    within: str | None = None
    """Label of nodes, such as `rack`: all of the gang is on nodes with one value of it."""
    not_before: float | None = None
    """A reservation: it starts then, and its room is kept for it."""

    def check(self) -> None:
        """
        Raises:
            InputError: its sizes are no way down.
        """
        if not self.sizes or not all(size.groups for size in self.sizes):
            raise InputError(f"job {self.id}: it has to have at least one size with at least one actor")
        for larger, smaller in zip(self.sizes, self.sizes[1:], strict=False):
            counts = larger.counts()
            if any(count > counts.get(stage, 0) for stage, count in smaller.counts().items()):
                raise InputError(
                    f"job {self.id}: its sizes must go from the largest to the least, and "
                    f"{smaller.counts()} comes after {counts}"
                )

    @property
    def waits_since(self) -> float:
        """Before its time, a job does not wait."""
        return self.submitted_at if self.not_before is None else max(self.submitted_at, self.not_before)

    @property
    def order(self) -> tuple[float, float, str]:
        """Within its queue: priority, then age."""
        return -self.priority, self.submitted_at, self.id

    def seconds(self, size: int) -> float | None:
        return None if self.expected_s is None else self.expected_s / self.sizes[size].speed


@dataclass(frozen=True)
class Plan:
    """Room that a waiting job has been given, and that others are about to leave."""

    size: int
    placed: Placed
    since: float
    cells: Placed | None = None
    """Of its queue's guarantee; None: it has to give the room back if somebody is guaranteed it."""
    firm_size: int | None = None
    """The size that `cells` are for; None: all of it, if there are any."""


@dataclass(frozen=True)
class Waiting:
    """A job that does not run."""

    job: Job
    num_passed: int = 0
    """Jobs that came later and started before it, on room that it needs."""
    plan: Plan | None = None
    left_s: float | None = None
    """Of `expected_s`, if it ran before; None: all of it."""
    num_fast_failures: int = 0
    """Attempts in a row that failed soon after they started."""
    failed_at: float | None = None
    """The last of them."""
    ran_s: float = 0.0
    """Time in which it had room before: that was no waiting."""

    @property
    def since(self) -> float:
        """When it would have begun to wait, had it waited without a break."""
        return self.job.waits_since + self.ran_s

    def ends_at(self, now: float, size: int) -> float | None:
        left = self.job.expected_s if self.left_s is None else self.left_s
        return None if left is None else now + left / self.job.sizes[size].speed


@dataclass(frozen=True)
class Step:
    """What a running job is told to do, and has not finished."""

    size: int | None
    """None: stop, at a snapshot."""
    placed: Placed
    """What it keeps: the first members of every stage."""
    for_job: str
    cells: Placed | None = None


@dataclass(frozen=True)
class Running:
    """A job that has room."""

    job: Job
    size: int
    placed: Placed
    started_at: float
    cells: Placed | None = None
    """The cells of its queue's guarantee that it is in; may be fewer members than `placed` has."""
    ends_at: float | None = None
    """As expected now; None: unknown."""
    lost_s: float = 0.0
    """Seconds of work that stopping it now would lose: since its last snapshot."""
    changed_at: float | None = None
    """When its size was last changed."""
    num_shrunk: int = 0
    step: Step | None = None
    ran_s: float = 0.0
    """As of `Waiting`: in earlier attempts, that had to leave or were lost."""

    @property
    def waited_s(self) -> float:
        """For its room, the times together if it had to leave before."""
        return self.started_at - self.job.waits_since - self.ran_s


@dataclass(frozen=True)
class Decision:
    """What is to be done about one job, and why, in one sentence."""

    job_id: str
    reason: str


@dataclass(frozen=True)
class Start(Decision):
    size: int
    placed: Placed
    cells: Placed | None
    borrows: bool
    """Its queue uses more than its guarantee then, so that this job may have to give room back."""
    ends_at: float | None


@dataclass(frozen=True)
class Reserve(Decision):
    """Its room is known; it starts when those who are there have left."""

    plan: Plan


@dataclass(frozen=True)
class Shrink(Decision):
    """Go on with fewer actors: a training from a snapshot, a service with fewer replicas."""

    size: int
    placed: Placed
    cells: Placed | None
    for_job: str


@dataclass(frozen=True)
class Stop(Decision):
    """Take a snapshot, stop, and wait again."""

    for_job: str


@dataclass(frozen=True)
class Grow(Decision):
    """Go on with more actors; or, at the same size, only be in the cells of its queue from now on."""

    size: int
    placed: Placed
    """Those who are there stay where they are."""
    cells: Placed | None


@dataclass(frozen=True)
class Refuse(Decision):
    """It could never run here."""


@dataclass(frozen=True)
class Wait(Decision):
    starts_at: float | None
    """As expected now; None: unknown."""
    num_passed: int
