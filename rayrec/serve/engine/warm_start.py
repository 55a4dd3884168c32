"""What a replica leaves to the one that takes its place: its newest users, and the shapes of its programs.

    before: each answer ─► newest users ─┐ every so often
            programs that are there ─────┴─► FOLDER/warm-ID.json
    after:  all files ─► programs are ordered with the first ones
                     └─► users are answered, newest first ─► contexts kept, rows and pages read ─► ready

The first requests of a replica that knows nobody cost what a history costs that is read as a whole, and all
of them come at once when it says that it is ready. Replicas of Ray Serve have no names that outlive them, so
each reads what all have left; with more users than a prefix cache holds, it stops where the cache is full.
Each user and shape has the time when it was last asked for: else what is read would be left again for ever.

Nothing here keeps a replica from starting: files that cannot be read are passed over, and readiness waits for
users no longer than it may.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from rayrec.models.compiled_ranking.buckets import Bucket
from rayrec.platform.errors import InputError
from rayrec.platform.files import write_atomically
from rayrec.serve.config.warm_start import WarmStartConfig
from rayrec.serve.wire.schemas import RecommendRequest

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")
_PREFIX = "warm-"
BATCH = 16
"""Users that are answered together, at most."""
MAX_USER_KEY = 256
"""Characters; users with longer keys are not remembered."""

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
        found = json.loads(content)
        try:
            users = {str(user): float(at) for user, at in found["users"]}
            buckets = {
                str(name): {Bucket(*map(int, shape)): float(at) for *shape, at in shapes}
                for name, shapes in found["buckets"].items()
            }
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not what a replica leaves ({error!r})") from error
        return Left(users, buckets)


class Answering(Protocol):
    """What of a `RecommendationService` is asked here."""

    @property
    def kept(self) -> tuple[float, float, float] | None: ...

    def warm(self, users: Sequence[str]) -> int: ...


class WarmStart:
    """Remembers for the next replica, and has what the ones before have left. From any thread."""

    def __init__(self, config: WarmStartConfig, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            clock: UNIX seconds, as files have them.

        Raises:
            InputError: the folder is none, or not to be used by this process.
        """
        self._config, self._clock = config, clock
        self._folder = Path(config.folder)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise InputError(f"warm_start.folder: {self._folder} cannot be made ({error})") from error
        except OSError as error:  # of a store that is down now
            logger.warning("warm_start.folder: %s cannot be made now: %s", self._folder, error)
        else:
            if not os.access(self._folder, os.W_OK | os.X_OK):
                raise InputError(f"warm_start.folder: {self._folder} cannot be written to")
        self.left = self._read()
        """By the replicas before; users newest last."""
        self._users = dict(self.left.users)
        self._lock = threading.Lock()
        self._path = self._folder / f"{_PREFIX}{uuid.uuid4().hex[:12]}.json"
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_warmed, self._seconds = 0, 0.0
        self._buckets: Callable[[], Buckets] = dict

    def note(self, requests: Sequence[RecommendRequest]) -> None:
        """These were answered."""
        users = [
            str(each.user_id)
            for each in requests
            if each.user_id is not None and each.history is None and len(str(each.user_id)) <= MAX_USER_KEY
        ]
        with self._lock:
            for user in users:
                self._users.pop(user, None)  # newest last
                self._users[user] = self._clock()
            while len(self._users) > self._config.users:
                del self._users[next(iter(self._users))]

    def warm(self, service: Answering, max_batch: int = BATCH) -> int:
        """Answer the newest users, as long as it helps and there is time; how many were answered.

        It waits no longer than there is time. What hangs by then goes on beside the first requests, and
        answers nobody after that.
        """
        began = time.perf_counter()
        users, most_s = list(self.left.users)[::-1][: self._config.users], self._config.most_s
        if users and most_s > 0:
            arguments = (service, users, min(max_batch, BATCH), began + most_s)
            thread = threading.Thread(target=self._warm, args=arguments, name="warm-start-users", daemon=True)
            thread.start()
            thread.join(most_s)
            if thread.is_alive():
                logger.warning("ready after %g s, while users of the replica before are not answered", most_s)
        self._seconds = time.perf_counter() - began
        if users:
            logger.info("answered %d users ahead, in %.1f s", self._num_warmed, self._seconds)
        return self._num_warmed

    def _warm(self, service: Answering, users: Sequence[str], size: int, until: float) -> None:
        try:
            kept = service.kept
            for start in range(0, len(users), size):
                if time.perf_counter() >= until:
                    return
                self._num_warmed += service.warm(users[start : start + size])
                before, kept = kept, service.kept
                if before is not None and kept is not None and _is_full(before, kept):
                    return
        except Exception as error:  # they are answered all the same when they come, or get their error
            logger.warning("users of the replica before are not answered ahead: %s", error)

    def start(self, buckets: Callable[[], Buckets] = dict) -> None:
        """Write a file every so often, from now on.

        Args:
            buckets: of the programs that are there.
        """
        self._buckets = buckets

        def run() -> None:
            while not self._stopping.wait(self._config.every_s):
                self._save_or_say()

        self._thread = threading.Thread(target=run, name="warm-start", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the last file."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._save_or_say()

    def save(self) -> None:
        """Write what there is now; nothing where nobody was answered."""
        with self._lock:
            left = Left(dict(self._users), self._buckets())
        left = left.since(self._clock() - self._config.max_age_s)
        if left.users or left.buckets:
            write_atomically(self._path, left.to_bytes(), mode=0o600)

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        return {"warm_start_users": float(self._num_warmed), "warm_start_seconds": self._seconds}

    def _save_or_say(self) -> None:
        try:
            self.save()
        except Exception as error:  # requests are answered all the same, and the next file may be written
            logger.warning("nothing is left to the next replica: %s", error)

    def _read(self) -> Left:
        first = self._clock() - self._config.max_age_s
        users: dict[str, float] = {}
        buckets: dict[str, dict[Bucket, float]] = {}
        for path in self._files():
            left = self._read_file(path, first)
            _add(users, left.users)
            for name, found in left.buckets.items():
                _add(buckets.setdefault(name, {}), found)
        newest = sorted(users.items(), key=lambda each: each[1])[-self._config.users :]
        return Left(dict(newest), buckets).since(first)

    def _files(self) -> list[Path]:
        try:
            return sorted(self._folder.glob(f"{_PREFIX}*.json"))
        except OSError as error:
            logger.warning("%s: cannot be read, and nobody is answered ahead: %s", self._folder, error)
            return []

    def _read_file(self, path: Path, first: float) -> Left:
        """Empty where there is nothing of use; one that is older than all of use is deleted."""
        try:
            if path.stat().st_mtime >= first:
                return Left.of_bytes(path.read_bytes())
            path.unlink()
        except FileNotFoundError:
            pass  # another replica that starts has deleted it
        except (OSError, ValueError) as error:
            logger.warning("%s: cannot be read, and is passed over: %s", path, error)
        return Left()


def _add(times: dict[_Key, float], more: Mapping[_Key, float]) -> None:
    """The later time of each."""
    for key, at in more.items():
        times[key] = max(at, times.get(key, at))


def _is_full(before: tuple[float, float, float], after: tuple[float, float, float]) -> bool:
    """Whether histories that were not there were read, and others had to go for them."""
    histories, read, reused = (now - then for then, now in zip(before, after, strict=True))
    return histories <= 0 and read > 0 and reused == 0
