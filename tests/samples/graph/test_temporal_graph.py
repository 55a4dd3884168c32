import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.samples.graph.sampling import Sampling, degrees, hops, neighbors
from rayrec.samples.graph.temporal_graph import MANIFEST, MAX_SEGMENTS, Segment, TemporalGraph
from rayrec.samples.graph.views import ANY_TIME
from tests.helpers.examples import examples
from tests.samples.graph.brute_force import Event, append, bounded, graph_of, newest

EVENTS = st.lists(
    st.builds(Event, st.integers(-2, 5), st.integers(0, 6), st.integers(0, 12), st.integers(-1, 1)),
    max_size=60,
)
KINDS = ("view", "buy")


@examples(60)
@given(
    events=EVENTS, of=st.sampled_from(["user", "item"]), before=st.integers(-1, 14), fan_out=st.integers(1, 9)
)
def test_neighbors_are_the_newest_edges_strictly_before_a_time(events, of, before, fan_out):
    graph = graph_of(events, kinds=KINDS)
    nodes = np.arange(-3, 8)

    found = neighbors(graph, of, nodes, np.full(len(nodes), before), fan_out)

    other = "item" if of == "user" else "user"
    for row, node in enumerate(nodes.tolist()):
        expected = newest(events, of, node, before)[:fan_out]
        count = int(found.counts_F[row])
        assert found.ids_FK[row, :count].tolist() == [getattr(event, other) for event in expected]
        assert found.times_FK[row, :count].tolist() == [event.time for event in expected]
        assert found.kinds_FK[row, :count].tolist() == [event.kind for event in expected]
    assert degrees(graph, of, nodes, np.full(len(nodes), before)).tolist() == [
        len(newest(events, of, node, before)) for node in nodes.tolist()
    ]


@examples(60)
@given(events=EVENTS, data=st.data(), by=st.sampled_from(["newest", "weight", "uniform"]))
def test_what_is_read_depends_on_the_set_of_events_alone(events, data, by):
    """Not on their order, on what comes late or again, on how they are grouped, or on periods."""
    again = data.draw(st.permutations(events + events[: len(events) // 2]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(again)), max_size=9)))
    period = data.draw(st.sampled_from([None, 1, 3, 100]))
    graphs = [graph_of(events, kinds=KINDS), graph_of([], period, KINDS)]
    for start, stop in zip([0, *cuts], [*cuts, len(again)], strict=True):
        append(graphs[1], again[start:stop])

    seeds, before = np.arange(-2, 7), data.draw(st.integers(0, 14))
    sampling = Sampling(by, most=5, weights={"view": 1.0, "buy": 3.0}, seed=7)
    ways = [hops(graph, "item", seeds, np.full(len(seeds), before), (3, 2), sampling) for graph in graphs]

    for ours, theirs in zip(*ways, strict=True):
        for name in ("ids_FK", "times_FK", "kinds_FK", "counts_F"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert graphs[0].state.num_edges == graphs[1].state.num_edges == len(set(events))
    assert len(graphs[1].state.segments) <= MAX_SEGMENTS


@examples(40)
@given(events=EVENTS, data=st.data(), now=st.integers(0, 12), period=st.sampled_from([None, 1, 5]))
def test_later_events_do_not_change_an_earlier_answer(events, data, now, period):
    past, later = ([e for e in events if (e.time >= now) == is_later] for is_later in (False, True))
    graphs = [graph_of(past, period, KINDS), graph_of(past, period, KINDS)]
    append(graphs[1], data.draw(st.permutations(later)))

    nodes, before = np.arange(-3, 8), np.full(11, now)
    for of in ("user", "item"):
        ways = [neighbors(graph, of, nodes, before, 9) for graph in graphs]
        assert np.array_equal(ways[0].ids_FK, ways[1].ids_FK)
        assert np.array_equal(*(degrees(graph, of, nodes, before) for graph in graphs))


def test_a_bound_and_segments_by_time_are_not_taken_together():
    with pytest.raises(ValueError, match="the bound holds over all time"):
        graph_of([], period=5, max_edges_per_node=4)


@examples(40)
@given(events=EVENTS, more=EVENTS, most=st.sampled_from([None, 1, 3]))
def test_an_append_counts_the_events_that_are_there_since(events, more, most):
    """In at least one direction: a bound of its user, or of its item, may leave one out."""
    graph = graph_of(events, kinds=KINDS, max_edges_per_node=most)

    num_new = append(graph, more)

    kept = [set(bounded({*events, *more}, of, most or 10**9)) for of in ("user", "item")]
    assert num_new >= len(set.union(*kept) - set(events))
    if most is None:
        assert num_new == len(set(more) - set(events))
    elif not events:
        assert num_new == len(set.union(*kept))


@examples(80)
@given(events=EVENTS, data=st.data(), most=st.integers(1, 4))
def test_a_bounded_graph_has_the_newest_edges_of_each_node_whatever_order_they_come_in(events, data, most):
    """Each direction by itself; what was given back and comes again, or late, is not taken for newer."""
    again = data.draw(st.permutations(events + events[: len(events) // 2]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(again)), max_size=9)))
    graph = graph_of([], None, KINDS, most)
    for start, stop in zip([0, *cuts], [*cuts, len(again)], strict=True):
        append(graph, again[start:stop])

    assert append(graph, again) == 0
    nodes, before = np.arange(-3, 8), data.draw(st.integers(-1, 14))
    for of, other in (("user", "item"), ("item", "user")):
        left = bounded(events, of, most)
        found = neighbors(graph, of, nodes, np.full(len(nodes), before), 9)
        for row, node in enumerate(nodes.tolist()):
            expected = newest(left, of, node, before)
            count = int(found.counts_F[row])
            assert [
                *zip(
                    found.ids_FK[row, :count].tolist(),
                    found.times_FK[row, :count].tolist(),
                    found.kinds_FK[row, :count].tolist(),
                    strict=True,
                )
            ] == [(getattr(event, other), event.time, event.kind) for event in expected]
        assert degrees(graph, of, nodes, np.full(len(nodes), before)).tolist() == [
            len(newest(left, of, node, before)) for node in nodes.tolist()
        ]
    edges = graph.state.edges()
    assert {Event(*map(int, edge)) for edge in zip(*edges, strict=True)} == set(bounded(events, "user", most))


def test_a_bounded_graph_forgets_what_is_old_as_well():
    events = [Event(user, item, time) for user in range(3) for item, time in enumerate(range(0, 100, 10))]
    graph = graph_of(events, max_edges_per_node=4)

    graph.drop_before(75)
    append(graph, events)

    expected = [event for event in bounded(events, "user", 4) if event.time >= 75]
    assert degrees(graph, "user", np.arange(3), np.full(3, ANY_TIME)).tolist() == [len(expected) // 3] * 3


def test_memory_of_a_bounded_graph_does_not_grow_with_its_hubs(tmp_path):
    graph = graph_of([], max_edges_per_node=20)
    free = graph_of([])
    for start in range(0, 20_000, 500):
        times = np.arange(start, start + 500)
        for one in (graph, free):
            one.append(times % 10, times % 7, times)

    assert graph.state.num_bytes < free.state.num_bytes / 10
    graph.save(tmp_path / "graph")
    again = TemporalGraph.open(tmp_path / "graph")
    for of in ("user", "item"):
        ours, theirs = (degrees(one, of, np.arange(10), np.full(10, ANY_TIME)) for one in (graph, again))
        assert (
            ours.tolist()
            == theirs.tolist()
            == [20] * (10 if of == "user" else 7) + [0] * (0 if of == "user" else 3)
        )


def test_no_edge_at_the_time_of_the_question_or_behind_a_detour_is_sampled():
    """The example of pyg-team/pytorch_geometric#7794: an edge of time 2 is not known at time 2."""
    graph = graph_of([Event(0, 10, 1), Event(0, 11, 2), Event(1, 10, 1), Event(1, 12, 3)])

    first, second = hops(graph, "user", np.array([0]), np.array([2]), (4, 4))

    assert first.ids_FK[0, : first.counts_F[0]].tolist() == [10]
    # From user 0 by item 10 to users; user 1 is reached, and what it does at time 3 is not looked at.
    assert set(second.ids_FK[0, : second.counts_F[0]].tolist()) == {0, 1}
    third = neighbors(graph, "user", second.ids_FK[0, :2], np.array([2, 2]), 4)
    assert set(third.ids_FK[third.ids_FK >= 0].tolist()) == {10}


def test_draws_are_uniform_without_repetition_and_weights_hold():
    events = [Event(0, item, item, int(item < 5)) for item in range(10)]
    graph = graph_of(events, kinds=KINDS)
    counts = np.zeros(10)
    weighted = np.zeros(10)
    for seed in range(2000):
        for sums, by in ((counts, "uniform"), (weighted, "weight")):
            sampling = Sampling(by, weights={"view": 1.0, "buy": 4.0}, seed=seed)
            found = neighbors(graph, "user", np.array([0]), np.array([ANY_TIME]), 2, sampling)
            assert len(set(found.ids_FK[0].tolist())) == 2
            sums[found.ids_FK[0, : 1 if by == "weight" else 2]] += 1

    assert np.abs(counts - 400).max() < 80, "two of ten each time"
    assert weighted[:5].sum() / 2000 == pytest.approx(0.8, abs=0.04), "the first draw is by weight"


def test_a_kind_without_weight_is_not_drawn_and_an_unknown_one_is_refused():
    graph = graph_of([Event(0, 1, 1, 0), Event(0, 2, 2, 1)], kinds=KINDS)

    found = neighbors(
        graph, "user", np.array([0]), np.array([9]), 5, Sampling("weight", weights={"buy": 1.0})
    )

    assert found.ids_FK[0, : found.counts_F[0]].tolist() == [2]
    with pytest.raises(InputError, match=r"no event of the graph is a 'like'; its kinds are view, buy"):
        neighbors(graph, "user", np.array([0]), np.array([9]), 5, Sampling("weight", weights={"like": 1.0}))
    with pytest.raises(InputError, match="kinds from 7 to 7"):
        append(graph, [Event(0, 1, 1, 7)])


def test_degrees_within_a_window_are_the_popularity_at_that_time():
    graph = graph_of([Event(user, 3, time) for user, time in enumerate([10, 20, 30, 40])])
    items, times = np.array([3, 3, 3, 4]), np.array([41, 40, 15, 50])

    assert degrees(graph, "item", items, times, within=20).tolist() == [2, 2, 1, 0]


def test_degrees_of_all_time_have_edges_before_1970():
    graph = graph_of([Event(user, 3, time) for user, time in enumerate([-(10**12), -5, 0, 5])])

    assert degrees(graph, "item", np.array([3]), np.array([ANY_TIME])) == 4
    assert degrees(graph, "item", np.array([3]), np.array([1])) == 3


def test_old_edges_are_dropped_at_once_and_their_segments_with_them():
    events = [Event(user, item, time) for user in range(3) for item, time in enumerate(range(0, 100, 10))]
    graph = graph_of(events, period=30)

    graph.drop_before(45)

    expected = [event for event in events if event.time >= 45]
    for node in range(3):
        found = neighbors(graph, "user", np.array([node]), np.array([ANY_TIME]), 20)
        assert found.counts_F[0] == len(newest(expected, "user", node, ANY_TIME))
    assert degrees(graph, "user", np.array([0]), np.array([ANY_TIME])) == 5
    assert min(segment.last_time for segment in graph.state.segments) >= 45
    assert append(graph, [Event(0, 1, 44)]) == 0, "what is too old does not come back"


def test_what_is_forgotten_is_given_back_however_many_periods_there_are(tmp_path):
    """More periods than segments: the oldest stand together, and go by parts."""
    events = [Event(n % 5, n % 7, n) for n in range(4000)]
    graph = graph_of(events, period=20)

    graph.drop_before(3500)

    assert graph.state.num_edges < 2 * 500
    assert degrees(graph, "user", np.arange(5), np.full(5, ANY_TIME)).sum() == 500


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine.arrow").write_bytes(b"data")

    with pytest.raises(InputError, match="something else is there"):
        graph_of([Event(1, 2, 3)]).save(tmp_path)

    assert (tmp_path / "mine.arrow").read_bytes() == b"data"


def test_a_reader_whose_segments_went_meanwhile_reads_the_newer_ones(tmp_path, monkeypatch):
    graph = graph_of([Event(n % 7, n % 5, n) for n in range(50)])
    graph.save(tmp_path)
    load, events = Segment.load, iter(range(100, 105))

    def saved_meanwhile(path, period, digest):
        for _ in range(3):
            if (n := next(events, None)) is not None:
                append(graph, [Event(1, 2, 1000 * n + m) for m in range(100)])
                graph.save(tmp_path)
        if not path.exists():
            monkeypatch.setattr(Segment, "load", load)
        return load(path, period, digest)

    monkeypatch.setattr(Segment, "load", saved_meanwhile)

    assert TemporalGraph.open(tmp_path).state.num_edges == graph.state.num_edges


def test_ids_and_times_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="which stands for none"):
        append(graph_of([]), [Event(1, -(2**63), 3)])
    with pytest.raises(ValueError, match="2 nodes have 1 times"):
        neighbors(graph_of([]), "user", np.array([1, 2]), np.array([3]), 4)
    with pytest.raises(ValueError, match="2 nodes have 1 times"):
        degrees(graph_of([]), "user", np.array([1, 2]), np.array([3]))


def test_a_saved_graph_is_read_as_it_was_and_grows_on(tmp_path):
    events = [Event(n % 7, n % 5, n) for n in range(200)]
    graph = graph_of(events[:150], period=64)
    graph.save(tmp_path)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.arrow")}

    opened = TemporalGraph.open(tmp_path)
    append(opened, events[140:])
    opened.save(tmp_path)

    again = TemporalGraph.open(tmp_path)
    whole = graph_of(events)
    nodes = np.arange(7)
    for which in (opened, again):
        for name in ("ids_FK", "times_FK", "counts_F"):
            ours, theirs = (neighbors(one, "user", nodes, np.full(7, ANY_TIME), 60) for one in (which, whole))
            assert np.array_equal(getattr(ours, name), getattr(theirs, name))
    kept = [path for path, at in files.items() if path.exists() and path.stat().st_mtime_ns == at]
    assert kept, "segments that did not change are not written again"
    named = {entry["file"] for entry in json.loads((tmp_path / MANIFEST).read_text())["segments"]}
    append(again, [Event(1, 1, 10_000)])
    again.save(tmp_path)
    left = {path.name for path in tmp_path.glob("*.arrow")}
    now = {entry["file"] for entry in json.loads((tmp_path / MANIFEST).read_text())["segments"]}
    assert left == named | now, "a reader of the manifest before may still map its files; older ones are gone"


@pytest.mark.parametrize("what", ["byte", "missing", "manifest", "nothing"])
def test_a_damaged_graph_is_refused(what, tmp_path):
    graph_of([Event(n, n, n) for n in range(50)]).save(tmp_path)
    (segment,) = tmp_path.glob("*.arrow")
    if what == "byte":
        content = bytearray(segment.read_bytes())
        content[len(content) // 2] ^= 1
        segment.write_bytes(content)
    elif what == "missing":
        segment.unlink()
    elif what == "manifest":
        (tmp_path / MANIFEST).write_text("{}")
    else:
        (tmp_path / MANIFEST).unlink()

    with pytest.raises(InputError, match=r"make the graph again|there is no graph"):
        TemporalGraph.open(tmp_path)


def test_events_of_another_log_are_refused():
    graph = graph_of([])

    with pytest.raises(InputError, match="another log"):
        graph.check_log("0123", "stores/clicks")


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_saves_leaves_a_whole_graph(tmp_path):
    program = textwrap.dedent(
        """
        import sys
        from tests.samples.graph.brute_force import Event, append, graph_of
        graph = graph_of([Event(n % 7, n % 5, n) for n in range(100)])
        graph.save(sys.argv[1])
        print("saved", flush=True)
        n = 100
        while True:
            append(graph, [Event(n % 7, n % 5, n)])
            graph.save(sys.argv[1])
            n += 1
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=os.getcwd(),
        env=os.environ,
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()

    found = TemporalGraph.open(tmp_path)

    num_edges = found.state.num_edges
    expected = graph_of([Event(n % 7, n % 5, n) for n in range(num_edges)])
    assert num_edges >= 100
    ours, theirs = (
        neighbors(graph, "item", np.arange(5), np.full(5, ANY_TIME), 30, Sampling("uniform", seed=3))
        for graph in (found, expected)
    )
    assert np.array_equal(ours.ids_FK, theirs.ids_FK)
