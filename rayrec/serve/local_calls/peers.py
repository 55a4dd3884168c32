"""Chooses who answers a call: a replica of the same node by its socket, or any other one by the way around.

    call ─► two of the replicas, one of this node ─► fewer calls of ours under way? ─► its socket ─► answer
               │                                       └ the other one is elsewhere ─► way around
               ├ none of this node is known ───────────────────────────────────────► way around
               └ full, leaving, or gone before it began, or gone and repeatable ───► way around

    who there is ◄─ learn(): at the first call, every few seconds while there are calls, and when one is gone

The way around is Ray Serve's handle, which waits where all replicas are full and knows those of all nodes.
What a caller knows of the load are its own calls: "power of two choices" needs no more to keep replicas even.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from rayrec.serve.local_calls.connection import Connection, LostError, NotSentError
from rayrec.serve.local_calls.frames import Kind

logger = logging.getLogger(__name__)

LEARN_EVERY_S = 5.0
"""While there are calls: a new replica of this node is asked by its socket after at most so long."""
LEARN_AGAIN_S = 0.5
"""After somebody was gone, or nothing was learned, at the soonest."""
LEARN_S = 2.5
"""In which replicas say where they are."""
KEPT_S = 15.0
"""So long the socket of a replica is used that does not say where it is: it may be busy, or hang."""


@dataclass(frozen=True)
class Address:
    """Of a replica."""

    replica: str
    """Empty: of one that did not say where it is."""
    node: str
    path: str | None
    """Of its socket; None: it has none."""


Learn = Callable[[], Awaitable[Sequence[Address]]]
"""The addresses of all replicas that there are."""
WayAround = Callable[[str, tuple[Any, ...]], Awaitable[Any]]
"""(method, arguments) to what any replica returns."""


@dataclass
class PeerCounts:
    """Of calls so far."""

    by_socket: int = 0
    around: int = 0
    refused: int = 0
    """By a replica that was full or leaving; they went around."""
    lost: int = 0
    """By a replica that was gone before its answer."""


class Peers:
    """The replicas of one deployment, as one caller has them; on one event loop."""

    def __init__(
        self,
        node: str,
        learn: Learn,
        around: WayAround,
        context: Callable[[], Any] = lambda: None,
        draw: random.Random | None = None,
    ) -> None:
        """
        Args:
            node: of this process.
            context: goes along with a call; see `Answer`.
            draw: chooses which replicas are compared.
        """
        self._node, self._learn, self._around, self._context = node, learn, around, context
        self._draw = draw or random.Random()
        self._here: dict[str, Connection] = {}
        self._told_at: dict[str, float] = {}
        """When a replica that is asked by its socket last said where it is."""
        self._retired: list[Connection] = []
        """Of replicas that are asked no more, and may still answer."""
        self._num_elsewhere = self._under_way_around = 0
        self._learning: asyncio.Task[None] | None = None
        self._learn_at = 0.0
        self.counts = PeerCounts()

    async def call(self, method: str, *arguments: Any, repeatable: bool) -> Any:
        """What a replica returns.

        Args:
            repeatable: whether another one may compute it where the first was gone before its answer.

        Raises:
            LostError: the replica was gone and may have begun what is not repeatable.
            Exception: what it raises, or the way around.
        """
        self._look()
        replica = self._chosen()
        if replica is None:
            return await self._asked_around(method, arguments)
        try:
            answer = await self._here[replica].call(method, arguments, self._context())
        except LostError as error:
            self.counts.lost += 1
            self._gone(replica)
            if not (repeatable or isinstance(error, NotSentError)):
                raise
            return await self._asked_around(method, arguments)
        if answer.kind is Kind.ANSWERED:
            self.counts.by_socket += 1
            return answer.value
        if answer.kind is Kind.FAILED:
            self.counts.by_socket += 1
            raise answer.value
        self.counts.refused += 1
        if answer.kind is Kind.LEAVING and (leaving := self._here.pop(replica, None)) is not None:
            self._retired.append(leaving)
        return await self._asked_around(method, arguments)

    async def learn(self) -> None:
        """Connect to those that are new on this node, and ask those no more that there are no more."""
        async with asyncio.timeout(LEARN_EVERY_S):
            found = await self._learn()
        here = {
            each.replica: each.path for each in found if each.node == self._node and each.path is not None
        }
        now = monotonic()
        self._told_at |= dict.fromkeys(here, now)
        is_silent = any(not each.replica for each in found)
        kept = 0
        for replica in set(self._here) - set(here):
            if is_silent and now - self._told_at[replica] < KEPT_S:
                kept += 1
            else:
                self._retired.append(self._here.pop(replica))  # its answers still come
        self._num_elsewhere = max(len(found) - len(here) - kept, 0)
        self._told_at = {name: at for name, at in self._told_at.items() if name in self._here or name in here}
        for connection in [each for each in self._retired if not each.num_under_way]:
            connection.close()
            self._retired.remove(connection)
        for replica, path in here.items():
            if replica not in self._here or not self._here[replica].is_open():
                try:
                    self._here[replica] = await Connection.open(Path(path))
                except OSError as error:  # it has just ended
                    self._here.pop(replica, None)
                    logger.debug("%s: %s", path, error)

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        return {
            "local_calls_total": self.counts.by_socket,
            "local_calls_around_total": self.counts.around,
            "local_calls_refused_total": self.counts.refused,
            "local_calls_lost_total": self.counts.lost,
            "local_calls_replicas": len(self._here),
        }

    def close(self) -> None:
        """End all connections; calls that are under way are given up."""
        if self._learning is not None:
            self._learning.cancel()
        for connection in (*self._here.values(), *self._retired):
            connection.close()
        self._here.clear()
        self._retired.clear()

    def _chosen(self) -> str | None:
        """A replica of this node; None: the way around."""
        for replica in [name for name, connection in self._here.items() if not connection.is_open()]:
            self._gone(replica)
        if not self._here:
            return None
        names = list(self._here)
        first = names.pop(self._draw.randrange(len(names)))
        if not names and not self._num_elsewhere:
            return first
        other = self._draw.randrange(len(names) + self._num_elsewhere)
        under_way = self._here[first].num_under_way
        if other < len(names):
            return names[other] if self._here[names[other]].num_under_way < under_way else first
        return None if self._under_way_around / self._num_elsewhere < under_way else first

    async def _asked_around(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self.counts.around += 1
        self._under_way_around += 1
        try:
            return await self._around(method, arguments)
        finally:
            self._under_way_around -= 1

    def _gone(self, replica: str) -> None:
        self._here.pop(replica, None)
        self._learn_at = min(self._learn_at, monotonic() + LEARN_AGAIN_S)

    def _look(self) -> None:
        """Learn who there is, if that was long ago; nobody waits for it."""
        if monotonic() < self._learn_at or self._learning is not None:
            return
        self._learn_at = monotonic() + LEARN_EVERY_S
        self._learning = asyncio.get_running_loop().create_task(self._learn_quietly())

    async def _learn_quietly(self) -> None:
        try:
            await self.learn()
        except Exception as error:  # as of replicas that start; calls go around, and it is tried again
            logger.info("who answers on this node is not known: %s", error)
            self._learn_at = monotonic() + LEARN_AGAIN_S
        finally:
            self._learning = None
