"""What is known of a call over gRPC, and what it gets: without a server, so that tests need none.

    metadata, peer, deadline ─► Call ─► `RpcService` ─► Reply ─► status, details, trailing metadata, message

A status by the HTTP status that means the same, so that both protocols count and explain alike:

    400 INVALID_ARGUMENT      a message, tensor or parameter is wrong
    401 UNAUTHENTICATED       no token, or a wrong one
    403 PERMISSION_DENIED     the service is for its own machine alone
    404 NOT_FOUND             no such model or version
    413 RESOURCE_EXHAUSTED    the message is too large
    429 RESOURCE_EXHAUSTED    too many requests of this caller
    503 UNAVAILABLE           too many of all, or what it needs does not answer; worth another try
    504 DEADLINE_EXCEEDED     it would be answered too late
    500 INTERNAL              a failure of ours, whose id the log has

What is worth another try says when in `grpc-retry-pushback-ms`, which gRPC's own retries go by.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from starlette.datastructures import Headers

STATUS = {
    200: grpc.StatusCode.OK,
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
PUSHBACK = "grpc-retry-pushback-ms"
_MAX_DETAILS = 2000
"""Characters: details travel as a header, which clients bound."""


@dataclass(frozen=True)
class Call:
    """Besides its message."""

    headers: Mapping[str, str]
    """Its metadata; names in any case."""
    address: str | None
    """Where it is from."""
    left_s: float | None = None
    """Until its deadline; None: it has none, or nobody knows it."""

    @classmethod
    def of(cls, context: Any, trusted_proxy: bool = False) -> Call:
        """By the context of a server.

        Args:
            context: gRPC's own, or Ray Serve's.
            trusted_proxy: calls from this machine come through a proxy, which says whose they are.
        """
        raw = [
            (key.encode(), value.encode("latin-1", errors="replace"))
            for key, value in context.invocation_metadata() or ()
            if isinstance(value, str)  # what ends in -bin has bytes, and is none of ours
        ]
        headers = Headers(raw=raw)
        address = address_of_peer(context.peer())
        if trusted_proxy and is_loopback(address) and (said := headers.get("x-forwarded-for")):
            address = said.rpartition(",")[2].strip()
        time_remaining = getattr(context, "time_remaining", None)  # Ray Serve's has none
        return cls(headers, address, None if time_remaining is None else time_remaining())


@dataclass(frozen=True)
class Reply:
    """What a call gets."""

    content: bytes = b""
    """The message; none where it failed."""
    status: int = 200
    """As of HTTP."""
    details: str = ""
    trailing: Sequence[tuple[str, str]] = field(default_factory=tuple)
    """Metadata after the message."""

    @classmethod
    def failed(cls, status: int, details: str, wait_s: float | None = None) -> Reply:
        """
        Args:
            wait_s: when it is worth another try; None: it is not.
        """
        trailing = () if wait_s is None else ((PUSHBACK, str(int(wait_s * 1e3))),)
        # A sentence may quote half of a surrogate pair, which no header can have.
        said = details[:_MAX_DETAILS].encode(errors="backslashreplace").decode()
        return cls(b"", status, said, trailing)

    @property
    def code(self) -> grpc.StatusCode:
        return STATUS.get(self.status, grpc.StatusCode.UNKNOWN)


def address_of_peer(peer: str) -> str | None:
    """The IP address in what gRPC calls a peer, such as `ipv4:127.0.0.1:50210` or `ipv6:%5B::1%5D:50210`."""
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else None


def is_loopback(address: str | None) -> bool:
    """Whether a connection is from this machine; one without an address is, as of a socket of files."""
    return address is None or address == "::1" or address.removeprefix("::ffff:").startswith("127.")
