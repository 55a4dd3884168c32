"""Kueue's arithmetic of quotas: what a queue may use now, what of that is borrowed, and its fair share.

    cohort (root)        subtree quota: its own, and what its children may lend
      ├─ cohort          usage: what its children use beyond what they keep for themselves
      │    └─ queue
      └─ queue           subtree quota: nominal; usage: all that its jobs hold

Source: kubernetes-sigs/kueue, `pkg/cache/scheduler/{resource_node,fair_sharing}.go` (available, usage,
dominant resource share), `pkg/scheduler/fair_sharing_iterator.go` (who is next), proposals 79 (hierarchical
cohorts) and 1714 (fair sharing). Amounts are whole numbers of the smallest share that Ray counts, so that
sums are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import total_ordering

from rayrec.jobs.queues import CohortConfig, QueueConfig, QueuesConfig, ResourceQuota
from rayrec.pipelines.cluster.placement import SMALLEST_SHARE
from rayrec.platform.errors import InputError

UNITS = round(1 / SMALLEST_SHARE)
"""Of one CPU or card."""

Amounts = Mapping[str, int]
"""By Ray's name of the resource, in units."""


def units(amount: float) -> int:
    """In units, rounded as Ray does."""
    return round(amount * UNITS)


def in_units(amounts: Mapping[str, float]) -> dict[str, int]:
    return {name: units(amount) for name, amount in amounts.items()}


@total_ordering
@dataclass(frozen=True, eq=False)
class FairShare:
    """The dominant resource share of a queue or cohort: what it borrows, of what it could, over its weight.

    The smaller one gets what is free; from the larger one is taken. Shares of weight 0 are larger than all
    others.
    """

    ratio: float
    """Of the resource of which most is borrowed, in thousandths of what can be lent; not weighted."""
    weight: float
    resource: str = ""
    borrows: bool = False

    @property
    def value(self) -> float:
        """Weighted, in thousandths."""
        if self.ratio == 0:
            return 0.0
        return math.inf if self.weight == 0 else self.ratio / self.weight

    def _key(self) -> tuple[float, float]:
        return self.value, self.ratio if math.isinf(self.value) else 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FairShare) and self._key() == other._key()

    def __lt__(self, other: FairShare) -> bool:
        return self._key() < other._key()

    __hash__ = None  # type: ignore[assignment]


@dataclass
class _Quota:
    nominal: int
    borrowing_limit: int | None
    lending_limit: int | None


@dataclass
class _Entry:
    """A queue or cohort in the tree."""

    name: str
    parent: _Entry | None
    weight: float
    quotas: dict[str, _Quota]
    children: list[_Entry] = field(default_factory=list)
    subtree: dict[str, int] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    """What the lending limit keeps from the parent."""
    potentials: dict[str, int] = field(default_factory=dict)
    """What was computed of them: they depend on settings alone."""

    def up(self) -> Iterator[_Entry]:
        """Its cohorts, from the nearest to the root."""
        entry = self.parent
        while entry is not None:
            yield entry
            entry = entry.parent

    def borrowing_limit(self, resource: str) -> int | None:
        quota = self.quotas.get(resource)
        return None if quota is None else quota.borrowing_limit

    def sum_up(self) -> None:
        """Children first."""
        self.subtree = {name: quota.nominal for name, quota in self.quotas.items()}
        for child in self.children:
            child.sum_up()
            for name, amount in child.subtree.items():
                self.subtree[name] = self.subtree.get(name, 0) + amount - child.kept.get(name, 0)
        self.kept = {
            name: max(0, self.subtree[name] - quota.lending_limit)
            for name, quota in self.quotas.items()
            if quota.lending_limit is not None
        }

    def left_here(self, resource: str) -> int:
        """Of what is kept from the parent."""
        return max(0, self.kept.get(resource, 0) - self.usage.get(resource, 0))

    def available(self, resource: str) -> int:
        """Less than 0 where more was given than there is."""
        if self.parent is None:
            return self.subtree.get(resource, 0) - self.usage.get(resource, 0)
        over = self.parent.available(resource)
        if (limit := self.borrowing_limit(resource)) is not None:
            kept = self.kept.get(resource, 0)
            lent = self.subtree.get(resource, 0) - kept
            over = min(over, lent - max(0, self.usage.get(resource, 0) - kept) + limit)
        return self.left_here(resource) + over

    def potential(self, resource: str) -> int:
        if resource not in self.potentials:
            most = self.subtree.get(resource, 0)
            if self.parent is not None:
                limit = self.borrowing_limit(resource)
                over = self.kept.get(resource, 0) + self.parent.potential(resource)
                most = over if limit is None else min(most + limit, over)
            self.potentials[resource] = most
        return self.potentials[resource]

    def add(self, resource: str, amount: int) -> None:
        here = self.left_here(resource)
        self.usage[resource] = self.usage.get(resource, 0) + amount
        if self.parent is not None and amount > here:
            self.parent.add(resource, amount - here)

    def remove(self, resource: str, amount: int) -> None:
        above = self.usage.get(resource, 0) - self.kept.get(resource, 0)
        self.usage[resource] = self.usage.get(resource, 0) - amount
        if self.parent is not None and above > 0:
            self.parent.remove(resource, min(amount, above))

    def within(self, resources: Sequence[str]) -> bool:
        """Whether it uses no more than its own of all of them."""
        return all(self.subtree.get(name, 0) >= self.usage.get(name, 0) for name in resources)

    def share(self, more: Amounts | None = None) -> FairShare:
        """With `more` in use than there is."""
        if self.parent is None:
            return FairShare(0.0, self.weight)
        ratio, resource, borrows = 0.0, "", False
        for name in sorted(self.subtree):
            amount = self.usage.get(name, 0) + (more.get(name, 0) if more else 0) - self.subtree[name]
            if amount <= 0:
                continue
            borrows = True
            lendable = self.parent.potential(name)
            if lendable > 0 and amount * 1000 / lendable > ratio:
                ratio, resource = amount * 1000 / lendable, name
        return FairShare(ratio, self.weight, resource, borrows)


@dataclass(frozen=True)
class Candidate:
    """The first job of a queue, as `QuotaTree.next_of` compares it."""

    queue: str
    amounts: Amounts
    priority: int
    since: float


@dataclass(frozen=True)
class ReclaimRight:
    """What a queue may take from another."""

    queue: str
    """The one from which it is taken."""
    by_tree: bool
    """Its subtree's own quota is used by the other, so that priorities do not matter for borrowing."""
    below: tuple[str, ...]
    """Cohorts under the nearest common one, which have to borrow, too."""


class QuotaTree:
    """Queues and cohorts with what they have and use; what is in use is added and removed."""

    def __init__(self, config: QueuesConfig) -> None:
        settings = {cohort.name: cohort for cohort in config.cohorts}
        parents = config.parents()
        self._cohorts: dict[str, _Entry] = {}
        self._queues: dict[str, _Entry] = {}
        self._config = {queue.name: queue for queue in config.queues}

        def cohort(name: str | None) -> _Entry | None:
            if name is None:
                return None
            if name not in self._cohorts:
                self._cohorts[name] = _entry(
                    settings.get(name) or CohortConfig(name=name), cohort(parents[name])
                )
            return self._cohorts[name]

        for name in parents:
            cohort(name)
        for queue in config.queues:
            self._queues[queue.name] = _entry(queue, cohort(queue.cohort))
        self._roots = [
            entry for entry in (*self._cohorts.values(), *self._queues.values()) if entry.parent is None
        ]
        for root in self._roots:
            root.sum_up()

    def counted(self, queue: str, amounts: Amounts) -> dict[str, int]:
        """The part of what a job asks for that its queue counts."""
        config = self._config[queue]
        return {name: amount for name, amount in amounts.items() if amount > 0 and config.counts(name)}

    def usage(self, queue: str) -> dict[str, int]:
        return dict(self._queues[queue].usage)

    def nominal(self, queue: str) -> dict[str, int]:
        return dict(self._queues[queue].subtree)

    def available(self, queue: str, resource: str) -> int:
        """What it may use beyond what it uses, borrowing included; 0 where too much was given before."""
        return max(0, self._queues[queue].available(resource))

    def potential(self, queue: str, resource: str) -> int:
        """The most that it may ever use: what is there while nobody else uses anything."""
        return self._queues[queue].potential(resource)

    def lendable(self, cohort: str, resource: str) -> int:
        """What a cohort's members share when all of it is unused."""
        return self._cohorts[cohort].potential(resource)

    def fits(self, queue: str, amounts: Amounts) -> bool:
        """Whether there is quota for all of it, borrowed or not."""
        entry = self._queues[queue]
        return all(amount <= max(0, entry.available(name)) for name, amount in amounts.items())

    def could_fit(self, queue: str, amounts: Amounts) -> bool:
        """Whether there would be, if nobody used anything. What a queue does not name, it has none of."""
        entry = self._queues[queue]
        return all(
            name in entry.quotas and amount <= entry.potential(name) for name, amount in amounts.items()
        )

    def could_fit_beside(self, queue: str, amounts: Amounts) -> bool:
        """Whether there would be, beside what the queue itself uses, if nobody else used anything."""
        entry = self._queues[queue]
        return all(
            amount + entry.usage.get(name, 0) <= entry.potential(name) for name, amount in amounts.items()
        )

    def borrows(self, queue: str, amounts: Amounts | None = None) -> bool:
        """Whether it uses more than its nominal quota of any resource, or would with `amounts`, of theirs."""
        entry = self._queues[queue]
        names = entry.usage if amounts is None else amounts
        return any(
            entry.usage.get(name, 0) + (amounts or {}).get(name, 0) > entry.subtree.get(name, 0)
            for name in names
        )

    def borrows_any_of(self, queue: str, resources: Sequence[str]) -> bool:
        """Whether it uses more than its nominal quota of one of these."""
        return not self._queues[queue].within(resources)

    def add(self, queue: str, amounts: Amounts) -> None:
        for name, amount in amounts.items():
            self._queues[queue].add(name, amount)

    def remove(self, queue: str, amounts: Amounts) -> None:
        for name, amount in amounts.items():
            self._queues[queue].remove(name, amount)

    @contextmanager
    def with_more(self, queue: str, amounts: Amounts) -> Iterator[None]:
        """Inside the block, the queue uses `amounts` more."""
        self.add(queue, amounts)
        try:
            yield
        finally:
            self.remove(queue, amounts)

    def share(self, queue: str) -> FairShare:
        return self._queues[queue].share()

    def cohort_share(self, cohort: str) -> FairShare:
        return self._cohorts[cohort].share()

    def next_of(self, candidates: Sequence[Candidate]) -> Candidate:
        """The one to be admitted next: in each cohort, from the queues up, that of the least share.

        Shares are those after admission. Between equal ones and between trees, priority decides, then age.
        """
        by_queue = {candidate.queue: candidate for candidate in candidates}
        shares: dict[tuple[int, str], FairShare] = {}
        for name, candidate in by_queue.items():
            entry = self._queues[name]
            shares[id(entry), name] = entry.share(candidate.amounts)
            if entry.parent is None or entry.parent.parent is None:
                continue  # a root's share is nothing
            with self.with_more(name, candidate.amounts):
                for over in entry.up():
                    shares[id(over), name] = over.share()

        def best(entry: _Entry) -> Candidate | None:
            if not entry.children:
                return by_queue.get(entry.name) if self._queues.get(entry.name) is entry else None
            inside = [(child, found) for child in entry.children if (found := best(child)) is not None]
            if not inside:
                return None
            return min(
                inside,
                key=lambda pair: (
                    shares[id(pair[0]), pair[1].queue],
                    -pair[1].priority,
                    pair[1].since,
                    pair[1].queue,
                ),
            )[1]

        found = [each for root in self._roots if (each := best(root)) is not None]
        return min(found, key=lambda each: (-each.priority, each.since, each.queue))

    def reclaim_rights(self, queue: str, amounts: Amounts, resources: Sequence[str]) -> list[ReclaimRight]:
        """From which queues a job may take, of `resources`, before priorities are looked at.

        Those that use more than their nominal quota, in cohorts that do. Source: Kueue's classical
        preemption, `pkg/scheduler/preemption/classical/hierarchical_preemption.go`.

        Args:
            amounts: what the job asks for.
            resources: those of them that are missing.
        """
        own = self._queues[queue]
        fits, rest = _fit_in(own, amounts)
        rights: list[ReclaimRight] = []
        seen: _Entry = own

        def collect(entry: _Entry, below: tuple[str, ...]) -> None:
            for child in entry.children:
                if child is seen or child.within(resources):
                    continue
                if self._queues.get(child.name) is child:
                    rights.append(ReclaimRight(child.name, fits, below))
                else:
                    collect(child, (*below, child.name))

        for over in own.up():
            collect(over, ())
            here, rest = _fit_in(over, rest)
            fits = fits or here
            seen = over
        return rights

    def still_borrows(self, right: ReclaimRight, resources: Sequence[str]) -> bool:
        """Whether more may be taken by this right, after what was removed since."""
        return not self._queues[right.queue].within(resources) and not any(
            self._cohorts[name].within(resources) for name in right.below
        )

    def check_holds(self) -> None:
        """Refuse settings under which less is there than is in use.

        Raises:
            InputError: names the queue or cohort, what it may have, and what its jobs hold.
        """
        for name, entry in self._queues.items():
            for resource, used in sorted(entry.usage.items()):
                limit = entry.potential(resource)
                if used > limit:
                    raise InputError(
                        f"queue {name!r}: its jobs hold {used / UNITS:g} {resource}, and with these settings "
                        f"it may have {limit / UNITS:g} at most; stop some of them first, or leave it as "
                        "much"
                    )
        for name, entry in self._cohorts.items():
            for resource, used in sorted(entry.usage.items()):
                limit = entry.potential(resource)
                if used > limit:
                    raise InputError(
                        f"cohort {name!r}: jobs of its queues hold {used / UNITS:g} {resource}, and with "
                        f"these settings there are {limit / UNITS:g}; stop some of them first, or leave it "
                        "as much"
                    )


def _entry(config: QueueConfig | CohortConfig, parent: _Entry | None) -> _Entry:
    def of(quota: ResourceQuota) -> _Quota:
        borrowing, lending = quota.borrowing_limit, quota.lending_limit
        return _Quota(
            units(quota.nominal),
            None if borrowing is None else units(borrowing),
            None if lending is None else units(lending),
        )

    quotas = config.all_quotas if isinstance(config, QueueConfig) else config.quotas
    entry = _Entry(config.name, parent, config.weight, {name: of(quota) for name, quota in quotas.items()})
    if parent is not None:
        parent.children.append(entry)
    return entry


def _fit_in(entry: _Entry, amounts: Amounts) -> tuple[bool, dict[str, int]]:
    """Whether amounts fit in a subtree's own quota, and what of them has to come from above."""
    fits = all(
        entry.subtree.get(name, 0) >= entry.usage.get(name, 0) + amount for name, amount in amounts.items()
    )
    return fits, {name: max(0, amount - entry.left_here(name)) for name, amount in amounts.items()}
