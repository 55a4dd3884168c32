"""Admission control: what becomes of a request between the HTTP side and the batcher.

    headers ─► RequestInfo ─► check_room ─► body ─► begin_all: load ─► degradation level ─► batcher ─► answer
                                └ 429, 503            └ cached answer           └ 429, 503        └ cached

`check_room` refuses by the headers alone, before anything is spent on a body. `begin_all` decides; it relies
on the room that was found, unless others were admitted while the body came.

Everything but the batcher runs on the event loop; only the counts of requests in flight, which the batcher's
thread releases, have a lock.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NoReturn

from rayrec.serve.admission.answer_cache import AnswerCache, key_of
from rayrec.serve.admission.limits import Admissions, Clock, Room, ServiceLimitError
from rayrec.serve.admission.request_info import RequestInfo
from rayrec.serve.config.admission import AdmissionConfig, StepName
from rayrec.serve.engine.allocation import Allocator, Decision, Facts, draw_of, text_bits
from rayrec.serve.engine.batching import Batcher, DeadlineError, TooManyWaitingError
from rayrec.serve.engine.current import Service
from rayrec.serve.engine.degradation import NOT_DEGRADED, DegradationLevel, DegradationPolicy, combined
from rayrec.serve.engine.draws import Note
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.understanding import DegradedRequest, RefusedRequestError
from rayrec.serve.events.request_log import RequestLog
from rayrec.serve.wire.schemas import RecommendAnswer, RecommendRequest


@dataclass(frozen=True)
class AdmissionStatus:
    """For metrics."""

    in_flight: int
    """Requests that were admitted and have no answer yet; with limits, as often as these count them."""
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
    price: float | None = None
    """Of a second of the device; None where nothing is allocated by value."""


@dataclass(frozen=True)
class _Entry:
    """A request of a message, at the degradation level in force."""

    request: RecommendRequest
    key: bytes | None
    """Of answers that are kept; None where none are."""
    kept: RecommendAnswer | None
    """A cached answer, which will do."""
    decision: Decision | None
    """What was decided by value; None where nothing is."""

    @property
    def is_refused(self) -> bool:
        return self.decision is not None and self.decision.is_refused


class AdmissionControl:
    """Answers requests, or refuses them."""

    def __init__(
        self,
        config: AdmissionConfig,
        service: Service,
        batcher: Batcher[RecommendRequest, RecommendAnswer],
        timeout_s: float,
        clock: Clock = time.monotonic,
        request_log: RequestLog | None = None,
        allocator: Allocator | None = None,
    ) -> None:
        """
        Args:
            allocator: decides how much of each request is computed; None: as much as the levels allow.
            batcher: computes what requests ask of the service.
            timeout_s: a request that would not be answered by then is refused; its own bound may be lower.
            request_log: of what is asked and answered.
        """
        self._request_log, self._allocator = request_log, allocator
        self._config, self._service, self._batcher, self._timeout_s = config, service, batcher, timeout_s
        self._clock = clock
        self.statistics = batcher.statistics
        """Of all requests that were admitted, in any protocol."""
        self._num_coming = 0
        """Messages that were found to have room by their headers, and are not here yet."""
        self._admissions = Admissions(config.service, config.callers, clock)
        self._policy = DegradationPolicy(config.degrade.steps)
        self._cache: AnswerCache[RecommendAnswer] | None = None
        if any(step.do == "cached_answer" for step in config.degrade.steps):
            self._cache = AnswerCache(config.degrade.cache, clock)

    def read_headers(self, headers: Mapping[str, str], address: str | None) -> RequestInfo:
        """Make the record that all decisions about a message are taken by.

        Args:
            address: where the connection is from.

        Raises:
            HeaderError: a header that cannot be used.
        """
        info = RequestInfo.of(headers, address, self._config.callers.header, self._timeout_s, self._clock)
        if self._allocator is not None and (header := self._allocator.config.value.header) is not None:
            info.value = headers.get(header)
        return info

    def check_room(self, info: RequestInfo) -> None:
        """Refuse what `begin_all` would refuse whatever the body says, and where room is short requests of
        least value; takes nothing. Room that is found is noted, and `begin_all` looks for it again only where
        others were admitted meanwhile.

        Raises:
            CallerLimitError, ServiceLimitError, TooManyWaitingError, DeadlineError: as `begin_all`.
        """
        # By value first: else those that come last are refused, whatever they are worth. A request that finds
        # a cached answer needs no room.
        if self._allocator is not None and info.value is not None and self._cache is None:
            draw = random.getrandbits(64)
            info.room_by_value = self._allocator.room_for(info.value, draw, self._room_taken(info))
            if info.room_by_value == "none":
                self._refuse_by_value()
        with self._counting_refusals(1):
            info.room = self._admissions.check(info.caller)
            if self._cache is None:
                self._batcher.check_room(self._left_s(info))
        info.is_coming = True
        self._num_coming += 1

    def here(self, info: RequestInfo) -> None:
        """A message that was found to have room is here as a whole, or does not come any more; may be called
        again."""
        self._num_coming -= info.is_coming
        info.is_coming = False

    def admit(self, info: RequestInfo) -> Callable[[], None]:
        """Admit what the batcher does not compute; what is returned has to be called when it is done.

        Raises:
            CallerLimitError: too many of this caller.
            ServiceLimitError: too many of all callers.
        """
        return self._admissions.admit(info.caller)

    def draw(self, users: Iterable[str | int | None], info: RequestInfo) -> RecommendationService:
        """The model that answers a message now, by one rule for all protocols: a canary answers its share of
        the users, who never meet two versions. May be called from any thread.

        Args:
            users: of the rows, as its body names them; where it names none, or several, its header says whom
                it is for. A message for several users has no share.
        """
        named = {str(user) for user in users if user is not None}
        several = len(named) > 1
        if several and info.user is None:
            return self._service.pinned
        user = info.user if several or not named else named.pop()
        pinned, info.note = self._service.drawn_for(user)
        return pinned

    def begin(
        self,
        request: RecommendRequest,
        info: RequestInfo,
        pinned: RecommendationService | None = None,
        request_id: str | None = None,
    ) -> asyncio.Future[RecommendAnswer]:
        """`begin_all` of one."""
        (answered,) = self.begin_all([request], info, pinned, request_id)
        return answered

    def begin_all(
        self,
        requests: Sequence[RecommendRequest],
        info: RequestInfo,
        pinned: RecommendationService | None = None,
        request_id: str | None = None,
    ) -> list[asyncio.Future[RecommendAnswer]]:
        """Admit the requests of one message, all or none, and hand them to the batcher before it returns;
        call it on the event loop.

        Args:
            requests: at most `most_at_once`.
            pinned: the model that is to answer; None: the one that `draw` finds.
            request_id: of the message, for the log; None: it is not logged.

        Returns:
            The answers; or RefusedRequestError, UnavailableError, DeadlineError, as of service and batcher.
            One that is cancelled before its turn is not computed.

        Raises:
            CallerLimitError: too many of this caller.
            ServiceLimitError: too many of all callers.
            TooManyWaitingError: the batcher has too many in flight.
            DeadlineError: one would be answered too late.
        """
        began = time.perf_counter()
        info.num_rows = len(requests)
        if pinned is None:
            pinned = self.draw([request.user_id for request in requests], info)
        entries, all_answered = self._begun(requests, info, pinned, request_id)
        counted = partial(self._count, began)
        for entry, answered in zip(entries, all_answered, strict=True):
            if entry.kept is not None:
                self.statistics.outcome("cache_hit", 0.0)
            answered.add_done_callback(counted)
        computed = [each for entry, each in zip(entries, all_answered, strict=True) if entry.kept is None]
        if info.note is not None and computed:
            together = asyncio.gather(*computed, return_exceptions=True)
            together.add_done_callback(partial(_noted, info.note, began))
        log = self._request_log
        if log is not None and request_id is not None and log.wants(request_id):
            for row, (entry, request, answered) in enumerate(
                zip(entries, requests, all_answered, strict=True)
            ):
                decided = None if entry.decision is None else entry.decision.columns
                note = partial(
                    log.answered, request_id, row, request, began, decided=decided, model=pinned.model
                )
                answered.add_done_callback(partial(_unless_refused, note))
        return all_answered

    def _count(self, began: float, answered: asyncio.Future[RecommendAnswer]) -> None:
        is_success = not answered.cancelled() and answered.exception() is None
        self.statistics.outcome("success" if is_success else "fail", time.perf_counter() - began)

    def _begun(
        self,
        requests: Sequence[RecommendRequest],
        info: RequestInfo,
        pinned: RecommendationService,
        request_id: str | None,
    ) -> tuple[list[_Entry], list[asyncio.Future[RecommendAnswer]]]:
        self.here(info)
        caller, costs = info.caller, self._costs(requests, pinned)
        count = sum(costs)
        with self._counting_refusals(len(requests)):
            room = self._admissions.check(caller, count, info.room)
        decisions = self._decisions(requests, info, pinned, request_id)
        return self._submitted(requests, info, pinned, decisions, costs, room)

    def _room_taken(self, info: RequestInfo) -> float:
        """Share of the places in flight that are taken, or of the time that a message has left that it would
        wait, whichever is more."""
        batcher, most = self._batcher, self._admissions.service.concurrency.most
        places = min(batcher.max_waiting, most or batcher.max_waiting)
        # Of many that come at once, all headers are read before the first body is.
        num_coming = self._num_coming
        waits_s = batcher.wait_s(num_coming) * batcher.costs.at(batcher.costs.measured_width).caution
        taken = (batcher.in_flight + num_coming) / places
        return max(taken, waits_s / max(self._left_s(info), 1e-3))

    def _refuse_by_value(self, count: int = 1) -> NoReturn:
        self._admissions.num_refused += count
        raise ServiceLimitError("there is little room, and other requests are worth more", 1.0)

    def _submitted(
        self,
        requests: Sequence[RecommendRequest],
        info: RequestInfo,
        pinned: RecommendationService,
        decisions: Sequence[Decision | None],
        costs: Sequence[int],
        room: Room,
    ) -> tuple[list[_Entry], list[asyncio.Future[RecommendAnswer]]]:
        """Admit requests whose actions are decided, and hand them to the batcher."""
        caller, count = info.caller, sum(costs)
        entries = self._entries(requests, pinned, decisions)
        if any(each.kept is None and each.is_refused for each in entries):
            self._refuse_by_value(count)
        # Before any is submitted: an idle model computes the first at once, whatever becomes of the others.
        self._check_waiting(sum(entry.kept is None for entry in entries))
        slots = iter(self._admissions.admit_all(caller, count, room))
        releases = [list(islice(slots, cost)) for cost in costs]
        # The batcher computes with a service that stays the same.
        compute = None if pinned is self._service else pinned.recommend_all
        timeout_s = self._left_s(info)
        submitted: list[Future[RecommendAnswer]] = []
        all_answered: list[asyncio.Future[RecommendAnswer]] = []
        try:
            for request, entry, release in zip(requests, entries, releases, strict=True):
                if entry.kept is not None:
                    self._batcher.spared(pinned.width_of(request))
                    _release_all(release)
                    answered = asyncio.get_running_loop().create_future()
                    answered.set_result(entry.kept)
                else:
                    group = pinned.group_of(entry.request)
                    width = pinned.width_of(entry.request)
                    future = self._batcher.submit(
                        entry.request,
                        group,
                        timeout_s,
                        compute,
                        width,
                        info.priority,
                        follows=bool(submitted),
                        asked_width=pinned.width_of(request),
                    )
                    # A caller that disconnects does not stop the model: the slot is free when the batcher is
                    # done with the request.
                    future.add_done_callback(partial(_released, release))
                    submitted.append(future)
                    answered = asyncio.wrap_future(future)
                    if entry.key is not None:
                        answered.add_done_callback(partial(self._keep, entry.key))
                if entry.decision is not None:
                    answered.add_done_callback(partial(self._note_answer, entry.decision, entry.request))
                all_answered.append(answered)
        except BaseException as error:
            if self._allocator is not None and isinstance(error, TooManyWaitingError | DeadlineError):
                self._allocator.left_to_chance(len(requests))
            for future in submitted:
                future.cancel()
            for release in releases[len(all_answered) :]:
                _release_all(release)
            self._admissions.give_back(caller, count)
            raise
        return entries, all_answered

    def _decisions(
        self,
        requests: Sequence[RecommendRequest],
        info: RequestInfo,
        pinned: RecommendationService,
        request_id: str | None,
    ) -> list[Decision | None]:
        """What each request is to get, by its value."""
        if (allocator := self._allocator) is None:
            return [None] * len(requests)
        id_bits = random.getrandbits(64) if request_id is None else text_bits(request_id)
        # A message is admitted as a whole.
        may_refuse = info.room_by_value is None and len(requests) == 1
        room_taken = self._room_taken(info) if may_refuse else 0.0
        return [
            allocator.decide(
                Facts(
                    _user_of(request),
                    pinned.num_events_of(request),
                    draw_of(id_bits, row),
                    self._cost_scale(request, pinned),
                    room_taken=room_taken,
                    room=info.room_by_value,
                ),
                info.value,
                pinned.model,
            )
            for row, request in enumerate(requests)
        ]

    def _cost_scale(self, request: RecommendRequest, pinned: RecommendationService) -> float:
        """Times the device seconds of a usual request that one takes."""
        known = self._batcher.costs
        width, usual = pinned.width_of(request), known.measured_width
        if width == usual:
            return 1.0
        return known.at(width).least_s / known.at(usual).least_s

    def _note_answer(
        self, decision: Decision, request: RecommendRequest, answered: asyncio.Future[RecommendAnswer]
    ) -> None:
        assert self._allocator is not None, "it has decided"
        error = asyncio.CancelledError() if answered.cancelled() else answered.exception()
        if error is None:
            answer = answered.result()
            self._allocator.answered(decision, "cached_answer" in answer.degraded)
            items = [(item.item_id, item.score) for item in answer.items if item.source == "model"]
            self._allocator.learn(_user_of(request), items)
        elif isinstance(error, DeadlineError):
            self._allocator.left_to_chance()
        else:
            self._allocator.took_nothing(decision)

    @contextmanager
    def _counting_refusals(self, count: int) -> Iterator[None]:
        """Let the price rise for requests that there is no room for."""
        try:
            yield
        except (TooManyWaitingError, DeadlineError, ServiceLimitError):
            if self._allocator is not None:
                self._allocator.refused(count)
                self._allocator.left_to_chance(count)
            raise

    def _costs(self, requests: Sequence[RecommendRequest], pinned: RecommendationService) -> list[int]:
        """What each request of a message counts for limits: how many times as long it takes as one that says
        nothing of how much is wanted, by the batches of late, and at least 1.

        A message of few enough rows costs no more than may come at once: else it never could.
        """
        left = self._admissions.most_at_once
        if left is None:
            return [1] * len(requests)
        known = self._batcher.costs
        usual_s = known.at(known.measured_width).of(1)
        costs = []
        for num_before, request in enumerate(requests):
            cost = round(known.at(pinned.width_of(request)).of(1) / usual_s)
            num_after = len(requests) - num_before - 1
            costs.append(max(min(cost, left - num_after), 1))
            left -= costs[-1]
        return costs

    def _left_s(self, info: RequestInfo) -> float:
        return max(info.expires_at - self._clock(), 0.0)

    def _entries(
        self,
        requests: Sequence[RecommendRequest],
        pinned: RecommendationService,
        decisions: Sequence[Decision | None],
    ) -> list[_Entry]:
        """What is asked of the batcher, at the levels that would be in force for one after the other."""
        entries = []
        num_waiting = 0
        for request, decision in zip(requests, decisions, strict=True):
            level = self._level(num_waiting)
            if decision is not None:
                level = combined(level, decision.level)
                if level != decision.level:  # then something else is computed than was decided
                    decision = replace(decision, propensity=None)
            key = None
            if self._cache is not None and not _names_lists(request):  # which change meanwhile
                key = key_of(request, pinned.model, pinned.ranker)
            kept = self._kept(key) if level.takes_cached and key is not None else None
            num_waiting += kept is None
            if level != NOT_DEGRADED:
                request = DegradedRequest.of(request, level)
            entries.append(_Entry(request, key, kept, decision))
        return entries

    def _check_waiting(self, count: int) -> None:
        in_flight = self._batcher.in_flight
        if count and in_flight + count > self._batcher.max_waiting:
            more = "" if count == 1 else f", and {count} of one message come"
            self._batcher.refused(count)
            raise TooManyWaitingError(f"{in_flight} requests are waiting already{more}")

    def _keep(self, key: bytes, answered: asyncio.Future[RecommendAnswer]) -> None:
        assert self._cache is not None
        if answered.cancelled() or answered.exception() is not None:
            return
        answer = answered.result()
        # A near-line answer is kept in its store, and there a newer one may be.
        if "popular_items" not in answer.degraded and answer.source != "nearline":
            self._cache.put(key, answer)

    @property
    def most_at_once(self) -> int:
        """Requests of one message that are admitted while nothing else is in flight."""
        return min(self._batcher.max_waiting, self._admissions.most_at_once or self._batcher.max_waiting)

    @property
    def status(self) -> AdmissionStatus:
        admissions, cache = self._admissions, self._cache
        # Not those of the last request: that may have come while there was much to do, hours ago.
        load = self._load() if self._config.degrade.steps else 0.0
        return AdmissionStatus(
            in_flight=admissions.service.concurrency.in_flight,
            callers=0 if admissions.callers is None else len(admissions.callers),
            refused_callers=admissions.num_refused_callers,
            refused=admissions.num_refused,
            load=load,
            steps=tuple(self._policy.at(load)),
            cached=0 if cache is None else len(cache),
            cache_hits=0 if cache is None else cache.num_hits,
            price=None if self._allocator is None else self._allocator.price_now,
        )

    def _level(self, num_before: int) -> DegradationLevel:
        """Of a request that comes after so many others of its message."""
        if not self._config.degrade.steps:
            return NOT_DEGRADED
        return self._policy.update(self._load(num_before + 1))

    def _load(self, num_coming: int = 0) -> float:
        """How loaded the replica is, as a share of what it can do in time.

        Args:
            num_coming: requests that are about to be admitted.
        """
        if self._config.degrade.by == "wait":
            return self._batcher.wait_s() / self._timeout_s
        load = (self._batcher.in_flight + num_coming) / self._batcher.max_waiting
        concurrency = self._admissions.service.concurrency
        if concurrency.most is not None:
            load = max(load, (concurrency.in_flight + num_coming) / concurrency.most)
        return load

    def _kept(self, key: bytes | None) -> RecommendAnswer | None:
        assert self._cache is not None
        assert key is not None
        answer = self._cache.get(key)
        if answer is None:
            return None
        return answer.model_copy(update={"degraded": [*answer.degraded, "cached_answer"]})


def _noted(note: Note, began: float, answered: asyncio.Future[list[RecommendAnswer | BaseException]]) -> None:
    """A message is counted once, with its first error, or the time of the last of its answers."""
    if not answered.cancelled():
        error = next((each for each in answered.result() if isinstance(each, BaseException)), None)
        note(time.perf_counter() - began, error)


def _unless_refused(
    note: Callable[[asyncio.Future[RecommendAnswer]], None], answered: asyncio.Future[RecommendAnswer]
) -> None:
    """Note what became of a request, unless it was a mistake of its caller."""
    if answered.cancelled() or not isinstance(answered.exception(), RefusedRequestError):
        note(answered)


def _user_of(request: RecommendRequest) -> str | None:
    return None if request.user_id is None else str(request.user_id)


def _names_lists(request: RecommendRequest) -> bool:
    wanted = request.filter
    return wanted is not None and bool(wanted.allow_lists or wanted.deny_lists)


def _released(releases: Sequence[Callable[[], None]], future: Future[RecommendAnswer]) -> None:
    _release_all(releases)


def _release_all(releases: Sequence[Callable[[], None]]) -> None:
    for release in releases:
        release()
