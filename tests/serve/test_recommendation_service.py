from dataclasses import replace

import pandas as pd
import pytest

from rayrec.pipelines.inference.answers import Budget
from rayrec.serve.engine.degradation import NOT_DEGRADED
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.understanding import DegradedRequest, RefusedRequestError
from rayrec.serve.wire.schemas import RecommendRequest
from tests.serve.fake_recommender import FakeRecommender


@pytest.fixture
def recommender():
    return FakeRecommender()


@pytest.fixture
def service(recommender):
    return RecommendationService(recommender, max_k=50)


def ask(service, **fields):
    return service.recommend(RecommendRequest(**fields))


def test_known_user_brings_the_stored_history(service, recommender):
    answer = ask(service, user_id="ann", k=2)

    assert recommender.asked == [([11, 12], 0, 2, True)]
    assert answer.source == "model"
    assert answer.ignored_items == []
    assert [(item.item_id, item.title, item.score) for item in answer.items] == [
        ("m0", "Film 0", -0.5),
        ("m1", "Film 1", -1.5),
    ]


def test_answer_names_the_run_and_the_steps_in_its_weights(service):
    model = ask(service, k=1).model
    assert (model.run, model.step) == ("films", 100)  # steps 0 to 99


def test_integer_keys_mean_what_their_digits_mean(service, recommender):
    ask(service, user_id=42, k=1)
    ask(service, history=[7], k=1)
    assert recommender.asked == [([13], 1, 1, True), ([12], None, 1, True)]


def test_history_of_the_request_wins_and_the_user_stays(service, recommender):
    ask(service, user_id="ann", history=["brazil", "alien", "brazil"], k=1, exclude_seen=False)
    assert recommender.asked == [([13, 11, 13], 0, 1, False)]


def test_what_an_answer_remembers_takes_no_memory_by_the_size_of_the_catalog(service):
    """Ten thousand answers are kept for the step that gives them again, and each filter has a mask."""
    for wanted in ({"filter": {"allow": ["alien"]}}, {"candidates": ["alien", "brazil"]}):
        answer = ask(service, user_id="ann", k=1, **wanted)
        assert (answer.query.user_id, answer.query.history_ids.tolist()) == (0, [11, 12])
        assert answer.query.allowed_I is None


def test_unknown_user_with_a_history_is_nobody_of_the_training_data(service, recommender):
    ask(service, user_id="zoe", history=["alien"], k=1)
    assert recommender.asked == [([11], None, 1, True)]


def test_unknown_items_are_left_out_and_named_once(service, recommender):
    answer = ask(service, history=["nosuch", "alien", 99, "nosuch"], k=1)
    assert recommender.asked == [([11], None, 1, True)]
    assert answer.ignored_items == ["nosuch", 99]


@pytest.mark.parametrize(("num_events", "num_unread"), [(3, 0), (5, 2)])
def test_events_too_old_for_the_model_are_counted(service, num_events, num_unread):
    assert ask(service, history=["alien"] * num_events, k=1).unread_events == num_unread


@pytest.mark.parametrize(
    "fields",
    [{}, {"user_id": "zoe"}, {"history": []}, {"user_id": "ann", "history": []}, {"history": ["nosuch"]}],
    ids=["nothing", "unknown user", "empty history", "known user, empty history", "unknown item"],
)
def test_popular_items_answer_where_no_item_is_known(service, recommender, fields):
    answer = ask(service, k=2, **fields)
    assert recommender.asked == []
    assert answer.source == "popular"
    assert [item.item_id for item in answer.items] == ["p0", "p1"]
    assert answer.ignored_items == fields.get("history", [])


def test_more_than_the_catalog_is_all_of_it(service, recommender):
    assert len(ask(service, user_id="ann", k=50).items) == 3
    assert len(ask(service, k=4).items) == 3


def test_more_than_an_answer_holds_is_refused(service):
    with pytest.raises(RefusedRequestError, match="k: 51 items are more than the 50 of one answer"):
        ask(service, k=51)


def test_warming_up_takes_the_model_through_a_user_and_a_history(service, recommender):
    service.warm_up()
    assert recommender.asked == [([11, 12], 0, 3, True), ([11], None, 3, True)]


def test_a_row_is_made_a_user_and_a_history_by_the_run(service, recommender):
    answer = ask(service, row={"user": 5, "clicks": "11 99 13 99"}, k=1)
    assert recommender.asked == [([11, 13], 5, 1, True)]
    assert answer.ignored_items == [99]
    assert ask(service, row={"user": 5}).source == "popular"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"row": {}, "user_id": "ann"}, "row: stands for user_id and history; give it without them"),
        ({"row": {}, "history": []}, "row: stands for user_id and history"),
        ({"row": {"price": 1}}, "row: there is no field 'price'"),
    ],
)
def test_rows_that_the_run_cannot_use_are_refused(service, fields, expected):
    with pytest.raises(RefusedRequestError, match=expected):
        ask(service, **fields)


def test_times_of_a_request_stay_with_their_known_items(service, recommender):
    ask(service, history=["alien", "nosuch", "brazil"], timestamps=[5, 6, 7], k=1)
    assert recommender.asked == [([11, 13], None, 1, True)]
    assert recommender.times == [[5, 7]]


def test_a_history_without_times_has_none_and_a_stored_one_its_own(service, recommender):
    ask(service, history=["alien"], user_id="ann", k=1)
    ask(service, user_id="ann", k=1)
    ask(service, row={"user": 5, "clicks": "11 99 13"}, k=1)
    assert recommender.times == [None, [100, 200], [0, 20]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"history": ["alien"], "timestamps": [1, 2]}, "timestamps: 2 times for the 1 items of the history"),
        ({"history": ["alien", 7], "timestamps": [2, 1]}, "timestamps: 1 is before 2; give .* oldest first"),
        ({"user_id": "ann", "timestamps": [1, 2]}, "timestamps: are those of a history"),
        ({"row": {}, "timestamps": []}, "row: stands for user_id and history"),
    ],
)
def test_times_that_are_of_no_history_are_refused(service, fields, expected):
    with pytest.raises(RefusedRequestError, match=expected):
        ask(service, **fields)


@pytest.mark.parametrize("time", [1.5, "2024-01-01", True, 1_700_000_000_000, -(10**12)])
def test_times_are_whole_seconds(service, time):
    with pytest.raises(ValueError, match="timestamps"):
        ask(service, history=["alien"], timestamps=[time])


def test_an_instruction_comes_along_with_user_history_or_row(service, recommender):
    wanted = {"behavior": "LIKE", "trigger_item": 7}
    for who in ({"user_id": "ann"}, {"history": ["brazil"]}, {"row": {"user": 1, "clicks": "11"}}):
        ask(service, instruction=wanted, **who)
    ask(service, user_id="ann")

    assert recommender.instructions == [{"behavior": 0, "trigger_item": 1}] * 3 + [{}]


def test_whoever_looks_at_an_item_is_somebody_for_the_model_without_a_history(service, recommender):
    answer = ask(service, user_id="zoe", instruction={"trigger_item": "brazil"}, k=1)

    assert answer.source == "model"
    assert recommender.asked == [([], None, 1, True)]
    assert recommender.instructions == [{"trigger_item": 2}]


def test_popular_items_that_are_new_answer_where_operations_leave_nothing(service, recommender):
    recommender.leaves_nothing = True

    answer = ask(service, user_id="ann", k=1)

    assert (answer.source, [item.item_id for item in answer.items]) == ("popular", ["p0"])
    assert answer.unread_events == 2
    assert recommender.left_out.tolist() == [11, 12]
    ask(service, user_id="ann", k=1, exclude_seen=False)
    assert recommender.left_out is None


def test_an_instruction_that_names_what_nobody_knows_is_refused(service, recommender):
    with pytest.raises(RefusedRequestError, match="no event has 'HATE'; those that occur: LIKE, VIEW"):
        ask(service, user_id="ann", instruction={"behavior": "HATE"})
    assert recommender.asked == []


def test_costs_are_measured_by_doubling_up_to_the_largest_batch_or_one_that_takes_too_long():
    service = RecommendationService(FakeRecommender(), max_k=50)

    costs, short = service.measured_costs(5), service.measured_costs(5, most_s=0.0)

    assert (costs.max_size, short.max_size) == (5, 1)
    assert costs.of(1) > 0


def test_requests_cost_by_their_beams_in_powers_of_two(service):
    service._understanding.item_keys = pd.Index([f"i{number}" for number in range(200)])
    of_popular = DegradedRequest.of(RecommendRequest(k=17), level(asks_model=False))

    assert service.width_of(RecommendRequest(k=1)) == 16  # ten beams
    assert service.width_of(RecommendRequest(k=17)) == 32
    assert service.width_of(RecommendRequest(k=10**9)) == 64  # of which no more than 50 are answered
    assert service.width_of(of_popular) == 0


def test_fewer_beams_are_narrower_and_a_model_that_scores_every_item_has_one_width(service):
    fewer = level(budget=Budget(max_beams=3))

    assert service.width_of(DegradedRequest.of(RecommendRequest(k=2), fewer)) == 4
    service._recommender.num_beams = lambda k, budget: 0

    assert service.width_of(RecommendRequest(k=3)) == 1


def level(**how):
    return replace(NOT_DEGRADED, **how)


def ask_for_less(service, how, **fields):
    (answer,) = service.recommend_all([DegradedRequest.of(RecommendRequest(**fields), how)])
    return answer


def test_a_budget_reaches_the_model_and_is_said(service, recommender):
    budget = Budget(max_beams=3, max_events=1)

    answer = ask_for_less(service, level(budget=budget), user_id="ann", k=2)

    assert recommender.budgets == [budget]
    assert answer.degraded == ["fewer_beams", "shorter_history"]
    assert answer.source == "model"


@pytest.mark.parametrize(
    ("budget", "k"),
    [(Budget(max_beams=10), 1), (Budget(max_beams=3), 10), (Budget(max_events=2), 1)],
    ids=["as many beams", "as many beams as items", "no more events"],
)
def test_an_answer_that_lost_nothing_says_so(service, budget, k):
    service._understanding.item_keys = pd.Index([str(place) for place in range(20)])
    assert ask_for_less(service, level(budget=budget), user_id="ann", k=k).degraded == []


def test_without_the_model_a_user_gets_popular_items_that_are_new(service, recommender):
    answer = ask_for_less(service, level(asks_model=False), user_id="ann", k=1)

    assert recommender.asked == []
    assert (answer.source, answer.degraded, answer.unread_events) == ("popular", ["popular_items"], 2)
    assert recommender.left_out.tolist() == [11, 12]


def test_whoever_would_get_popular_items_anyway_loses_nothing(service):
    assert ask_for_less(service, level(asks_model=False), user_id="zoe").degraded == []


def test_a_degraded_request_is_refused_like_any_other(service):
    (refused,) = service.recommend_all([DegradedRequest.of(RecommendRequest(k=51), level(asks_model=False))])
    assert isinstance(refused, RefusedRequestError)


def test_requests_that_are_searched_for_alike_are_computed_together(service, recommender):
    requests = [
        RecommendRequest(user_id="ann", k=1, exclude_seen=False),
        DegradedRequest.of(RecommendRequest(user_id="42", k=2), level(budget=Budget(max_events=1))),
        DegradedRequest.of(RecommendRequest(user_id="ann", k=2), level(budget=Budget(max_beams=10))),
        RecommendRequest(user_id="zoe", k=2),
    ]
    assert len(set(map(service.group_of, requests))) == 1

    answers = service.recommend_all(requests)

    assert [len(answer.items) for answer in answers] == [1, 2, 2, 2]
    assert [answer.source for answer in answers] == ["model"] * 3 + ["popular"]
    assert [asked[2:] for asked in recommender.asked] == [(1, False), (2, True), (2, True)]
    assert [answer.degraded for answer in answers] == [[], [], [], []]


def test_where_every_item_is_scored_few_items_are_not_held_up_by_many(service):
    service._understanding.item_keys = pd.Index([f"i{number}" for number in range(5000)])
    service._recommender.num_beams = lambda k, budget: 0
    service.max_k = 1000
    group_of = {k: service.group_of(RecommendRequest(k=k)) for k in (1, 10, 128, 129, 256, 1000)}
    assert group_of[1] == group_of[10] == group_of[128] != group_of[129] == group_of[256] != group_of[1000]


def test_where_every_item_is_scored_requests_cost_by_their_items_above_a_few(service):
    service._understanding.item_keys = pd.Index([f"i{number}" for number in range(5000)])
    service._recommender.num_beams = lambda k, budget: 0
    service.max_k = 1000
    widths = [service.width_of(RecommendRequest(k=k)) for k in (1, 128, 129, 256, 1000, 10**9)]
    assert widths == [1, 1, 2, 2, 8, 8]


def test_requests_without_the_model_are_not_computed_with_others(service):
    request = RecommendRequest(user_id="ann")
    how = [level(), level(budget=Budget(max_beams=3)), level(asks_model=False)]
    assert len({service.group_of(DegradedRequest.of(request, each)) for each in how}) == 2
    service._is_compiled = True  # whose programs have as many beams for all rows
    assert len({service.group_of(DegradedRequest.of(request, each)) for each in how}) == 3
    service._is_compiled = False
    assert service.group_of(DegradedRequest.of(request, level(ranks=False))) == service.group_of(request)


def test_popular_items_answer_where_the_model_names_none_and_all_answers_are_counted(caplog):
    recommender = FakeRecommender()
    service = RecommendationService(recommender, max_k=50)
    service.warm_up()
    service.recommend(RecommendRequest(history=["alien"], k=2))
    service.recommend(RecommendRequest(k=2))
    recommender.names_nothing = True

    answer = service.recommend(RecommendRequest(history=["alien"], k=2))

    assert (answer.source, [item.item_id for item in answer.items]) == ("popular", ["p0", "p1"])
    assert "the model of version 100 names no item for a history of 1 events" in caplog.text
    recommender.popular = lambda k, exclude_ids=None: []
    assert service.recommend(RecommendRequest(history=["alien"], k=2)).items == []  # has seen everything
    following = RecommendationService(recommender, max_k=50, before=service)
    assert {name: count for name, count in following.metrics().items() if "answers" in name} == {
        "serving_answers_model_total": 1,
        "serving_answers_merged_total": 0,
        "serving_answers_neighbors_total": 0,
        "serving_answers_popular_total": 2,
        "serving_answers_nearline_total": 0,
        "serving_answers_empty_total": 1,
        "serving_answers_without_items_total": 1,
    }
