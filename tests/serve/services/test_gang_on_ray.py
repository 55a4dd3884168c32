"""A dense part that is a gang of ranks, as a deployment of Ray Serve."""

from __future__ import annotations

import os
import signal
import time

import pytest
from ray import serve

from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.launch.launch import serving
from rayrec.serve.on_ray.deployments import resources_of
from rayrec.serve.on_ray.serving import APPLICATION
from tests.helpers.http import fetch
from tests.helpers.runs import make_run

MOST_S = 120.0
"""A gang is there again by then, also on a machine that does much else."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), "generative")


def config_of(*, device="cpu", **dense) -> ServeConfig:
    cpus = {"cpus": 0.1}
    services = {"gateway": cpus, "sparse": cpus, "dense": {**cpus, **dense}}
    return ServeConfig.parse({"services": services, "device": device})


def other_ranks() -> tuple[int, ...]:
    """Processes of the gang besides the replica's."""
    handle = serve.get_deployment_handle("dense", APPLICATION)
    return handle.ranks.remote().result(timeout_s=30)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_killed_rank_restarts_its_gang_and_requests_are_told_to_come_back(run, free_port):
    config = config_of(tensor_parallel=2).model_copy(update={"port": free_port, "timeout_s": 30})
    recommender = Recommender.load(run)
    (expected,) = recommender.recommend([recommender.query_of_user("u1")], 3)
    body = {"user_id": "u1", "k": 3}

    with serving(run, config) as url:
        status, before = fetch(f"{url}/v1/recommend", body)
        assert status == 200  # ready is what has all ranks
        (killed,) = other_ranks()
        os.kill(killed, signal.SIGKILL)

        statuses, deadline = [], time.monotonic() + MOST_S
        while time.monotonic() < deadline:
            status, after = fetch(f"{url}/v1/recommend", body)
            statuses.append(status)
            if status == 200 and len(statuses) > 1:
                break
            time.sleep(0.2)
        (rank,) = other_ranks()

    assert [(item["item_id"], pytest.approx(item["score"], abs=1e-5)) for item in before["items"]] == [
        (item.item_key, item.score) for item in expected
    ]
    assert after["items"] == before["items"]
    assert set(statuses) == {200, 503}
    assert statuses[-1] == 200
    assert rank != killed


def test_every_rank_claims_a_device(run):
    ((claim, count),) = resources_of(run, config_of(device="cuda", tensor_parallel=4, replicas=2))

    assert (claim, count) == ({"num_cpus": 0.1, "num_gpus": 1}, 8)


def test_fused_communication_is_refused_where_there_is_none(run):
    asked = {"tensor_parallel": 2, "fused_communication": True}
    assert resources_of(run, config_of(device="cuda", **asked))
    for device in ("cpu", "npu"):
        with pytest.raises(InputError, match=rf"dense\.fused_communication: .* of the kind {device} have in"):
            resources_of(run, config_of(device=device, **asked))


@pytest.mark.parametrize(
    ("dense", "said"),
    [
        ({"tensor_parallel": 2, "streams": 2}, r"dense\.tensor_parallel is 2 and dense\.streams 2"),
        ({"tensor_parallel": 2, "mps": {}}, r"dense\.tensor_parallel is 2, whose ranks have a device each"),
        (
            {"fused_communication": True},
            r"dense\.fused_communication is of ranks .* dense\.tensor_parallel is 1",
        ),
        ({"tensor_parallel": 0}, "tensor_parallel"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(dense, said):
    with pytest.raises(InputError, match=said):
        config_of(**dense)


def test_ranks_that_would_each_keep_contexts_on_disk_are_refused():
    """An error of one disk would let ranks read different parts of a batch, and sum what does not fit."""
    kept = {"prefix_cache_mib": 1, "prefix_cache_host_mib": 1, "prefix_cache_disk_mib": 1}
    config = config_of(tensor_parallel=2).model_dump()

    with pytest.raises(InputError, match=r"prefix_cache_disk_mib: dense\.tensor_parallel is 2"):
        ServeConfig.parse({**config, **kept})
    ServeConfig.parse({**config, **kept, "prefix_cache_disk_mib": 0})


def test_a_network_that_ranks_cannot_share_is_refused_before_anything_starts(run, free_port):
    config = config_of(tensor_parallel=3).model_copy(update={"port": free_port})

    said = r"dense\.tensor_parallel: Block has num_heads 2, which 3 ranks"
    with pytest.raises(InputError, match=said), serving(run, config):
        pass
