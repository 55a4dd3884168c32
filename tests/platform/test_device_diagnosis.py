"""Machines that are not here: what is said of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from rayrec.platform import device_diagnosis as diagnosis
from rayrec.platform.device_diagnosis import Surroundings, why_no_cuda, why_no_npu
from rayrec.platform.frameworks import examine_framework

SMI = "| NVIDIA-SMI 470.82.01   Driver Version: 470.82.01   CUDA Version: 11.4     |"


def machine(
    versions: Mapping[str, str] | None = None,
    outputs: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Surroundings:
    """
    Args:
        outputs: of commands, by a word in them.
    """

    def output(command):
        return next((text for word, text in (outputs or {}).items() if word in " ".join(command)), None)

    return Surroundings((versions or {}).get, output, (files or {}).get, environment or {})


def torch_with(cuda: str | None, is_available: bool = False):
    return SimpleNamespace(
        __version__="2.13.0+cu130" if cuda else "2.13.0+cpu",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: is_available),
    )


@pytest.mark.parametrize(
    ("torch", "found", "expected"),
    [
        (torch_with("13.0", is_available=True), machine(), None),
        (
            torch_with(None),
            machine(outputs={"nvidia-smi": SMI}),
            "this torch was built without CUDA; from the index that pytorch.org names for CUDA, run "
            "pip install --force-reinstall torch==2.13.0",
        ),
        (
            torch_with("13.0"),
            machine(),
            "there is no NVIDIA driver; install one for CUDA 13.0 or newer",
        ),
        (
            torch_with("13.0"),
            machine(outputs={"nvidia-smi": SMI}),
            "the NVIDIA driver 470.82.01 runs CUDA 11.4 and this torch was built for CUDA 13.0; update the "
            "driver, or install a torch built for CUDA 11.4",
        ),
        (
            torch_with("11.8"),
            machine(outputs={"nvidia-smi": SMI}),
            "torch sees no CUDA device in spite of the driver 470.82.01; check it with nvidia-smi",
        ),
        (
            torch_with("13.0"),
            machine(outputs={"nvidia-smi": SMI}, environment={"CUDA_VISIBLE_DEVICES": ""}),
            "CUDA_VISIBLE_DEVICES is '', which hides every GPU from this process; unset it",
        ),
        (
            torch_with("13.0"),
            machine(
                files={diagnosis.NVIDIA_DRIVER: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1  x"}
            ),
            "torch sees no CUDA device in spite of the driver 580.1; check it with nvidia-smi",
        ),
    ],
    ids=[
        "there",
        "no CUDA in torch",
        "no driver",
        "driver too old",
        "driver new enough",
        "hidden",
        "no tools",
    ],
)
def test_why_there_is_no_cuda(torch, found, expected):
    assert why_no_cuda(found, torch) == expected


NO_NPU = SimpleNamespace(__version__="2.13.0+cpu")
TORCH_NPU = {"torch-npu": "2.13.0"}
DRIVER = {diagnosis.ASCEND_DRIVER: "Version=25.0.rc1\n"}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            machine(),
            "there is no Ascend driver (npu-smi is not found); install the driver, CANN, and then "
            "'rayrec[npu]', which breaks torch on a machine without them",
        ),
        (
            machine({}, {}, DRIVER),
            "torch_npu is not installed; install the extra: pip install 'rayrec[npu]'",
        ),
        (
            machine({"torch-npu": "2.9.0"}),
            "torch_npu 2.9.0 is for another torch than 2.13.0+cpu; run pip install 'torch-npu==2.13.*'",
        ),
        (
            machine(TORCH_NPU, {"import torch_npu": "", "torch_npu": "failed: libhccl.so: cannot open"}),
            "there is no Ascend driver (npu-smi is not found); install the driver and firmware of the NPU",
        ),
        (
            machine(TORCH_NPU, {"torch_npu": "failed: libhccl.so: cannot open"}, DRIVER),
            f"the Ascend toolkit (CANN) is not in this environment; run source {diagnosis.CANN_SETTINGS}, "
            "or install CANN if there is no such file",
        ),
        (
            machine(
                TORCH_NPU,
                {"torch_npu": "failed: undefined symbol: aclrt\nand more"},
                DRIVER | {"/cann/version.cfg": "runtime_running_version=8.1.RC1"},
                {"ASCEND_HOME_PATH": "/cann"},
            ),
            "torch_npu 2.13.0 cannot be loaded with CANN 8.1.RC1 and driver 25.0.rc1: undefined "
            "symbol: aclrt; install the CANN that the release notes of this torch_npu name",
        ),
        (
            machine(TORCH_NPU, {}, DRIVER, {"ASCEND_TOOLKIT_HOME": "/cann"}),
            "torch_npu 2.13.0 cannot be loaded with CANN /cann and driver 25.0.rc1: the process that "
            "imported it died or did not return; install the CANN that the release notes of this "
            "torch_npu name",
        ),
    ],
    ids=[
        "nothing",
        "not installed",
        "another torch",
        "no driver",
        "no toolkit",
        "another toolkit",
        "import hangs",
    ],
)
def test_why_there_is_no_npu(found, expected):
    assert why_no_npu(found, NO_NPU) == expected


def test_what_is_found_of_a_device_is_told():
    found = machine(
        TORCH_NPU,
        {"nvidia-smi": SMI},
        DRIVER,
        {"CUDA_VISIBLE_DEVICES": "0,1", "ASCEND_TOOLKIT_HOME": "/cann"},
    )

    assert diagnosis.device_facts("cpu", found) == {}
    assert diagnosis.device_facts("cuda", found) == {
        "driver": "470.82.01",
        "driver's CUDA": "11.4",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    assert diagnosis.device_facts("npu", found) == {
        "torch_npu": "2.13.0",
        "CANN": "/cann",
        "driver": "25.0.rc1",
    }


PINS = (
    "numpy==2.4.6",
    'torch==2.13.0; extra == "cpu"',
    'keras==3.15.1; extra == "tensorflow"',
    'tensorflow-cpu==2.21.0; extra == "tensorflow"',
)
REINSTALL = (
    "rayrec[tensorflow] takes keras==3.15.1, tensorflow-cpu==2.21.0: "
    "run pip install --force-reinstall 'rayrec[tensorflow]'"
)


@pytest.mark.parametrize(
    ("name", "found", "expected"),
    [
        (
            "TensorFlow",
            machine(),
            (False, "not installed; for ranking models of Keras: pip install 'rayrec[tensorflow]'"),
        ),
        (
            "TensorFlow",
            machine({"tensorflow": "2.21.0"}, {"tensorflow": "a warning\nanswer: CPU:0, GPU:0\n"}),
            (True, "tensorflow 2.21.0, sees CPU:0, GPU:0"),
        ),
        (
            "TensorFlow",
            machine({"tensorflow-cpu": "2.21.0"}, {"tensorflow": ""}),
            (False, f"tensorflow-cpu 2.21.0 cannot be imported; {REINSTALL}"),
        ),
        (
            "TensorFlow",
            machine(
                {"tensorflow-cpu": "2.19.0", "numpy": "2.4.6", "protobuf": "7.36.2"},
                {"tensorflow": "a warning\nfailed: TypeError: Descriptors cannot be created\n"},
            ),
            (
                False,
                "tensorflow-cpu 2.19.0, with numpy 2.4.6, protobuf 7.36.2, cannot be imported "
                f"(TypeError: Descriptors cannot be created); {REINSTALL}",
            ),
        ),
        ("Keras", machine({"keras": "3.15.1"}, {"keras": "answer: torch"}), (True, "keras 3.15.1, on torch")),
        (
            "Keras",
            machine({"keras": "2.15.0"}, {"keras": "answer: torch"}),
            (False, f"keras 2.15.0 is too old, models are of Keras 3; {REINSTALL}"),
        ),
    ],
    ids=["not installed", "there", "broken", "does not fit", "Keras", "old Keras"],
)
def test_a_framework_is_told_with_the_devices_that_it_sees(name, found, expected):
    found = dataclasses.replace(found, requirements=lambda: PINS)

    assert examine_framework(name, found) == expected


def test_pins_are_left_out_where_nobody_has_installed_us():
    found = dataclasses.replace(machine({"keras": "2.15.0"}), requirements=lambda: ())

    assert examine_framework("Keras", found) == (
        False,
        "keras 2.15.0 is too old, models are of Keras 3; run pip install --force-reinstall "
        "'rayrec[tensorflow]'",
    )


def test_a_program_that_asks_a_framework_says_why_it_could_not(tmp_path, monkeypatch):
    (tmp_path / "keras.py").write_text("raise TypeError('two\\nlines')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    here = dataclasses.replace(diagnosis.HERE, version={"keras": "3.15.1"}.get, requirements=lambda: ())

    assert examine_framework("Keras", here)[1].startswith(
        "keras 3.15.1 cannot be imported (TypeError: two lines); run pip install"
    )


def test_torch_here_sees_the_host():
    is_there, detail = examine_framework("PyTorch")

    assert is_there
    assert "sees cpu" in detail
