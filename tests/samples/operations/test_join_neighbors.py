"""`join_neighbors`, held to brute force on a small graph."""

import pickle
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.graph import GraphConfig, TemporalGraph
from rayrec.samples.operations.join_neighbors import JoinNeighborsConfig
from rayrec.samples.prepare.ids import hash_strings
from tests.helpers.feature_operations import computed, context, program
from tests.samples.graph.brute_force import Event, append, co_visits

T0 = 1_600_000_000
EVENTS = [Event(user, (user * step) % 7, T0 + 100 * step + user) for user in range(1, 6) for step in range(8)]


def near(graph: object, **more: object) -> dict[str, object]:
    return {"op": "join_neighbors", "graph": str(graph), "items": "items", "output": "near", **more}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph")
    graph = TemporalGraph(GraphConfig(log="clicks"))
    append(graph, EVENTS)
    graph.save(folder)
    return folder


def test_rows_get_what_others_met_beside_their_items_before_their_time(graph):
    histories, times = [[1, 2], [], [3], [5, 1]], [T0 + 350, T0 + 900, T0 + 210, T0]
    columns = {"items": pa.array(histories), "timestamp": pa.array(times)}

    found = computed(columns, near(graph))

    for history, before, items in zip(histories, times, found["near"].to_pylist(), strict=True):
        scores = co_visits(EVENTS, history, before, last=20, decay=0.8, window=5, most=200)
        scores = {item: score for item, score in scores.items() if item not in history}
        assert set(items) == set(scores)
        assert [scores[item] for item in items] == sorted(scores.values(), reverse=True)


def test_events_of_an_item_are_counted_within_some_time(graph):
    items, times = [1, 2, None, 99, 1], [T0 + 400, T0 + 700, T0 + 700, T0 + 700, None]
    columns = {"item": pa.array(items), "at": pa.array(times)}
    counts = {"of_late": 250, "ever": 10**8}

    found = computed(
        columns, {"op": "join_neighbors", "graph": str(graph), "time": "at", "item": "item", "counts": counts}
    )

    for name, within in counts.items():
        expected = [
            0
            if item is None or at is None
            else sum(event.item == item and at - within <= event.time < at for event in EVENTS)
            for item, at in zip(items, times, strict=True)
        ]
        assert found[name].to_pylist() == expected


@pytest.mark.parametrize(("added", "changes"), [(EVENTS[-1].time, False), (EVENTS[-1].time - 1, True)])
def test_prepared_rows_are_kept_while_a_graph_grows_unless_events_come_late(tmp_path, added, changes):
    append(grown := TemporalGraph(GraphConfig(log="clicks")), EVENTS)
    contents = []
    for events in ([], [Event(9, 9, added)], EVENTS, [Event(9, 8, added + 9)]):
        append(grown, events)
        grown.save(tmp_path)
        contents.append(JoinNeighborsConfig.parse(near(tmp_path), source="test").content())
        grown = TemporalGraph.open(tmp_path)

    assert (contents[0] != contents[1]) == changes
    assert contents[1] == contents[2] == contents[3]


def test_a_graph_that_lacks_edges_of_the_past_because_of_later_ones_is_refused(tmp_path):
    append(bounded := TemporalGraph(GraphConfig(log="clicks", max_edges_per_node=3)), EVENTS)
    bounded.save(tmp_path)

    with pytest.raises(InputError, match=r"keeps the newest 3 edges.* without --max-per-node"):
        computed({"items": pa.array([[1]]), "timestamp": pa.array([T0])}, near(tmp_path))


def test_times_may_be_timestamps_and_the_operation_travels(graph):
    at = pa.array([datetime.fromtimestamp(T0 + 350, UTC)], pa.timestamp("ms", "UTC"))
    columns = {"items": pa.array([[1, 2]]), "timestamp": at}
    rows = pa.RecordBatch.from_pydict(columns)
    made = program(rows.schema, near(graph))

    first = made(rows, context(1))
    again = pickle.loads(pickle.dumps(made))(rows, context(1))

    in_seconds = {"items": columns["items"], "timestamp": pa.array([T0 + 350])}
    settings = near(graph)
    assert first["near"].to_pylist() == again["near"].to_pylist()
    assert first["near"].to_pylist() == computed(in_seconds, settings)["near"].to_pylist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"items": "items"}, "`items` goes with `output`"),
        ({}, "say what to write"),
        ({"item": "item", "counts": {"n": 0}}, "seconds must be positive"),
        ({"items": "item", "output": "near"}, "expected lists"),
        ({"items": "items", "output": "near", "time": "items"}, "expected one value"),
        ({"items": "items", "output": "near", "graph": "nowhere"}, "there is no graph"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_row_is_read(graph, settings, message):
    columns = {"items": pa.array([[1]]), "item": pa.array([1]), "timestamp": pa.array([T0])}

    with pytest.raises(InputError, match=message):
        computed(columns, {"op": "join_neighbors", "graph": str(graph), **settings})


def test_times_in_another_unit_are_refused(graph):
    columns = {"items": pa.array([[1]]), "timestamp": pa.array([T0 * 1000])}

    with pytest.raises(InputError, match="in ms"):
        computed(columns, near(graph))


def test_a_graph_that_was_saved_anew_is_read_anew(tmp_path):
    append(grown := TemporalGraph(GraphConfig(log="clicks")), EVENTS)
    grown.save(tmp_path)
    columns = {"item": pa.array([3]), "timestamp": pa.array([T0 + 5000])}
    rows = pa.RecordBatch.from_pydict(columns)
    settings = {"op": "join_neighbors", "graph": str(tmp_path), "item": "item", "counts": {"ever": 10**10}}
    made = program(rows.schema, settings)
    before = made(rows, context(1))["ever"].to_pylist()[0]

    append(grown, [Event(9, 3, T0 + 4000)])
    grown.save(tmp_path)

    assert made(rows, context(1))["ever"].to_pylist() == [before + 1]


def test_a_graph_of_another_log_that_took_its_place_is_refused(graph, tmp_path):
    settings = near(tmp_path)
    rows = pa.RecordBatch.from_pydict({"items": pa.array([[1]]), "timestamp": pa.array([T0])})
    append(one := TemporalGraph(GraphConfig(log="clicks")), EVENTS)
    one.save(tmp_path)
    made = program(rows.schema, settings)
    append(other := TemporalGraph(GraphConfig(log="orders")), EVENTS)
    other.save(tmp_path)

    with pytest.raises(InputError, match="another log"):
        made(rows, context(1))


def test_an_unknown_item_has_no_neighbors_and_texts_are_ids(tmp_path):
    graph = TemporalGraph(GraphConfig(id_kinds={"user": "integer", "item": "string"}))
    append(graph, EVENTS)
    graph.save(tmp_path)
    columns = {"items": pa.array([["lamp"]]), "timestamp": pa.array([T0 + 900])}

    found = computed(columns, near(tmp_path))

    assert found["near"].to_pylist() == [[]]


def test_blanks_around_texts_are_cut_off_as_when_the_graph_was_built(tmp_path):
    lamp, desk = hash_strings(["lamp", "desk"]).tolist()
    graph = TemporalGraph(GraphConfig(id_kinds={"user": "integer", "item": "string"}))
    append(graph, [Event(1, lamp, T0), Event(1, desk, T0 + 1)])
    graph.save(tmp_path)
    columns = {
        "items": pa.array([[" lamp"]]),
        "item": pa.array(["lamp "]),
        "timestamp": pa.array([T0 + 900]),
    }

    found = computed(columns, near(tmp_path, item="item", counts={"ever": 10**8}))

    assert found["near"].to_pylist() == [[desk]]
    assert found["ever"].to_pylist() == [1]
