"""What a gRPC server registers: every method takes and gives serialized messages.

The message is parsed where it is understood, so that one that is too large, or of a caller without a token,
costs nothing; and in Ray Serve's proxy, which hands it on, no classes of messages are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from rayrec.serve.rpc.calls import Call
from rayrec.serve.rpc.messages import SERVICE
from rayrec.serve.rpc.service import METHODS, RpcService

Handle = Callable[..., Any]


def handlers(handle_of: Callable[[str], Handle]) -> grpc.GenericRpcHandler:
    """Of all methods.

    Args:
        handle_of: what answers calls of a method: `handle(content, context)`.
    """
    return grpc.method_handlers_generic_handler(
        SERVICE, {name: grpc.unary_unary_rpc_method_handler(handle_of(name)) for name in METHODS}
    )


def answering(service: RpcService) -> grpc.GenericRpcHandler:
    """Handlers of a server of `grpc.aio`, on the event loop of the service."""

    def handle_of(method: str) -> Handle:
        async def handle(content: bytes, context: grpc.aio.ServicerContext) -> bytes:
            reply = await service.answer(method, content, Call.of(context))
            if reply.trailing:
                context.set_trailing_metadata(tuple(reply.trailing))
            if reply.code is not grpc.StatusCode.OK:
                await context.abort(reply.code, reply.details)
            return reply.content

        return handle

    return handlers(handle_of)


def add_to_serve(servicer: Any, server: Any) -> None:
    """What Ray Serve calls by its path: it replaces what is called by the methods of a deployment.

    Args:
        servicer: unused: Serve's stands for none.
    """

    def nobody(content: bytes, context: Any) -> bytes:
        raise AssertionError("replaced by Ray Serve")

    server.add_generic_rpc_handlers((handlers(lambda name: nobody),))
