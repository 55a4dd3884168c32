"""Server-sent events as they come over a network, in pieces of any size.

Source: the HTML standard, html.spec.whatwg.org, section 9.2 (server-sent events).
"""

from __future__ import annotations

import re

MOST_BYTES = 4 * 1024 * 1024
"""Of one event."""
_END_OF_LINE = re.compile(rb"\r\n|\n|\r(?!$)")
"""A return at the end may be half of one."""


class EventTooLargeError(ValueError):
    """An event has no end, or is none."""


class EventReader:
    """Tells the data of events; not thread-safe."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        """Of a line that has not ended."""
        self._data: list[str] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[str]:
        """The data of events that are whole now.

        Raises:
            EventTooLargeError: one is larger than any answer's.
        """
        self._parts.append(piece)
        self._size += len(piece)
        if self._size > MOST_BYTES:
            raise EventTooLargeError(f"an event has more than {MOST_BYTES:,} bytes")
        if b"\n" not in piece and b"\r" not in piece:
            return []
        *lines, rest = _END_OF_LINE.split(b"".join(self._parts))
        self._parts, found = [rest], []
        for line in lines:
            if not line:
                if self._data:
                    found.append("\n".join(self._data))
                self._data, self._size = [], len(rest)
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode(errors="replace"))
        return found
