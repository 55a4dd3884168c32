"""The replica's side of calls within a node: its socket, and Ray Serve's own accounting of what comes by it.

    socket ─► Listener ─► Serve's replica: as many at once as it takes, its metrics, its draining ─► method

What comes by the socket is handed to the object that Serve's own server hands calls to. So they share one
limit (`max_ongoing_requests`), one gauge that replicas are scaled by, one count, one latency; and a replica
that ends waits for both. That object is private to Serve: a test checks the names used here, and where one
is missing, replicas have no sockets and all calls go by handles.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import ray
from ray import serve

from rayrec.serve.local_calls.listener import LeavingError, Listener, RefusedError
from rayrec.serve.local_calls.peers import Address

logger = logging.getLogger(__name__)

FOLDER = "rayrec-calls"
"""Of all sockets, in the folder of Ray's session on the node."""


class LocalReplica:
    """Base of replicas whose methods are called within a node without Serve's handles."""

    _listener: Listener | None = None
    _opened: asyncio.Task[Address] | None = None

    async def local_address(self) -> Address:
        """Where this replica is; it listens from the first time on that somebody asks."""
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_task(self._open())
        return await asyncio.shield(self._opened)

    async def _open(self) -> Address:
        context = serve.get_replica_context()
        name, node = context.replica_id.unique_id, ray.get_runtime_context().get_node_id()
        try:
            replica = _ServeReplica()
            path = session_folder() / FOLDER / f"{name}.sock"
            listener = Listener(path, replica.answer)
            await replica.on_its_loop(listener)
        except (ImportError, AttributeError, KeyError, OSError) as error:
            logger.warning("calls within this node go by Ray Serve's handles: %s", error)
            return Address(name, node, None)
        self._listener, self._loop = listener, replica.loop
        return Address(name, node, str(path))

    def close_socket(self) -> None:
        """Call it before the replica ends, from any thread."""
        if self._listener is not None:
            self._loop.call_soon_threadsafe(self._listener.close)
            self._listener = None


def session_folder() -> Path:
    """Of Ray's session on this node.

    Raises:
        AttributeError: this version of Ray keeps it elsewhere.
    """
    node: Any = ray._private.worker._global_node
    return Path(node.get_session_dir_path())


class _ServeReplica:
    """Serve's object around this replica."""

    def __init__(self) -> None:
        """
        Raises:
            ImportError, AttributeError, KeyError: this version of Ray has other names.
        """
        from ray.serve._private.common import RequestMetadata
        from ray.serve._private.utils import generate_request_id

        self._metadata, self._new_id = RequestMetadata, generate_request_id
        worker = ray._private.worker.global_worker
        self._replica: Any = worker.actors[worker.actor_id]._replica_impl
        self.loop: asyncio.AbstractEventLoop = self._replica._event_loop
        self._application = self._replica._deployment_id.app_name
        self._is_leaving()  # so that what is missing is missed now

    async def on_its_loop(self, listener: Listener) -> None:
        """Listen on Serve's loop, which may not be that of the methods."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(listener.start(), self.loop))

    async def answer(self, method: str, arguments: tuple[Any, ...], context: tuple[str, str]) -> Any:
        """As Serve's own server answers a call.

        Args:
            context: id and route of the request that the call is part of, empty where there are none.

        Raises:
            RefusedError: the replica has as many calls as it takes, or ends.
            Exception: what the method raises.
        """
        if self._is_leaving():
            raise LeavingError
        request_id, route = context
        metadata = self._metadata(
            request_id=request_id or self._new_id(),
            internal_request_id=self._new_id(),
            call_method=method,
            route=route,
            app_name=self._application,
        )
        results = self._replica.handle_request_with_rejection(metadata, *arguments)
        if not (await anext(results)).accepted:
            await results.aclose()
            raise RefusedError
        answer = await anext(results)
        async for _ in results:  # to its end, where Serve counts it
            pass
        return answer

    def _is_leaving(self) -> bool:
        # Serve drains until there are no calls, and would do so for as long as they come here.
        leaving: bool = self._replica._shutting_down
        return leaving
