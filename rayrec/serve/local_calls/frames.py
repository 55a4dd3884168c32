"""Messages between two processes of one node.

    CALL     (method, arguments, context)  ─►
    CANCEL                                 ─►
                                           ◄─  ANSWERED  what the method returned
                                           ◄─  FAILED    what it raised
                                           ◄─  REFUSED   nothing was begun
                                           ◄─  LEAVING   the same, and the process takes no more calls

A message is a header (kind, number of the call, bytes that follow) and a pickled value. Ray's own calls are
pickled as well; who may connect is the same user, who could do anything to either process without it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import pickle
import struct
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<BQQ")
_JOINED_BYTES = 64 * 1024
"""Up to which header and value are written at once, which takes a copy."""


class Kind(enum.IntEnum):
    """Of a message."""

    CALL = 1
    CANCEL = 2
    ANSWERED = 3
    FAILED = 4
    REFUSED = 5
    LEAVING = 6


_KINDS = frozenset(Kind)


class Frame(NamedTuple):
    """A message."""

    kind: Kind
    number: int
    """Of the call, counted by the caller's end of the connection."""
    value: Any


class UnreadableError(ValueError):
    """A value that came cannot be unpickled here."""


class FrameReader:
    """Cuts what comes in pieces of any size into messages."""

    def __init__(self) -> None:
        self._come = bytearray()
        self.is_lost = False
        """A kind came that there is not: the other end speaks something else, and nothing more is read."""

    def read(self, piece: bytes) -> list[Frame]:
        """The messages that are whole now, with an `UnreadableError` for a value that cannot be unpickled."""
        if self.is_lost:
            return []
        self._come += piece
        frames, begin = [], 0
        with memoryview(self._come) as come:
            while len(come) - begin >= _HEADER.size:
                kind, number, num_bytes = _HEADER.unpack_from(come, begin)
                if kind not in _KINDS:
                    self.is_lost = True
                    break
                end = begin + _HEADER.size + num_bytes
                if len(come) < end:
                    break
                with come[begin + _HEADER.size : end] as content:
                    frames.append(Frame(Kind(kind), number, _unpickled(content)))
                begin = end
        del self._come[:begin]
        return frames


class FramedProtocol(ABC, asyncio.Protocol):
    """One end of a connection; on one event loop."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._writable = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._writable.set()  # who waits to write finds that there is nobody to write to

    def pause_writing(self) -> None:
        """Called by the loop: the other end is slower than this one."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Called by the loop."""
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        for frame in self._reader.read(data):
            self.received(frame)
        if self._reader.is_lost and self.is_open():
            logger.warning("a connection within this node is closed: the other end speaks something else")
            self.close()

    @abstractmethod
    def received(self, frame: Frame) -> None:
        """A message came."""

    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """End the connection at once; what was not sent is not sent."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, kind: Kind, number: int, pickled: bytes = b"") -> bool:
        """Write a message; False: there is nobody to write to."""
        if self._transport is None or self._transport.is_closing():
            return False
        header = _HEADER.pack(kind, number, len(pickled))
        if len(pickled) <= _JOINED_BYTES:
            self._transport.write(header + pickled)
        else:
            self._transport.write(header)
            self._transport.write(pickled)
        return True

    async def writable(self) -> None:
        """Wait until the other end has taken most of what was written."""
        await self._writable.wait()


def _unpickled(content: memoryview) -> Any:
    """What was pickled, None of nothing; an error instead, which is of one call and not of the connection."""
    if not content:
        return None
    try:
        return pickle.loads(content)
    except Exception as error:
        logger.warning("a value of a call within this node cannot be unpickled", exc_info=True)
        return UnreadableError(f"{type(error).__name__}: {error}")


def pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
