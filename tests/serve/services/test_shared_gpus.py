"""What replicas with a network claim of accelerators."""

import pytest

from rayrec.platform.errors import InputError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray.deployments import resources_of
from tests.helpers.runs import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"))


def config_of(device, **dense) -> ServeConfig:
    return ServeConfig.parse({"device": device, "services": {"dense": dense}})


def test_each_has_a_gpu_of_its_own_or_a_share_and_knows_by_whom_it_is_shared(run):
    ((alone, count),) = resources_of(run, config_of("cuda", replicas=2))
    assert (alone, count) == ({"num_cpus": 1.0, "num_gpus": 1}, 2)

    ((shared, count),) = resources_of(run, config_of("cuda", replicas=4, mps={"share": 0.25}))
    variables = shared.pop("runtime_env")["env_vars"]
    assert (shared, count) == ({"num_cpus": 1.0, "num_gpus": 0.25}, 4)
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert "CUDA_MPS_PIPE_DIRECTORY" in variables


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_what_cannot_be_shared_is_refused(run, device):
    with pytest.raises(InputError, match=rf"dense\.mps: {device} is not shared"):
        resources_of(run, config_of(device, mps={}))
