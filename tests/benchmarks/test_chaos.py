"""A bounded run under kills; `make chaos` is the long one."""

import pytest
import ray

from benchmarks.chaos import GROUP_ROLE, ROLES, chaos


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_under_kills_ends_with_the_bits_of_one_left_alone(ray_cluster, tmp_path):
    cluster = ray.get_runtime_context().gcs_address  # drivers that start their own take longer

    outcome = chaos(tmp_path, num_kills=5, num_trainers=2, seed=1, cluster=cluster)

    assert outcome.differences == []
    assert outcome.kills.total() == 5
    assert set(outcome.kills) == set(ROLES)
    assert outcome.starts == 2  # with 2 and 3 servers, and other numbers of readers and feature workers
    assert outcome.trained_again > 0


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_groups_of_trainers_end_with_the_same_bits_whoever_of_them_dies(ray_cluster, tmp_path):
    cluster = ray.get_runtime_context().gcs_address

    outcome = chaos(tmp_path, num_kills=6, num_trainers=4, seed=2, cluster=cluster, group_size=2)

    assert outcome.differences == []
    assert set(outcome.kills) == {*ROLES, GROUP_ROLE}
