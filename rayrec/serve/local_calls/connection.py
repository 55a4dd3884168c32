"""A connection to a listener, on which many calls are under way at once."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

from rayrec.serve.local_calls.frames import Frame, FramedProtocol, Kind, UnreadableError, pickled


class LostError(ConnectionError):
    """The other end is gone; whether it began a call is not known."""


class NotSentError(LostError):
    """It was gone before the call was sent to it."""


class Connection(FramedProtocol):
    """On one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Frame]] = {}

    @staticmethod
    async def open(path: Path) -> Connection:
        """Connect.

        Raises:
            OSError: nobody listens there, or not to this user.
        """
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(Connection, str(path))
        return connection

    @property
    def num_under_way(self) -> int:
        """Calls that have no answer yet."""
        return len(self._calls)

    async def call(self, method: str, arguments: tuple[Any, ...], context: Any) -> Frame:
        """What comes back: `ANSWERED` or `FAILED` with a value, or `REFUSED` or `LEAVING`.

        The other end stops computing what is cancelled here.

        Raises:
            LostError: the connection ended first.
        """
        content = pickled((method, arguments, context))
        await self.writable()
        number = next(self._numbers)
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            if not self.send(Kind.CALL, number, content):
                raise NotSentError("nobody listens any more")
            return await answer
        except asyncio.CancelledError:
            self.send(Kind.CANCEL, number)
            raise
        finally:
            del self._calls[number]

    def received(self, frame: Frame) -> None:
        if isinstance(frame.value, UnreadableError):  # the call was computed, so it is not lost
            frame = frame._replace(kind=Kind.FAILED)
        # What was cancelled may be answered all the same.
        if (answer := self._calls.get(frame.number)) is not None and not answer.done():
            answer.set_result(frame)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(LostError("the process that computed the call has ended"))
