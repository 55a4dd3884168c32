"""What setup.cfg requires, and what constraints.txt pins."""

from __future__ import annotations

import configparser
import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXACT = {"torch", "torch-npu", "fbgemm-gpu-cpu", "torchmetrics"}
"""Of `setup.cfg`, those with an upper bound: compiled for each other, or asked for exactly by torchrec."""


def declared() -> dict[str, list[Requirement]]:
    """By extra, and by "" for what RayRec always requires."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    texts = {"": parser["options"]["install_requires"], **parser["options.extras_require"]}
    return {
        name: [Requirement(line) for line in text.splitlines() if line.strip() and not line.startswith("#")]
        for name, text in texts.items()
    }


def pinned() -> dict[str, str]:
    lines = re.findall(r"^([^#\s]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def test_requirements_are_ranges_with_a_lower_bound():
    for extra, requirements in declared().items():
        for requirement in requirements:
            operators = {specifier.operator for specifier in requirement.specifier}
            expected = {"=="} if requirement.name in EXACT and extra not in ("cpu", "gpu") else {">="}
            assert operators == expected, f"{extra or 'install_requires'}: {requirement}"


def test_the_pinned_versions_are_within_the_ranges():
    versions = pinned()
    for requirements in declared().values():
        for requirement in requirements:
            if requirement.name != "torch-npu":  # which no index has for machines without the driver
                assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), (
                    requirement
                )


def test_everything_that_is_required_is_pinned():
    """Along what the installed packages require in turn."""
    versions = pinned()
    waiting = [requirement for requirements in declared().values() for requirement in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    missing = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in seen or name == "torch-npu":
            continue
        seen.add(key)
        if name not in versions:
            missing.add(name)
        try:
            texts = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed here
        for text in texts:
            further = Requirement(text)
            extras = ["", *requirement.extras]
            if further.marker is None or any(further.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(further)

    assert not missing
