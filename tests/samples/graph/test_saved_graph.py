"""A saved graph as long-lived processes read it while it grows."""

import logging

import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.graph.saved import SavedGraph
from rayrec.samples.graph.temporal_graph import MANIFEST, Segment
from tests.samples.graph.brute_force import Event, append, graph_of


def test_segments_that_are_there_already_are_not_read_again(tmp_path, monkeypatch):
    graph = graph_of([Event(n % 7, n % 5, n) for n in range(50)])
    graph.save(tmp_path)
    saved, load, read = SavedGraph(str(tmp_path)), Segment.load, []
    assert saved.current().state.num_edges == 50
    monkeypatch.setattr(Segment, "load", lambda *one: read.append(one[0].name) or load(*one))

    append(graph, [Event(1, 1, 100)])
    graph.save(tmp_path)

    assert saved.current().state.num_edges == 51
    assert len(read) == 1 < len(graph.state.segments)


def test_what_cannot_be_read_is_said_and_what_was_read_before_is_kept(tmp_path, caplog):
    graph = graph_of([Event(n % 7, n % 5, n) for n in range(50)])
    graph.save(tmp_path)
    saved = SavedGraph(str(tmp_path))
    held = saved.current()
    whole = (tmp_path / MANIFEST).read_text()

    (tmp_path / MANIFEST).write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert [saved.current(), saved.current()] == [held, held]

    assert (saved.num_failures, len(caplog.records)) == (1, 1), "not at every question again"
    assert "the graph that was read before is kept" in caplog.text
    (tmp_path / MANIFEST).write_text(whole)
    append(graph, [Event(1, 1, 100)])
    graph.save(tmp_path)
    assert saved.current().state.num_edges == 51


def test_late_events_are_said_once(tmp_path, caplog):
    graph = graph_of([Event(n % 7, n % 5, n) for n in range(50)])
    graph.save(tmp_path)
    saved, said = SavedGraph(str(tmp_path)), []

    for time in (60, 40, 41):
        append(graph, [Event(1, 1, time)])
        graph.save(tmp_path)
        saved.current()
        said.append(caplog.text.count("events came late"))

    assert said == [0, 1, 1]


def test_a_graph_that_is_damaged_from_the_beginning_is_refused(tmp_path):
    graph_of([Event(1, 2, 3)]).save(tmp_path)
    (tmp_path / MANIFEST).write_text("{}")

    with pytest.raises(InputError, match="is damaged"):
        SavedGraph(str(tmp_path))
