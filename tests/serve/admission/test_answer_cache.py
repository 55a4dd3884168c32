"""Which answers are kept, and for whom."""

from __future__ import annotations

import pytest

from rayrec.serve.admission.answer_cache import AnswerCache, key_of
from rayrec.serve.config.admission import CacheConfig
from rayrec.serve.wire.schemas import ModelInfo, RecommendRequest
from tests.serve.admission.clocks import Clock

FILMS = ModelInfo(run="films", step=100)


def key(**fields: object) -> bytes:
    return key_of(RecommendRequest(**fields), FILMS)


def test_an_answer_is_given_until_it_is_too_old():
    clock = Clock()
    cache = AnswerCache[str](CacheConfig(max_age_s=5.0), clock)
    cache.put(b"a", "answer")

    clock.now += 5.0
    assert cache.get(b"a") == "answer"
    clock.now += 0.1
    assert cache.get(b"a") is None
    assert len(cache) == 0
    assert (cache.num_hits, cache.num_misses) == (1, 1)


def test_a_newer_answer_takes_the_place_and_begins_anew():
    clock = Clock()
    cache = AnswerCache[str](CacheConfig(max_age_s=5.0), clock)
    cache.put(b"a", "old")
    clock.now += 4.0
    cache.put(b"a", "new")
    clock.now += 4.0

    assert cache.get(b"a") == "new"


def test_what_was_used_longest_ago_leaves_first():
    cache = AnswerCache[str](CacheConfig(max_entries=2), Clock())
    cache.put(b"a", "A")
    cache.put(b"b", "B")
    assert cache.get(b"a") == "A"

    cache.put(b"c", "C")

    assert [cache.get(name) for name in (b"a", b"b", b"c")] == ["A", None, "C"]
    assert len(cache) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"user_id": "bob"},
        {"history": ["alien"]},
        {"k": 3},
        {"exclude_seen": False},
        {"rank": False},
        {"timestamps": [1]},
        {"row": {"user": 1}},
        {"instruction": {"behavior": "LIKE"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_whatever_a_request_says_makes_another_answer(other):
    assert key(user_id="ann") == key(user_id="ann")
    assert key(**{"user_id": "ann", **other}) != key(user_id="ann")


def test_another_model_makes_another_answer():
    request = RecommendRequest(user_id="ann")
    newer, ranked = ModelInfo(run="films", step=200), ModelInfo(run="clicks", step=10)
    assert len({key_of(request, FILMS), key_of(request, newer), key_of(request, FILMS, ranked)}) == 3


def test_the_order_of_a_rows_columns_does_not_matter_and_any_text_has_a_key():
    assert key(row={"a": 1, "b": 2}) == key(row={"b": 2, "a": 1})
    assert key(row={"a": "\ud800"}) != key(row={"a": "\ud801"})
