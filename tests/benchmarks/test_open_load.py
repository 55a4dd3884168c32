"""The generator that waits for no answer: what it sends hangs on its plan, and nothing that comes of it is
left out."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
from fastapi import FastAPI, Request, Response

from benchmarks.open_load import LOST, Plan, outcomes
from tests.serve.fake_recommender import listening


def plan_of(address: str, **changes: object) -> Plan:
    settings: dict[str, object] = {
        "url": f"http://{address}/ask",
        "rate": 200.0,
        "seconds": 0.5,
        "timeout_ms": 700,
        "shares": (0.5, 0.25, 0.25),
        "header": "X-Caller-Key",
    }
    return Plan(**{**settings, **changes})  # type: ignore[arg-type]


def test_requests_come_when_they_are_due_though_nobody_is_answered():
    api, seen, all_came = FastAPI(), [], asyncio.Event()

    @api.post("/ask")
    async def ask(request: Request) -> Response:
        seen.append(request.headers)
        if len(seen) == num_planned:
            all_came.set()
        await asyncio.wait_for(all_came.wait(), timeout=20)
        return Response('{"degraded":[]}')

    # The same seed, the same times: how many there are is known beforehand.
    num_planned = len(_due_s(plan_of("127.0.0.1:1")))
    with listening(api) as address:
        outcome = outcomes([{}])(plan_of(address))

    assert len(outcome.due_s) == num_planned == len(seen)
    assert 60 < num_planned < 140
    assert (outcome.status == 200).all()
    assert outcome.is_whole.all()
    assert (outcome.lag_s >= 0).all()
    # Those that came first waited for the last one.
    assert outcome.seconds[0] >= outcome.due_s[-1] - outcome.due_s[0]
    assert {headers["X-Request-Timeout-Ms"] for headers in seen} == {"700"}
    callers = [headers["X-Caller-Key"] for headers in seen]
    assert sorted(set(callers)) == ["caller-0", "caller-1", "caller-2"]
    assert max(set(callers), key=callers.count) == "caller-0"


def _due_s(plan: Plan) -> np.ndarray:
    """By a service that is not there."""
    return outcomes_without_service(plan).due_s


def outcomes_without_service(plan: Plan):
    from benchmarks.open_load import _Load

    return _Load(plan, iter([]))


def test_refusals_are_told_apart_and_a_connection_that_ends_is_a_lost_request():
    statuses, lock = iter([200, 429, 503] * 1000), threading.Lock()

    async def api(scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        await receive()
        with lock:
            status = next(statuses)
        if status == 503 and next(statuses) == 200:  # every third dies
            raise ConnectionError("as a process that is killed")
        headers = [(b"content-length", b"2"), *([(b"retry-after", b"1")] if status == 429 else [])]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    with listening(api) as address:  # type: ignore[arg-type]
        outcome = outcomes([{}])(plan_of(address))

    assert (outcome.says_when == (outcome.status == 429)).all()
    assert not outcome.is_whole.any()
    assert np.isfinite(outcome.seconds).all()
    assert {200, 429} <= set(outcome.status.tolist()) <= {200, 429, 500, 503, LOST}
