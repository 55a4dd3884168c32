"""A process whose clients ask one thing after the other, try once more after a failure, and hold every answer
to what the model itself says.

    expected: version ─► user ─► (items, scores), of the model called directly
    client: ask ─► failed? again, once ─► answer: of a version that is known, and its items and scores alone
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle

Expected = Mapping[int | None, Mapping[str, tuple[list[str], list[float]]]]
"""Items and scores by version (None: a run is served) and user."""
SCORES_DIFFER_BY = 1e-5
"""At most: what the size of a batch rounds."""
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Window:
    """What clients are to do."""

    url: str
    connections: int
    seconds: float


@dataclass
class Checked:
    """What became of the requests."""

    requests: int = 0
    again: int = 0
    """That were tried once more."""
    failures: Counter[str] = field(default_factory=Counter)
    """First tries that failed, by what they were answered with."""
    failed: int = 0
    """After that, too."""
    wrong: list[str] = field(default_factory=list)
    """Sentences, on answers that are not those of their version."""
    versions: Counter[int | None] = field(default_factory=Counter)
    """Answers by version."""
    longest_gap_s: float = 0.0
    """In which nobody was answered."""
    latencies_s: list[float] = field(default_factory=list)


def checks(expected: Expected, k: int) -> Callable[[Window], Checked]:
    """In the process: clients that ask for the users of `expected`, for each window."""
    users = cycle(list(next(iter(expected.values()))))
    return lambda window: asyncio.run(_Clients(expected, k, users).run(window))


class _Clients:
    def __init__(self, expected: Expected, k: int, users: Iterator[str]) -> None:
        self._expected, self._k, self._users = expected, k, users
        self._found = Checked()
        self._answered_at = 0.0

    async def run(self, window: Window) -> Checked:
        import aiohttp  # which Ray brings along

        self._answered_at = time.perf_counter()
        ends = self._answered_at + window.seconds
        connector = aiohttp.TCPConnector(limit=window.connections)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)

        async def client() -> None:
            while time.perf_counter() < ends:
                await self._ask(session, window.url)

        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await asyncio.gather(*(client() for _ in range(window.connections)))
        return self._found

    async def _ask(self, session: object, url: str) -> None:
        user, found = next(self._users), self._found
        found.requests += 1
        began = time.perf_counter()
        failure, answer = await self._tried(session, url, user)
        if failure is not None:
            found.failures[failure] += 1
            found.again += 1
            failure, answer = await self._tried(session, url, user)
        if failure is not None:
            found.failures[f"{failure}, again"] += 1
            found.failed += 1
            return
        now = time.perf_counter()
        found.longest_gap_s = max(found.longest_gap_s, now - self._answered_at)
        self._answered_at = now
        found.latencies_s.append(now - began)
        self._check(user, answer)

    async def _tried(self, session: object, url: str, user: str) -> tuple[str | None, dict[str, object]]:
        """Why it failed, or the answer."""
        import aiohttp

        assert isinstance(session, aiohttp.ClientSession)
        body = json.dumps({"user_id": user, "k": self._k}).encode()
        try:
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                content = await answer.read()
                if answer.status != 200:
                    return str(answer.status), {}
                return None, json.loads(content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return type(error).__name__, {}

    def _check(self, user: str, answer: dict) -> None:  # type: ignore[type-arg]
        version = answer["model"]["version"]
        self._found.versions[version] += 1
        keys = [item["item_id"] for item in answer["items"]]
        scores = [item["score"] for item in answer["items"]]
        if version not in self._expected:
            self._found.wrong.append(f"{user}: nobody knows version {version}")
            return
        expected_keys, expected_scores = self._expected[version][user]
        if not same(keys, scores, expected_keys, expected_scores):
            self._found.wrong.append(
                f"{user}: version {version} gives {expected_keys} with {expected_scores}, the answer is "
                f"{keys} with {scores}"
            )


def same(
    keys: list[str], scores: list[float], expected_keys: list[str], expected_scores: list[float]
) -> bool:
    """Whether an answer is the one that was expected; items of equal scores may change places."""
    if len(keys) != len(expected_keys) or len(scores) != len(expected_scores):
        return False
    if any(abs(a - b) > SCORES_DIFFER_BY for a, b in zip(scores, expected_scores, strict=True)):
        return False
    score_of = dict(zip(expected_keys, expected_scores, strict=True))
    last = expected_scores[-1] if expected_scores else 0.0
    return all(
        abs(score_of.get(key, last) - score) <= SCORES_DIFFER_BY
        for key, score in zip(keys, scores, strict=True)
    )
