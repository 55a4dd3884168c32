"""Answers with near-line products: those of this history and version, or none."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from rayrec.pipelines.inference.answers import Wanted
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.nearline.config import MOST_EVENTS, NearlineConfig
from rayrec.pipelines.nearline.kinds import InstructionsKind, kinds_of
from rayrec.pipelines.nearline.product_store import ProductStore
from rayrec.pipelines.nearline.source import UserEventsSource
from rayrec.pipelines.nearline.worker import NearlineWorker
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.samples.stores.recent import UserEvents
from rayrec.serve.config.nearline import NearlineReadConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.degradation import DegradationLevel
from rayrec.serve.engine.products import ProductReader
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.understanding import DegradedRequest
from rayrec.serve.events.user_state import ProcessState
from rayrec.serve.wire.schemas import Filter, RecommendRequest
from tests.helpers.runs import BACKBONE, NUM_ITEMS, make_run
from tests.pipelines.nearline.test_products import Values

LONG = {"chunk_events": 4, "summary_tokens": 2, "newest": 3, "max_chunks": 8}
CACHED = DegradationLevel(takes_cached=True)


@pytest.fixture(scope="module")
def recommender(tmp_path_factory) -> Recommender:
    backbone = {key: value for key, value in BACKBONE.items() if key != "max_length"}
    folder = tmp_path_factory.mktemp("run")
    return Recommender.load(make_run(folder, "lazy", backbone=backbone, long_history=LONG))


class Served:
    """A service, and the store of what was computed before."""

    def __init__(self, recommender, **config) -> None:
        self.recommender, self.values, self.now = recommender, Values(), [1000.0]
        self.service = RecommendationService(recommender, max_k=50)
        self.reader = ProductReader(
            NearlineReadConfig(store="x", **config), ProductStore(self.values), lambda: self.now[0]
        )
        self.service.products = self.reader
        self.service.user_state = ProcessState(MOST_EVENTS, 100)

    def compute(self, **config):
        settings = NearlineConfig.parse({"products": ["summaries", "candidates"], **config})
        events = UserEventsSource(self.recommender, None)
        kinds = kinds_of(settings, self.recommender)
        store = ProductStore(self.values)
        NearlineWorker(self.recommender, kinds, events, store, settings, clock=lambda: self.now[0]).finish()

    def ask(self, level=None, **fields):
        request = RecommendRequest(user_id="u1", k=5, **fields)
        return self.service.recommend(request if level is None else DegradedRequest.of(request, level))

    def happens(self, item, time_s=2_000_000_000):
        user = self.recommender.dataset.user_by_key("u1")
        events = UserEvents(np.array([time_s * 1_000_000]), np.array([item]), np.array([-1]))
        self.service.user_state.append(np.array([user]), events)

    def metric(self, name):
        return self.reader.metrics()[f"nearline_{name}"]


@pytest.fixture
def served(recommender):
    return Served(recommender)


def keys_of(answer):
    return [item.item_id for item in answer.items]


def scores_of(answer):
    return [item.score for item in answer.items]


def unseen_item(recommender):
    seen = recommender.dataset.history_of("u1")
    return int(np.setdiff1d(recommender.dataset.items.ids_I, seen)[0])


def test_answers_with_products_are_those_without(served):
    plain = served.ask()
    served.compute()

    answer = served.ask()
    assert keys_of(answer) == keys_of(plain)
    assert scores_of(answer) == pytest.approx(scores_of(plain), abs=1e-3)
    assert (answer.source, answer.degraded) == ("model", [])
    assert served.metric("summaries_hits_total") == 1


def test_the_step_that_takes_cached_answers_takes_the_products(served):
    plain = served.ask()
    assert served.ask(CACHED).source == "model"
    served.compute()

    answer = served.ask(CACHED)
    assert (answer.source, answer.degraded) == ("nearline", ["cached_answer"])
    assert keys_of(answer) == keys_of(plain)
    assert scores_of(answer) == pytest.approx(scores_of(plain), abs=1e-3)
    served.now[0] = 1030.0
    served.ask(CACHED)
    assert served.metric("candidates_hits_total") == 2
    assert served.metric("candidates_missing_total") == 1
    assert served.metric("candidates_age_seconds") == 30


def test_products_with_too_few_items_are_no_hits(served):
    served.compute(candidates=3)

    assert served.ask(CACHED).source == "model"
    assert served.metric("candidates_short_total") == 1
    assert served.metric("candidates_hits_total") == 0


def test_filters_and_seen_items_hold_for_what_was_found_before(served):
    served.compute()
    first, second, *_ = keys_of(served.ask(CACHED))

    answer = served.ask(CACHED, filter=Filter(deny=[first]))
    assert answer.source == "nearline"
    assert keys_of(answer)[0] == second
    only = served.ask(CACHED, filter=Filter(allow=[second]))
    assert keys_of(only) == [second]
    seen = served.recommender.dataset.history_of("u1")
    positions = served.recommender.dataset.item_positions(seen)
    seen_keys = {served.recommender.dataset.items.keys[place].as_py() for place in positions.tolist()}
    assert not seen_keys & set(keys_of(answer))
    everything = served.ask(CACHED, exclude_seen=False)
    assert seen_keys & set(keys_of(everything)) or len(seen_keys) < NUM_ITEMS


def test_candidates_of_an_earlier_beginning_say_so_and_leave_out_what_is_seen_now(served):
    served.compute()
    (first, *_) = keys_of(served.ask(CACHED))
    position = served.recommender.dataset.position_by_key(first)
    served.happens(int(served.recommender.dataset.items.ids_I[position]))

    answer = served.ask(CACHED)
    assert answer.degraded == ["cached_answer", "earlier_history"]
    assert first not in keys_of(answer)
    served.now[0] += 601
    assert served.ask(CACHED).source == "model"
    assert served.metric("candidates_old_total") == 1


def test_candidates_of_the_history_as_it_is_have_no_age(served):
    """They are what would be computed now; `rayrec nearline --once` need not run again for quiet users."""
    served.compute()
    served.now[0] += 86_400

    assert served.ask(CACHED).source == "nearline"
    assert served.metric("candidates_old_total") == 0


def test_what_a_ranking_model_said_of_candidates_has_an_age(served, recommender):
    """It may read when it is asked, and a graph that moves."""
    served.compute()
    query, reader = recommender.query_of_user("u1"), served.reader
    user = recommender.dataset.user_by_key("u1")
    (plain,) = reader.read(recommender, None, [user]).values()
    number = len(plain["candidates"].arrays["items"])
    opinion = {
        "objective": np.arange(number, dtype=float),
        "labels": np.array(["click"]),
        "probabilities": np.full((number, 1), 0.5),
    }
    ranked = replace(plain["candidates"], arrays={**plain["candidates"].arrays, **opinion})

    def answer(product, ranks):
        return reader.answer(recommender, query, Wanted(3), {"candidates": product}, ranks)

    assert answer(ranked, True).is_ranked
    served.now[0] += 601
    assert answer(ranked, True) is None
    assert served.metric("candidates_old_total") == 1
    assert not answer(ranked, False).is_ranked
    assert not answer(plain["candidates"], True).is_ranked
    assert reader.candidates(recommender, query, {"candidates": ranked})  # found by the model alone


def test_a_late_event_before_the_others_makes_products_stale(served):
    served.compute()
    served.happens(unseen_item(served.recommender), time_s=-1_000_000)

    answer = served.ask(CACHED)
    assert answer.source == "model"
    assert served.metric("candidates_stale_total") == 1


def test_a_history_that_shrank_makes_products_stale(served, recommender, monkeypatch):
    served.compute()
    whole = recommender.query_of_user("u1")

    def shrunk(key):
        times = None if whole.times is None else whole.times[:-2]
        return replace(whole, history_ids=whole.history_ids[:-2], times=times)

    monkeypatch.setattr(recommender, "query_of_user", shrunk)
    with_products = served.ask(CACHED)
    served.service.products = None
    without = served.ask()
    assert with_products.source == "model"
    assert keys_of(with_products) == keys_of(without)
    assert scores_of(with_products) == pytest.approx(scores_of(without), abs=1e-3)
    assert served.metric("candidates_stale_total") == 1


def test_products_of_another_version_are_never_read(served, recommender, monkeypatch):
    served.compute()
    monkeypatch.setitem(recommender.__dict__, "identity", "0" * 32)
    assert served.ask(CACHED).source == "model"
    assert served.metric("candidates_missing_total") == 1


@contextmanager
def down(served):
    served.values.error = UnavailableError("values", 1, "gone")
    yield
    served.values.error = None


def test_a_store_that_is_down_or_half_written_costs_a_counter(served):
    plain = served.ask()
    served.compute()
    with down(served):
        assert keys_of(served.ask(CACHED)) == keys_of(plain)
    assert served.metric("unusable_down_total") == 2
    served.reader.store = ProductStore(served.values)
    for name, record in served.values.kept.items():
        served.values.kept[name] = record[: len(record) // 2]
    assert keys_of(served.ask(CACHED)) == keys_of(plain)
    assert served.metric("unusable_corrupt_total") == 2


def test_an_answer_says_which_old_events_it_lacks(recommender):
    served = Served(recommender, max_new_chunks=0)
    long = [
        user for user in recommender.dataset.sorted_user_keys if len(recommender.dataset.history_of(user)) > 8
    ]
    request = RecommendRequest(user_id=long[0], k=3)
    assert served.service.recommend(request).degraded == ["no_long_history"]
    served.compute(products=["summaries"])
    assert served.service.recommend(request).degraded == []


def test_instructions_are_used_where_the_request_has_none(recommender, monkeypatch):
    served = Served(recommender, products=["instructions"])
    monkeypatch.setattr(recommender, "instruction_of", lambda names: dict.fromkeys(names, 1))
    asked = []

    def function(keys, queries):
        asked.extend(keys)
        return [{"scenario": "search"} if key == "u1" else None for key in keys]

    settings, store = NearlineConfig(products=("instructions",)), ProductStore(served.values)
    kinds = [InstructionsKind(recommender, function, "module:function")]
    events = UserEventsSource(recommender, None)
    NearlineWorker(recommender, kinds, events, store, settings, clock=lambda: 1000.0).finish()
    assert sorted(asked) == recommender.dataset.sorted_user_keys

    def instruction_of(user, has_instruction):
        ids = [recommender.dataset.user_by_key(user)]
        products = served.reader.read(recommender, None, ids)[ids[0]]
        query = recommender.query_of_user(user)
        return served.reader.applied(recommender, query, products, has_instruction).instruction

    assert instruction_of("u1", False) == {"scenario": 1}
    assert instruction_of("u1", True) == {}
    assert instruction_of("u2", False) == {}
    wrong = InstructionsKind(recommender, lambda keys, queries: [], "module:wrong")
    with pytest.raises(InputError, match="expected a list with a mapping"):
        wrong.make(["u1"], [recommender.query_of_user("u1")], [None])


def test_products_are_read_where_the_whole_model_is():
    with pytest.raises(InputError, match="leave out --services"):
        ServeConfig.parse({"nearline": {"store": "products"}, "services": {}})


def test_a_version_is_covered_when_its_users_are_done(served, recommender):
    served.reader.config = NearlineReadConfig(store="x", min_coverage=0.9)
    assert not served.reader.is_covered(recommender)
    settings = NearlineConfig(products=("candidates",), batch_users=8)
    worker = NearlineWorker(
        recommender,
        kinds_of(settings, recommender),
        UserEventsSource(recommender, None),
        ProductStore(served.values),
        settings,
    )
    worker.step()
    assert 0 < served.reader.store.coverage(recommender.identity) < 0.9
    assert not served.reader.is_covered(recommender)
    while worker.step():
        pass
    assert served.reader.is_covered(recommender)
    served.values.names_after = None
    assert not served.reader.is_covered(recommender)
