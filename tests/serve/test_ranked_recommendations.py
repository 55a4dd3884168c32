"""Answers of a service with a ranking stage."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from rayrec.serve.engine.degradation import DegradationLevel
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.understanding import DegradedRequest, RefusedRequestError
from rayrec.serve.wire.schemas import RecommendRequest
from tests.serve.fake_ranking import FakeStage
from tests.serve.fake_recommender import FakeRecommender, api_of


@pytest.fixture
def stage():
    return FakeStage(FakeRecommender())


@pytest.fixture
def service(stage):
    return RecommendationService(stage._recommender, max_k=50, stage=stage)


def ask(service, **fields):
    return service.recommend(RecommendRequest(**fields))


def test_items_are_ranked_and_have_both_scores(service):
    answer = ask(service, user_id="ann", k=2)

    assert [item.item_id for item in answer.items] == ["m4", "m3"]
    first = answer.items[0]
    assert (first.score, first.ranking.score, first.ranking.probabilities) == (-4.5, 0.4, {"click": 0.4})
    assert answer.ranker.model_dump() == {"run": "clicks", "step": 10, "candidates": 5}
    assert answer.model.run == "films"


def test_a_request_may_turn_ranking_off(service):
    answer = ask(service, user_id="ann", k=2, rank=False)

    assert [item.item_id for item in answer.items] == ["m0", "m1"]
    assert answer.ranker is None
    assert answer.items[0].ranking is None


def test_ranking_that_is_not_there_is_refused():
    service = RecommendationService(FakeRecommender(), max_k=50)
    with pytest.raises(RefusedRequestError, match="rank: this service has no ranking stage"):
        ask(service, user_id="ann", rank=True)
    assert ask(service, user_id="ann", rank=False).items


def test_popular_items_are_not_ranked(service):
    answer = ask(service, user_id="zoe", k=2, rank=True)

    assert (answer.source, answer.ranker, answer.items[0].ranking) == ("popular", None, None)


def test_what_goes_wrong_with_one_request_is_its_own(service, stage):
    with TestClient(api_of(service)) as client:
        stage.fails = True
        failed = client.post("/v1/recommend", json={"user_id": "ann"})
        without = client.post("/v1/recommend", json={"user_id": "ann", "rank": False})
        stage.fails = False
        again = client.post("/v1/recommend", json={"user_id": "ann", "k": 1})
        wrong = client.post("/v1/recommend", json={"user_id": "ann", "rank": "yes"})

    assert (failed.status_code, without.status_code, again.status_code) == (503, 200, 200)
    assert again.json()["items"][0]["ranking"] == {"score": 0.4, "probabilities": {"click": 0.4}}
    assert again.json()["ranker"]["run"] == "clicks"
    assert wrong.status_code == 422
    assert "rank" in wrong.json()["error"]


def test_a_busy_service_leaves_ranking_out_and_says_so(service):
    no_ranking = DegradationLevel(ranks=False)
    asked = [RecommendRequest(user_id="ann", k=2, rank=rank) for rank in (None, True, False)]

    answers = [service.recommend_all([DegradedRequest.of(each, no_ranking)])[0] for each in asked]

    assert [answer.degraded for answer in answers] == [["no_ranking"], ["no_ranking"], []]
    for answer in answers:
        assert [item.item_id for item in answer.items] == ["m0", "m1"]
        assert answer.ranker is None
