"""How many replicas a rate needs, by formula and by simulation."""

import pytest

from rayrec.pipelines.capacity.replicas import erlang_c, plan_replicas, simulate_replicas, waiting_quantile_s
from rayrec.platform.errors import InputError

COSTS = {1: 0.004, 4: 0.007, 16: 0.020, 64: 0.075}


def test_erlangs_formula_by_known_values():
    assert erlang_c(0.5, 1) == pytest.approx(0.5)
    assert erlang_c(2.0, 3) == pytest.approx(4 / 9)


def test_one_replica_without_batches_waits_as_an_mm1_queue():
    simulated = simulate_replicas({1: 0.01}, 50.0, 1, num_requests=200_000, variation=1.0)
    wait = waiting_quantile_s(0.5, 1, 0.01, 1.0)

    # Lognormal instead of exponential service, of the same variation: the tail of the wait is near, not
    # equal.
    assert simulated.utilization == pytest.approx(0.5, abs=0.02)
    assert simulated.p99_s == pytest.approx(wait + 0.03, rel=0.35)


def test_the_plan_is_enough_and_one_replica_less_is_not():
    plan = plan_replicas(COSTS, 5000.0, 0.03)

    assert plan.p99_s <= 0.03
    assert simulate_replicas(COSTS, 5000.0, plan.replicas - 1).p99_s > 0.03


def test_a_late_deadline_is_no_reason_for_replicas_that_fall_behind_for_good():
    """Those that are simulated come within 1.5 s, in which no queue grows up to the deadline."""
    plan = plan_replicas({1: 0.1, 64: 0.4}, 20_000.0, 2.0)

    assert plan.most_rate > 20_000
    assert plan.utilization <= 1
    assert plan.replicas <= plan.by_formula


def test_twice_the_rate_takes_about_twice_the_replicas():
    one, two = (plan_replicas(COSTS, rate, 0.03).replicas for rate in (4000.0, 8000.0))

    assert two == pytest.approx(2 * one, abs=2)


def test_batches_grow_with_the_load():
    sizes = [simulate_replicas(COSTS, rate, 1, num_requests=5000).mean_batch for rate in (10.0, 300.0, 700.0)]

    assert sizes == sorted(sizes)
    assert sizes[0] == pytest.approx(1.0, abs=0.1)
    assert sizes[2] > 5


def test_the_same_seed_gives_the_same_answers():
    assert simulate_replicas(COSTS, 300.0, 2, 2000, seed=3) == simulate_replicas(
        COSTS, 300.0, 2, 2000, seed=3
    )


@pytest.mark.parametrize(
    ("costs", "rate", "p99", "said"),
    [
        (COSTS, 100.0, 0.003, "no number of replicas is enough"),
        ({4: 0.1}, 100.0, 1.0, "have to begin with size 1"),
        ({}, 100.0, 1.0, "have to begin with size 1"),
        ({1: 0.0}, 100.0, 1.0, "above 0"),
        (COSTS, 0.0, 1.0, "have to be above 0"),
    ],
)
def test_what_no_replicas_can_do_is_refused(costs, rate, p99, said):
    with pytest.raises(InputError, match=said):
        plan_replicas(costs, rate, p99)
