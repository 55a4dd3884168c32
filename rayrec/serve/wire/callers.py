"""Who a request is from, for limits of each caller."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from fastapi import Request

from rayrec.serve.wire.deadlines import HeaderError

MAX_CALLER_KEY = 256
"""Characters: each caller's is kept."""


@dataclass(frozen=True)
class Origin:
    """Where a request is from."""

    headers: Mapping[str, str]
    """Of HTTP; names in any case."""
    address: str | None
    """Where the connection is from."""


def origin_of(http: Request) -> Origin:
    return Origin(http.headers, http.client.host if http.client else None)


def caller_of(origin: Origin, header: str) -> Hashable:
    """A key and an address are never the same caller.

    Args:
        header: that names the caller; one who sends none goes by the address.

    Raises:
        HeaderError: the key is too long to be kept.
    """
    key = origin.headers.get(header)
    if key is None:
        return "address", origin.address
    if len(key) > MAX_CALLER_KEY:
        raise HeaderError(f"{header}: expected at most {MAX_CALLER_KEY} characters, got {len(key)}")
    return "key", key
