"""Answers calls on a Unix domain socket that nobody but the same user may use.

folder  0700, of this user      made here, or refused
└ NAME.sock  0600

connection ─► CALL ─► a task ─► answer(method, arguments, context) ─► ANSWERED, FAILED, REFUSED, LEAVING
              CANCEL, or the caller is gone ─► the task is cancelled
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import pickle
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayrec.serve.local_calls.frames import Frame, FramedProtocol, Kind, UnreadableError, pickled

logger = logging.getLogger(__name__)

LONGEST_PATH = 107
"""Bytes, of a socket of Linux; macOS takes 103, and says so itself."""

Answer = Callable[[str, tuple[Any, ...], Any], Awaitable[Any]]
"""(method, arguments, context) to what the method returns."""


class RefusedError(Exception):
    """There is no room for a call now; nothing was begun."""


class LeavingError(RefusedError):
    """Nor will there be."""


class Listener:
    """On one event loop."""

    def __init__(self, path: Path, answer: Answer) -> None:
        """
        Args:
            path: of the socket; its folder is made.
            answer: raises `RefusedError` where it begins nothing, and anything else that the caller gets.
        """
        self.path = path
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._connections: set[_Caller] = set()

    async def start(self) -> None:
        """Listen, and remove what processes that were killed have left in the folder.

        Raises:
            OSError: the folder is not of this user alone, or the path cannot be a socket's.
        """
        if len(os.fsencode(self.path)) > LONGEST_PATH:
            raise OSError(f"{self.path}: the path of a socket has at most {LONGEST_PATH} bytes")
        own_folder(self.path.parent)
        listening = await asyncio.to_thread(_listening, self.path)  # it may wait for other processes
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._connected, sock=listening)

    def close(self) -> None:
        """Listen no more; calls that are under way are given up."""
        self.path.unlink(missing_ok=True)
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()

    def _connected(self) -> _Caller:
        return _Caller(self._answer, self._connections)


class _Caller(FramedProtocol):
    """A connection of somebody who calls."""

    def __init__(self, answer: Answer, connections: set[_Caller]) -> None:
        super().__init__()
        self._answer, self._connections = answer, connections
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._connections.discard(self)
        for task in self._tasks.values():
            task.cancel()

    def received(self, frame: Frame) -> None:
        if frame.kind is Kind.CANCEL:
            if (task := self._tasks.pop(frame.number, None)) is not None:
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._answered(frame))
        self._tasks[frame.number] = task
        task.add_done_callback(lambda _: self._tasks.pop(frame.number, None))

    async def _answered(self, frame: Frame) -> None:
        try:
            if isinstance(frame.value, UnreadableError):
                raise frame.value
            method, arguments, context = frame.value
            kind, content = Kind.ANSWERED, pickled(await self._answer(method, arguments, context))
        except LeavingError:
            kind, content = Kind.LEAVING, b""
        except RefusedError:
            kind, content = Kind.REFUSED, b""
        except asyncio.CancelledError:
            if frame.number not in self._tasks or not self.is_open():
                raise  # nobody waits for it
            # The caller asked for no such thing, and would wait for as long as it may.
            self.send(Kind.FAILED, frame.number, pickled(RuntimeError(f"{method}: cancelled by the replica")))
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # by who ends the loop
            return
        except Exception as error:
            kind, content = Kind.FAILED, _pickled_error(error)
        await self.writable()
        self.send(kind, frame.number, content)


def own_folder(folder: Path) -> None:
    """Make a folder that nobody else may enter.

    Raises:
        OSError: one is there that others may enter, or that is another user's.
    """
    folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder}: not a folder of this user alone, so no socket is made there")


def _listening(path: Path) -> socket.socket:
    """A socket on which connections are taken; stale ones of its folder are removed."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with _locked(path.parent):
            remove_stale(path.parent)
            made.bind(str(path))
            os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
            made.listen()
    except BaseException:
        made.close()
        raise
    return made


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone of all processes: between its bind and its listen, a socket looks as one that was left."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which unlocks it


def remove_stale(folder: Path) -> None:
    """Remove the sockets on which nobody listens; for who has locked the folder."""
    for path in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError as error:  # busy, or gone meanwhile
                logger.debug("%s: %s", path, error)


def _pickled_error(error: Exception) -> bytes:
    try:
        content = pickled(error)
        pickle.loads(content)  # many exceptions cannot be made again of their arguments
        return content
    except Exception:
        return pickled(RuntimeError(f"{type(error).__name__}: {error}"))
