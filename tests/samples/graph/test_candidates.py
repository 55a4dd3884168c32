import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.samples.graph.candidates import CoVisitation, Histories, Walks, co_visited, walked
from rayrec.samples.graph.similarity import SimilarityConfig, similar_items
from rayrec.samples.graph.views import ANY_TIME
from tests.helpers.examples import examples
from tests.samples.graph.brute_force import Event, append, co_visits, graph_of, swing

EVENTS = st.lists(
    st.builds(Event, st.integers(0, 5), st.integers(0, 6), st.integers(0, 12), st.just(-1)), max_size=50
)


def histories(*rows: list[int], before: int = ANY_TIME) -> Histories:
    items_N = np.array([item for row in rows for item in row], dtype=np.int64)
    offsets_B1 = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return Histories(items_N, offsets_B1, np.full(len(rows), before))


def found(candidates, row: int = 0) -> dict[int, float]:
    kept = candidates.scores_BK[row] > -np.inf
    ids, scores = candidates.ids_BK[row][kept].tolist(), candidates.scores_BK[row][kept].tolist()
    assert scores == sorted(scores, reverse=True)
    return dict(zip(ids, scores, strict=True))


@examples(60)
@given(
    events=EVENTS,
    rows=st.lists(st.lists(st.integers(0, 7), max_size=5), min_size=1, max_size=3),
    before=st.integers(0, 14),
    most=st.integers(1, 9),
    period=st.sampled_from([None, 3]),
)
def test_co_visited_items_are_those_that_others_met_nearby_before_the_time(
    events, rows, before, most, period
):
    graph, settings = graph_of([], period), CoVisitation(3, 0.5, 2, most, most)
    for start in range(0, len(events), 11):
        append(graph, events[start : start + 11])

    candidates = co_visited(graph, histories(*rows, before=before), 10, settings)

    for row, history in enumerate(rows):
        expected = co_visits(events, history, before, last=3, decay=0.5, window=2, most=most)
        assert found(candidates, row) == pytest.approx(expected)


def test_seen_items_are_left_out_and_the_best_are_kept():
    events = [Event(user, item, 10 * user + item) for user in range(4) for item in range(6)]
    graph, asked = graph_of(events), histories([0])
    everything = found(co_visited(graph, asked, 10))

    some = found(co_visited(graph, asked, 2, left_out_BE=np.array([[1, -1]])))

    assert 1 in everything
    assert some == {item: everything[item] for item in list(everything)[:3] if item != 1}


def test_an_event_changes_the_next_answer():
    graph = graph_of([Event(0, 1, 1), Event(0, 2, 2)])
    assert found(co_visited(graph, histories([1]), 5)) == {2: 1.0}

    append(graph, [Event(7, 1, 3), Event(7, 9, 4)])

    assert found(co_visited(graph, histories([1]), 5)) == {2: 1.0, 9: 1.0}


def test_nothing_is_known_of_an_unknown_item_or_an_empty_history():
    graph = graph_of([Event(0, 1, 1), Event(0, 2, 2)])

    for candidates in (co_visited(graph, histories([], [77]), 3), walked(graph, histories([], [77]), 3)):
        assert not found(candidates, 0)
        assert not found(candidates, 1)
        assert (candidates.ids_BK == -1).all()


@examples(40)
@given(events=EVENTS, repeated=st.booleans())
def test_swing_sums_over_all_pairs_of_users(events, repeated):
    graph = graph_of(events + events[:9] if repeated else events)
    items = np.arange(8)

    table = similar_items(graph, items, SimilarityConfig("swing", k=8, alpha=0.7))

    for place, item in enumerate(items.tolist()):
        kept = table.scores_IK[place] > -np.inf
        ours = dict(
            zip(table.ids_IK[place][kept].tolist(), table.scores_IK[place][kept].tolist(), strict=True)
        )
        assert ours == pytest.approx(swing(events, item, 0.7))


def test_which_users_of_an_item_count_does_not_depend_on_the_appends():
    events = [Event(user, item, 5) for user in range(30) for item in range(4) if (user * 7 + item) % 3]
    grouped = graph_of([])
    for start in (20, 0, 40, 10):
        append(grouped, events[start : start + 20])
    append(grouped, events)
    for method in ("swing", "rp3"):
        config = SimilarityConfig(method, k=4, most_users=5)
        whole, parts = (similar_items(graph, np.arange(4), config) for graph in (graph_of(events), grouped))
        assert np.array_equal(whole.ids_IK, parts.ids_IK)
        assert np.array_equal(whole.scores_IK, parts.scores_IK)


def test_rp3_is_the_probability_of_two_steps_with_popular_items_held_back():
    graph = graph_of([Event(0, 1, 1), Event(0, 2, 2), Event(1, 1, 3), Event(1, 3, 4), Event(2, 3, 5)])

    table = similar_items(graph, np.array([1, 2, 3]), SimilarityConfig("rp3", k=3, beta=0.5))

    # From item 1: to user 0 or 1, each with 1/2; from there to 2 or 3 with 1/2; item 3 has two users.
    assert table.ids_IK[0, :2].tolist() == [2, 3]
    assert table.scores_IK[0, :2] == pytest.approx([0.25, 0.25 / 2**0.5])


def test_a_table_answers_a_history_with_weighted_sums():
    events = [
        Event(user, item, 10 * user + item) for user in range(4) for item in range(6) if (user + item) % 3
    ]
    graph, rows = graph_of(events), histories([0, 3], [5])
    table = similar_items(graph, np.arange(6), SimilarityConfig("co_visitation"))

    answered, computed = table.answer(rows, 6), co_visited(graph, rows, 6)

    for row in range(2):
        assert found(answered, row) == pytest.approx(found(computed, row))


def test_walks_visit_as_often_as_the_graph_says_and_repeat_to_the_bit():
    """Item 1 has users 0 and 1; by user 0 one comes to item 2, by user 1 to items 3 and 4."""
    events = [Event(0, 1, 1), Event(0, 2, 2), Event(1, 1, 3), Event(1, 3, 4), Event(1, 4, 5)]
    graph, settings = graph_of(events), Walks(steps=60_000, restart=1.0)

    scores = found(walked(graph, histories([1]), 5, settings))

    # One step each: item 2 with 1/2 * 1/2, items 3 and 4 with 1/2 * 1/3 each.
    assert scores[2] / 60_000 == pytest.approx(1 / 4, abs=0.01)
    assert scores[3] / 60_000 == pytest.approx(1 / 6, abs=0.01)
    assert found(walked(graph_of(events[::-1]), histories([1]), 5, settings)) == scores
    other = Walks(steps=60_000, restart=1.0, seed=1)
    assert found(walked(graph, histories([1]), 5, other)) != scores


def test_visits_from_several_items_of_a_history_are_boosted():
    """Item 5 is one step from both items of the history, 6 and 7 each from one: 5 has twice their visits, and
    (2 sqrt(v))^2 = 4 v of the score."""
    events = [Event(0, 1, 1), Event(0, 5, 2), Event(0, 6, 3), Event(1, 2, 1), Event(1, 5, 2), Event(1, 7, 3)]
    settings = Walks(steps=40_000, restart=1.0, decay=1.0)

    scores = found(walked(graph_of(events), histories([1, 2]), 5, settings))

    assert scores[5] / scores[6] == pytest.approx(4.0, rel=0.1)
    assert scores[5] / scores[7] == pytest.approx(4.0, rel=0.1)


def test_a_walk_begins_again_at_a_node_whose_edges_before_the_question_are_gone():
    """It ended there, at the first such node, and left its mark in the table of sums."""
    events = [Event(0, 1, 1), Event(0, 7, 5), Event(0, 8, 6)]
    events += [Event(1, 1, 1), Event(1, 2, 2), Event(2, 2, 3)]
    events += [Event(3, 2, 7), Event(4, 2, 8)]  # of item 2, only these are left
    graph = graph_of(events, max_edges_per_node=2)
    settings = Walks(steps=20_000, restart=0.0)

    scores = found(walked(graph, histories([1], before=5), 5, settings))

    # From item 1 to item 2 with 1/2 * 1/2, back again always: there in one of five steps.
    assert scores == {2: pytest.approx(20_000 / 5, rel=0.1)}


def test_walks_stop_early_where_enough_items_were_visited_often():
    events = [Event(0, item, item) for item in range(50)]
    asked = histories([0])

    some = found(walked(graph_of(events), asked, 50, Walks(steps=100_000, enough_items=3, enough_visits=4)))
    whole = found(walked(graph_of(events), asked, 50, Walks(steps=100_000)))

    assert sum(score >= 4 for score in some.values()) == 3
    assert sum(some.values()) < sum(whole.values()) / 100


def test_an_item_that_comes_twice_in_a_history_is_one_place_to_begin_at():
    events = [Event(0, 1, 1), Event(0, 6, 3), Event(1, 2, 1), Event(1, 7, 3)]
    settings = Walks(steps=30_000, restart=1.0, decay=1.0)

    scores = found(walked(graph_of(events), histories([1, 1, 2]), 5, settings))

    assert scores[6] / scores[7] == pytest.approx(2.0, rel=0.1), "twice the steps, and no boost"
