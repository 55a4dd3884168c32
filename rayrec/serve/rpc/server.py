"""The gRPC server of a single process, on the event loop of its HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.config.tls import TlsConfig
from rayrec.serve.rpc.handlers import answering
from rayrec.serve.rpc.service import RpcService
from rayrec.serve.wire.request_body import MAX_BODY_BYTES

STOP_TIMEOUT_S = 5.0
"""In which calls in flight are answered when the service stops."""
_SPARE_BYTES = 64 * 1024
"""Of a message above the bound that the service explains: one that is larger is refused by gRPC itself."""


@asynccontextmanager
async def answering_calls(service: RpcService, config: ServeConfig) -> AsyncIterator[None]:
    """Calls are answered inside the block, at `grpc_port`.

    Raises:
        RuntimeError: the port is taken.
    """
    assert config.grpc_port is not None, "asked before"
    server = grpc.aio.server(
        maximum_concurrent_rpcs=config.connections.most,
        options=[
            ("grpc.max_receive_message_length", MAX_BODY_BYTES + _SPARE_BYTES),
            # A second service at the same port would get some of the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", config.connections.of_one_address),
        ],
    )
    server.add_generic_rpc_handlers((answering(service),))
    address = target_of(config.host, config.grpc_port)
    if config.tls is None:
        server.add_insecure_port(address)
    else:
        server.add_secure_port(address, credentials_of(config.tls))
    await server.start()
    try:
        yield
    finally:
        await server.stop(STOP_TIMEOUT_S)


def target_of(host: str, port: int) -> str:
    """An address as gRPC writes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def credentials_of(tls: TlsConfig) -> grpc.ServerCredentials:
    """The certificate of the service, for a gRPC server."""
    key, chain = Path(tls.key).read_bytes(), Path(tls.certificate).read_bytes()
    return grpc.ssl_server_credentials([(key, chain)])
