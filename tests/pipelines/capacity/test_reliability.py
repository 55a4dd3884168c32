"""Intervals of snapshots and what failures take, by the published formulas."""

import math

import pytest

from rayrec.pipelines.capacity.reliability import (
    cluster_mtbf_s,
    daly_interval_s,
    expected_losses,
    young_interval_s,
)


def test_a_cluster_fails_as_often_as_all_its_nodes_together():
    assert cluster_mtbf_s([(100, 1000.0), (50, 500.0)]) == pytest.approx(5.0)
    assert math.isinf(cluster_mtbf_s([]))


def test_youngs_interval_is_the_root_of_twice_cost_times_mtbf():
    assert young_interval_s(50.0, 10_000.0) == pytest.approx(1000.0)


def test_dalys_interval_is_youngs_where_a_snapshot_is_cheap():
    assert daly_interval_s(1.0, 1e6) == pytest.approx(young_interval_s(1.0, 1e6), rel=1e-3)


def test_dalys_interval_where_a_snapshot_is_dear():
    # delta = 200, M = 100 * 4: x = sqrt(200 / 800) = 0.5.
    assert daly_interval_s(200.0, 400.0) == pytest.approx(400.0 * (1 + 0.5 / 3 + 0.25 / 9) - 200.0)
    assert daly_interval_s(1000.0, 400.0) == 400.0


def test_no_other_interval_loses_less_than_youngs():
    best = young_interval_s(20.0, 5000.0)
    losses = [expected_losses(best * times, 20.0, 5000.0, 100.0).total for times in (0.5, 0.9, 1.0, 1.1, 2.0)]

    assert min(losses) == losses[2]
    assert expected_losses(best, 20.0, 5000.0, 100.0).restarts == pytest.approx(0.02)


def test_mlsysim_says_the_same_interval():
    pytest.importorskip("mlsysim", reason="mlsysim is not installed: pip install mlsysim")
    from benchmarks.capacity import young_difference

    assert young_difference() < 0.01
