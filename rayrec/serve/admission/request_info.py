"""What is known of a message besides what it asks for: made once, of its headers, and filled in later."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import Scope

from rayrec.serve.admission.limits import Room
from rayrec.serve.config.admission import USER_HEADER
from rayrec.serve.engine import allocation
from rayrec.serve.engine.batching import DEFAULT_PRIORITY
from rayrec.serve.engine.draws import Note
from rayrec.serve.wire.deadlines import HeaderError, timeout_of

MAX_CALLER_KEY = 256
"""Characters: each caller's is kept."""

_SCOPE_KEY = "rayrec.request_info"


@dataclass
class RequestInfo:
    """Of one message over HTTP."""

    caller: Hashable
    """For limits of each caller: a key and an address are never the same caller."""
    expires_at: float
    """When its answer is of no use any more, by the clock that it was made with."""
    began_at: float
    """When its headers were read, by the same clock."""
    user: str | None = None
    """Whom its header says that it is for."""
    note: Note | None = None
    """What to call when it is answered; None: no version was drawn for it."""
    num_rows: int = 1
    """Requests in the message, as limits count them; 1 until its body is understood."""
    priority: int = DEFAULT_PRIORITY
    """Of its requests among those that wait for the model; lower ones come first."""
    room: Room | None = None
    """Of the limits, found before the body was read."""
    is_coming: bool = False
    """It was found to have room, and its body is not here yet."""
    value: str | None = None
    """What its header says that its requests are worth."""
    room_by_value: allocation.Room | None = None
    """Found by the value that the header says; None: it says none."""

    @staticmethod
    def of(
        headers: Mapping[str, str],
        address: str | None,
        caller_header: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> RequestInfo:
        """Read the headers of a message.

        Args:
            headers: of HTTP; names in any case.
            address: where the connection is from.
            caller_header: names the caller; a request without it goes by the address.
            timeout_s: the service's own bound.

        Raises:
            HeaderError: the caller's key is too long to be kept, or the timeout is no number.
        """
        # What the body takes to come counts: the caller waits from now on.
        began_at = clock()
        expires_at = began_at + timeout_of(headers, timeout_s)
        key, user = headers.get(caller_header), headers.get(USER_HEADER) or None
        if key is None:
            return RequestInfo(("address", address), expires_at, began_at, user)
        if len(key) > MAX_CALLER_KEY:
            raise HeaderError(
                f"{caller_header}: expected at most {MAX_CALLER_KEY} characters, got {len(key)}"
            )
        return RequestInfo(("key", key), expires_at, began_at, user)


def address_of(http: HTTPConnection) -> str | None:
    """Where a connection is from."""
    return http.client.host if http.client else None


def attach_info(scope: Scope, info: RequestInfo) -> None:
    """Let the handlers of a request find what is known of it."""
    scope[_SCOPE_KEY] = info


def info_of(http: HTTPConnection) -> RequestInfo:
    """What the middleware has attached."""
    info: RequestInfo = http.scope[_SCOPE_KEY]
    return info
