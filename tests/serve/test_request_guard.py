"""Bodies that do not come."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI, Request

from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.events import EventsConfig
from rayrec.serve.engine.batching import BatchCosts, Batcher
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.events.intake import EventIntake
from rayrec.serve.web.api import build_api
from rayrec.serve.web.error_handlers import add_error_handlers
from rayrec.serve.web.guards import RequestGuard
from tests.serve.fake_recommender import FakeRecommender
from tests.serve.slow_bodies import answer_of, posted, under_way


def api_that_waits(body_timeout_s: float) -> FastAPI:
    api = FastAPI()
    api.add_middleware(RequestGuard, max_body_bytes=100, body_timeout_s=body_timeout_s)
    add_error_handlers(api)

    @api.post("/v1/recommend")
    async def recommend(body: dict[str, int]) -> dict[str, int]:
        return body

    @api.post("/v1/completions")
    async def completions(http: Request) -> int:
        return len(await http.body())

    @api.post("/v1/leaves")
    async def leaves(http: Request) -> str:
        await http.body()
        # As frameworks wait for callers to go away.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await http.receive()
        return "nobody left"

    return api


@pytest.mark.parametrize("path", ["/v1/recommend", "/v1/completions"])
def test_a_body_that_does_not_end_is_refused_and_its_connection_closed(path):
    status, headers = asyncio.run(answer_of(api_that_waits(0.02), path, b"{", ends=False))

    assert (status, headers[b"connection"]) == (408, b"close")


def test_after_the_body_nobody_is_hurried():
    assert asyncio.run(posted(api_that_waits(0.01), "/v1/leaves", b"{", b"}")) == 200


def test_events_that_come_slowly_have_no_place_meanwhile():
    recommender = FakeRecommender()
    service = RecommendationService(recommender, max_k=50)
    recommender.dataset.check_times = lambda: None
    intake = EventIntake.open(EventsConfig(), lambda: recommender.dataset)
    batcher = Batcher(service.recommend_all, BatchCosts({1: 1e-6}), 4)
    admission = AdmissionConfig.parse({"service": {"concurrency": 1}})
    api = build_api(service, batcher, 10.0, admission, intake=intake)

    async def scenario() -> int:
        slow = await under_way(api, "/v1/events")
        answered = await posted(api, "/v1/recommend", b"{}")
        slow.cancel()
        return answered

    assert asyncio.run(scenario()) == 200
