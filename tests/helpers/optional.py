"""Packages that are not everywhere, and take long to import."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def skip_without(package: str) -> None:
    """Skip the module that calls this where a package is missing; does not import it.

    `pytest.importorskip` would: every process of xdist collects all modules, and runs the tests of some.
    """
    if find_spec(package) is None:
        pytest.skip(f"{package} is missing", allow_module_level=True)
