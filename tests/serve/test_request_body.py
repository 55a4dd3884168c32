"""What is wrong in a million places is read once, and told of once; nobody else waits meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from pydantic import ValidationError

from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.events.intake import RefusedEventError
from rayrec.serve.protocols.completions import read_request
from rayrec.serve.web.events import checked_events
from rayrec.serve.wire.errors import RequestError
from rayrec.serve.wire.item_texts import ItemTexts
from rayrec.serve.wire.request_body import MAX_CONTAINERS, beside_the_loop, parsed_json, strict_json
from rayrec.serve.wire.schemas import Event, RecommendRequest
from tests.serve.fake_recommender import FakeRecommender, api_of

MANY = 5_000
UNKNOWN = {f"f{number}": 1 for number in range(MANY)}
FEW = 4
"""Errors that are collected: of a value that may be of two types there are two."""


@pytest.mark.parametrize(
    ("fields", "location"),
    [
        ({"history": [[]] * MANY}, ("history", 0)),
        ({"timestamps": [""] * MANY}, ("timestamps", 0)),
        (UNKNOWN, ("f0",)),
        ({"instruction": UNKNOWN}, ("instruction", "f0")),
        ({"k": 3, **UNKNOWN}, ("f0",)),
    ],
)
def test_of_many_errors_of_a_request_the_first_is_collected(fields, location):
    with pytest.raises(ValidationError) as refused:
        RecommendRequest.model_validate(fields)

    assert refused.value.error_count() <= FEW
    assert refused.value.errors()[0]["loc"][: len(location)] == location


def test_of_many_prompts_that_are_none_the_first_is_looked_at():
    with pytest.raises(RequestError, match="numbers of tokens are not known here") as refused:
        read_request({"model": "recommend", "prompt": [1] * MANY})

    assert isinstance(refused.value.__cause__, ValidationError)
    assert refused.value.__cause__.error_count() <= FEW


def checked_count(count: int) -> None:
    if count > 2:
        raise RefusedEventError(f"{count} are too many")


def test_events_are_counted_before_they_are_looked_at_and_the_first_wrong_one_is_told():
    with pytest.raises(RefusedEventError, match=f"{MANY} are too many"):
        checked_events(json.dumps([1] * MANY).encode(), checked_count)
    good = {"user_id": "u", "item_id": "i"}
    with pytest.raises(RequestError, match=r"1\.f0: unknown field; known are user_id, ") as refused:
        checked_events(json.dumps([good, {**good, **UNKNOWN}]).encode(), checked_count)
    assert refused.value.__cause__.error_count() <= FEW
    assert checked_events(json.dumps(good).encode(), checked_count) == [Event(**good)]


def test_a_body_of_too_many_arrays_is_refused_before_they_are_made():
    many = b"[" + b",".join([b"[]"] * MAX_CONTAINERS) + b"]"
    with pytest.raises(RequestError, match="more than 20000 arrays and objects; send less"):
        parsed_json(many)
    as_text = json.dumps({"history": ["[[{\\" * MAX_CONTAINERS + '"[' * 9]}).encode()
    assert len(parsed_json(as_text)["history"]) == 1
    with pytest.raises(RequestError, match="not valid JSON"):  # a text without an end, and soon
        parsed_json(b'"' + b'\\"[' * 300_000)

    client = TestClient(api_of(RecommendationService(FakeRecommender(), max_k=50)))
    for path in ("/v1/recommend", "/v2/models/recommend/infer", "/v1/completions"):
        answer = client.post(path, content=many, headers={"Content-Type": "application/json"})
        assert (answer.status_code, "more than 20000 arrays" in answer.text) == (400, True)


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"NaN", b"-Infinity"])
def test_a_number_that_is_not_finite_is_refused_however_it_is_written(number):
    with pytest.raises(RequestError, match="give a finite"):
        strict_json(b'{"row": {"price": ' + number + b"}}")
    assert strict_json(b"[1.5e3, -0.25, 7]") == [1500.0, -0.25, 7]


def test_what_is_large_is_done_in_a_thread_and_what_is_small_is_not():
    async def scenario() -> tuple[Any, Any]:
        small = await beside_the_loop(False, threading.get_ident)
        return small, await beside_the_loop(True, threading.get_ident)

    small, large = asyncio.run(scenario())
    assert (small == threading.get_ident(), large == threading.get_ident()) == (True, False)


def test_the_texts_of_items_are_looked_up_together():
    asked = []

    class Keys:
        """As an index of pandas."""

        def get_indexer(self, keys):
            asked.append(list(keys))
            return np.array([["alien", "7", "brazil"].index(key) for key in keys], dtype=np.int64)

        def __getitem__(self, place):
            return ["alien"][place]

    texts = ItemTexts(Keys(), np.array([[1, 0], [1, 1], [2, 0]]))
    asked.clear()

    assert texts.texts_of(["brazil", "alien", "brazil"]) == ["<a_2><b_0>", "<a_1><b_0>", "<a_2><b_0>"]
    assert asked == [["brazil", "alien", "brazil"]]
