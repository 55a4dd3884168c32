"""What the doctor says of machines that are not here."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rayrec.platform.device_diagnosis import Surroundings
from rayrec.platform.doctor import Diagnosis, examine, is_healthy

REQUIREMENTS = (
    "ray[data,default,serve]>=2.55.0",
    "numpy>=2.1.0",
    'redis>=5.2.0; extra == "redis"',
    'torch>=2.13.0; extra == "cpu"',
    'pyre-extensions>=0.0.32; extra == "torchrec"',
)
VERSIONS = {"ray": "2.60.0", "numpy": "2.4.6", "torch": "2.13.0+cpu"}


def findings(versions: Mapping[str, str], requirements=REQUIREMENTS) -> dict[str, Diagnosis]:
    machine = Surroundings(versions.get, lambda command: None, lambda path: None, {}, lambda: requirements)
    return {finding.subject: finding for finding in examine(machine)}


def test_what_every_run_needs_is_there():
    found = findings(VERSIONS)

    assert is_healthy(list(found.values()))
    assert [(found[name].status, found[name].detail) for name in VERSIONS] == [
        ("ok", version) for version in VERSIONS.values()
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"numpy": None}, "install RayRec with its dependencies: pip install 'rayrec[cpu]'"),
        ({"numpy": "1.26.4"}, "1.26.4, needed is >=2.1.0: pip install 'numpy>=2.1.0'"),
    ],
)
def test_a_package_that_is_missing_or_too_old_is_named_with_what_to_install(changed, said):
    found = findings(VERSIONS | changed)

    assert (found["numpy"].status, found["numpy"].detail) == ("missing", said)
    assert not is_healthy(list(found.values()))


def test_an_extra_is_there_when_all_of_it_is():
    command = "pip install 'rayrec[torchrec]', then pip install --no-deps torchrec==1.8.0"

    nothing = findings(VERSIONS)
    half = findings(VERSIONS | {"pyre-extensions": "0.0.32"})
    whole = findings(VERSIONS | {"pyre-extensions": "0.0.32", "torchrec": "1.8.0"})

    assert nothing["extra redis"].detail == (
        "not installed; for event stores as a service: pip install 'rayrec[redis]'"
    )
    assert half["extra torchrec"].detail == (
        f"not installed (torchrec missing); for models written against torchrec: {command}"
    )
    assert whole["extra torchrec"] == Diagnosis(
        "extra torchrec",
        "ok",
        "for models written against torchrec: pyre-extensions 0.0.32, torchrec 1.8.0",
    )


def test_from_a_checkout_that_is_not_installed_versions_are_not_checked():
    found = findings(VERSIONS, requirements=())

    assert is_healthy(list(found.values()))
    assert "pip install --editable" in found["RayRec"].detail
