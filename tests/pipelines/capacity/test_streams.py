"""Two streams, rates that depend on sizes, and collectives, by worked numbers."""

import pytest

from benchmarks.published_steps import dlrm_errors, transformer_errors
from rayrec.pipelines.capacity.streams import (
    Collective,
    Operation,
    Rate,
    all_reduce_s,
    ring_all_reduce_s,
    schedule,
    tree_all_reduce_s,
)


def test_communication_hides_behind_what_does_not_need_it():
    timeline = schedule(
        [
            Operation("lookup", "compute", 1.0),
            Operation("exchange", "communicate", 3.0, ("lookup",)),
            Operation("bottom", "compute", 2.0),
            Operation("top", "compute", 2.0, ("exchange",)),
        ]
    )

    assert timeline.seconds == 6.0  # lookup 1, exchange until 4, top until 6
    assert timeline.exposed_s == 1.0
    assert timeline.exposed_share == pytest.approx(1 / 3)


def test_an_operation_waits_for_its_stream():
    timeline = schedule([Operation("a", "communicate", 2.0), Operation("b", "communicate", 2.0)])

    assert timeline.seconds == 4.0


def test_small_operations_reach_less_of_the_peak():
    rate = Rate(100.0, ((10.0, 0.5), (0.0, 0.1)))

    assert rate.seconds(10.0) == 0.2
    assert rate.seconds(5.0) == 0.5
    assert rate.seconds(0.0) == 0.0


def test_a_ring_moves_nearly_twice_the_buffer_and_a_tree_has_fewer_messages():
    assert ring_all_reduce_s(8e9, 4, 1e9, 0.0) == pytest.approx(12.0)
    assert tree_all_reduce_s(8e9, 1024, 1e9, 1.0) == pytest.approx(16.0 + 20.0)
    assert all_reduce_s(8.0, 1024, 1e9, 1.0) == pytest.approx(20.0)  # the tree: latency decides
    assert all_reduce_s(8e9, 1, 1e9, 1.0) == 0.0


def test_a_collective_is_latency_and_what_passes_a_link():
    half = Collective(bytes_per_s=100.0, latency_s=1.0, scalar=1.5, offset=-1.0)

    assert half.seconds(100.0, 2) == pytest.approx(1.75)
    assert half.seconds(100.0, 1) == 0.0


def test_published_steps_are_met_within_a_tenth():
    errors = dlrm_errors() | transformer_errors()

    assert len(errors) == 17
    assert {name: error for name, error in errors.items() if abs(error) > 0.1} == {}
