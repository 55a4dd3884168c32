"""Simulated steps are the closed form where nothing queues, and a seed decides about a whole month."""

import math
import statistics
from dataclasses import replace

import pytest

from rayrec.embeddings.config import TableConfig
from rayrec.pipelines.capacity.calibration import this_machine
from rayrec.pipelines.capacity.planner import plan_cluster
from rayrec.pipelines.capacity.simulate import simulate_run, simulate_steps
from rayrec.pipelines.capacity.step_model import step_plan
from rayrec.pipelines.capacity.workload import Scale
from tests.pipelines.capacity.plans import COSTS, WORK, cluster_with, large

TABLES = [TableConfig(name="feature", dim=16, seed=1)]
DAY_S = 86_400.0


@pytest.mark.parametrize("mode", ["sync", "exact_prefetch", "bounded_stale"])
@pytest.mark.parametrize(
    "changed", [{}, {"read_per_row": 1e-4}, {"features_per_token": 1e-5}, {"driver_per_call": 0.1}]
)
def test_simulated_steps_are_those_of_the_closed_form_where_nothing_queues(mode, changed):
    machine, costs, work = this_machine(64), replace(COSTS, **changed), replace(WORK, mode=mode)
    plan = step_plan(work, machine, costs)

    simulated = simulate_steps(work, machine, plan, noise=False)

    assert simulated.mean_s == pytest.approx(plan.seconds, rel=0.05)
    assert simulated.server_busy < 1


def test_trainers_queue_at_a_server():
    cluster = cluster_with()
    work = replace(WORK, is_near=False).scaled(Scale(trainers=32, servers=2))
    plan = step_plan(work, cluster, COSTS)

    simulated = simulate_steps(work, cluster, plan, noise=False)

    assert simulated.mean_s >= 0.95 * plan.parts.server
    assert simulated.server_busy > 0.5


def test_servers_that_share_few_cores_take_as_long_as_in_the_closed_form():
    work = replace(WORK, is_near=False).scaled(Scale(trainers=32, servers=16))
    plans = {}
    for cores in ("64 cores, assumed", "1 cores, assumed"):
        cluster = cluster_with("servers.cores", cores)
        plan = plans[cores] = step_plan(work, cluster, COSTS)
        simulated = simulate_steps(work, cluster, plan, noise=False)
        assert simulated.mean_s >= 0.9 * plan.seconds, cores
    few, many = plans["1 cores, assumed"], plans["64 cores, assumed"]
    assert few.server_stretch > 4 * many.server_stretch


def test_the_slowest_trainer_decides_about_a_step():
    cluster = cluster_with("noise.slowdown", "2 times, assumed")
    work = replace(WORK, is_near=False, mode="bounded_stale").scaled(Scale(trainers=32, servers=16))
    plan = step_plan(work, cluster, replace(COSTS, dense_per_step=0.5))
    quiet = simulate_steps(work, cluster, plan, noise=False)

    noisy = [simulate_steps(work, cluster, plan, seed=seed).mean_s / quiet.mean_s for seed in range(5)]

    assert all(times > 1.05 for times in noisy)  # the largest of 32 lognormal factors
    assert max(noisy) > 1.7  # a slow card among them


def test_the_same_seed_gives_the_same_month(calibration):
    plan = plan_cluster(large(), TABLES, cluster_with(), calibration)

    first, again, other = (simulate_run(plan, 30 * DAY_S, seed) for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_losses_are_those_of_the_formula(calibration):
    cluster = cluster_with("failures.trainer_node_mtbf", "1 days, assumed").with_number(
        "failures.spares", 100
    )
    plan = plan_cluster(large(sparse_bytes=5e11), TABLES, cluster, calibration)

    run = simulate_run(plan, 200 * DAY_S)

    assert run.failures == pytest.approx(200 * 6, rel=0.15)
    assert 1 - run.useful_share == pytest.approx(plan.snapshots.losses.total, rel=0.15)


@pytest.mark.slow
def test_failures_over_many_runs_are_as_many_as_nodes_rates_and_days_say(calibration):
    cluster = cluster_with("failures.spares", "100 nodes, assumed")
    plan = plan_cluster(large(servers=1), TABLES, cluster, calibration)
    # Four nodes of trainers and the one of two that has the server; each fails once in 100 days.
    cycle_s = 20 * DAY_S + plan.snapshots.restart_s
    num_runs, expected = 30, 100 * DAY_S / cycle_s

    runs = [simulate_run(plan, 100 * DAY_S, seed) for seed in range(num_runs)]

    assert runs[0].expected_failures == pytest.approx(expected)
    counts = [run.failures for run in runs]
    # Three standard errors of a mean of Poisson counts, here for 30 runs: 25 %.
    assert statistics.fmean(counts) == pytest.approx(expected, abs=3 * math.sqrt(expected / num_runs))
    assert 0.5 < statistics.variance(counts) / expected < 1.6
    assert min(counts) < 0.6 * expected  # a single run says little


@pytest.mark.slow
def test_without_spares_a_run_waits_for_repairs(calibration):
    cluster = cluster_with("failures.spares", "0 nodes, assumed")
    plan = plan_cluster(large(), TABLES, cluster, calibration)

    run = simulate_run(plan, 365 * DAY_S)

    assert run.failures > 5
    assert run.waiting_for_nodes_s == pytest.approx(run.failures * (DAY_S - 60), rel=0.1)


def test_a_cluster_that_never_fails_loses_to_snapshots_alone(calibration):
    cluster = cluster_with("failures.trainer_node_mtbf", "1e9 years, assumed")
    plan = plan_cluster(large(), TABLES, cluster, calibration)

    run = simulate_run(plan, DAY_S)

    assert run.failures == 0
    assert run.useful_share > 0.99
