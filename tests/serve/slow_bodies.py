"""Requests of whose bodies a part has come."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from starlette.types import ASGIApp, Message, Scope

from rayrec.serve.on_ray.http_messages import HttpRequest


def scope_of(path: str) -> Scope:
    headers = ((b"host", b"here"), (b"content-type", b"application/json"))
    return HttpRequest("POST", path, b"", headers, b"", ("10.0.0.1", 1)).scope


async def posted(api: ASGIApp, path: str, *parts: bytes, ends: bool = True) -> int:
    """Status of the answer to a body that comes in parts; where it does not end, nothing follows them."""
    status, _ = await answer_of(api, path, *parts, ends=ends)
    return status


async def answer_of(
    api: ASGIApp, path: str, *parts: bytes, ends: bool = True, all_read: asyncio.Event | None = None
) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers.

    Args:
        all_read: set when the application asks for more than the parts.
    """
    left: Iterator[tuple[int, bytes]] = iter(enumerate(parts, 1))
    found: list[Message] = []

    async def receive() -> Message:
        for number, part in left:
            return {"type": "http.request", "body": part, "more_body": not ends or number < len(parts)}
        if all_read is not None:
            all_read.set()
        await asyncio.Event().wait()  # for ever
        raise AssertionError

    async def send(message: Message) -> None:
        found.append(message)

    await api(scope_of(path), receive, send)
    return found[0]["status"], dict(found[0]["headers"])


async def under_way(api: ASGIApp, path: str) -> asyncio.Task[tuple[int, dict[bytes, bytes]]]:
    """A request of which the application waits for the rest."""
    all_read = asyncio.Event()
    task = asyncio.create_task(answer_of(api, path, b"{", ends=False, all_read=all_read))
    await asyncio.wait_for(all_read.wait(), timeout=20)
    return task
