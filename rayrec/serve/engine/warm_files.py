"""Files that replicas leave for those that start after them, and how they are read: so much, and so long.

newest first ─► a file, young enough, with room ─► users and shapes, with the later time of each
                 └ anything else: a line in the log, and the next file

The folder is shared, and may hold what other versions or other programs have written. What a replica reads of
it is bounded, as all of it is read before the first answer.
"""

from __future__ import annotations

import json
import logging
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rayrec.models.compiled_ranking.buckets import Bucket

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")
_Result = TypeVar("_Result")
PREFIX = "warm-"

Times = Mapping[str, float]
"""When users were last asked for, in UNIX seconds."""
Buckets = Mapping[str, Mapping[Bucket, float]]
"""Shapes of programs with the same, by the fingerprint of the model that they are of."""


@dataclass(frozen=True)
class Left:
    """By one replica, or by all."""

    users: Times = field(default_factory=dict)
    buckets: Buckets = field(default_factory=dict)

    def since(self, first: float) -> Left:
        """What was asked for from then on."""
        users = {user: at for user, at in self.users.items() if at >= first}
        buckets = {
            name: {each: at for each, at in found.items() if at >= first}
            for name, found in self.buckets.items()
        }
        return Left(users, {name: found for name, found in buckets.items() if found})

    def to_bytes(self) -> bytes:
        shapes = {
            name: [[each.num_rows, each.length, each.width, at] for each, at in found.items()]
            for name, found in self.buckets.items()
        }
        return json.dumps({"users": list(self.users.items()), "buckets": shapes}).encode()

    @staticmethod
    def of_bytes(content: bytes) -> Left:
        """
        Raises:
            ValueError: it is something else.
        """
        try:
            found = json.loads(content)
        except RecursionError as error:
            raise ValueError("not what a replica leaves (lists in lists in lists)") from error
        try:
            users = {str(user): float(at) for user, at in found["users"]}
            buckets = {
                str(name): {Bucket(*map(int, shape)): float(at) for *shape, at in shapes}
                for name, shapes in found["buckets"].items()
            }
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(f"not what a replica leaves ({error!r})") from error
        return Left(users, buckets)


def read_left(folder: Path, first: float, room: int, most_users: int) -> Left:
    """What all replicas have left.

    Args:
        first: UNIX seconds; what is older is not read, and deleted where a whole file is.
        room: bytes of all files together.
        most_users: the newest are taken.
    """
    users: dict[str, float] = {}
    buckets: dict[str, dict[Bucket, float]] = {}
    for content in _contents(folder, first, room):
        _add(users, content.users)
        for name, found in content.buckets.items():
            _add(buckets.setdefault(name, {}), found)
    newest = sorted(users.items(), key=lambda each: each[1])[-most_users:]
    return Left(dict(newest), buckets).since(first)


def in_time(call: Callable[[], _Result], seconds: float) -> _Result:
    """What a call returns, which may hang: then it goes on in a thread that nobody waits for.

    Raises:
        TimeoutError: it takes longer.
        Exception: what it raises.
    """
    done: Future[_Result] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="warm-start-files", daemon=True).start()
    return done.result(seconds)


def _contents(folder: Path, first: float, room: int) -> Iterable[Left]:
    passed_over = []
    for _, size, path in sorted(_young(folder, first), key=lambda each: -each[0]):
        if size > room:
            passed_over.append(size)
            continue
        room -= size
        try:
            with path.open("rb") as file:
                yield Left.of_bytes(file.read(size))
        except FileNotFoundError:
            pass  # another replica that starts has deleted it
        except (OSError, ValueError) as error:
            _pass_over(path, error)
    if passed_over:
        files = (
            "1 file of %d bytes is" if len(passed_over) == 1 else f"{len(passed_over)} files of %d bytes are"
        )
        logger.warning(
            f"%s: {files} passed over, for which warm_start.read_mib has no room", folder, sum(passed_over)
        )


def _young(folder: Path, first: float) -> Iterable[tuple[float, int, Path]]:
    """(When it was written, bytes, file) of those that are not too old; the others are deleted."""
    for path in _files(folder):
        try:
            status = path.stat()
            if status.st_mtime < first:
                path.unlink()
            elif stat.S_ISREG(status.st_mode):
                yield status.st_mtime, status.st_size, path
            else:  # a pipe, say, which would be waited for
                logger.warning("%s: is no file, and is passed over", path)
        except FileNotFoundError:
            pass  # as above
        except OSError as error:
            _pass_over(path, error)


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob(f"{PREFIX}*.json"))
    except OSError as error:
        logger.warning("%s: cannot be read, and nobody is answered ahead: %s", folder, error)
        return []


def _pass_over(path: Path, error: Exception) -> None:
    logger.warning("%s: cannot be read, and is passed over: %s", path, error)


def _add(times: dict[_Key, float], more: Mapping[_Key, float]) -> None:
    """The later time of each."""
    for key, at in more.items():
        times[key] = max(at, times.get(key, at))
