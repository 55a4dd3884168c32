"""Which dense frameworks are installed, what they were built for, and which devices they see.

A framework is asked in a process of its own: imported here, it would take memory and threads from whoever
asked, and a broken driver may take the process with it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rayrec.platform.device_diagnosis import HERE, Surroundings


@dataclass(frozen=True)
class Framework:
    packages: tuple[str, ...]
    """Distributions that bring it, the one of our extra first."""
    requirement: str
    """Of pip: ourselves with the extra that brings it."""
    brings: str
    """What it is for here."""
    question: str
    """Python that prints `answer:` and the devices that it sees."""


FRAMEWORKS = {
    "PyTorch": Framework(
        ("torch",),
        "rayrec[cpu]",
        "every dense program",
        "import torch\n"
        "from rayrec.platform.devices import KINDS, why_missing\n"
        "print('answer:', ', '.join(kind for kind in KINDS if why_missing(kind) is None))\n",
    ),
    "TensorFlow": Framework(
        ("tensorflow-cpu", "tensorflow"),
        "rayrec[tensorflow]",
        "TensorFlow programs",
        "import tensorflow\n"
        "seen = tensorflow.config.list_physical_devices()\n"
        "print('answer:', ', '.join(device.name.removeprefix('/physical_device:') for device in seen))\n",
    ),
}


def examine_framework(name: str, machine: Surroundings = HERE) -> tuple[bool, str]:
    """Whether it is there, and one sentence: version and devices, or how to get it."""
    framework = FRAMEWORKS[name]
    found = [(package, version) for package in framework.packages if (version := machine.version(package))]
    if not found:
        return False, f"not installed; for {framework.brings}: pip install '{framework.requirement}'"
    package, version = found[0]
    shown = machine.output([sys.executable, "-c", framework.question])
    if shown is None or "answer:" not in shown:
        last = (shown or "").strip().splitlines()[-1:]
        said = f" ({last[0]})" if last else ""
        return False, (
            f"{package} {version} is installed and cannot be imported{said}; "
            f"run pip install --force-reinstall '{framework.requirement}'"
        )
    return True, f"{package} {version}, sees {shown.rpartition('answer:')[2].strip() or 'no device'}"
