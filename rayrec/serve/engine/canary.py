"""A canary in a replica: who is answered by it, what becomes of their requests, and when it ends.

each look: canary.json ─► none: nothing │ new: load it ─► a share of the users goes to it
                             │                 ├ what it is loaded from does not answer: again, some times
                             │                 └ cannot be loaded, or its answers are none: returned
                             └ runs: every few seconds report the counts, judge those of all replicas
                                       └ worse: returned │ passed: promoted, and the pointer moves
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial

import xxhash

from rayrec.pipelines.versions.canary import Canaries, Canary
from rayrec.pipelines.versions.canary_counts import ArmCounts, CanaryCounts
from rayrec.platform.errors import UnavailableError
from rayrec.serve.engine.draws import Draw
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.understanding import RefusedRequestError

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 5.0
LEAST_LOADS, LOADS_FOR_S = 10, 900.0
"""Tries to load a canary while what it is loaded from does not answer, and for how long, before it is taken
back. A dense part elsewhere does not answer in time as long as it loads the network itself."""


class RunningCanary:
    """A canary that is loaded; from any thread."""

    def __init__(self, canary: Canary, service: RecommendationService) -> None:
        self.canary, self.service = canary, service
        self._baseline, self._own = ArmCounts(), ArmCounts()
        self._lock = threading.Lock()

    def draw(self, user: str | int | None) -> Draw:
        """Whether a user is answered by it: always the same ones, in every replica; requests without a user
        are drawn each for itself."""
        key = uuid.uuid4().hex if user is None else str(user)
        bits = xxhash.xxh3_64_intdigest(f"{self.canary.id}/{key}".encode(errors="replace"))
        takes = bits < self.canary.settings.share * 2.0**64
        # Of the lower bits, which say nothing of the share.
        return Draw(takes, partial(self._note, self._own if takes else self._baseline, bits))

    def _note(self, arm: ArmCounts, bits: int, seconds: float, error: BaseException | None) -> None:
        if isinstance(error, (RefusedRequestError, asyncio.CancelledError)):
            return
        with self._lock:
            arm.add(None if error is not None else seconds, bits)

    @property
    def counts(self) -> CanaryCounts:
        """Of this replica, so far."""
        with self._lock:
            return CanaryCounts(self._baseline.plus(ArmCounts()), self._own.plus(ArmCounts()))


class CanaryFollower:
    """Begins and ends canaries as a store says it; called by the thread that follows the store."""

    def __init__(
        self,
        canaries: Canaries,
        begin: Callable[[RunningCanary | None], None],
        load: Callable[[int], RecommendationService],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            begin: let a canary have its share from now on; None: there is none any more.
            load: a version, ready for requests.
        """
        self._canaries, self._begin, self._load, self._clock = canaries, begin, load, clock
        self._running: RunningCanary | None = None
        self._loaded_in_vain: tuple[str, int, float] = ("", 0, 0.0)
        """Id of a canary, how often what it is loaded from did not answer, and when it was tried first."""
        self._replica = uuid.uuid4().hex[:12]
        self._reported_at = 0.0
        self._num_returned = 0

    @property
    def running(self) -> RunningCanary | None:
        return self._running

    def look(self, serving: int) -> None:
        """Do what the store says now.

        Args:
            serving: the version that answers here.

        Raises:
            InputError: a file of the canary is damaged.
            OSError, UnavailableError: the store, or what a canary needs to be loaded, does not answer.
        """
        self._canaries.settle()
        canary, running = self._canaries.running(), self._running
        if running is not None and (canary is None or canary.id != running.canary.id):
            if self._is_about_to_serve(running.canary, serving):
                return  # its users keep it until it answers everybody, after the next look
            self._end()
        if canary is None:
            return
        if serving != canary.baseline:
            # A replica that has not loaded the baseline yet waits; elsewhere it may be compared.
            if (pointed := self._canaries.serving) != canary.baseline:
                reason = f"version {pointed} serves instead of {canary.baseline}"
                self._canaries.finish(canary, "stopped", reason)
                if self._running is not None:
                    self._end()
            return
        if self._running is None:
            self._start(canary)
        elif self._clock() - self._reported_at >= REPORT_EVERY_S:
            self._report(self._running)

    def _is_about_to_serve(self, canary: Canary, serving: int) -> bool:
        return serving != canary.version and self._canaries.serving == canary.version

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        running = self._running
        counts = CanaryCounts(ArmCounts(), ArmCounts()) if running is None else running.counts
        return {
            "canary_version": 0.0 if running is None else float(running.canary.version),
            "canary_share": 0.0 if running is None else running.canary.settings.share,
            "canary_requests": counts.canary.num_requests,
            "canary_errors": counts.canary.num_errors,
            "canary_p95_seconds": counts.canary.quantile_s(0.95),
            "canary_baseline_requests": counts.baseline.num_requests,
            "canary_baseline_errors": counts.baseline.num_errors,
            "canary_baseline_p95_seconds": counts.baseline.quantile_s(0.95),
            "canaries_returned_total": self._num_returned,
        }

    def _start(self, canary: Canary) -> None:
        try:
            service = self._load(canary.version)
        except (OSError, UnavailableError) as error:  # of the store, or of what it asks to load it
            number, tries_s = self._note_in_vain(canary)
            if number < LEAST_LOADS or tries_s < LOADS_FOR_S:
                raise
            self._give_up(canary, f"it could not be loaded in {number} tries, for {tries_s:.0f} s: {error}")
            return
        except Exception as error:
            self._give_up(canary, f"it could not be loaded: {error}")
            return
        self._running = RunningCanary(canary, service)
        self._reported_at = self._clock()
        self._begin(self._running)
        share = canary.settings.share
        logger.info("version %d answers %.3g %% of the users, as a canary", canary.version, 100 * share)

    def _note_in_vain(self, canary: Canary) -> tuple[int, float]:
        """How often a canary was tried to be loaded in vain, and for how long."""
        tried, number, since = self._loaded_in_vain
        if tried != canary.id:
            number, since = 0, self._clock()
        self._loaded_in_vain = canary.id, number + 1, since
        return number + 1, self._clock() - since

    def _give_up(self, canary: Canary, reason: str) -> None:
        logger.error("the canary, version %d, is taken back: %s", canary.version, reason)
        self._canaries.finish(canary, "returned", reason)
        self._num_returned += 1

    def _report(self, running: RunningCanary) -> None:
        canary = running.canary
        self._canaries.report(canary, self._replica, running.counts)
        self._reported_at = self._clock()
        verdict = self._canaries.verdict(canary)
        if verdict.state == "worse":
            self._canaries.finish(canary, "returned", verdict.reason)
            self._end()
        elif verdict.state == "passed" and canary.settings.promotes:
            # It ends here when this replica has gone to it: until then its users keep it.
            self._canaries.finish(canary, "promoted", verdict.reason)

    def _end(self) -> None:
        assert self._running is not None, "the caller looks"
        canary = self._running.canary
        end = self._canaries.end(canary)
        self._running = None
        self._begin(None)
        if end is None:
            logger.warning("the canary, version %d, has gone from the store", canary.version)
            return
        self._num_returned += end.state == "returned"
        log = logger.warning if end.state == "returned" else logger.info
        log("the canary, version %d, is %s: %s", canary.version, end.state, end.reason)
