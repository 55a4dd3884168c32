"""A replica follows a store of versions: it looks, loads beside the requests, and flips.

pointer has moved ─► version held already? ─────────────────────────► flip
                     └ else: segments on the rows that are held, weights ─► warmed up ─┘
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rayrec.embeddings.threads import give_way
from rayrec.pipelines.versions.loading import LoadedVersion, load_version
from rayrec.pipelines.versions.store import VersionStore
from rayrec.serve.current import CurrentService
from rayrec.serve.service import RecommendationService

logger = logging.getLogger(__name__)

AGAIN_AFTER_S = 10.0
"""After a version that could not be loaded."""


class VersionFollower:
    """Keeps a service at the version that a store points to.

    Whatever goes wrong, the version that answers goes on answering.
    """

    def __init__(
        self,
        store: VersionStore,
        current: CurrentService,
        loaded: LoadedVersion,
        build: Callable[[LoadedVersion], RecommendationService],
        device: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            loaded: the version that `current` answers with.
            build: a service for a version, ready for requests.
            device: overrides the device that the run was trained on.
        """
        self._store, self._current, self._build, self._device = store, current, build, device
        self._clock = clock
        self._loaded = {loaded.manifest.number: loaded}
        self._serving = self._newest = loaded.manifest.number
        self._num_errors = 0
        self._last_error: str | None = None
        self._not_before = 0.0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, every_s: float) -> None:
        """Look from now on, on a thread of low priority."""

        def run() -> None:
            give_way()
            while not self._stopping.wait(every_s):
                self.look()

        self._thread = threading.Thread(target=run, name="versions", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return when nothing is loaded any more."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> bool:
        """Go where the store points; whether another version answers now."""
        try:
            pointer = self._store.current()
            if pointer is None or pointer.version == self._serving:
                return False
            if pointer.version == self._newest and self._clock() < self._not_before:
                return False
            self._newest = pointer.version
            self._go_to(pointer.version)
        except Exception as error:  # of a store, a file, or a model: what answers is not touched by it
            self._num_errors += 1
            self._not_before = self._clock() + AGAIN_AFTER_S
            if str(error) != self._last_error:
                self._last_error = str(error)
                logger.error("version %d goes on answering: %s", self._serving, error)
            return False
        self._last_error, self._not_before = None, 0.0
        return True

    def _go_to(self, number: int) -> None:
        service = self._current.held(number)
        if service is None:
            manifest = self._store.version(number)
            held = self._loaded[self._serving]
            loaded = load_version(self._store, manifest, self._device, held)
            service = self._build(loaded)
            self._loaded[number] = loaded
        before, self._serving = self._serving, number
        self._current.flip(service)
        self._loaded = {each: self._loaded[each] for each in (before, number)}
        logger.info(
            "version %d answers, published %.1f s ago", number, self.figures()["serving_version_age_s"]
        )

    def figures(self) -> dict[str, float]:
        """For meters."""
        serving = self._loaded[self._serving]
        return {
            "serving_version": self._serving,
            "serving_version_age_s": self._clock() - serving.manifest.published_at,
            "serving_versions_behind": self._newest - self._serving,
            "serving_version_rows": serving.tables.num_rows,
            "serving_version_errors": self._num_errors,
        }
