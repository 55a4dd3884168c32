"""Why a device cannot be used, in one sentence that says what to install or change.

The part of `devices` that names drivers and packages. It sees a machine only through `Surroundings`, so that
tests can describe machines that they do not have. (`torch.utils.collect_env` reads the same drivers, but not
which CUDA a driver supports, and only of this machine.)

Sources: CUDA Compatibility (docs.nvidia.com/deploy/cuda-compatibility): a driver runs what was built for
its CUDA or an older one, and within one major version also what was built for a newer one; the README of
torch_npu, whose versions are those of the torch they are for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

TIMEOUT_S = 60.0
"""Limit for programs that are run: a broken driver may never answer."""
CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"
NPU_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
NVIDIA_DRIVER = "/proc/driver/nvidia/version"
CANN_SETTINGS = "/usr/local/Ascend/ascend-toolkit/set_env.sh"
CANN_FOLDERS = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""Environment variables that those settings set."""
ASCEND_DRIVER = "/usr/local/Ascend/driver/version.info"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> Sequence[str]:
    try:
        return importlib.metadata.requires("rayrec") or ()
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return ()


def _output(command: Sequence[str]) -> str | None:
    """Stdout and stderr of a program; None if there is no such program, it fails or does not end."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None


@dataclass(frozen=True)
class Surroundings:
    """The drivers and packages of a machine."""

    version: Callable[[str], str | None] = _version
    """Of an installed package; None where it is not."""
    output: Callable[[Sequence[str]], str | None] = _output
    """Of a command; None where it is not there, fails, or does not end."""
    text: Callable[[str], str | None] = _text
    """Of a file; None where there is none."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    requirements: Callable[[], Sequence[str]] = _requirements
    """RayRec's own, with those of extras, from the metadata of the installed package."""


HERE = Surroundings()


@dataclass(frozen=True)
class CudaDriver:
    version: str
    cuda: str | None
    """Newest CUDA that it supports, if it says so."""


def cuda_driver(machine: Surroundings = HERE) -> CudaDriver | None:
    """The NVIDIA driver; None where there is none."""
    shown = machine.output(["nvidia-smi"]) or ""
    version = re.search(r"Driver Version:\s*([\d.]+)", shown)
    newest = re.search(r"CUDA(?: UMD)? Version:\s*([\d.]+)", shown)
    if version is None:
        # Containers may lack the driver's tools; the kernel module's version is there.
        version = re.search(r"Kernel Module.*?\s([\d.]+)\s", machine.text(NVIDIA_DRIVER) or "")
    if version is None:
        return None
    return CudaDriver(version[1], newest[1] if newest else None)


def why_no_cuda(machine: Surroundings = HERE, torch: ModuleType | None = None) -> str | None:
    """Say why torch cannot use a CUDA device; None if it can.

    Args:
        torch: another one than the installed, for tests.
    """
    torch = torch or importlib.import_module("torch")
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        version = torch.__version__.partition("+")[0]
        return (
            "this torch was built without CUDA; from the index that pytorch.org names for CUDA, run "
            f"pip install --force-reinstall torch=={version}"
        )
    if (reason := _hidden(CUDA_VISIBLE, "GPU", machine)) is not None:
        return reason
    driver = cuda_driver(machine)
    if driver is None:
        return f"there is no NVIDIA driver; install one for CUDA {torch.version.cuda} or newer"
    if driver.cuda is not None and _major(driver.cuda) < _major(torch.version.cuda):
        return (
            f"the NVIDIA driver {driver.version} runs CUDA {driver.cuda} and this torch was built for CUDA "
            f"{torch.version.cuda}; update the driver, or install a torch built for CUDA {driver.cuda}"
        )
    return f"torch sees no CUDA device in spite of the driver {driver.version}; check it with nvidia-smi"


@dataclass(frozen=True)
class AscendStack:
    """Versions of the software below torch_npu; None for what is missing."""

    torch_npu: str | None
    toolkit: str | None
    """Version of CANN, or the folder that the environment names."""
    driver: str | None


def ascend_stack(machine: Surroundings = HERE) -> AscendStack:
    folder = next((machine.environment[name] for name in CANN_FOLDERS if machine.environment.get(name)), None)
    toolkit = None
    if folder is not None:
        stated = re.search(r"[Vv]ersion=\s*([\w.]+)", machine.text(f"{folder}/version.cfg") or "")
        toolkit = stated[1] if stated else folder
    driver = re.search(r"[Vv]ersion=\s*([\w.]+)", machine.text(ASCEND_DRIVER) or "")
    listed = machine.output(["npu-smi", "info", "-l"])
    return AscendStack(
        torch_npu=machine.version("torch-npu"),
        toolkit=toolkit,
        driver=driver[1] if driver else ("unknown version" if listed is not None else None),
    )


def why_no_npu(machine: Surroundings = HERE, torch: ModuleType | None = None) -> str | None:
    """Say why torch cannot use an NPU; None if it can. Imports torch_npu only if that works."""
    torch = torch or importlib.import_module("torch")
    # torch_npu is imported only here: without its driver it breaks `import torch` for everyone.
    if not hasattr(torch, "npu"):
        if (reason := why_torch_npu_does_not_fit(torch.__version__, machine)) is not None:
            return reason
        if (message := torch_npu_fails_with(machine)) is not None:
            return why_torch_npu_fails(message, machine)
        importlib.import_module("torch_npu")
    if torch.get_device_module("npu").is_available():
        return None
    return _hidden(NPU_VISIBLE, "NPU", machine) or (
        "torch_npu sees no NPU; check the Ascend driver with npu-smi info"
    )


def why_torch_npu_does_not_fit(torch_version: str, machine: Surroundings = HERE) -> str | None:
    """Say why the installed torch_npu does not fit this torch; None if it does. Nothing is imported."""
    installed = machine.version("torch-npu")
    if installed is None:
        if ascend_stack(machine).driver is None:
            return (
                "there is no Ascend driver (npu-smi is not found); install the driver, CANN, and then "
                "'rayrec[npu]', which breaks torch on a machine without them"
            )
        return "torch_npu is not installed; install the extra: pip install 'rayrec[npu]'"
    wanted = ".".join(torch_version.partition("+")[0].split(".")[:2])
    if ".".join(installed.split(".")[:2]) != wanted:
        return (
            f"torch_npu {installed} is for another torch than {torch_version}; "
            f"run pip install 'torch-npu=={wanted}.*'"
        )
    return None


def torch_npu_fails_with(machine: Surroundings = HERE) -> str | None:
    """Import torch_npu in a process of its own; returns the error's message, None if there is none.

    Without its driver it could break torch in this process, or never return.
    """
    program = (
        "try:\n    import torch, torch_npu\n"
        "except BaseException as error:\n    print('failed:', error)\n"
        "else:\n    print('loaded')\n"
    )
    # Otherwise torch imports torch_npu by itself, and fails with it.
    shown = machine.output(["env", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", sys.executable, "-c", program])
    if shown is None:
        return "the process that imported it died or did not return"
    return shown.partition("failed:")[2].strip() or None if "failed:" in shown else None


def why_torch_npu_fails(message: str, machine: Surroundings = HERE) -> str:
    """Explain a failed import of torch_npu by what is missing below it."""
    stack = ascend_stack(machine)
    if stack.driver is None:
        return "there is no Ascend driver (npu-smi is not found); install the driver and firmware of the NPU"
    if stack.toolkit is None:
        return (
            f"the Ascend toolkit (CANN) is not in this environment; run source {CANN_SETTINGS}, "
            "or install CANN if there is no such file"
        )
    first = next(iter(message.strip().splitlines()), "no reason given")
    return (
        f"torch_npu {stack.torch_npu} cannot be loaded with CANN {stack.toolkit} and driver {stack.driver}: "
        f"{first}; install the CANN that the release notes of this torch_npu name"
    )


def device_facts(kind: str, machine: Surroundings = HERE) -> dict[str, str]:
    """Versions of the drivers, runtimes and packages of a device, by name, even if it cannot be used."""
    facts: dict[str, str | None] = {}
    if kind == "cuda":
        driver = cuda_driver(machine)
        if driver is not None:
            facts = {"driver": driver.version, "driver's CUDA": driver.cuda}
        facts[CUDA_VISIBLE] = machine.environment.get(CUDA_VISIBLE)
    elif kind == "npu":
        stack = ascend_stack(machine)
        facts = {"torch_npu": stack.torch_npu, "CANN": stack.toolkit, "driver": stack.driver}
        facts[NPU_VISIBLE] = machine.environment.get(NPU_VISIBLE)
    return {name: value for name, value in facts.items() if value is not None}


def _hidden(variable: str, what: str, machine: Surroundings) -> str | None:
    value = machine.environment.get(variable)
    if value is not None and value.strip() in ("", "-1"):
        return f"{variable} is {value!r}, which hides every {what} from this process; unset it"
    return None


def _major(version: str) -> int:
    return int(version.partition(".")[0])
