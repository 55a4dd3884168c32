"""Bodies of requests: unpacked, and read as JSON, for protocols that read them themselves."""

from __future__ import annotations

import json
import zlib
from typing import Any, NoReturn

from fastapi import Request

from rayrec.serve.errors import RequestError

MAX_BODY_BYTES = 1024 * 1024
"""A larger body is refused, whether it is packed or not."""

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""What tells zlib the format; `deflate` is zlib's own (RFC 9110, section 8.4.1.2)."""


async def unpacked_body(request: Request) -> bytes:
    """
    Raises:
        RequestError: it is packed in another way than gzip or deflate (415), not what its header says, or
            larger than allowed when unpacked (413).
    """
    body = await request.body()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
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
            f"the body, packed with {encoding!r}, is cut off or has more behind its end; send it whole, "
            "packed at once"
        )
    return whole


def json_object(content: bytes) -> dict[str, Any]:
    """
    Raises:
        RequestError: it is no JSON, or no object; a key stands there twice, or a number is not finite.
    """
    try:
        found = json.loads(
            content.decode(), object_pairs_hook=_without_repetition, parse_constant=_refuse_constant
        )
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise RequestError("the body is not valid JSON") from error
    if not isinstance(found, dict):
        raise RequestError("expected a JSON object")
    return found


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RequestError(f"the key {twice!r} stands in one object twice; which is meant?")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"{name} is no number of JSON; give a finite one")
