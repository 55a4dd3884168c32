"""Bodies of requests: unpacked, and read as JSON, for protocols that read them themselves."""

from __future__ import annotations

import asyncio
import json
import math
import re
import zlib
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from rayrec.serve.wire.errors import RequestError

MAX_BODY_BYTES = 1024 * 1024
"""A larger body is refused, whether it is packed or not."""
LARGE_BYTES = 64 * 1024
"""To read a larger body takes milliseconds, in which the event loop would answer nobody."""
LARGE_ITEMS = 1000
"""Of an answer: to write more of them takes as long."""
MAX_CONTAINERS = 20_000
"""Arrays and objects of a body: one for each event of two of the longest histories. The interpreter looks for
garbage in them while it makes them, which took most of a second for as many as a body can have."""

_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""One that does not end is a text, too: to look for its end from each quote within would take for ever."""
Result = TypeVar("Result")

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""What tells zlib the format; `deflate` is zlib's own (RFC 9110, section 8.4.1.2)."""


async def beside_the_loop(is_large: bool, call: Callable[[], Result]) -> Result:
    """What `call` gives or raises; in a thread where it is large, so that the event loop answers others.

    A thread has the interpreter in turns with the loop, between steps of Python: no step may be long, as a
    check is that collects an error for each of a million values.
    """
    return await asyncio.to_thread(call) if is_large else call()


async def unpacked_body(request: Request) -> bytes:
    """Read a body and decompress it as its Content-Encoding says.

    Raises:
        RequestError: it is packed in another way than gzip or deflate (415), not what its header says, or
            larger than allowed when unpacked (413).
    """
    return unpacked(await request.body(), request.headers.get("content-encoding"))


def unpacked(body: bytes, content_encoding: str | None) -> bytes:
    """As `unpacked_body`.

    Args:
        content_encoding: the header, if there is one.
    """
    encoding = (content_encoding or "identity").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in _WINDOW_BITS:
        raise RequestError(
            f"the body comes with the Content-Encoding {encoding!r}; known are {', '.join(_WINDOW_BITS)}", 415
        )
    return _unpacked(body, encoding)


def _unpacked(body: bytes, encoding: str) -> bytes:
    # Stops at the limit, whatever the body would become: a kilobyte may stand for a megabyte.
    unpacker = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        whole = unpacker.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise RequestError(f"the body is not what its Content-Encoding {encoding!r} says") from error
    if len(whole) > MAX_BODY_BYTES:
        raise RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes unpacked; send less", 413)
    if not unpacker.eof or unpacker.unused_data:
        raise RequestError(
            f"the body, packed with {encoding!r}, is cut off or has more after its end; send it whole, "
            "packed at once"
        )
    return whole


def parsed_json(content: bytes, **hooks: Any) -> Any:
    """Parse JSON after checking its size.

    Args:
        hooks: of `json.loads`.

    Raises:
        RequestError: it is no JSON, or of too many parts.
    """
    check_containers(content)
    try:
        return json.loads(content.decode(), **hooks)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise RequestError("the body is not valid JSON") from error


def check_containers(content: bytes) -> None:
    """Check that JSON has few enough arrays and objects to be parsed in time.

    Raises:
        RequestError: there are too many arrays and objects.
    """
    if _num_openings(content) > MAX_CONTAINERS and _num_openings(_TEXTS.sub(b"", content)) > MAX_CONTAINERS:
        raise RequestError(f"the body has more than {MAX_CONTAINERS} arrays and objects; send less")


def strict_json(content: bytes) -> Any:
    """Parse JSON in which no key stands in an object twice, and every number is finite.

    Raises:
        RequestError: it is something else, or of too many parts.
    """
    return parsed_json(
        content,
        object_pairs_hook=_without_repetition,
        parse_constant=_refuse_constant,
        parse_float=_finite,
    )


def json_object(content: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly.

    Raises:
        RequestError: it is no JSON, or no object; a key stands there twice, or a number is not finite.
    """
    found = strict_json(content)
    if not isinstance(found, dict):
        raise RequestError("expected a JSON object")
    return found


class CheckedRoute(APIRoute):
    """A route whose body the framework validates, read as `json_object` reads those of others."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As the framework wants it."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            return await handle(_CheckedRequest(request.scope, request.receive))

        return checked


class _CheckedRequest(Request):
    async def body(self) -> bytes:
        body = await super().body()
        try:
            return unpacked(body, self.headers.get("content-encoding"))
        except RequestError as error:  # the framework takes all but this for one of its own
            raise HTTPException(error.status, str(error)) from error

    async def json(self) -> Any:
        body = await self.body()
        try:
            return strict_json(body)
        except RequestError as error:
            raise HTTPException(error.status, str(error)) from error


def _num_openings(content: bytes) -> int:
    return content.count(b"[") + content.count(b"{")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RequestError(f"the key {twice!r} stands in one object twice; which is meant?")
    return values


def _finite(text: str) -> float:
    """A number of JSON; of one such as 1e999, the float would be infinite."""
    if not math.isfinite(value := float(text)):
        raise RequestError(f"{text[:40]} is more than a float holds; give a finite number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"{name} is no number of JSON; give a finite one")
