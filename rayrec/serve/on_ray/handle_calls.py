"""Calls of other deployments from threads that may wait for them.

A handle of Ray Serve may only be used on an event loop, and replicas compute on threads without one; so the
calls run on a loop of their own. A handle may also belong to the loop on which it was first used, which is
Ray Serve's own in a constructor: what is called here is first used here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from rayrec.platform.errors import UnavailableError
from rayrec.serve.on_ray.callees import Callee


class HandleCalls:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="handle calls", daemon=True)
        self._thread.start()

    def callee(self, make: Callable[[], Callee]) -> Callee:
        """What `call` takes.

        Args:
            make: of a deployment that nobody has used so far; called on the loop of these calls.
        """

        async def made() -> Callee:
            return make()

        return asyncio.run_coroutine_threadsafe(made(), self._loop).result()

    def call(self, callee: Callee, method: str, *arguments: Any, timeout_s: float) -> Any:
        """What the method of a replica returns, which is asked for a second time where the replica ends.

        Args:
            callee: of `callee`.

        Raises:
            TimeoutError: not in time.
            Exception: what it raises, or that no replica is there.
        """

        async def ask() -> Any:
            async with asyncio.timeout(timeout_s):
                return await callee.call(method, *arguments, repeatable=True)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result()

    def close(self) -> None:
        """End the loop; calls that are under way are given up."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextmanager
def unanswered_by(service: str) -> Iterator[None]:
    """Say which service did not answer; what a replica raises itself stays as it is.

    Raises:
        UnavailableError: not in time, or no replica is there.
    """
    try:
        yield
    except (TimeoutError, RayActorError, RayServeException) as error:
        raise UnavailableError(service, 1, str(error) or "no answer in time") from error
