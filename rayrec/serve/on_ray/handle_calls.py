"""Calls of other deployments from threads that may wait for them.

A handle of Ray Serve may only be used on an event loop, and replicas compute on threads without one; so the
calls run on a loop of their own. A handle may also belong to the loop on which it was first used, which is
Ray Serve's own in a constructor: what is called here is first used here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from rayrec.platform.errors import UnavailableError
from rayrec.serve.on_ray.ray_ingress import by_message, of_session


class HandleCalls:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="handle calls", daemon=True)
        self._thread.start()

    def handle_of(self, deployment: DeploymentHandle, session: str | None = None) -> DeploymentHandle:
        """What `call` takes: a deployment that is asked by messages.

        Args:
            deployment: that nobody has used so far.
            session: whose calls come to the same replica; see `sticky_routing`.
        """

        async def take() -> DeploymentHandle:
            handle = by_message(deployment)
            return handle if session is None else of_session(handle, session)

        return asyncio.run_coroutine_threadsafe(take(), self._loop).result()

    def call(self, handle: DeploymentHandle, method: str, *arguments: Any, timeout_s: float) -> Any:
        """What the method of a replica returns.

        Args:
            handle: of `handle_of`.

        Raises:
            TimeoutError: not in time.
            Exception: what it raises, or that no replica is there.
        """

        async def ask() -> Any:
            async with asyncio.timeout(timeout_s):
                return await getattr(handle, method).remote(*arguments)

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
