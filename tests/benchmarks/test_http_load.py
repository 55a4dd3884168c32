"""The load generator: as many answers as are told are counted, of different requests; errors are none."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from benchmarks.http_load import windows
from tests.serve.fake_recommender import listening


def test_as_many_answers_are_counted_as_asked_for_of_other_bodies():
    api, seen = FastAPI(), []

    @api.post("/ask")
    async def ask(body: dict[str, int]) -> dict[str, int]:
        seen.append(body["n"])
        return body

    with listening(api) as address:
        window = windows([{"n": n} for n in range(100)])((f"http://{address}/ask", 4, 40))

    assert len(window.latencies_s) == 40
    assert 0 < window.percentile(50) <= window.percentile(99)
    # Four at a time are done at most so much faster than one.
    assert 0 < window.rate <= 4 / window.latencies_s.min()
    assert len(seen) == len(set(seen)) == 50


def test_a_refusal_ends_the_measurement():
    with (
        listening(FastAPI()) as address,
        pytest.raises(RuntimeError, match=r"answers 404"),
    ):
        windows([{}])((f"http://{address}/nowhere", 2, 10))
