"""A request of HTTP and its answer as values that travel between processes, and an application asked by one.

So what stands in front of an application need not know its routes: bodies are whole, as they are in the
service, which streams none. What a gateway has to know of a body is read once, and travels with the message:

    /v1/recommend     {"user_id": ...}             one row
    /v1/completions   {"user": ..., "prompt": []}  a row for each prompt
    /v2/.../infer     {"inputs": [{"shape": []}]}  rows of tensors; users are in these, which are not read

A body that cannot be read is of no user and counts as one row: its target says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

from rayrec.serve.config.admission import USER_HEADER
from rayrec.serve.protocols.tensor_codec import HEADER_LENGTH
from rayrec.serve.wire.errors import RequestError
from rayrec.serve.wire.request_body import LARGE_BYTES, parsed_json, unpacked

Pairs = tuple[tuple[bytes, bytes], ...]

_OF_CONNECTION = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"expect"})
"""Headers that are about one connection and go no further (RFC 9110, section 7.6.1)."""

_USER_FIELDS = ("user_id", "user")
"""Of `/v1/recommend` and of `/v1/completions`."""


@dataclass(frozen=True)
class MessageContents:
    """What is read of a message to forward it."""

    user: str | None
    num_rows: int
    """How many requests it counts for, which its target would compute one by one; at least 1."""


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
    """Address of the client."""

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
    def is_large(self) -> bool:
        """Whether to read its contents takes so long that others should not wait for it."""
        return len(self.body) > LARGE_BYTES or self.header("content-encoding") is not None

    @cached_property
    def contents(self) -> MessageContents:
        """Read from the body the first time, and kept, also in another process."""
        body = _described(self)
        return MessageContents(_user_in(body), _num_rows_in(body, self.path))

    @property
    def user(self) -> str | None:
        """By the header, or else by the body."""
        named = self.header(USER_HEADER)
        return self.contents.user if named is None else named

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


def _described(request: HttpRequest) -> dict[str, Any]:
    """The JSON object of a message, without bytes that follow it; empty where there is none."""
    try:
        body = unpacked(request.body, request.header("content-encoding"))
        length = request.header(HEADER_LENGTH)
        if length is not None and length.isascii() and length.isdigit() and len(length) < 10:
            body = body[: int(length)]
        found = parsed_json(body)
    except RequestError:
        return {}
    return found if isinstance(found, dict) else {}


def _user_in(body: dict[str, Any]) -> str | None:
    for field in _USER_FIELDS:
        if isinstance(user := body.get(field), (str, int)) and not isinstance(user, bool):
            # JSON can write half of a surrogate pair, which cannot be hashed.
            return str(user).encode(errors="backslashreplace").decode()
    return None


def _num_rows_in(body: dict[str, Any], path: str) -> int:
    prompts, inputs = body.get("prompt"), body.get("inputs")
    if path.startswith("/v2/") and isinstance(inputs, list):
        # All inputs have the same rows, or the target refuses the message.
        return max((_num_rows(each) for each in inputs), default=1)
    return max(len(prompts), 1) if isinstance(prompts, list) else 1


def _num_rows(described: Any) -> int:
    shape = described.get("shape") if isinstance(described, dict) else None
    rows = shape[0] if isinstance(shape, list) and shape else 1
    return max(rows, 1) if isinstance(rows, int) else 1
