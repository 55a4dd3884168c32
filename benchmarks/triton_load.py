"""A process that keeps a service busy with Triton's own clients, over HTTP or over gRPC.

Both ask the same: a user's key and a number of items, tensors as bytes. One client each, with as many calls
at once as it is told: over HTTP as many connections, over gRPC one that calls share, which is how each is
used.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import numpy as np

from benchmarks.http_load import Window

Protocol = Literal["http", "grpc"]
Infer = Callable[[str], Awaitable[Any]]
"""Asks for a user; raises where there is no answer."""


def windows(users: Sequence[str], k: int) -> Callable[[tuple[Protocol, str, int, int]], Window]:
    """In the process: measures windows of (protocol, address, calls at once, requests)."""
    remaining = itertools.cycle(users)

    def measure(window: tuple[Protocol, str, int, int]) -> Window:
        protocol, address, at_once, num_requests = window
        return asyncio.run(_measured(protocol, address, at_once, num_requests))

    async def _measured(protocol: Protocol, address: str, at_once: int, num_requests: int) -> Window:
        client, infer = _client(protocol, address, at_once, k)
        async with client:
            return await _measure(infer, remaining, at_once, num_requests)

    return measure


def _client(protocol: Protocol, address: str, at_once: int, k: int) -> tuple[Any, Infer]:
    if protocol == "http":
        from tritonclient.http import InferInput
        from tritonclient.http.aio import InferenceServerClient

        client = InferenceServerClient(address, conn_limit=at_once)
    else:
        from tritonclient.grpc import InferInput
        from tritonclient.grpc.aio import InferenceServerClient

        client = InferenceServerClient(address)

    async def infer(user: str) -> Any:
        given = InferInput("user_id", [1], "BYTES")
        given.set_data_from_numpy(np.array([user], dtype=object))
        answer = await client.infer("recommend", [given], parameters={"k": k})
        return answer.as_numpy("item_id")

    return client, infer


async def _measure(infer: Infer, users: Any, at_once: int, num_requests: int) -> Window:
    latencies_s: list[float] = []
    times: list[float] = []
    # As `http_load`: those that begin and end a window find a service that is not full.
    warm = num_requests // 8
    remaining = iter(range(num_requests + 2 * warm))

    async def caller() -> None:
        for _ in remaining:
            began = time.perf_counter()
            await infer(next(users))
            times.append(time.perf_counter())
            latencies_s.append(times[-1] - began)

    await asyncio.gather(*(caller() for _ in range(at_once)))
    counted = slice(warm, warm + num_requests)
    began = times[warm - 1] if warm else times[0]
    seconds = times[warm + num_requests - 1] - began
    return Window((num_requests if warm else num_requests - 1) / seconds, np.array(latencies_s[counted]))
