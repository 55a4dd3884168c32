"""The service in this process, without Ray: for small installations, and for the least time per request.

One process answers, with all models; nothing starts it again when it dies.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from rayrec.platform.errors import InputError
from rayrec.serve.app.loading import load_models
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.config.tls import check_tls
from rayrec.serve.rpc.server import answering_calls
from rayrec.serve.rpc.service import RpcService
from rayrec.serve.web.address import check_port, url_of, wait_until_ready
from rayrec.serve.web.connections import Connections, allowed_by_files
from rayrec.serve.web.metrics import PrometheusMeter
from rayrec.serve.web.models import protect

KEEP_ALIVE_S = 5
STOP_TIMEOUT_S = 5
"""In which requests in flight are answered when the service stops."""


class _Server(uvicorn.Server):
    """Answers calls over gRPC as well, on the same event loop."""

    def __init__(self, settings: ServeConfig, api: FastAPI, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._settings, self._api = settings, api
        self._calls = AsyncExitStack()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        async with self._calls:
            if self._settings.grpc_port is not None:
                calls = RpcService.of(self._api, self._settings)
                await self._calls.enter_async_context(answering_calls(calls, self._settings))
            await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # First: behind the last request, the application closes its logs, and calls belong there, too.
        try:
            await self._calls.aclose()
        finally:
            await super().shutdown(sockets)


@contextmanager
def serving_here(run: str | Path, config: ServeConfig) -> Iterator[str]:
    """The service runs inside the block; the value is its base URL, such as `http://127.0.0.1:8000`.

    Raises:
        InputError: the run cannot be loaded, the port is taken, several replicas are asked for, or the
            certificate cannot be used.
        RuntimeError: the service does not answer.
    """
    if config.num_replicas > 1:
        raise InputError(
            f"{config.num_replicas} replicas are several processes; leave out --single-process, or --replicas"
        )
    check_port(config.host, config.port)
    if config.grpc_port is not None:
        check_port(config.host, config.grpc_port, "--grpc-port")
    if config.tls is not None:
        check_tls(config.tls)
    api = load_models(run, config, lambda _, name: PrometheusMeter(name))
    with answering_here(api, config) as url:
        yield url


@contextmanager
def answering_here(api: FastAPI, config: ServeConfig) -> Iterator[str]:
    """An application answers inside the block, as settings say of address, token, TLS and
    connections; the value is its base URL.

    Raises:
        RuntimeError: it does not answer.
    """
    protect(api, config)
    connections = Connections(allowed_by_files(config.connections))
    server = _Server(
        config,
        api,
        uvicorn.Config(
            api,
            host=config.host,
            port=config.port,
            ssl_certfile=None if config.tls is None else config.tls.certificate,
            ssl_keyfile=None if config.tls is None else config.tls.key,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            timeout_keep_alive=config.connections.keep_alive_s or KEEP_ALIVE_S,
            http=connections.protocol,  # type: ignore[arg-type]  # called as a class is
        ),
    )
    # Of a thread: signals are the caller's, on the main one.
    thread = threading.Thread(target=server.run, name="http", daemon=True)
    thread.start()
    try:
        url = url_of(config.host, config.port, config.tls is not None)
        wait_until_ready(url)
        yield url
    finally:
        server.should_exit = True
        thread.join()
