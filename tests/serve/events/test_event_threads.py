"""A store of events that hangs holds up events, and nothing else."""

from __future__ import annotations

import asyncio
import os
import threading

import httpx
from fastapi import FastAPI

from rayrec.serve.web.events import events_router
from rayrec.serve.wire.schemas import EventsAnswer

DEFAULT_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""That asyncio has for everything else."""


class HangingIntake:
    def __init__(self) -> None:
        self.num_entered = 0
        self.goes_on = threading.Event()
        self._lock = threading.Lock()

    def check_count(self, count):
        with self._lock:
            self.num_entered += 1
        assert self.goes_on.wait(timeout=60)

    def take(self, events):
        return EventsAnswer(taken=len(events), repeated=0, unknown_items=0)


def test_large_bodies_are_read_while_a_store_of_events_does_not_answer():
    """Both had the threads of the event loop, and users' histories were read by them, too."""
    intake, api = HangingIntake(), FastAPI()
    api.include_router(events_router(intake))
    event = {"user_id": "u1", "item_id": "i1"}

    async def scenario() -> list[int]:
        transport = httpx.ASGITransport(app=api)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            posts = [asyncio.create_task(client.post("/v1/events", json=[event])) for _ in range(64)]
            while intake.num_entered < DEFAULT_THREADS:
                await asyncio.sleep(0)
            try:
                async with asyncio.timeout(10):
                    assert await asyncio.to_thread(sum, [1, 2]) == 3
            finally:
                intake.goes_on.set()
            return [answer.status_code for answer in await asyncio.gather(*posts)]

    assert asyncio.run(scenario()) == [200] * 64
