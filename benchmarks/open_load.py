"""A process that sends requests when they are due, whether or not those before have been answered.

    plan: times drawn beforehand ─► due ─► an idle connection, or a new one ─► answer: status, seconds

Callers of a service that is overloaded do not wait for each other, so a generator whose connections have one
request at a time (`http_load.py`) cannot overload anything. Seconds count from when a request was due: one
that this process is late with is the service's as far as can be told, and how late it was is told beside.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

IDLE_CONNECTIONS = 64
"""Opened before the first request."""
PATIENCE_S = 30.0
"""After the last request, for answers."""
LOST = 0
"""The status of a request whose connection ended, or that was never answered."""


@dataclass(frozen=True)
class Plan:
    """Requests of several callers at times that hang on the seed alone."""

    url: str
    rate: float
    """Requests per second on average, as a Poisson process has them."""
    seconds: float
    timeout_ms: int
    """Sent along as the time in which an answer is of use."""
    shares: tuple[float, ...]
    """Of the requests, by caller; their sum is 1."""
    header: str
    """That names the caller."""
    seed: int = 0
    values: float | None = None
    """The exponent of the Pareto law of what requests are worth, at least 1 each; None: they do not say."""


@dataclass(frozen=True)
class Outcome:
    """What became of N requests, in the order in which they were due."""

    due_s: np.ndarray
    """[N] seconds since the first could have been."""
    lag_s: np.ndarray
    """[N] from when a request was due to when this process sent it."""
    seconds: np.ndarray
    """[N] from when a request was due to the end of its answer."""
    status: np.ndarray
    """[N] of the answers; `LOST` for none."""
    says_when: np.ndarray
    """[N] whether an answer has a `Retry-After`."""
    is_whole: np.ndarray
    """[N] whether nothing was lowered of it."""
    value: np.ndarray
    """[N] what the request was worth."""
    degraded: list[str]
    """[N] what was lowered, as the answer has it."""


def outcomes(bodies: Sequence[dict[str, object]]) -> Callable[[Plan], Outcome]:
    """In the process: carries out plans, with other bodies every time."""
    encoded = itertools.cycle([json.dumps(body).encode() for body in bodies])

    def measure(plan: Plan) -> Outcome:
        gc.collect()
        gc.disable()  # which would stop everything for a while
        try:
            return asyncio.run(_Load(plan, encoded).run())
        finally:
            gc.enable()

    return measure


class _Load:
    def __init__(self, plan: Plan, bodies: Iterator[bytes]) -> None:
        parts = urllib.parse.urlsplit(plan.url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address, self._bodies = (parts.hostname, parts.port), bodies
        random = np.random.default_rng(plan.seed)
        expected = plan.rate * plan.seconds
        gaps_N = random.exponential(1 / plan.rate, size=round(expected + 10 * expected**0.5 + 10))
        times_N = np.cumsum(gaps_N)
        self.due_s = times_N[times_N < plan.seconds]
        num = len(self.due_s)
        self._callers = random.choice(len(plan.shares), size=num, p=plan.shares)
        self.value = np.ones(num) if plan.values is None else 1 + random.pareto(plan.values, num)
        self._says_value = plan.values is not None
        self._degraded = [""] * num
        self._heads = [
            (
                f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
                f"{plan.header}: caller-{caller}\r\nX-Request-Timeout-Ms: {plan.timeout_ms}\r\n"
                "Content-Length: "
            ).encode()
            for caller in range(len(plan.shares))
        ]
        self._sent_s, self._done_s = np.full(num, np.nan), np.full(num, np.nan)
        self._status = np.full(num, LOST)
        self._says_when, self._is_whole = np.zeros(num, dtype=bool), np.zeros(num, dtype=bool)
        self.idle: list[_Connection] = []
        self._num_open = num
        self._opening: set[asyncio.Task[None]] = set()
        self._all_answered = asyncio.Event()

    async def run(self) -> Outcome:
        for connection in await asyncio.gather(*(self._open() for _ in range(IDLE_CONNECTIONS))):
            self.idle.append(connection)
        began = self._began = time.perf_counter()
        for number, due in enumerate(self.due_s.tolist()):
            while (left := due - (time.perf_counter() - began)) > 0:
                await asyncio.sleep(left)
            if not number % 16:
                await asyncio.sleep(0)  # when everything is due, answers are read all the same
            self._send(number)
        if not self._num_open:
            self._all_answered.set()
        with contextlib.suppress(TimeoutError):  # the rest stays lost
            await asyncio.wait_for(self._all_answered.wait(), PATIENCE_S)
        for connection in self.idle:
            connection.close()
        seconds = self._done_s - self.due_s
        return Outcome(
            self.due_s,
            self._sent_s - self.due_s,
            np.where(np.isnan(seconds), np.inf, seconds),
            self._status,
            self._says_when,
            self._is_whole,
            self.value,
            self._degraded,
        )

    def _send(self, number: int) -> None:
        self._sent_s[number] = time.perf_counter() - self._began
        body = next(self._bodies)
        head = self._heads[self._callers[number]]
        if self._says_value:
            head = b"%s%r\r\nContent-Length: " % (
                head.removesuffix(b"Content-Length: ") + b"X-Request-Value: ",
                float(self.value[number]),
            )
        request = b"%s%d\r\n\r\n%s" % (head, len(body), body)
        while self.idle:
            connection = self.idle.pop()
            if connection.is_open:
                connection.ask(number, request)
                return
        task = asyncio.create_task(self._send_by_new(number, request))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _send_by_new(self, number: int, request: bytes) -> None:
        try:
            connection = await self._open()
        except OSError:
            self.answered(number, b"", b"")
            return
        connection.ask(number, request)

    async def _open(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self), *self._address
        )
        return connection

    def answered(self, number: int, head: bytes, body: bytes) -> None:
        """An answer is there, or never will be, with neither head nor body."""
        self._done_s[number] = time.perf_counter() - self._began
        if head:
            self._status[number] = int(head[9:12])
            self._says_when[number] = b"\r\nretry-after:" in head.lower()
            self._is_whole[number] = b'"degraded":[]' in body
            _, _, rest = body.partition(b'"degraded":[')
            self._degraded[number] = rest.partition(b"]")[0].decode().replace('"', "")
        self._num_open -= 1
        if not self._num_open:
            self._all_answered.set()


class _Connection(asyncio.Protocol):
    """With one request at a time."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._number: int | None = None
        self._answer = b""
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def ask(self, number: int, request: bytes) -> None:
        self._number = number
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, end, body = self._answer.partition(b"\r\n\r\n")
        if not end or len(body) < _length(head):
            return
        number, self._number, self._answer = self._number, None, b""
        if number is None:  # nothing was asked: as when a service is about to close
            return
        self._load.answered(number, head, body)
        if self.is_open:
            self._load.idle.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._number is not None:
            self._load.answered(self._number, b"", b"")
            self._number = None

    def close(self) -> None:
        self._transport.close()


def _length(head: bytes) -> int:
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0]) if found else 0
