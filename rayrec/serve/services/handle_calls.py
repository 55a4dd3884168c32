"""Calls of other deployments from threads that may wait for them.

A handle of Ray Serve may only be used on an event loop, and replicas compute on threads without one; so the
calls run on a loop of their own.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from ray.serve.handle import DeploymentHandle


class HandleCalls:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="handle calls", daemon=True)
        self._thread.start()

    def call(self, handle: DeploymentHandle, method: str, *arguments: Any, timeout_s: float) -> Any:
        """What the method of a replica returns.

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
