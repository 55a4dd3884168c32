"""A thread that follows the pointer of a version store, for a replica or for a dense part alone.

every so often: pointer ─► go_to(version) ─► done
                             └ fails: said once, counted, tried again later, or when it has moved
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rayrec.pipelines.versions.store import VersionStore

logger = logging.getLogger(__name__)

AGAIN_AFTER_S = 10.0
"""After a version that could not be loaded: loading takes time and disk from what answers."""


class PointerFollower:
    """Whatever goes wrong, what is held is not touched by it."""

    def __init__(
        self, store: VersionStore, go_to: Callable[[int], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            go_to: called at each look; does nothing for a version that it has gone to already.
        """
        self._store, self._go_to, self._clock = store, go_to, clock
        self.wanted: int | None = None
        """The version that the store pointed to when it last answered."""
        self.num_errors = 0
        self._last_error: str | None = None
        self._failed: int | None = None
        self._not_before = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, every_s: float) -> None:
        """Look from now on, on a thread of its own.

        Its priority is that of the others. With a lower one, on a machine whose cores are all busy, it would
        hold the interpreter's lock while it waits for a core, and the answering thread would wait with it.
        """

        def run() -> None:
            while not self._stopping.wait(every_s):
                self.look()

        self._thread = threading.Thread(target=run, name="versions", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return when nothing is loaded any more."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """Go where the store points, unless that has just failed."""
        going: int | None = None
        try:
            pointer = self._store.current()
            if pointer is None:
                return
            self.wanted = pointer.version
            if pointer.version == self._failed and self._clock() < self._not_before:
                return
            going = pointer.version
            self._go_to(going)
        except Exception as error:  # of a store, a file, or a model
            self.num_errors += 1
            self._failed, self._not_before = going, self._clock() + AGAIN_AFTER_S
            if str(error) != self._last_error:
                self._last_error = str(error)
                logger.error("what is held goes on answering: %s", error)
            return
        self._last_error = self._failed = None
