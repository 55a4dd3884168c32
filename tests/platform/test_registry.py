"""Implementations by name: our own, and those of other packages."""

import sys

import pytest

from rayrec.platform.errors import InputError
from rayrec.platform.registry import Registry

OWN = {"ordered": "collections:OrderedDict", "counter": "collections:Counter"}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with a module, and entry points of the group `rayrec.tests`."""

    def install(entry_points: str, module: str = "class Tiny: pass", name: str = "tinylib"):
        (tmp_path / f"{name}_module.py").write_text(module)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[rayrec.tests]\n{entry_points}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, f"{name}_module", raising=False)

    return install


def registry() -> Registry[type]:
    return Registry("rayrec.tests", "thing", OWN)


def test_own_implementations_are_imported_when_asked_for():
    from collections import Counter

    assert registry()["counter"] is Counter
    assert registry().names() == ("ordered", "counter")


def test_other_packages_add_to_a_registry(package):
    package("tiny = tinylib_module:Tiny")

    things = registry()

    assert things.names() == ("ordered", "counter", "tiny")
    assert things["tiny"].__name__ == "Tiny"
    assert "tiny" in things


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(InputError, match="there is no thing 'tree'; known: ordered, counter"):
        registry()["tree"]


def test_a_package_may_not_take_a_name_that_is_taken(package):
    package("counter = tinylib_module:Tiny")

    with pytest.raises(InputError, match="'tinylib' brings a thing called 'counter', which RayRec"):
        registry().names()


def test_a_package_that_cannot_be_imported_is_named_with_its_error(package):
    package("tiny = tinylib_module:Tiny", module="import nothing_of_this_name")

    with pytest.raises(InputError, match=r"'tiny' of the package 'tinylib' cannot be imported .*nothing_of"):
        registry()["tiny"]
