"""Operations on two streams of a card, computation and communication, and when each of them runs.

    computation     lookup ─► layer 1 ─► layer 2 ──────────► layer 3 ─► ...
    communication             └► all-to-all ─────► ▲ needs it

An operation starts when its stream is free and what it depends on is done; each stream keeps its order.
Communication that runs while the computation stream stands still is exposed.

Sources: the two-stream schedule is that of MAD-Max (Hsia et al., ISCA'24, arXiv:2310.02784); efficiency that
depends on the size of an operation, and the cost of a collective, latency + bytes (1 + offset / n) / rate,
are those of Calculon (Isaev et al., SC'23).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stream = Literal["compute", "communicate"]


@dataclass(frozen=True)
class Operation:
    """One piece of work of a step."""

    name: str
    stream: Stream
    seconds: float
    after: tuple[str, ...] = ()
    """Names of operations that have to be done; those that no operation has are left out."""


@dataclass(frozen=True)
class Timeline:
    """When operations ran."""

    seconds: float
    """Until the last one is done."""
    compute_s: float
    """Sum of the computation stream's work."""
    communicate_s: float

    @property
    def exposed_s(self) -> float:
        """Time that the computation stream stands still."""
        return self.seconds - self.compute_s

    @property
    def exposed_share(self) -> float:
        """Of the communication, what is not hidden; 0 where there is none."""
        return self.exposed_s / self.communicate_s if self.communicate_s else 0.0


def schedule(operations: Sequence[Operation]) -> Timeline:
    """Run operations, given in the order of their streams; an operation waits only for earlier ones."""
    free: dict[Stream, float] = {"compute": 0.0, "communicate": 0.0}
    busy: dict[Stream, float] = {"compute": 0.0, "communicate": 0.0}
    ends: dict[str, float] = {}
    for operation in operations:
        start = max([free[operation.stream], *(ends[name] for name in operation.after if name in ends)])
        ends[operation.name] = free[operation.stream] = start + operation.seconds
        busy[operation.stream] += operation.seconds
    return Timeline(max(free.values()), busy["compute"], busy["communicate"])


@dataclass(frozen=True)
class Rate:
    """What a resource reaches, by the size of an operation."""

    peak: float
    """Units per second."""
    achieved: tuple[tuple[float, float], ...]
    """(size from which it holds, share of the peak), largest first; the last one holds for all smaller."""

    @classmethod
    def flat(cls, peak: float, share: float = 1.0) -> Rate:
        """The same for every size."""
        return cls(peak, ((0.0, share),))

    def seconds(self, size: float) -> float:
        """Of an operation of so many units."""
        if size <= 0:
            return 0.0
        share = next((share for least, share in self.achieved if size >= least), self.achieved[-1][1])
        return size / (self.peak * share)


@dataclass(frozen=True)
class Collective:
    """A kind of exchange between n ranks: latency + scalar * bytes * (1 + offset / n) / rate."""

    bytes_per_s: float
    latency_s: float = 0.0
    scalar: float = 1.0
    """Times the bytes of an operation that pass one rank's link."""
    offset: float = 0.0

    def seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Of an exchange of so many bytes, as large as one rank's buffer is."""
        if num_ranks < 2:
            return 0.0
        return self.latency_s + self.scalar * num_bytes * (1 + self.offset / num_ranks) / self.bytes_per_s


def ring_all_reduce_s(num_bytes: float, num_ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """Sum a buffer over ranks in a ring: 2 (n - 1) / n of it pass every link, in 2 (n - 1) messages."""
    if num_ranks < 2:
        return 0.0
    return 2 * (num_ranks - 1) * (num_bytes / num_ranks / bytes_per_s + latency_s)


def tree_all_reduce_s(num_bytes: float, num_ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """Sum a buffer over ranks by a double binary tree: twice the buffer, and 2 log2 n messages one after
    the other."""
    if num_ranks < 2:
        return 0.0
    return 2 * num_bytes / bytes_per_s + 2 * (num_ranks - 1).bit_length() * latency_s


def all_reduce_s(num_bytes: float, num_ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """Of the faster one of ring and tree, as collective libraries choose."""
    ring = ring_all_reduce_s(num_bytes, num_ranks, bytes_per_s, latency_s)
    return min(ring, tree_all_reduce_s(num_bytes, num_ranks, bytes_per_s, latency_s))
