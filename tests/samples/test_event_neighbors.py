"""Neighbors of events in the features of a batch, held to brute force on small graphs."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayrec.samples.features.features import SequenceFeatures
from rayrec.samples.features.neighbors import NO_TIME, NeighborFinder
from rayrec.samples.graph import GraphConfig, TemporalGraph
from tests.helpers.data import sample_batch
from tests.samples.graph.brute_force import Event, append, co_visits, graph_of

EVENTS = st.lists(
    st.builds(Event, st.integers(1, 4), st.integers(0, 6), st.integers(1, 9), st.just(-1)),
    max_size=40,
    unique=True,
)
CATALOG = np.array([6, 2, 0, 4, 1, 3])
"""Item 5 is not in it."""


def finder(graph: TemporalGraph, count: int = 10) -> NeighborFinder:
    return NeighborFinder(lambda: graph, count)


def expected(events: list[Event], item: int, before: int) -> dict[int, float]:
    return co_visits(events, [item], before, last=1, decay=1.0, window=5, most=200)


def batch_of(rows: list[list[int]], times: list[list[int]]):
    return dataclasses.replace(sample_batch(rows), times_N=np.array([time for row in times for time in row]))


@given(EVENTS, st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=8))
def test_an_event_gets_what_was_met_beside_its_item_strictly_before_it(events, asked):
    items_N, times_N = (np.array(column) for column in zip(*asked, strict=True))

    ids_NJ, weights_NJ = finder(graph_of(events)).find(items_N, times_N)

    for item, time, ids_J, weights_J in zip(items_N, times_N, ids_NJ, weights_NJ, strict=True):
        found = {int(ident): weight for ident, weight in zip(ids_J, weights_J, strict=True) if ident >= 0}
        assert found == expected(events, item, time)
        assert (np.diff(weights_J) <= 0).all()
        assert not weights_J[len(found) :].any()


@given(EVENTS, st.integers(1, 9))
def test_what_happens_at_the_time_of_an_event_or_later_is_not_seen(events, now):
    batch = batch_of([[2, 4, 1, 3], [6, 0]], [[now - 2, now - 1, now, now + 1], [now, now]])
    past = [event for event in events if event.time < now]

    found, alike = (
        SequenceFeatures(CATALOG, max_length=5, neighbors=finder(graph_of(known)))(batch)[0]
        for known in (events, past)
    )

    np.testing.assert_array_equal(found.neighbors_NJ, alike.neighbors_NJ)
    np.testing.assert_array_equal(found.neighbor_weights_NJ, alike.neighbor_weights_NJ)


def test_the_target_of_an_event_is_no_neighbor_of_it_by_the_row_itself():
    rows, times = [[2, 4, 1]], [[3, 4, 5]]
    graph = graph_of([Event(7, item, time) for item, time in zip(rows[0], times[0], strict=True)])

    (features,) = SequenceFeatures(CATALOG, max_length=5, neighbors=finder(graph))(batch_of(rows, times))

    assert not features.neighbor_weights_NJ.any()


def test_neighbors_are_positions_of_the_catalog_whose_shares_add_up_to_one():
    events = [Event(1, 2, 1), Event(1, 5, 2), Event(1, 4, 3), Event(2, 2, 1), Event(2, 4, 2)]
    features = SequenceFeatures(CATALOG, max_length=5, neighbors=finder(graph_of(events), count=3))

    found = features.ranking(batch_of([[2, 3]], [[8, 9]]))

    # 4 stands two events behind 2 once, and beside it once; 5 is no item of the catalog.
    assert CATALOG[found.neighbors_NJ].tolist() == [[4, 2, 2], [3, 3, 3]]
    assert found.neighbor_weights_NJ.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert found.neighbor_weights_NJ.dtype == np.float32


def test_rows_of_neighbors_are_looked_up_with_those_of_the_items():
    graph = graph_of([Event(user, item, 1 + item) for user in (1, 2) for item in (1, 2, 3)])
    features = SequenceFeatures(
        CATALOG, max_length=5, neighbors=finder(graph, count=2), num_negatives=4, num_trainers=2
    )

    shares = features(batch_of([[2, 3, 1], [1, 2]], [[8, 8, 9], [8, 9]]))

    for share in shares:
        lookup = share.lookups["item"]
        positions = [share.items_N, share.targets_N, share.negatives_S, share.neighbors_NJ.ravel()]
        assert lookup.ids_M[lookup.inverse].tolist() == CATALOG[np.concatenate(positions)].tolist()
        assert np.isin(lookup.ids_M, lookup.updated_ids).all()


def test_a_history_without_times_is_one_of_this_moment_and_a_training_row_is_not():
    graph = graph_of([Event(1, 2, 50), Event(1, 4, 60)])
    features = SequenceFeatures(CATALOG, max_length=5, neighbors=finder(graph, count=1))
    batch = batch_of([[2, 3]], [[NO_TIME, NO_TIME]])

    assert CATALOG[features.ranking(batch).neighbors_NJ[0]].tolist() == [4]
    assert not features(batch)[0].neighbor_weights_NJ.any()


def test_an_event_at_time_0_is_one_of_that_time():
    """A log may count days from its first."""
    graph = graph_of([Event(1, 2, 0), Event(1, 4, 1)])
    features = SequenceFeatures(CATALOG, max_length=5, neighbors=finder(graph, count=1))

    assert not features.ranking(batch_of([[2]], [[0]])).neighbor_weights_NJ.any()
    found = features.ranking(batch_of([[2]], [[NO_TIME]]))
    assert CATALOG[found.neighbors_NJ[0]].tolist() == [4]
    assert found.times_N.tolist() == [0], "of a time that no model can take nothing is said to it"


@given(EVENTS, st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=8))
def test_items_outside_the_catalog_do_not_take_the_place_of_others(events, asked):
    asked = [(item, time) for item, time in asked if item in CATALOG]
    strange = [Event(one.user, 100 + n, one.time) for one in events for n in range(3)]
    graph, rows = graph_of([*events, *strange]), [[item] for item, _ in asked]
    features = SequenceFeatures(CATALOG, max_length=5, neighbors=finder(graph, count=2))

    found = features.ranking(batch_of(rows, [[time] for _, time in asked]))

    for (item, time), items_J, shares_J in zip(
        asked, CATALOG[found.neighbors_NJ], found.neighbor_weights_NJ, strict=True
    ):
        scores = expected([*events, *strange], item, time)
        best = sorted((scores[ident] for ident in scores if ident in CATALOG), reverse=True)[:2]
        assert np.allclose(shares_J[shares_J > 0], np.array(best) / sum(best))
        assert all(scores[ident] in best for ident in items_J[shares_J > 0].tolist())


def test_a_graph_in_other_units_of_time_is_asked_in_its_own():
    graph = TemporalGraph(GraphConfig(time_unit="us"))
    append(
        graph, [Event(1, 2, 8_999_999), Event(1, 4, 8_999_998), Event(2, 2, 9_000_000), Event(2, 1, 8_000)]
    )

    ids_NJ, _ = finder(graph, 2).find(np.array([2]), np.array([9]))

    assert ids_NJ.tolist() == [[4, -1]]
