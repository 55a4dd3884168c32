"""Uvicorn's protocol with bounds: slow clients end, and no address has all connections.

    connection ─► too many of all, or of its address? 503, closed
        │ headers within `headers_timeout_s` ─► request ─► answer, taken within `answer_timeout_s`
        └──────────────────── again, after at most `keep_alive_s` ◄───┘

How long a body may take is `guards.RequestGuard`'s. With Ray, HAProxy has the same bounds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rayrec.serve.config.connections import ConnectionsConfig

logger = logging.getLogger(__name__)

OTHER_FILES = 256
"""Open files that are no connections: the model's, the log's, the libraries'."""
_BODY = json.dumps({"error": "too many connections; close some, and try again in a second"}).encode()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


def allowed_by_files(config: ConnectionsConfig) -> ConnectionsConfig:
    """Raise the process's limit of open files as far as needed; where it cannot be, have fewer connections,
    and say so."""
    needed = config.most + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return config
    possible = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    if possible == needed:
        return config
    most = max(possible - OTHER_FILES, 1)
    logger.warning(
        "%d files may be open (ulimit -Hn), so there are up to %d connections instead of %d",
        *(possible, most, config.most),
    )
    return config.model_copy(update={"most": most})


class Connections:
    """Those that are open, by address; on one event loop."""

    def __init__(self, config: ConnectionsConfig) -> None:
        self.config = config
        self._num_open: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """Count one more, if there may be one."""
        config = self.config
        if self._num_open.total() >= config.most or self._num_open[address] >= config.of_one_address:
            return False
        self._num_open[address] += 1
        return True

    def leave(self, address: str) -> None:
        self._num_open[address] -= 1
        if not self._num_open[address]:
            del self._num_open[address]

    def protocol(self, *args: Any, **settings: Any) -> BoundedProtocol:
        """What Uvicorn takes for a class of protocols."""
        return BoundedProtocol(self, *args, **settings)


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, connections: Connections, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        # Nothing here speaks WebSocket. Uvicorn would hand the connection to another protocol, and
        # nobody would count that it ends: an address that asked often enough would have none any more.
        self.ws_protocol_class = None
        self._bounds = connections
        self._address: str | None = None
        """Under which it is counted; None: it is not."""
        self._headers_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: Uvicorn would advise libraries that change nothing here, at every such request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        if not self._bounds.enter(address):
            transport.write(_REFUSAL)
            transport.close()
            return
        self._address = address
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._headers_timer)
        self._headers_timer = None
        _cancel(self._answer_timer)
        self._answer_timer = None
        if self._address is not None:
            self._bounds.leave(self._address)
            self._address = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._address is not None:  # else it is refused, and closes
            super().data_received(data)

    def on_message_begin(self) -> None:
        if self._headers_timer is None:
            self._await_headers()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        _cancel(self._headers_timer)
        self._headers_timer = None
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._answer_timer = self.loop.call_later(self._bounds.config.answer_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._answer_timer)
        self._answer_timer = None
        super().resume_writing()

    def _await_headers(self) -> None:
        self._headers_timer = self.loop.call_later(
            self._bounds.config.headers_timeout_s, self.transport.close
        )


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
