"""Which dense frameworks are installed, what they were built for, and which devices they see.

Each is imported in a process of its own: here it would take memory and threads, and a broken driver may crash
the process.
"""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import dataclass

from rayrec.platform.device_diagnosis import HERE, Surroundings


@dataclass(frozen=True)
class Framework:
    packages: tuple[str, ...]
    """Distributions that contain it, the one of our extra first."""
    requirement: str
    """What to give pip: RayRec with the extra that brings it."""
    brings: str
    """What it is for here."""
    question: str
    """Python program that prints `answer:` and the devices it sees, or the like."""
    verb: str = "sees"
    """Comes before the answer in the sentence."""
    oldest: int = 0
    """Lowest major version."""
    fits: tuple[str, ...] = ()
    """Packages whose versions must fit it."""

    @property
    def extra(self) -> str:
        return self.requirement.partition("[")[2].rstrip("]")


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
        "ranking models of Keras",
        "import tensorflow\n"
        "seen = tensorflow.config.list_physical_devices()\n"
        "print('answer:', ', '.join(device.name.removeprefix('/physical_device:') for device in seen))\n",
        fits=("numpy", "protobuf"),
    ),
    "Keras": Framework(
        ("keras",),
        "rayrec[tensorflow]",
        "ranking models of Keras",
        "import importlib.util, os\n"
        "backend = 'torch' if importlib.util.find_spec('tensorflow') is None else 'tensorflow'\n"
        "os.environ.setdefault('KERAS_BACKEND', backend)\n"
        "import keras\n"
        "print('answer:', keras.backend.backend())\n",
        verb="on",
        oldest=3,
        fits=("tensorflow-cpu", "tensorflow", "numpy", "protobuf"),
    ),
}


def examine_framework(name: str, machine: Surroundings = HERE) -> tuple[bool, str]:
    """Whether a framework can be used, and one sentence: version and devices, or how to get it."""
    framework = FRAMEWORKS[name]
    found = _found(framework.packages, machine)
    if not found:
        return False, f"not installed; for {framework.brings}: pip install '{framework.requirement}'"
    package, version = found[0]
    if (reason := why_too_old(name, version, machine)) is not None:
        return False, reason
    # It reports errors itself: `output` returns nothing of a process that fails.
    program = (
        f"try:\n{textwrap.indent(framework.question, '    ')}"
        "except BaseException as error:\n"
        "    print('failed:', f'{type(error).__name__}:', *str(error).split())\n"
    )
    shown = machine.output([sys.executable, "-c", program]) or ""
    if "answer:" not in shown:
        return False, why_it_fails(name, shown.rpartition("failed:")[2].strip(), machine)
    answer = shown.rpartition("answer:")[2].strip()
    return True, f"{package} {version}, {framework.verb} {answer or 'no device'}"


def why_too_old(name: str, version: str, machine: Surroundings = HERE) -> str | None:
    """Say that a version is too old; None if it is new enough."""
    framework = FRAMEWORKS[name]
    if int(version.partition(".")[0]) >= framework.oldest:
        return None
    return (
        f"{framework.packages[0]} {version} is too old, models are of {name} {framework.oldest}; "
        f"{_how_to_get(framework, machine)}"
    )


def why_it_fails(name: str, message: str, machine: Surroundings = HERE) -> str:
    """Say which versions are installed and which fit, of a framework that cannot be imported.

    Args:
        message: of the failed import, if there is any.
    """
    framework = FRAMEWORKS[name]
    installed = ", ".join(" ".join(found) for found in _found(framework.packages, machine)) or name
    others = ", ".join(" ".join(found) for found in _found(framework.fits, machine))
    what = f"{installed}, with {others}," if others else installed
    said = f" ({message})" if message else ""
    return f"{what} cannot be imported{said}; {_how_to_get(framework, machine)}"


def _how_to_get(framework: Framework, machine: Surroundings) -> str:
    of_extra = re.compile(rf"([^;\s]+)\s*;.*\bextra == [\"']{framework.extra}[\"']")
    pins = sorted(match[1] for line in machine.requirements() if (match := of_extra.match(line)))
    fitting = f"{framework.requirement} takes {', '.join(pins)}: " if pins else ""
    return f"{fitting}run pip install --force-reinstall '{framework.requirement}'"


def _found(packages: tuple[str, ...], machine: Surroundings) -> list[tuple[str, str]]:
    return [(package, version) for package in packages if (version := machine.version(package))]
