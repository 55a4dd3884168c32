import pytest

from rayrec.platform import cluster
from rayrec.platform.errors import InputError


@pytest.mark.ray
def test_a_joined_cluster_stays_and_has_to_be_large_enough(ray_cluster):
    import ray

    with cluster.ray_cluster(cluster.ClusterConfig(), cpus_needed=8):
        pass
    assert ray.is_initialized()

    with (
        pytest.raises(
            InputError, match=r"need 9\.5 CPUs and the Ray cluster has 8; lower pipeline\.num_trainers"
        ),
        cluster.ray_cluster(cluster.ClusterConfig(), cpus_needed=9.5),
    ):
        pass
    assert ray.is_initialized()
