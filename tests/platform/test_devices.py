import ast
import re
from pathlib import Path

import pytest
import torch

import rayrec
from rayrec.platform import devices
from rayrec.platform.errors import InputError

PACKAGE = Path(rayrec.__file__).parent
DEVICE_LAYER = [PACKAGE / "platform" / name for name in ("devices.py", "device_diagnosis.py", "mps.py")]
"""What the devices are, and why one of them is not there. Triton kernels, which are CUDA's by nature, are
chosen by the list of backends that the layer keeps, and name no device either."""
OTHERS_WORDS = [
    *(
        PACKAGE / "platform" / "health" / f"{name}.py"
        for name in ("counters", "kernel_log", "npu_smi", "xids")
    ),
    PACKAGE / "platform" / "health" / "burn_in.py",  # a line of /proc
    PACKAGE / "pipelines" / "capacity" / "windows.py",  # the same
    PACKAGE / "platform" / "processors.py",  # a control group
    PACKAGE / "jobs" / "kubernetes.py",
    PACKAGE / "jobs" / "runner.py",
    PACKAGE / "serve" / "language" / "engine.py",  # a setting of transformers
    *(PACKAGE / "cli" / f"{name}.py" for name in ("jobs", "queues")),
]
"""What reads the words of drivers, or writes those of Kubernetes, of Ray's jobs and of a command."""
NAMES = ("cuda", "npu", "hccl", "nccl", "gloo", "num_gpus", *devices.ACCELERATOR_RESOURCES)
DEVICE_NAMES = re.compile(rf"(?<![a-zA-Z])({'|'.join(NAMES)})(?![a-zA-Z])")
"""Of a device, its collective, and what Ray calls it."""


def test_the_cpu_is_always_there():
    assert devices.why_missing("cpu") is None
    assert devices.get_device("cpu").torch == torch.device("cpu")
    assert devices.get_device("cpu").collective_backend == "gloo"


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_an_absent_device_is_explained_in_one_sentence(kind, monkeypatch):
    reason = devices.why_missing(kind)
    if reason is None:
        pytest.skip(f"this machine has {kind}")

    with pytest.raises(InputError) as raised:
        devices.get_device(kind)

    assert str(raised.value) == f"device: {kind!r} was asked for, but {reason}; or set device to 'cpu'"
    assert "\n" not in reason


def test_a_driver_that_fails_to_load_is_a_reason_too(monkeypatch):
    def broken() -> bool:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "is_available", broken)

    assert devices.why_missing("cuda") == "cuda cannot be initialized: driver too old"


def test_an_unknown_device_is_refused():
    with pytest.raises(InputError, match="there is no device 'tpu'; expected one of cpu, cuda, npu"):
        devices.get_device("tpu")


def test_what_is_known_of_a_device_needs_no_device():
    assert [devices.device_named(kind).kind for kind in devices.KINDS] == list(devices.KINDS)
    with pytest.raises(InputError, match="there is no device 'tpu'"):
        devices.device_named("tpu")


def test_only_accelerators_have_memory_of_their_own():
    assert [devices.device_named(kind).has_own_memory for kind in ("cpu", "cuda", "npu")] == [
        False,
        True,
        True,
    ]
    assert devices.device_memory_bytes("cpu") is None
    for kind in ("cuda", "npu"):
        is_missing = devices.why_missing(kind) is not None
        assert (devices.device_memory_bytes(kind) is None) == is_missing


def test_actors_claim_what_ray_counts():
    assert devices.ray_claim("cpu") == {}
    assert devices.ray_claim("cuda") == {"num_gpus": 1}
    assert devices.ray_claim("npu") == {"resources": {"NPU": 1}}


def test_actors_ask_for_resources_by_the_options_that_ray_has_for_them():
    asked = {"CPU": 0.5, "GPU": 1, "rack": 2}

    options = devices.ray_options(asked)

    assert options == {"num_cpus": 0.5, "num_gpus": 1, "resources": {"rack": 2}}
    assert devices.claimed_resources(options) == {"GPU": 1, "rack": 2}
    assert devices.ray_options({"NPU": 1}) == {"num_cpus": 0, "resources": {"NPU": 1}}
    claims = [devices.claimed_resources(devices.ray_claim(kind)) for kind in ("cpu", "cuda", "npu")]
    assert claims == [{}, {"GPU": 1}, {"NPU": 1}]


def names_in_code(source: str) -> list[str]:
    """Device names in identifiers and strings; docstrings and comments may speak of devices."""
    if not DEVICE_NAMES.search(source) and devices.HOST.kind not in source:
        return []  # which spares parsing most files
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found += DEVICE_NAMES.findall(node.value)
            found += [node.value] if node.value == devices.HOST.kind else []
        elif isinstance(node, ast.Attribute):
            found += DEVICE_NAMES.findall(node.attr)
        elif isinstance(node, ast.alias):
            found += DEVICE_NAMES.findall(node.name)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            found += DEVICE_NAMES.findall(node.arg)
    return found


def test_the_search_for_device_names_finds_them():
    assert names_in_code("'''cuda'''\nx.cuda()  # npu") == ["cuda"]
    assert names_in_code("import torch_npu\ny = 'cuda:0'") == ["npu", "cuda"]
    assert names_in_code("ask(num_gpus=1, of={'GPU': 1, 'NPU:0': 1, 'GPUS': 1})") == [
        "num_gpus",
        "GPU",
        "NPU",
    ]
    assert names_in_code("x.to('cpu'); torch.cuda.synchronize()") == ["cpu", "cuda"]


def test_only_the_device_layer_knows_devices_by_name():
    names_by_file = {path: names_in_code(path.read_text()) for path in PACKAGE.rglob("*.py")}
    named = {str(path.relative_to(PACKAGE)): names for path, names in names_by_file.items() if names}
    layer = {str(path.relative_to(PACKAGE)) for path in [*DEVICE_LAYER, *OTHERS_WORDS]}

    assert {file: names for file, names in named.items() if file not in layer} == {}
    assert named.keys() >= layer


def test_ray_shows_an_actor_its_accelerators_by_a_variable():
    variables = {kind: devices.device_named(kind).visibility_variable for kind in devices.KINDS}

    assert variables == {"cpu": None, "cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def test_the_host_has_a_profiler_an_autocast_and_no_memory_of_its_own():
    host = devices.HOST.torch
    x = torch.ones(4, 4)

    with devices.profile(host) as profiled, devices.autocast(host, enabled=True):
        product = x @ x

    assert product.dtype == torch.bfloat16
    assert "aten::mm" in {event.key for event in profiled.key_averages()}
    assert devices.device_memory(host) is None
