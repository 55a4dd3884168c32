"""A process that keeps a service busy: as many connections as it is told, each with one request at a time."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Window:
    """What a service did in a while."""

    rate: float
    """Answers per second."""
    latencies_s: np.ndarray
    """[N] of the answers."""

    def percentile(self, percent: float) -> float:
        """Seconds."""
        return float(np.percentile(self.latencies_s, percent))


def windows(bodies: Sequence[dict[str, object]]) -> Callable[[tuple[str, int, int]], Window]:
    """In the process: measures windows of (URL, connections, requests), each with other bodies than before.

    The function raises a RuntimeError for a status other than 200, since such answers cost nothing.
    """
    encoded = itertools.cycle([json.dumps(body).encode() for body in bodies])

    def measure(window: tuple[str, int, int]) -> Window:
        return asyncio.run(_measure(*window, encoded))

    return measure


async def _measure(url: str, num_connections: int, num_requests: int, bodies: Iterator[bytes]) -> Window:
    import aiohttp  # which Ray brings along

    latencies_s: list[float] = []
    # A quarter more than are counted: those that begin and end a window find a service that is not full.
    warm = num_requests // 8
    remaining = iter(range(num_requests + 2 * warm))
    times: list[float] = []

    async def connection(session: aiohttp.ClientSession) -> None:
        for _ in remaining:
            began = time.perf_counter()
            headers = {"Content-Type": "application/json"}
            async with session.post(url, data=next(bodies), headers=headers) as answer:
                content = await answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"{url} answers {answer.status}: {content[:200]!r}")
            times.append(time.perf_counter())
            latencies_s.append(times[-1] - began)

    connector = aiohttp.TCPConnector(limit=num_connections)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(connection(session) for _ in range(num_connections)))
    counted = slice(warm, warm + num_requests)
    began = times[warm - 1] if warm else times[0]
    seconds = times[warm + num_requests - 1] - began
    return Window((num_requests if warm else num_requests - 1) / seconds, np.array(latencies_s[counted]))
