"""What a replica leaves to the one that takes its place: its newest users, and the shapes of its programs.

    before: each answer ─► newest users ─┐ every so often
            programs that are there ─────┴─► FOLDER/warm-ID.json
    after:  all files ─► programs are ordered with the first ones
                     └─► users are answered, newest first ─► contexts kept, rows and pages read ─► ready

The first requests of a replica that knows nobody cost what a history costs that is read as a whole, and all
of them come at once when it says that it is ready. Replicas of Ray Serve have no names that outlive them, so
each reads what all have left; with more users than a prefix cache holds, it stops where the cache is full.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rayrec.models.compiled_ranking.buckets import Bucket
from rayrec.platform.errors import InputError
from rayrec.platform.files import write_atomically
from rayrec.serve.config.warm_start import WarmStartConfig
from rayrec.serve.wire.schemas import RecommendRequest

logger = logging.getLogger(__name__)

_PREFIX = "warm-"
BATCH = 16
"""Users that are answered together, at most."""
MAX_USER_KEY = 256
"""Characters; users with longer keys are not remembered."""

Buckets = Mapping[str, Sequence[Bucket]]
"""Shapes of programs, by the fingerprint of the model that they are of."""


@dataclass(frozen=True)
class Left:
    """By one replica, or by all."""

    users: tuple[str, ...] = ()
    """Newest last."""
    buckets: Buckets = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        shapes = {
            name: [[each.num_rows, each.length, each.width] for each in buckets]
            for name, buckets in self.buckets.items()
        }
        return json.dumps({"users": self.users, "buckets": shapes}).encode()

    @staticmethod
    def of_bytes(content: bytes) -> Left:
        """
        Raises:
            ValueError: it is something else.
        """
        found = json.loads(content)
        try:
            users = tuple(user for user in found["users"] if isinstance(user, str))
            buckets = {
                str(name): [Bucket(*map(int, shape)) for shape in shapes]
                for name, shapes in found["buckets"].items()
            }
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not what a replica leaves ({error!r})") from error
        return Left(users, buckets)


class Answering(Protocol):
    """What of a `RecommendationService` is asked here."""

    @property
    def kept(self) -> tuple[float, float, float] | None: ...

    def warm(self, users: Sequence[str]) -> None: ...


class WarmStart:
    """Remembers for the next replica, and has what the ones before have left. From any thread."""

    def __init__(self, config: WarmStartConfig, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            clock: UNIX seconds, as files have them.

        Raises:
            InputError: the folder cannot be used.
        """
        self._config, self._clock = config, clock
        self._folder = Path(config.folder)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"warm_start.folder: {self._folder} cannot be made ({error})") from error
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise InputError(f"warm_start.folder: {self._folder} cannot be written to")
        self.left = self._read()
        """By the replicas before."""
        self._users: OrderedDict[str, None] = OrderedDict.fromkeys(self.left.users)
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
                self._users[user] = None
                self._users.move_to_end(user)
            while len(self._users) > self._config.users:
                self._users.popitem(last=False)

    def warm(self, service: Answering, max_batch: int = BATCH) -> int:
        """Answer the newest users, as long as it helps and there is time; how many were answered."""
        began = time.perf_counter()
        users, size = list(reversed(self.left.users))[: self._config.users], min(max_batch, BATCH)
        kept = service.kept
        for start in range(0, len(users), size):
            if time.perf_counter() - began >= self._config.most_s:
                break
            part = users[start : start + size]
            try:
                service.warm(part)
            except Exception as error:  # they are answered all the same when they come, or get their error
                logger.warning("users of the replica before are not answered ahead: %s", error)
                break
            self._num_warmed += len(part)
            before, kept = kept, service.kept
            if before is not None and kept is not None and _is_full(before, kept):
                break
        self._seconds = time.perf_counter() - began
        if users:
            logger.info("answered %d users ahead, in %.1f s", self._num_warmed, self._seconds)
        return self._num_warmed

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
            left = Left(tuple(self._users), self._buckets())
        if left.users or left.buckets:
            write_atomically(self._path, left.to_bytes())
            self._path.chmod(0o600)

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        return {"warm_start_users": float(self._num_warmed), "warm_start_seconds": self._seconds}

    def _save_or_say(self) -> None:
        try:
            self.save()
        except OSError as error:
            logger.warning("nothing is left to the next replica: %s", error)

    def _read(self) -> Left:
        users: OrderedDict[str, None] = OrderedDict()
        buckets: dict[str, list[Bucket]] = {}
        files = [(each.stat().st_mtime, each) for each in self._folder.glob(f"{_PREFIX}*.json")]
        for written_at, path in sorted(files):
            if self._clock() - written_at > self._config.max_age_s:
                path.unlink(missing_ok=True)
                continue
            try:
                left = Left.of_bytes(path.read_bytes())
            except (OSError, ValueError) as error:
                logger.warning("%s: cannot be read, and is passed over: %s", path, error)
                continue
            for user in left.users:
                users[user] = None
                users.move_to_end(user)
            for name, found in left.buckets.items():
                buckets[name] = list(dict.fromkeys([*buckets.get(name, ()), *found]))
        return Left(tuple(users)[-self._config.users :], buckets)


def _is_full(before: tuple[float, float, float], after: tuple[float, float, float]) -> bool:
    """Whether histories that were not there were read, and others had to go for them."""
    histories, read, reused = (now - then for then, now in zip(before, after, strict=True))
    return histories <= 0 and read > 0 and reused == 0
