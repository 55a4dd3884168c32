"""Clients that try once more, and notice an answer that is not the one of its version."""

from __future__ import annotations

from itertools import count

import pytest
from fastapi import FastAPI, Response

from benchmarks.checked_load import Window, checks, same
from tests.serve.fake_recommender import listening

EXPECTED = {1: {"ann": (["a", "b"], [0.5, 0.25])}, 2: {"ann": (["b", "a"], [0.75, 0.5])}}


def asked(answer) -> object:
    """What clients found of a service that gives (status, version, items, scores) for a request's number."""
    api, numbers = FastAPI(), count()

    @api.post("/ask")
    async def ask(response: Response) -> dict[str, object]:
        response.status_code, version, keys, scores = answer(next(numbers))
        items = [{"item_id": key, "score": score} for key, score in zip(keys, scores, strict=True)]
        return {"model": {"version": version}, "items": items}

    with listening(api) as address:
        return checks(EXPECTED, 2)(Window(f"http://{address}/ask", 2, 0.3))


def test_answers_of_either_version_are_right_and_every_failure_is_tried_once_more():
    found = asked(
        lambda number: (
            (503, 1, [], []) if number % 5 == 0 else (200, 1 + number % 2, *EXPECTED[1 + number % 2]["ann"])
        )
    )
    assert found.wrong == []
    assert set(found.versions) == {1, 2}
    assert found.again == found.failures["503"] > 0
    assert sum(found.versions.values()) + found.failed == found.requests


def test_what_fails_again_has_failed():
    found = asked(lambda number: (503, 1, [], []))
    assert found.failed == found.again == found.requests > 0
    assert not found.versions


@pytest.mark.parametrize(
    ("version", "keys", "scores", "why"),
    [
        (1, *EXPECTED[2]["ann"], "version 1 gives"),  # items and scores of another version
        (1, ["a", "b"], [0.5, 0.2501], "version 1 gives"),
        (1, ["a"], [0.5], "version 1 gives"),
        (3, *EXPECTED[1]["ann"], "nobody knows version 3"),
    ],
)
def test_what_is_not_entirely_of_its_version_is_wrong(version, keys, scores, why):
    found = asked(lambda number: (200, version, keys, scores))
    assert len(found.wrong) == found.requests
    assert all(why in sentence for sentence in found.wrong)


def test_only_items_of_equal_scores_may_change_places():
    assert same(["a", "b"], [0.5, 0.5], ["b", "a"], [0.5, 0.500001])
    assert not same(["b", "a"], [0.5, 0.25], ["a", "b"], [0.5, 0.25])
    assert same(["a", "c"], [0.5, 0.25], ["a", "b"], [0.5, 0.25])  # another one of the last score
