"""A bounded run under kills; `make chaos` is the long one."""

import pytest

from benchmarks.chaos import ROLES, chaos


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_processes_are_killed_at_random_ends_with_the_bits_of_one_left_alone(tmp_path):
    outcome = chaos(tmp_path, num_kills=9, num_trainers=2, seed=3)

    assert outcome.differences == []
    assert outcome.kills.total() == 9
    assert set(outcome.kills) == set(ROLES)
    assert outcome.starts >= 3  # each with other numbers of servers, readers and feature workers
    assert outcome.trained_again > 0
