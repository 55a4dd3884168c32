import pytest

from rayrec.platform import cluster
from rayrec.platform.errors import InputError


@pytest.mark.ray
def test_a_joined_cluster_stays_and_has_to_be_large_enough(ray_cluster):
    import ray

    with cluster.ray_cluster(cluster.ClusterConfig(), cpus_needed=8):
        pass
    assert ray.is_initialized()
    assert not cluster.starts_cluster(cluster.ClusterConfig())

    with (
        pytest.raises(
            InputError, match=r"need 9\.5 CPUs and the Ray cluster has 8; lower pipeline\.num_trainers"
        ),
        cluster.ray_cluster(cluster.ClusterConfig(), cpus_needed=9.5),
    ):
        pass
    assert ray.is_initialized()


@pytest.mark.ray
def test_accelerators_that_the_cluster_lacks_are_not_waited_for(ray_cluster):
    claim = {"num_cpus": 1, "resources": {"abacus": 2}}

    with pytest.raises(
        InputError, match=r"the trainers need 6 abacus and the Ray cluster has 0; take fewer$"
    ):
        cluster.check_accelerators(claim, 3, "trainers", "take fewer")
    cluster.check_accelerators({"num_cpus": 1}, 3, "trainers", "take fewer")
    cluster.check_accelerators({"resources": {"CPU": 2}}, 4, "trainers", "take fewer")


@pytest.mark.parametrize(
    ("address", "environment", "expected"),
    [(None, None, True), (None, "", True), (None, "10.0.0.1:6379", False), ("auto", None, False)],
)
def test_a_cluster_is_started_where_none_is_named(monkeypatch, address, environment, expected):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)

    assert cluster.starts_cluster(cluster.ClusterConfig(address=address)) == expected
