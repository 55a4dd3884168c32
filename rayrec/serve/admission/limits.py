"""How many requests are admitted: by rate, by how many are in flight, for each caller and for all.

    request ─► its caller's Limit ─► the service's Limit ─► admitted; released when the answer is there
                     └ CallerLimitError      └ ServiceLimitError       each with the seconds to wait

A limit that refuses has taken nothing: a request that the service has no room for costs its caller no token.
The rows of one message are admitted together, or none of them is, and each counts as often as it takes longer
than a usual one (`AdmissionControl`). One thread admits; any thread may release.

The buckets are ours: the strategies of the `limits` package are windows, without a burst beside a rate, and
do not tell when several tokens will be there.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

from rayrec.serve.config.admission import CallersConfig, LimitConfig

Clock = Callable[[], float]
"""Seconds that never go back."""


class RefusedError(RuntimeError):
    """More is asked for than is admitted; nothing was done."""

    def __init__(self, why: str, wait_s: float) -> None:
        """
        Args:
            wait_s: when it may be worth to try again.
        """
        super().__init__(why, wait_s)
        self.why, self.wait_s = why, wait_s

    @property
    def retry_after_s(self) -> int:
        """Whole seconds, which is what the header takes."""
        return max(1, math.ceil(self.wait_s))

    def __str__(self) -> str:
        unit = "second" if self.retry_after_s == 1 else "seconds"
        return f"{self.why}; try again in {self.retry_after_s} {unit}"


class CallerLimitError(RefusedError):
    """This caller asks for too much."""


class ServiceLimitError(RefusedError):
    """All callers together do."""


class TokenBucket:
    """Admits `burst` requests at once and `rate` per second over time.

    Within any time t, it gives at most burst + rate * t tokens.
    """

    _WHOLE = 1.0 - 1e-9
    """Of a token: the rest is rounding, for callers that wait exactly the seconds they were told."""

    def __init__(self, rate: float, burst: int, clock: Clock) -> None:
        """
        Args:
            rate: tokens per second.
            burst: tokens that it holds, and begins with.
        """
        self.rate, self.burst = rate, burst
        self._clock = clock
        self._tokens = float(burst)
        self._filled_at = clock()

    def wait_s(self, count: int = 1) -> float:
        """Seconds until there are so many tokens, at most `burst`; 0 if there are."""
        now = self._clock()
        self._tokens = min(self.burst, self._tokens + self.rate * max(now - self._filled_at, 0.0))
        self._filled_at = max(now, self._filled_at)
        return 0.0 if self._tokens >= self._WHOLE * count else (count - self._tokens) / self.rate

    def take(self, count: int = 1) -> bool:
        """Take so many tokens, if there are."""
        if self.wait_s(count) > 0.0:
            return False
        self._tokens -= count
        return True

    def give_back(self, count: int) -> None:
        """Tokens that were taken for nothing."""
        self._tokens += count  # no more than were there: what is above `burst` is lost with time


class ConcurrencyLimit:
    """At most so many in flight; counts them, also where there is no limit."""

    _WEIGHT_OF_NEW = 0.1

    def __init__(self, most: int | None, clock: Clock) -> None:
        self.most = most
        self._clock = clock
        self._in_flight = 0
        self._held_s: float | None = None
        """How long requests were in flight, the newer the more it counts."""
        self._lock = threading.Lock()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def wait_s(self, count: int = 1) -> float:
        """Seconds until so many slots are likely to be free; 0 if they are."""
        if self.most is None or (lacking := self._in_flight + count - self.most) <= 0:
            return 0.0
        # Those in flight are done one after the other. Before any is, a second is as good a guess as any.
        return 1.0 if self._held_s is None else max(lacking * self._held_s / self.most, 1e-3)

    def enter(self) -> Callable[[], None]:
        """Take a slot, which has to be free; what is returned releases it, once."""
        began = self._clock()
        with self._lock:
            self._in_flight += 1
        is_released = False

        def release() -> None:
            nonlocal is_released
            with self._lock:
                if is_released:
                    return
                is_released = True
                self._in_flight -= 1
                held_s = self._clock() - began
                before_s = held_s if self._held_s is None else self._held_s
                self._held_s = before_s + self._WEIGHT_OF_NEW * (held_s - before_s)

        return release


class Limit:
    """Rate and concurrency, of one caller or of all."""

    def __init__(self, config: LimitConfig, clock: Clock) -> None:
        self.concurrency = ConcurrencyLimit(config.concurrency, clock)
        self.bucket: TokenBucket | None = None
        if config.rate is not None:
            assert config.most_of_burst is not None, "as there is a rate"
            self.bucket = TokenBucket(config.rate, config.most_of_burst, clock)

    def refusal(self, count: int = 1) -> tuple[str, float] | None:
        """Why so many are not admitted now, and the seconds to wait; None if they are. Takes nothing.

        Args:
            count: no more than the limit admits at once of those that find nobody.
        """
        more = "" if count == 1 else f", and what comes counts as {count}"
        if wait_s := self.concurrency.wait_s(count):
            return f"{self.concurrency.in_flight} requests are in flight already{more}", wait_s
        if self.bucket is not None and (wait_s := self.bucket.wait_s(count)):
            return f"more than {self.bucket.rate:g} requests a second have come{more}", wait_s
        return None

    def enter(self, count: int = 1) -> list[Callable[[], None]]:
        """Admit so many, after `refusal` said None; each of what is returned releases a slot."""
        if self.bucket is not None:
            taken = self.bucket.take(count)
            assert taken, "nothing else takes tokens"
        return [self.concurrency.enter() for _ in range(count)]


class Callers:
    """A limit for each caller, of as many as are kept."""

    def __init__(self, config: CallersConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self._limits: OrderedDict[Hashable, Limit] = OrderedDict()

    def __len__(self) -> int:
        return len(self._limits)

    def of(self, caller: Hashable) -> Limit:
        """The limit of this caller, which is then the most recently seen."""
        limit = self.known(caller)
        if limit is None:
            self._forget()
            limit = self._limits[caller] = Limit(self._config, self._clock)
        return limit

    def known(self, caller: Hashable) -> Limit | None:
        """As `of`; None for a caller that is not remembered, and is not for having been asked about."""
        limit = self._limits.get(caller)
        if limit is not None:
            self._limits.move_to_end(caller)
        return limit

    def _forget(self) -> None:
        """Make room for one. Callers with requests in flight stay: if forgotten, they could send more."""
        while len(self._limits) >= self._config.most_kept:
            idle = next((key for key, limit in self._limits.items() if not limit.concurrency.in_flight), None)
            if idle is None:
                return
            del self._limits[idle]


class Room(NamedTuple):
    """Found by a check of the limits. It lasts until others are admitted: time and releases only add."""

    num_admitted: int
    """Messages that had been admitted before."""
    num_requests: int
    """That there is room for."""


class Admissions:
    """Admits requests, or says why not."""

    def __init__(self, service: LimitConfig, callers: CallersConfig, clock: Clock) -> None:
        self.service = Limit(service, clock)
        bounds = [most for limit in (service, callers) if (most := limit.most_at_once) is not None]
        self.most_at_once = min(bounds, default=None)
        """Requests of one message that are admitted where nobody else is there; None is any number."""
        self.callers = None if callers.admits_everything else Callers(callers, clock)
        self.num_refused_callers = 0
        """Requests that were too many of their caller."""
        self.num_refused = 0
        """Requests that were too many of all."""
        self._num_admitted = 0

    def check(self, caller: Hashable, count: int = 1, room: Room | None = None) -> Room:
        """Raise if so many requests of this caller would not be admitted; takes and remembers nothing.

        Args:
            room: that an earlier check has found; while it lasts, the limits are not looked at again.

        Raises:
            CallerLimitError: too many of this caller.
            ServiceLimitError: too many of all callers.
        """
        if room is not None and room.num_admitted == self._num_admitted and room.num_requests >= count:
            return room
        # A caller that is not remembered has all of its limit, and no message is larger than that.
        own = None if self.callers is None else self.callers.known(caller)
        if own is not None and (refusal := own.refusal(count)):
            self.num_refused_callers += 1
            raise CallerLimitError(f"of this caller, {refusal[0]}", refusal[1])
        if refusal := self.service.refusal(count):
            self.num_refused += 1
            raise ServiceLimitError(f"of all callers, {refusal[0]}", refusal[1])
        return Room(self._num_admitted, count)

    def admit(self, caller: Hashable) -> Callable[[], None]:
        """`admit_all` of one."""
        (release,) = self.admit_all(caller, 1)
        return release

    def admit_all(self, caller: Hashable, count: int, room: Room | None = None) -> list[Callable[[], None]]:
        """Admit the requests of one message, all or none; each of what is returned has to be called when its
        request is no longer in flight.

        Args:
            count: at most `most_at_once`.
            room: as `check` takes it.

        Raises:
            CallerLimitError: too many of this caller.
            ServiceLimitError: too many of all callers.
        """
        self.check(caller, count, room)
        self._num_admitted += 1
        limits = [self.service] if self.callers is None else [self.callers.of(caller), self.service]
        slots = zip(*(limit.enter(count) for limit in limits), strict=True)
        return [partial(_release, releases) for releases in slots]

    def give_back(self, caller: Hashable, count: int) -> None:
        """Return the tokens of requests that were admitted, and refused before anything was done; their slots
        are released as ever."""
        own = None if self.callers is None else self.callers.known(caller)
        for limit in (own, self.service):
            if limit is not None and limit.bucket is not None:
                limit.bucket.give_back(count)


def _release(releases: Sequence[Callable[[], None]]) -> None:
    for release in releases:
        release()
