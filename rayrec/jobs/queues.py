"""Settings of queues and cohorts: who is guaranteed what, who may borrow, and from whom it is taken back.

The words and their meaning are Kueue's (kueue.sigs.k8s.io, concepts "Cluster Queue" and "Cohort"). New are
`cells`: a guarantee in shapes that fit on nodes. Resources have Ray's names: CPU, GPU, NPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rayrec.pipelines.cluster.placement import SMALLEST_SHARE, ActorGroup
from rayrec.platform.config import Config
from rayrec.platform.devices import ACCELERATOR_RESOURCES
from rayrec.platform.errors import InputError

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Kubernetes takes such names, so that the same queues can be handed to Kueue."""


class ResourceQuota(Config):
    """How much of one resource a queue or cohort has."""

    nominal: float = Field(default=0.0, ge=0)
    """The guarantee. Of a cohort: what it has beyond the sum of its queues, for all of them."""
    borrowing_limit: float | None = Field(default=None, ge=0)
    """The most that is borrowed from others of the cohort beyond `nominal`; None: whatever is unused."""
    lending_limit: float | None = Field(default=None, ge=0)
    """The most of `nominal` that others may borrow while it is unused; None: all of it."""


class Cell(Config):
    """One shape of a guarantee: so much on one node, so many times."""

    resources: dict[str, float]
    """What the cell has of each resource, on one node: one card, some, or all of a node's."""
    count: int = Field(default=1, ge=1)
    within: str | None = None
    """Label of nodes, such as `rack`: all `count` are on nodes with one value of it. None: anywhere."""
    labels: dict[str, str] = Field(default_factory=dict)
    """What the nodes have to have, as in `placement`."""

    @field_validator("resources")
    @classmethod
    def _has_something(cls, resources: dict[str, float]) -> dict[str, float]:
        if not resources or any(count <= 0 for count in resources.values()):
            raise ValueError(f"a cell's resources must be more than 0, got {resources}")
        return resources

    def group(self, stage: str, count: int = 1) -> ActorGroup:
        """The cell as actors that `assign` finds nodes for."""
        return ActorGroup(stage, "cells", count, self.resources, self.labels, "PACK")


class Preemption(Config):
    """From whom a job takes what it is guaranteed and does not find free."""

    reclaim_within_cohort: Literal["Never", "LowerPriority", "Any"] = "Any"
    """From jobs of other queues that have borrowed; Kueue's default is Never, which makes no guarantee."""
    within_queue: Literal["Never", "LowerPriority", "LowerOrNewerEqualPriority"] = "LowerPriority"
    """From jobs of its own queue; Kueue's default is Never."""
    borrow_within_cohort: Literal["Never", "LowerPriority"] = "Never"
    """Whether a job that has to borrow itself takes from borrowers of lower priority."""
    max_priority_threshold: int | None = None
    """With `borrow_within_cohort`: from no job above this priority."""

    @model_validator(mode="after")
    def _borrowing_needs_reclaim(self) -> Preemption:
        if self.borrow_within_cohort != "Never" and self.reclaim_within_cohort == "Never":
            raise ValueError(
                "borrow_within_cohort: LowerPriority needs reclaim_within_cohort: LowerPriority or Any, "
                "got Never"
            )
        if self.max_priority_threshold is not None and self.borrow_within_cohort == "Never":
            raise ValueError("max_priority_threshold needs borrow_within_cohort: LowerPriority, got Never")
        return self


class _Member(Config):
    """What queues and cohorts have in common."""

    name: str
    quotas: dict[str, ResourceQuota] = Field(default_factory=dict)
    """By Ray's name of the resource."""
    weight: float = Field(default=1.0, ge=0)
    """Of its fair share of what is borrowed; 0: it borrows only what nobody else wants."""

    @field_validator("name", "parent", "cohort", check_fields=False)
    @classmethod
    def _name_is_one(cls, name: str | None) -> str | None:
        if name is not None and not NAME.fullmatch(name):
            raise ValueError(
                f"a queue's or cohort's name must be lower-case letters, digits and '-', at most 63, got "
                f"{name!r}"
            )
        return name


class CohortConfig(_Member):
    """Queues that lend each other what they do not use."""

    parent: str | None = None
    """Cohort that it is part of."""


class QueueConfig(_Member):
    """A team's queue."""

    cohort: str | None = None
    """None: it neither borrows nor lends. A cohort without settings of its own needs no entry."""
    cells: tuple[Cell, ...] = ()
    """The guarantee in shapes; none: the guarantee is the numbers of `quotas`."""
    preemption: Preemption = Preemption()

    @model_validator(mode="after")
    def _lends_what_it_has(self) -> QueueConfig:
        # A cohort may lend more than its own quota: out of what its queues lend.
        for name, quota in self.all_quotas.items():
            if quota.lending_limit is not None and quota.lending_limit > quota.nominal:
                raise ValueError(
                    f"queue {self.name!r}: lending_limit of {name} must be at most its nominal quota of "
                    f"{quota.nominal:g}, got {quota.lending_limit:g}: nothing else can be lent"
                )
        return self

    @model_validator(mode="after")
    def _cells_are_the_quota(self) -> QueueConfig:
        """What the cells have is the nominal quota; other numbers beside it would be a second guarantee."""
        for name, count in self.cell_sums().items():
            quota = self.quotas.get(name)
            if quota is None or "nominal" not in quota.model_fields_set:
                continue
            # Three times a tenth is not three tenths to a computer.
            if abs(quota.nominal - count) >= SMALLEST_SHARE:
                raise ValueError(
                    f"queue {self.name!r}: its cells have {count:g} {name} and its nominal quota says "
                    f"{quota.nominal:g}; leave `nominal` out or make them equal"
                )
        return self

    def cell_sums(self) -> dict[str, float]:
        """What all cells have, by resource."""
        sums: Counter[str] = Counter()
        for cell in self.cells:
            for name, count in cell.resources.items():
                sums[name] += count * cell.count  # type: ignore[assignment]
        return dict(sums)

    @property
    def all_quotas(self) -> dict[str, ResourceQuota]:
        """Of every resource that is counted: with the cells' sums as nominal quota, if there are cells."""
        quotas = dict(self.quotas)
        for name, count in self.cell_sums().items():
            quotas[name] = quotas.get(name, ResourceQuota()).model_copy(update={"nominal": count})
        return quotas

    def counts(self, resource: str) -> bool:
        """Whether the queue limits a resource: what it names, and all kinds of accelerators.

        A queue that says nothing of CPUs does not count them; one that says nothing of a kind of cards
        has none.
        """
        return resource in self.quotas or resource in ACCELERATOR_RESOURCES or resource in self.cell_sums()


class QueuesConfig(Config):
    """All queues of a cluster."""

    queues: tuple[QueueConfig, ...] = ()
    cohorts: tuple[CohortConfig, ...] = ()

    @model_validator(mode="after")
    def _they_make_a_tree(self) -> QueuesConfig:
        _names_are_distinct("queue", self.queues)
        _names_are_distinct("cohort", self.cohorts)
        parents = self.parents()
        for name in sorted(parents):
            _no_cycle(name, parents)
        queues = [(queue, queue.cohort) for queue in self.queues]
        for member, over in [*queues, *((cohort, cohort.parent) for cohort in self.cohorts)]:
            for resource, quota in member.quotas.items():
                if over is None and (quota.borrowing_limit is not None or quota.lending_limit is not None):
                    raise ValueError(
                        f"{member.name!r}: {resource} has a borrowing or lending limit, and there is no "
                        "cohort to borrow from or lend to; give it one or leave the limit out"
                    )
        return self

    def parents(self) -> dict[str, str | None]:
        """Every cohort's parent, those without settings included."""
        parents = {cohort.name: cohort.parent for cohort in self.cohorts}
        named = [queue.cohort for queue in self.queues] + list(parents.values())
        return {**dict.fromkeys(filter(None, named)), **parents}

    def queue(self, name: str) -> QueueConfig:
        """
        Raises:
            InputError: there is none of this name.
        """
        for queue in self.queues:
            if queue.name == name:
                return queue
        known = ", ".join(sorted(queue.name for queue in self.queues)) or "none"
        raise InputError(
            f"there is no queue {name!r}; queues are: {known}; add it with `rayrec queue add {name}`"
        )


def _names_are_distinct(kind: str, members: Sequence[_Member]) -> None:
    twice = [name for name, count in Counter(member.name for member in members).items() if count > 1]
    if twice:
        raise ValueError(f"there are two settings of {kind} {twice[0]!r}; keep one of them")


def _no_cycle(start: str, parents: Mapping[str, str | None]) -> None:
    way = [start]
    while (parent := parents.get(way[-1])) is not None:
        way.append(parent)
        if parent == start:
            raise ValueError(
                f"cohorts must make a tree, and {' is part of '.join(map(repr, way))}; leave out one `parent`"
            )
        if len(way) > len(parents) + 1:  # a cycle further up, which is found from there
            return
