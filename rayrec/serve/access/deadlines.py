"""A request may say by when its answer is of use."""

from __future__ import annotations

from collections.abc import Mapping

HEADER = "X-Request-Timeout-Ms"


class HeaderError(ValueError):
    """A header that cannot be used; the message is for the caller."""


def timeout_of(headers: Mapping[str, str], most_s: float) -> float:
    """Seconds in which the answer is wanted.

    Args:
        headers: names in any case where the mapping takes them so, as those of a web framework do.
        most_s: the service's own bound; what a request says can only be less.

    Raises:
        HeaderError: no whole number of milliseconds above 0.
    """
    said = headers.get(HEADER)
    if said is None:
        return most_s
    # int() would take signs, underscores and digits of other scripts, and texts of any length.
    if not (said.isascii() and said.isdigit()) or not said.strip("0"):
        raise HeaderError(f"{HEADER}: expected a whole number of milliseconds above 0, got {said[:40]!r}")
    digits = said.lstrip("0")
    return most_s if len(digits) > 15 else min(int(digits) / 1000.0, most_s)
