"""Room on a server for gradients that come before their turn in the sum of a step.

    trainer 7                                server, whose sum has trainers 0 to 2
    a small part ──────────────────────────► kept until its turn        in one half of the buffer
    a large one: is there room? ───waits───► until there is, or until it is its turn
             ◄── yes ─────────────────────┘                             in the other half
    the part ──────────────────────────────► kept until its turn

A part that has to wait stays with its trainer: sent, it would take the server's memory, or that of its node,
while it waits to be taken. Whose turn it is gets room however full the buffer is, and waits for nobody but
lower ranks, so every step goes on. That holds for several servers, too: a trainer sends to one after the
other, in the same order as all, and what it waits for there comes from lower ranks, which wait for lower
ones still.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rayrec.embeddings.shard.contributions import Part

DEFAULT_STEP_BUFFER = 4 * 2**30
"""Bytes of a server's buffer, where nothing else is said."""

_PARTS = 2
"""Of a step that a trainer may send: head and rest."""


class PartKey(NamedTuple):
    """One part of one trainer's contribution to a step."""

    step: int
    rank: int
    part: Part


def part_bytes_without_asking(max_bytes: int, num_trainers: int, max_staleness: int = 0) -> int | None:
    """Bytes of a part that a trainer may send to a server without asking for room; None: any.

    If all of them send all that they may, they fill half of the buffer.

    Args:
        max_bytes: of a server's buffer.
        num_trainers: or groups of them, that call the server.
        max_staleness: steps that a trainer may be ahead of its updates.
    """
    if num_trainers == 1:
        return None  # it is always its turn
    return max_bytes // 2 // (num_trainers * _PARTS * (2 + max_staleness))


class StepBuffer:
    """Which of the parts that trainers ask for may come. Not thread-safe.

    Args:
        max_bytes: of the whole buffer; those that ask share half of it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._room = max_bytes - max_bytes // 2
        self._asking: dict[PartKey, int] = {}
        self._queues: dict[tuple[int, bool], list[PartKey]] = {}
        """Heaps of those that ask: by step, and heads apart, which have a sum of their own."""
        self._granted: dict[PartKey, int] = {}
        self._granted_bytes = 0
        self.num_held_back = 0
        """Parts for which there was no room when they were asked for."""

    def ask(self, key: PartKey, num_bytes: int, is_turn: Callable[[PartKey], bool]) -> bool:
        """Whether a part may come now; otherwise `grant` will say so."""
        if key in self._granted:
            return True
        if key not in self._asking:
            self._asking[key] = num_bytes
            heapq.heappush(self._queues.setdefault((key.step, key.part is Part.HEAD), []), key)
            if key not in self.grant(is_turn):
                self.num_held_back += 1
        return key in self._granted

    def is_granted(self, key: PartKey) -> bool:
        return key in self._granted

    def grant(self, is_turn: Callable[[PartKey], bool]) -> list[PartKey]:
        """Parts that may come from now on: of the earliest steps first, then of the lowest ranks.

        Args:
            is_turn: whether a part goes into the sum as soon as it comes.
        """
        granted: list[PartKey] = []
        for queue in (self._queues[name] for name in sorted(self._queues)):
            while queue and (self._fits(self._asking[queue[0]]) or is_turn(queue[0])):
                key = heapq.heappop(queue)
                self._granted[key] = self._asking.pop(key)
                self._granted_bytes += self._granted[key]
                granted.append(key)
        self._queues = {name: queue for name, queue in self._queues.items() if queue}
        return granted

    def release(self, keys: Iterable[PartKey]) -> None:
        """Give back the room of parts that are in the sum; those that never asked had none."""
        for key in keys:
            self._granted_bytes -= self._granted.pop(key, 0)

    def clear(self) -> None:
        """Forget all parts: their steps will not go on."""
        self._asking, self._queues, self._granted, self._granted_bytes = {}, {}, {}, 0

    def _fits(self, num_bytes: int) -> bool:
        return self._granted_bytes + num_bytes <= self._room
