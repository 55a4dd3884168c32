"""A share of the requests also goes to another target, whose answers nobody waits for.

    request ─► offer ─► the answer that the caller gets
                 └ a task of its own, if there is room ─► the shadow; its answer is thrown away

What the shadow does is not seen by callers: a task holds its errors, and a slot in flight is all it occupies.
The request that it gets is the very one that is answered, so it must not change it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import Any, Generic

from rayrec.serve.config.services import ShadowConfig
from rayrec.serve.routing.targets import Answer, Request, Send

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShadowCounts:
    """What became of the requests that were drawn for a shadow; those in flight are in none but the first."""

    sent: int = 0
    answered: int = 0
    failed: int = 0
    """An error, or no answer in time."""
    dropped: int = 0
    """Never sent: too many were in flight."""


class Shadow(Generic[Request]):
    """Sends requests on the running event loop. Not thread-safe."""

    def __init__(self, send: Send[Request, Any], config: ShadowConfig) -> None:
        """
        Args:
            send: asks the shadow; runs on the loop that answers, so it waits by `await` and never blocks.
        """
        self._send, self._config = send, config
        self._random = random.Random(config.seed)
        self._tasks: set[asyncio.Task[None]] = set()  # a loop holds its tasks by weak references only
        self._sent = self._answered = self._failed = self._dropped = 0

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    @property
    def counts(self) -> ShadowCounts:
        return ShadowCounts(self._sent, self._answered, self._failed, self._dropped)

    def offer(self, request: Request) -> None:
        """Send it if it is drawn and there is room. Returns at once and never raises."""
        if self._random.random() >= self._config.share:
            return
        if self.in_flight >= self._config.max_in_flight:
            self._dropped += 1
            return
        self._sent += 1
        task = asyncio.get_running_loop().create_task(self._ask(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give up what is in flight."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, request: Request) -> None:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._send(request)
        except Exception as error:
            self._failed += 1
            if self._failed & (self._failed - 1) == 0:  # the 1st, 2nd, 4th ...: the log shall stay readable
                logger.warning("a shadow has failed %d times, now by %r", self._failed, error)
        else:
            self._answered += 1


class Shadowed(Generic[Request, Answer]):
    """A target and its shadow, as one target."""

    def __init__(self, send: Send[Request, Answer], shadow: Shadow[Request]) -> None:
        self._send, self._shadow = send, shadow

    async def __call__(self, request: Request) -> Answer:
        """The answer, or the error, of the target."""
        self._shadow.offer(request)
        return await self._send(request)
