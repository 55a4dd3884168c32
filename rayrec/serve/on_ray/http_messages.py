"""A request of HTTP and its answer as values that travel between processes, and an application asked by one.

So whatever stands in front of an application need not know its routes: bodies are whole, as they are in the
service, which streams none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from urllib.parse import quote

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

Pairs = tuple[tuple[bytes, bytes], ...]

_OF_CONNECTION = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"expect"})
"""Headers that are about one connection and go no further (RFC 9110, section 7.6.1)."""


@dataclass(frozen=True)
class HttpRequest:
    """What a client sent."""

    method: str
    path: str
    """Without its percent signs."""
    query: bytes
    headers: Pairs
    """Names in lower case."""
    body: bytes
    client: tuple[str, int] | None
    """Address of the one who is connected."""

    @staticmethod
    async def of(request: Request) -> HttpRequest:
        """With its whole body."""
        scope = request.scope
        headers = tuple((name, value) for name, value in scope["headers"] if name not in _OF_CONNECTION)
        client = None if request.client is None else (request.client.host, request.client.port)
        return HttpRequest(
            request.method, scope["path"], scope["query_string"], headers, await request.body(), client
        )

    def header(self, name: str) -> str | None:
        return Headers(raw=list(self.headers)).get(name)

    @property
    def scope(self) -> Scope:
        """As ASGI servers make it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": quote(self.path).encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


@dataclass(frozen=True)
class HttpAnswer:
    """What a client gets."""

    status: int
    headers: Pairs
    body: bytes

    def with_header(self, name: str, value: str) -> HttpAnswer:
        return replace(self, headers=(*self.headers, (name.lower().encode(), value.encode("latin-1"))))

    def without_header(self, name: str) -> HttpAnswer:
        lowered = name.lower().encode()
        return replace(self, headers=tuple(each for each in self.headers if each[0].lower() != lowered))

    def as_response(self) -> Response:
        response = Response(self.body, self.status)
        response.raw_headers = [
            *((name, value) for name, value in self.headers if name != b"content-length"),
            (b"content-length", str(len(self.body)).encode()),
        ]
        return response


SendHttp = Callable[[HttpRequest], Awaitable[HttpAnswer]]
"""Asks an application, wherever it runs."""


async def answered_by(app: ASGIApp, request: HttpRequest) -> HttpAnswer:
    """What an application in this process answers."""
    status, headers, body = 500, Pairs(), bytearray()
    is_sent = False

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            return {"type": "http.disconnect"}
        is_sent = True
        return {"type": "http.request", "body": request.body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = tuple((bytes(name).lower(), bytes(value)) for name, value in message["headers"])
        elif message["type"] == "http.response.body":
            body.extend(message.get("body", b""))

    await app(request.scope, receive, send)
    return HttpAnswer(status, headers, bytes(body))


@asynccontextmanager
async def lifespan_of(api: FastAPI) -> AsyncIterator[None]:
    """What a server does before the first request and after the last, where no server runs."""
    async with api.router.lifespan_context(api):
        yield
