"""A replica follows a store of versions: it loads while requests are answered, and flips.

pointer has moved ─► version held already? ──────────────────────────────────► flip
                     └ else: segments on the rows that are held, weights ─► warmed up, asked ─┘
                                                                └ not sane: refused, counted
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.versions.canary import Canaries
from rayrec.pipelines.versions.gate import GateError
from rayrec.pipelines.versions.loading import LoadedVersion, load_version
from rayrec.pipelines.versions.store import VersionStore
from rayrec.serve.engine.canary import CanaryFollower
from rayrec.serve.engine.current import CurrentService
from rayrec.serve.engine.pointer import PointerFollower
from rayrec.serve.engine.service import RecommendationService

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Waiting:
    """A version that could answer, and whose products are not there yet."""

    loaded: LoadedVersion
    service: RecommendationService
    since: float


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
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            loaded: the version that `current` answers with.
            build: a service for a version, ready for requests.
            device: overrides the device that the run was trained on.
            clock: of waits, which a clock that is put back or forward must not change.
            wall_clock: UNIX seconds, as the store has them.
        """
        self._store, self._current, self._build, self._device = store, current, build, device
        self._clock, self._wall_clock = clock, wall_clock
        self._loaded = {loaded.manifest.number: loaded}
        self._serving = loaded.manifest.number
        self._num_refused = 0
        self._as_published: dict[int, float] = {}
        """By version that is held, the share of its answers that are as published, where known."""
        self._is_ready: Callable[[Recommender], bool] = lambda recommender: True
        self._wait_s = 0.0
        self._waiting: _Waiting | None = None
        self._canary_loaded: LoadedVersion | None = None
        self._canary = CanaryFollower(
            Canaries(store, wall_clock), current.share_with, self._load_canary, clock
        )
        self._pointer = PointerFollower(store, self._look, clock)

    def wait_for(self, is_ready: Callable[[Recommender], bool], most_s: float) -> None:
        """Let versions answer only when something is ready for them, or so many seconds have passed."""
        self._is_ready, self._wait_s = is_ready, most_s

    def start(self, every_s: float) -> None:
        """As `PointerFollower.start`."""
        self._pointer.start(every_s)

    def stop(self) -> None:
        """As `PointerFollower.stop`."""
        self._pointer.stop()

    def look(self) -> bool:
        """Go where the store points; whether another version answers now."""
        before = self._serving
        self._pointer.look()
        return self._serving != before

    def _look(self, number: int) -> None:
        self._go_to(number)
        self._canary.look(self._serving)

    def _load_canary(self, number: int) -> RecommendationService:
        self._canary_loaded, service = self._load(number)
        return service

    def _load(self, number: int) -> tuple[LoadedVersion, RecommendationService]:
        """A version that is fit to answer."""
        manifest = self._store.version(number)
        held = self._loaded[self._serving]
        try:
            loaded = load_version(self._store, manifest, self._device, held)
            service = self._build(loaded)
            as_published = service.check_answers(manifest.probes)
        except GateError:
            self._num_refused += 1
            raise
        # Else the answers were those of newer weights.
        if as_published is not None and manifest.weights_step == manifest.step:
            self._as_published[number] = as_published
        return loaded, service

    def _go_to(self, number: int) -> None:
        if number == self._serving:
            self._waiting = None  # one that waited is not wanted any more
            return
        service = self._current.held(number)
        waiting, canary = self._waiting, self._canary_loaded
        if service is not None and canary is not None and canary.manifest.number == number:
            self._loaded[number] = canary
        if service is None and waiting is not None and waiting.loaded.manifest.number == number:
            service = waiting.service
            if not self._may_answer(waiting):
                return
            self._loaded[number] = waiting.loaded
        elif service is None:
            loaded, service = self._load(number)
            self._waiting = _Waiting(loaded, service, self._clock())
            if not self._may_answer(self._waiting):
                logger.info("version %d waits for its near-line products", number)
                return
            self._loaded[number] = loaded
        self._waiting = None
        before, self._serving = self._serving, number
        self._current.flip(service)
        self._loaded = {each: self._loaded[each] for each in (before, number)}
        if self._canary.running is None:
            self._canary_loaded = None
        canaries = () if self._canary_loaded is None else (self._canary_loaded,)
        held = [each.manifest for each in (*self._loaded.values(), *canaries)]
        known = self._as_published
        self._as_published = {each.number: known[each.number] for each in held if each.number in known}
        self._store.clean_cache(held)
        logger.info(
            "version %d answers, published %.1f s ago", number, self.metrics()["serving_version_age_s"]
        )

    def _may_answer(self, waiting: _Waiting) -> bool:
        if self._clock() - waiting.since >= self._wait_s:
            return True
        return self._is_ready(waiting.service.recommender)

    def metrics(self) -> dict[str, float]:
        """For meters. What is wanted, and not loaded, is an earlier version where somebody went back."""
        serving, wanted = self._loaded[self._serving], self._pointer.wanted
        wanted = self._serving if wanted is None else wanted
        return {
            "serving_version": self._serving,
            "serving_version_age_s": self._wall_clock() - serving.manifest.published_at,
            "serving_version_wanted": wanted,
            "serving_version_waits_for_products": float(self._waiting is not None),
            "serving_version_not_loaded": float(wanted != self._serving),
            "serving_version_rows": serving.tables.num_rows,
            "serving_version_errors_total": self._pointer.num_errors,
            "serving_versions_refused_total": self._num_refused,
            # 1 where nothing is known, as of versions of old stores: an alert waits for less.
            "serving_version_as_published": self._as_published.get(self._serving, 1.0),
            **self._canary.metrics(),
        }
