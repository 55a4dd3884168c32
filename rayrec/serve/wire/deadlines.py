"""A request may say by when its answer is of use, and a proxy in front of the service when it came.

Under load a request waits before this process has read it: in HAProxy, in a socket, for the event loop. Whose
answer is of use for half a second has used up a part of it then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

HEADER = "X-Request-Timeout-Ms"
ARRIVED_HEADER = "X-Request-Start"
"""Milliseconds since 1970 by the clock of the proxy that wrote it. HAProxy replaces what callers say."""
NO_TIME_HEADER = "X-No-Time"
"""Of a replica's answer: it was refused since it would be late. Callers do not see it."""
_MOST_DIGITS = 15


class HeaderError(ValueError):
    """A header that cannot be used; the message is for the caller."""


def timeout_of(headers: Mapping[str, str], most_s: float, now: Callable[[], float] = time.time) -> float:
    """Seconds in which the answer is wanted, from now; 0 where that time is over.

    Args:
        headers: names in any case where the mapping takes them so, as those of a web framework do.
        most_s: the service's own bound; what a request says can only be less.
        now: seconds since 1970.

    Raises:
        HeaderError: no whole number of milliseconds above 0.
    """
    wanted_s = most_s
    if (said := headers.get(HEADER)) is not None:
        # int() would take signs, underscores and digits of other scripts, and texts of any length.
        if not _is_whole(said) or not said.strip("0"):
            raise HeaderError(f"{HEADER}: expected a whole number of milliseconds above 0, got {said[:40]!r}")
        digits = said.lstrip("0")
        wanted_s = most_s if len(digits) > _MOST_DIGITS else min(int(digits) / 1000.0, most_s)
    return max(wanted_s - _waited_s(headers, most_s, now), 0.0)


def _waited_s(headers: Mapping[str, str], most_s: float, now: Callable[[], float]) -> float:
    said = headers.get(ARRIVED_HEADER)
    if said is None or not _is_whole(said) or len(said) > _MOST_DIGITS:
        return 0.0
    waited_s = now() - int(said) / 1000.0
    # Nobody waits for longer than that: clocks differ, and would have every request refused.
    return waited_s if 0.0 < waited_s <= most_s else 0.0


def _is_whole(said: str) -> bool:
    return said.isascii() and said.isdigit()
