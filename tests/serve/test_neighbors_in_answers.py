"""Neighbors in the answers of a service: where the model has none, and among candidates to be ranked."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from numba.core.event import install_recorder

from rayrec.pipelines.inference.answers import Answer, Query, Wanted
from rayrec.pipelines.inference.merged_candidates import MergedCandidates
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError
from rayrec.samples.graph import GraphConfig, TemporalGraph
from rayrec.samples.prepare.ids import ids_of_kind
from rayrec.serve.config.neighbors import NeighborsConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.degradation import NOT_DEGRADED
from rayrec.serve.engine.live_graph import LiveGraph
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.understanding import DegradedRequest
from rayrec.serve.wire.schemas import Filter, RecommendRequest
from tests.helpers.runs import make_run

NOW = 1_700_000_000
STRING_IDS = {"user": "string", "item": "string"}


@pytest.fixture(scope="module")
def recommender(tmp_path_factory):
    return Recommender.load(make_run(tmp_path_factory.mktemp("neighbors")))


def ids(*keys: str) -> np.ndarray:
    return ids_of_kind(pa.array(keys), "string", "item")


def graph_of(*visits: tuple[str, str, int]) -> TemporalGraph:
    """Of (user, item, seconds after NOW)."""
    graph = TemporalGraph(GraphConfig(log="films", id_kinds=STRING_IDS))
    add(graph, *visits)
    return graph


def add(graph: TemporalGraph, *visits: tuple[str, str, int]) -> None:
    users, items, times = zip(*visits, strict=True)
    graph.append(ids(*users), ids(*items), NOW + np.array(times))


class Silent:
    """Has the data of a recommender, and names no item."""

    def __init__(self, recommender):
        self._recommender = recommender

    def __getattr__(self, name):
        return getattr(self._recommender, name)

    def answer_each(self, queries, wanted):
        return [Answer([], len(query.history_ids), 0) for query in queries]


@pytest.fixture
def graph():
    """Two users met i1 and then i2 and i3; i3 was met beside "new", which no catalog has."""
    return graph_of(
        ("u1", "i1", 1), ("u1", "i2", 2), ("u1", "i3", 3), ("u2", "i1", 1), ("u2", "i2", 2), ("z", "new", 4),
        ("z", "i3", 5), ("cold", "new", 6),
    )  # fmt: skip


def service_of(recommender, graph, stage=None, now=NOW + 100):
    neighbors = NeighborRecommender(recommender.dataset, graph, lambda: now)
    return RecommendationService(recommender, 50, stage, neighbors=neighbors)


def ask(service, **fields):
    answer = service.recommend(RecommendRequest(**fields))
    assert {item.source for item in answer.items} == (
        {"model", "neighbors"} if answer.source == "merged" else {answer.source} - {"none"}
    )
    return answer.source, [item.item_id for item in answer.items]


def test_whom_the_model_knows_nothing_of_gets_neighbors(recommender, graph):
    service = service_of(recommender, graph)

    assert ask(service, user_id="cold", k=5) == ("neighbors", ["i3"])  # by an item outside the catalog
    assert ask(service, history=["new"], k=5) == ("neighbors", ["i3"])
    assert ask(service, user_id="stranger", k=2)[0] == "popular"
    assert ask(service, k=2)[0] == "popular"
    assert ask(service, history=["i1"], k=2)[0] == "model"
    add(graph, ("stranger", "i1", 7))  # from now on known
    assert ask(service, user_id="stranger", k=5) == ("neighbors", ["i2", "i3"])
    counts = service.metrics()
    assert (counts["serving_answers_neighbors_total"], counts["serving_answers_popular_total"]) == (3, 2)


@pytest.mark.parametrize("bounds", [{}, {"max_edges_per_node": 5}, {"period": 86_400}])
def test_after_warming_up_with_an_empty_graph_nothing_is_compiled(recommender, bounds):
    """The first event of an empty graph would wait for a minute. Told where numba's cache is empty, as in
    a new checkout."""
    graph = TemporalGraph(GraphConfig(log="films", id_kinds=STRING_IDS, **bounds))
    service = service_of(recommender, graph)
    service.warm_up()

    with install_recorder("numba:compile") as compiled:
        for n in range(3):
            add(graph, ("u1", "i1", n), ("u1", "new", n), ("u1", f"i{n + 2}", n + 1))
        assert ask(service, history=["new"], k=1)[0] == "neighbors"
        ask(service, user_id="u1", k=1)
        ask(service, user_id="stranger", k=1)
    assert compiled.buffer == []
    assert graph.state.num_edges > 0


def test_what_a_user_of_the_graph_has_met_is_seen(recommender, graph):
    """All of it, and for popular items as well."""
    best = [item.item_key for item in recommender.popular(3)]
    add(graph, *(("cold", f"i{n}", 10 + n) for n in range(25)), *(("fan", item, 10) for item in best))
    service = service_of(recommender, graph)

    met = {f"i{n}" for n in range(25)}
    assert not met & set(ask(service, user_id="cold", k=30)[1])
    assert not set(best) & set(ask(service, user_id="fan", k=3)[1])
    assert met & set(ask(service, user_id="cold", k=30, exclude_seen=False)[1])


def test_a_filter_of_one_request_searches_for_that_one_again(recommender, monkeypatch):
    graph = graph_of(*((f"u{n}", item, n) for n in range(3, 30) for item in ("i1", f"i{n}")))
    neighbors, sizes = NeighborRecommender(recommender.dataset, graph, lambda: NOW + 100), []
    nearest = neighbors._nearest
    monkeypatch.setattr(
        neighbors, "_nearest", lambda queries, *how: sizes.append(len(queries)) or nearest(queries, *how)
    )
    only = np.zeros(len(recommender.dataset.items), np.bool_)
    only[recommender.dataset.item_positions(ids("i4", "i25"))] = True

    near = neighbors.near([Query(ids("i1")), Query(ids("i1"), allowed_I=only)], 2)

    assert sorted(recommender.dataset.items.keys[p].as_py() for p in near.items_BK[1].tolist()) == [
        "i25",
        "i4",
    ]
    assert sizes[:2] == [2, 1]


def test_neighbors_stand_in_for_a_model_that_names_nothing(recommender, graph, caplog):
    service = service_of(Silent(recommender), graph)

    assert ask(service, history=["i1"], k=5) == ("neighbors", ["i2", "i3"])
    assert "names no item for a history of 1 events" in caplog.text
    assert service.metrics()["serving_answers_without_items_total"] == 1
    unseen = ask(service, history=["i1", "i2"], k=5, exclude_seen=False)
    assert set(unseen[1]) == {"i1", "i2", "i3"}


def test_filters_hold_for_neighbors_and_an_empty_answer_has_no_source(recommender, graph):
    service = service_of(Silent(recommender), graph)

    assert ask(service, history=["i1"], filter=Filter(deny=["i2"])) == ("neighbors", ["i3"])
    assert ask(service, history=["i1"], filter=Filter(allow=["i3", "i9"]), k=1) == ("neighbors", ["i3"])
    assert ask(service, history=["i1"], filter=Filter(allow=["i9"])) == ("popular", ["i9"])
    assert ask(service, history=["i1"], filter=Filter(allow=["i1"])) == ("none", [])
    assert service.metrics()["serving_answers_empty_total"] == 1


def test_what_is_in_the_future_does_not_count_yet(recommender, graph):
    now = NOW + 2
    neighbors = NeighborRecommender(recommender.dataset, graph, lambda: now)
    service = RecommendationService(Silent(recommender), 50, neighbors=neighbors)

    assert ask(service, user_id="cold", k=5)[0] == "popular"
    now = NOW + 3
    assert ask(service, history=["i1"], k=5) == ("neighbors", ["i2"])
    now = NOW + 100
    assert ask(service, history=["i1"], k=5) == ("neighbors", ["i2", "i3"])


def test_under_load_neither_the_model_nor_neighbors_are_asked(recommender, graph):
    service = service_of(recommender, graph)
    request = RecommendRequest(user_id="cold", k=2)

    (answer,) = service.recommend_all([DegradedRequest.of(request, replace(NOT_DEGRADED, asks_model=False))])

    assert (answer.source, answer.degraded) == ("popular", ["popular_items"])


def test_items_outside_the_catalog_take_no_place_of_those_in_it(recommender):
    strange = [("u", f"new{n}", n + 2) for n in range(8)]
    graph = graph_of(("u", "i1", 1), *strange, ("v", "i1", 20), ("v", "i4", 30))
    neighbors = NeighborRecommender(recommender.dataset, graph)

    (answer,) = neighbors.answer([Query(ids("i1"))], 1)

    assert [item.item_key for item in answer.items] == ["i4"]


class _ModelFirst:
    """Generates i5 and i2 for everybody who has a history; num_read as a model."""

    def __init__(self, recommender):
        self._recommender, self.dataset = recommender, recommender.dataset

    def answer_each(self, queries, wanted):
        named = {item.item_key: item for item in self._recommender.popular(30)}
        items = [replace(named[key], score=-1.0 - n, source="model") for n, key in enumerate(("i5", "i2"))]
        return [
            Answer(items[: each.k] if len(query.history_ids) else [], 1, 0)
            for query, each in zip(queries, wanted, strict=True)
        ]


def test_candidates_are_merged_and_each_says_what_named_it(recommender, graph):
    neighbors = NeighborRecommender(recommender.dataset, graph, lambda: NOW + 100)
    both = MergedCandidates(_ModelFirst(recommender), neighbors)

    nobody = Query(np.zeros(0, np.int64))
    found, less, nothing = both.answer_each(
        [Query(ids("i1")), Query(ids("i1")), nobody], [Wanted(4), Wanted(2), Wanted(4)]
    )

    assert [(item.item_key, item.source, item.score) for item in found.items] == [
        ("i5", "model", -1.0),
        ("i2", "model", -2.0),  # which neighbors name as well
        ("i3", "neighbors", -2.0),
    ]
    assert [(item.item_key, item.source) for item in less.items] == [("i5", "model"), ("i2", "model")]
    assert nothing.items == []
    (alone,) = both.answer_each([nobody], [Wanted(4)])
    assert alone.items == []


def test_a_service_with_a_ranking_stage_ranks_both_and_answers_cold_users_without(
    recommender, graph, monkeypatch
):
    neighbors = NeighborRecommender(recommender.dataset, graph, lambda: NOW + 100)
    stage = object.__new__(RankingStage)
    merged = MergedCandidates(_ModelFirst(recommender), neighbors)
    monkeypatch.setattr(RankingStage, "answer_each", lambda self, *asked: merged.answer_each(*asked))
    stage.scorer, stage.config = recommender, ServeConfig.parse({"ranking": {"run": "x"}}).ranking
    recommender_alone = Silent(recommender)
    service = RecommendationService(recommender_alone, 50, stage, neighbors=neighbors)
    monkeypatch.setattr(RankingStage, "num_beams", lambda self, k, *_: 1)

    assert ask(service, history=["i1"], k=4) == ("merged", ["i5", "i2", "i3"])
    assert ask(service, user_id="cold", k=4) == ("neighbors", ["i3"])
    assert service.metrics()["serving_answers_merged_total"] == 1


def test_a_graph_of_another_log_or_time_is_refused(recommender, tmp_path):
    def open_graph(graph):
        folder = tmp_path / graph.config.log
        graph.save(folder)
        return LiveGraph(NeighborsConfig(graph=str(folder)), wall_clock=lambda: NOW)

    strange = TemporalGraph(GraphConfig(log="another", id_kinds=STRING_IDS))
    add(strange, ("u", "book", 1))
    opened = open_graph(strange)
    with pytest.raises(InputError, match=r"another: this graph is of another log.*it has 0 of the"):
        opened.check_data(recommender.dataset)
    numbers = TemporalGraph(GraphConfig(log="numbers"))
    numbers.append(np.array([1]), np.array([1]), np.array([NOW]))
    opened = open_graph(numbers)
    with pytest.raises(InputError, match=r"numbers: .* another log.*its ids are"):
        opened.check_data(recommender.dataset)
    late = TemporalGraph(GraphConfig(log="late", id_kinds=STRING_IDS))
    late.append(ids(*["u"] * 3), ids("i1", "i2", "i3"), np.array([0, NOW * 1000, NOW * 1000]))
    with pytest.raises(InputError, match=r"late: the events of this graph are in the future.*in s"):
        open_graph(late)
    with pytest.raises(InputError, match="there is no graph"):
        LiveGraph(NeighborsConfig(graph=str(tmp_path / "nothing")))
    open_graph(graph_of(("u", "i1", 1))).check_data(recommender.dataset)


def test_a_followed_store_is_one_with_both_sides():
    with pytest.raises(InputError, match=r"events\.by_item is missing"):
        ServeConfig.parse({"neighbors": {"graph": "g"}, "events": {"store": "s"}})
    both = ServeConfig.parse({"neighbors": {"graph": "g"}, "events": {"store": "s", "by_item": True}})
    assert both.followed_store == "s"
    elsewhere = ServeConfig.parse({"neighbors": {"graph": "g", "store": "t"}, "events": {"store": "s"}})
    assert elsewhere.followed_store == "t"
    assert ServeConfig.parse({"neighbors": {"graph": "g"}, "events": {}}).followed_store is None
