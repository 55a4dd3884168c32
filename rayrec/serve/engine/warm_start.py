"""What a replica leaves to the one that takes its place: its newest users, and the shapes of its programs.

    before: each answer ─► newest users ─┐ every so often
            programs that are there ─────┴─► FOLDER/warm-ID.json
    after:  all files ─► programs are ordered with the first ones
                     └─► users are answered, newest first ─► contexts kept, rows and pages read ─► ready

The first requests of a replica that knows nobody cost what a history costs that is read as a whole, and all
of them come at once when it says that it is ready. Replicas of Ray Serve have no names that outlive them, so
each reads what all have left; with more users than a prefix cache holds, it stops where the cache is full.
Each user and shape has the time when it was last asked for: else what is read would be left again for ever.

Nothing here keeps a replica from starting: files that cannot be read are passed over (`warm_files`), and
readiness waits for them and for users no longer than it may.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from rayrec.platform.errors import InputError
from rayrec.platform.files import write_atomically
from rayrec.serve.config.warm_start import WarmStartConfig
from rayrec.serve.engine.warm_files import PREFIX, Buckets, Left, in_time, read_left
from rayrec.serve.wire.schemas import RecommendRequest

logger = logging.getLogger(__name__)

BATCH = 16
"""Users that are answered together, at most."""
MAX_USER_KEY = 256
"""Characters; users with longer keys are not remembered."""


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
        self.left = self._read()
        """By the replicas before; users newest last."""
        self._users = dict(self.left.users)
        self._lock = threading.Lock()
        self._path = self._folder / f"{PREFIX}{uuid.uuid4().hex[:12]}.json"
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
        """Write the last file; a store that hangs is left alone."""
        self._stopping.set()

        def save() -> None:
            if self._thread is not None:
                self._thread.join()
            self._save_or_say()

        try:
            in_time(save, self._config.read_s)
        except TimeoutError:
            logger.warning("%s: the last file is not written within %g s", self._folder, self._config.read_s)

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

    def _read(self) -> Left:
        """
        Raises:
            InputError: as the constructor.
        """
        config = self._config
        first, room = self._clock() - config.max_age_s, int(config.read_mib * 2**20)

        def read() -> Left:
            _prepare(self._folder)
            return read_left(self._folder, first, room, config.users)

        try:
            return in_time(read, config.read_s)
        except TimeoutError:
            logger.warning(
                "%s: not read within %g s, and nobody is answered ahead", self._folder, config.read_s
            )
        return Left()

    def _save_or_say(self) -> None:
        try:
            self.save()
        except Exception as error:  # requests are answered all the same, and the next file may be written
            logger.warning("nothing is left to the next replica: %s", error)


def _prepare(folder: Path) -> None:
    """Make the folder, where it is not there.

    Raises:
        InputError: it cannot be one, or not be used by this process.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InputError(f"warm_start.folder: {folder} cannot be made ({error})") from error
    except OSError as error:  # of a store that is down now
        logger.warning("warm_start.folder: %s cannot be made now: %s", folder, error)
    else:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"warm_start.folder: {folder} cannot be written to")


def _is_full(before: tuple[float, float, float], after: tuple[float, float, float]) -> bool:
    """Whether histories that were not there were read, and others had to go for them."""
    histories, read, reused = (now - then for then, now in zip(before, after, strict=True))
    return histories <= 0 and read > 0 and reused == 0
