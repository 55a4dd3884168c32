"""gRPC through Ray Serve: its servers take the calls, and methods of a replica answer them.

    client ─► HAProxy ─► gRPC server that Serve starts in a replica ─┬─► `RpcMethods` ─► `RpcService`
           └► Serve's proxy, where there is no HAProxy ──────────────┘

HAProxy balances calls, not connections, and tells the replica what Serve does not: a call's deadline, as
`X-Request-Timeout-Ms`, and whose it is. Behind Serve's proxy a deadline is not known, but a call is cancelled
when it passes.

Serve's servers listen on all interfaces, whatever the address of the service; so a service of its own machine
looks where a call comes from (`RpcService`).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from ray.serve.config import gRPCOptions

from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray.ray_ingress import HAPROXY_SWITCH
from rayrec.serve.rpc.calls import Call
from rayrec.serve.rpc.handlers import add_to_serve
from rayrec.serve.rpc.service import METHODS, RpcService

SERVICER = f"{add_to_serve.__module__}.{add_to_serve.__name__}"


def grpc_options(config: ServeConfig) -> gRPCOptions | None:
    """What `serve.start` takes."""
    if config.grpc_port is None:
        return None
    more: dict[str, Any] = {"enable_reflection": False}  # older versions of Ray know none
    return gRPCOptions(port=config.grpc_port, grpc_servicer_functions=[SERVICER], **more)


class RpcMethods:
    """Methods that Serve calls by their names."""

    rpc: RpcService


class _Serialized:
    """A message that Serve takes for one of protobuf's."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def SerializeToString(self) -> bytes:  # protobuf's name
        return self._content


def _method(name: str) -> Callable[..., Awaitable[_Serialized]]:
    async def call(self: RpcMethods, content: bytes, grpc_context: Any) -> _Serialized:
        has_proxy = os.environ.get(HAPROXY_SWITCH) == "1"
        reply = await self.rpc.answer(name, content, Call.of(grpc_context, trusted_proxy=has_proxy))
        if reply.trailing:
            grpc_context.set_trailing_metadata(list(reply.trailing))
        if reply.code is not grpc.StatusCode.OK:
            # Set and not raised: Serve logs what is raised with its stack, for every call that is refused.
            grpc_context.set_code(reply.code)
            grpc_context.set_details(reply.details)
        return _Serialized(reply.content)

    call.__name__ = name
    return call


for _name in METHODS:
    setattr(RpcMethods, _name, _method(_name))
