"""What stands between the HTTP side and the batcher.

    headers ─► deadline, caller ─► admitted? ─► load ─► steps in force ─► batcher ─► answer
       └ `door.py` asks the same     └ 429, 503            └ an answer of before     └ kept for others

Everything but the batcher runs on the event loop; only the counts of what is in hand, from which its thread
takes, have a lock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rayrec.serve.access.answer_cache import AnswerCache, key_of
from rayrec.serve.access.callers import Origin, caller_of
from rayrec.serve.access.config import AccessConfig, StepName
from rayrec.serve.access.deadlines import timeout_of
from rayrec.serve.access.degrade import NOT_LOWERED, Ladder, Lowered
from rayrec.serve.access.limits import Admissions, Clock
from rayrec.serve.batching import Batcher
from rayrec.serve.current import Service
from rayrec.serve.request_log import RequestLog
from rayrec.serve.schemas import RecommendAnswer, RecommendRequest
from rayrec.serve.service import LoweredRequest, RecommendationService


@dataclass(frozen=True)
class AccessStatus:
    """For metrics."""

    in_hand: int
    """Requests that were admitted and have no answer yet."""
    callers: int
    """Of which something is remembered."""
    refused_callers: int
    """Requests so far that were too many of their caller."""
    refused: int
    """Requests so far that were too many of all."""
    load: float
    """Now, 1 is full; 0 without steps."""
    steps: tuple[StepName, ...]
    """In force at that load: a request may find others, which it adds to."""
    cached: int
    """Answers that are kept."""
    cache_hits: int
    """Requests so far that were answered by one."""


class Access:
    """Answers requests, or refuses them."""

    def __init__(
        self,
        config: AccessConfig,
        service: Service,
        batcher: Batcher[RecommendRequest, RecommendAnswer],
        timeout_s: float,
        clock: Clock = time.monotonic,
        request_log: RequestLog | None = None,
    ) -> None:
        """
        Args:
            batcher: computes what requests ask of the service.
            timeout_s: a request that would not be answered by then is refused; its own bound may be lower.
            request_log: of what is asked and answered.
        """
        self._request_log = request_log
        self._config, self._service, self._batcher, self._timeout_s = config, service, batcher, timeout_s
        self._admissions = Admissions(config.service, config.callers, clock)
        self._ladder = Ladder(config.degrade.steps)
        self._cache: AnswerCache[RecommendAnswer] | None = None
        if any(step.do == "cached_answer" for step in config.degrade.steps):
            self._cache = AnswerCache(config.degrade.cache, clock)

    def admit(self, origin: Origin) -> Callable[[], None]:
        """Admits what the batcher does not compute; what is returned has to be called when it is done.

        Raises:
            HeaderError: a header that cannot be used.
            CallerLimitError: too many of this caller.
            ServiceLimitError: too many of all callers.
        """
        return self._admissions.admit(caller_of(origin, self._config.callers.header))

    def begin(
        self,
        request: RecommendRequest,
        origin: Origin,
        pinned: RecommendationService | None = None,
        request_id: str | None = None,
        row: int = 0,
    ) -> asyncio.Future[RecommendAnswer]:
        """Admits a request, and hands it to the batcher before it returns; call it on the event loop.

        Args:
            pinned: the model that is to answer; None: the one that answers now.
            request_id: of the message, for the log; None: it is not logged.
            row: of the message.

        Returns:
            The answer; or RefusedRequestError, UnavailableError, DeadlineError, as of service and batcher.
            One that is cancelled before its turn is not computed.

        Raises:
            HeaderError: a header that cannot be used.
            CallerLimitError: too many of this caller.
            ServiceLimitError: too many of all callers.
            TooManyWaitingError: the batcher has too many in hand.
        """
        began = time.perf_counter()
        answered = self._begun(request, origin, self._service.pinned if pinned is None else pinned)
        log = self._request_log
        if log is not None and request_id is not None and log.wants(request_id):
            answered.add_done_callback(partial(log.answered, request_id, row, request, began))
        return answered

    def _begun(
        self, request: RecommendRequest, origin: Origin, pinned: RecommendationService
    ) -> asyncio.Future[RecommendAnswer]:
        timeout_s = timeout_of(origin.headers, self._timeout_s)
        leave = self.admit(origin)
        try:
            lowered = self._lowered()
            key = None if self._cache is None else key_of(request, pinned.model, pinned.ranker)
            if lowered.takes_cached and (kept := self._kept(key)) is not None:
                leave()
                answered = asyncio.get_running_loop().create_future()
                answered.set_result(kept)
                return answered
            if lowered != NOT_LOWERED:
                request = LoweredRequest.of(request, lowered)
            group = pinned.group_of(request)
            # The batcher computes with a service that stays the same.
            compute = None if pinned is self._service else pinned.recommend_all
            future = self._batcher.submit(request, group, timeout_s, compute, pinned.width_of(request))
        except BaseException:
            leave()
            raise
        # A caller who goes away does not stop the model: the place is free when the batcher is done with it.
        future.add_done_callback(lambda _: leave())
        answered = asyncio.wrap_future(future)
        if key is not None:
            answered.add_done_callback(partial(self._keep, key))
        return answered

    def check_room(self, origin: Origin) -> None:
        """Say what `begin` would for want of room, by the headers of a request; takes nothing.

        Raises:
            HeaderError, CallerLimitError, ServiceLimitError, TooManyWaitingError: as `begin`.
            DeadlineError: it would be answered too late.
        """
        timeout_s = timeout_of(origin.headers, self._timeout_s)
        self._admissions.check(caller_of(origin, self._config.callers.header))
        # A request that finds an answer of before waits for nobody.
        if self._cache is None:
            self._batcher.check_room(timeout_s)

    def _keep(self, key: bytes, answered: asyncio.Future[RecommendAnswer]) -> None:
        assert self._cache is not None
        if answered.cancelled() or answered.exception() is not None:
            return
        answer = answered.result()
        if "popular_items" not in answer.degraded:
            self._cache.put(key, answer)

    @property
    def most_at_once(self) -> int:
        """Requests of one message that may have a place, if nobody else is there."""
        return self._batcher.max_waiting

    @property
    def status(self) -> AccessStatus:
        admissions, cache = self._admissions, self._cache
        # Not those of the last request: that may have come while there was much to do, hours ago.
        load = self._load() if self._config.degrade.steps else 0.0
        return AccessStatus(
            in_hand=admissions.service.concurrency.in_hand,
            callers=0 if admissions.callers is None else len(admissions.callers),
            refused_callers=admissions.num_refused_callers,
            refused=admissions.num_refused,
            load=load,
            steps=tuple(self._ladder.at(load)),
            cached=0 if cache is None else len(cache),
            cache_hits=0 if cache is None else cache.num_hits,
        )

    def _lowered(self) -> Lowered:
        if not self._config.degrade.steps:
            return NOT_LOWERED
        return self._ladder.update(self._load(num_coming=1))

    def _load(self, num_coming: int = 0) -> float:
        """
        Args:
            num_coming: requests that were admitted, and that the batcher does not have yet.
        """
        if self._config.degrade.by == "wait":
            return self._batcher.wait_s() / self._timeout_s
        load = (self._batcher.in_hand + num_coming) / self._batcher.max_waiting
        concurrency = self._admissions.service.concurrency
        if concurrency.most is not None:
            load = max(load, concurrency.in_hand / concurrency.most)
        return load

    def _kept(self, key: bytes | None) -> RecommendAnswer | None:
        assert self._cache is not None
        assert key is not None
        answer = self._cache.get(key)
        if answer is None:
            return None
        return answer.model_copy(update={"degraded": [*answer.degraded, "cached_answer"]})
