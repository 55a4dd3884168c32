"""`rayrec doctor`: what is installed, which devices there are, what is missing and how to get it.

Packages and versions that are needed are read from the metadata of the installed RayRec (`setup.cfg`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.requirements import Requirement

from rayrec.platform import devices
from rayrec.platform.device_diagnosis import HERE, Surroundings, device_facts
from rayrec.platform.frameworks import FRAMEWORKS, examine_framework
from rayrec.platform.processors import num_processors

Status = Literal["ok", "optional", "missing"]

EXTRAS = {
    "redis": "event stores as a service",
    "text": "item vectors from text",
    "hf": "causal language models",
    "tune": "searches for settings",
    "torchrec": "models written against torchrec",
}
"""Extra to what it is for; those of devices and frameworks are examined with these."""
WITHOUT_DEPENDENCIES = {"torchrec": "torchrec==1.8.0"}
"""By extra, what is installed after it with `pip install --no-deps`."""
MIN_SHARED_MEMORY = 256 * 1024 * 1024


@dataclass(frozen=True)
class Diagnosis:
    """One line of the examination."""

    subject: str
    status: Status
    detail: str


def examine(machine: Surroundings = HERE) -> list[Diagnosis]:
    """Look at everything; nothing is started or changed."""
    return [
        _python(),
        *_required(machine),
        *(_optional(extra, machine) for extra in EXTRAS),
        *(_device(kind, machine) for kind in devices.KINDS),
        *(_framework(name, machine) for name in FRAMEWORKS),
        _cpus(),
        _shared_memory(),
    ]


def is_healthy(findings: list[Diagnosis]) -> bool:
    """Whether nothing that every run needs is missing."""
    return all(finding.status != "missing" for finding in findings)


def _python() -> Diagnosis:
    # Older ones cannot even import this module.
    return Diagnosis("Python", "ok", ".".join(map(str, sys.version_info[:3])))


def _required(machine: Surroundings) -> Iterator[Diagnosis]:
    requirements = [one for one in map(Requirement, machine.requirements()) if _applies(one, "")]
    if not requirements:
        reason = "run from source, without metadata: pip install --editable '.[cpu]'"
        yield Diagnosis("RayRec", "optional", f"versions are not checked; {reason}")
    # torch comes with an extra, since there are several builds of it.
    for one in [Requirement("torch"), *requirements]:
        version = machine.version(one.name)
        if version is None:
            how = "install RayRec with its dependencies: pip install 'rayrec[cpu]'"
            yield Diagnosis(one.name, "missing", how)
        elif not one.specifier.contains(version, prereleases=True):
            how = f"pip install '{one.name}{one.specifier}'"
            yield Diagnosis(one.name, "missing", f"{version}, needed is {one.specifier}: {how}")
        else:
            yield Diagnosis(one.name, "ok", version)


def _optional(extra: str, machine: Surroundings) -> Diagnosis:
    """An extra is there when everything that it asks for is."""
    requirements = [one for one in map(Requirement, machine.requirements()) if _applies(one, extra)]
    requirements = [one for one in requirements if not _applies(one, "")]
    command = f"pip install 'rayrec[{extra}]'"
    if (further := WITHOUT_DEPENDENCIES.get(extra)) is not None:
        requirements.append(Requirement(further))
        command += f", then pip install --no-deps {further}"
    versions = {one.name: machine.version(one.name) for one in requirements}
    missing = [name for name, version in versions.items() if version is None]
    subject, purpose = f"extra {extra}", EXTRAS[extra]
    if missing or not versions:
        lacks = f" ({', '.join(missing)} missing)" if len(missing) < len(versions) else ""
        return Diagnosis(subject, "optional", f"not installed{lacks}; for {purpose}: {command}")
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Diagnosis(subject, "ok", f"for {purpose}: {found}")


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _device(kind: str, machine: Surroundings) -> Diagnosis:
    reason = devices.why_missing(kind)
    facts = ", ".join(f"{name} {value}" for name, value in device_facts(kind, machine).items())
    if reason is None:
        return Diagnosis(f"device {kind}", "ok", f"can be used; {facts}" if facts else "can be used")
    return Diagnosis(f"device {kind}", "optional", f"{reason}; found: {facts}" if facts else reason)


def _framework(name: str, machine: Surroundings) -> Diagnosis:
    is_there, detail = examine_framework(name, machine)
    return Diagnosis(f"framework {name}", "ok" if is_there else "optional", detail)


def _cpus() -> Diagnosis:
    return Diagnosis("CPUs", "ok", f"{os.cpu_count()} logical, {num_processors()} for this process")


def _shared_memory() -> Diagnosis:
    path = "/dev/shm"
    if not os.path.isdir(path):
        return Diagnosis(
            "shared memory", "optional", f"no {path}: Ray keeps objects on disk, which is slower"
        )
    free = shutil.disk_usage(path).free
    size = f"{free / 2**20:,.0f} MiB free in {path}"
    if free >= MIN_SHARED_MEMORY:
        return Diagnosis("shared memory", "ok", size)
    return Diagnosis(
        "shared memory", "optional", f"{size}: Ray will be slower; in a container, raise --shm-size"
    )
