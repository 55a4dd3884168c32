"""The parts of a checkout that are not installed with the package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from rayrec.platform.errors import InputError

CHECKOUT = Path(__file__).resolve().parents[2]


def load_benchmarks() -> ModuleType:
    """The `benchmarks` package of the checkout that this package was imported from.

    Raises:
        InputError: the package was installed without its checkout.
    """
    if not (CHECKOUT / "benchmarks" / "harness.py").is_file():
        raise InputError(
            f"{CHECKOUT}: there are no benchmarks here; they come with the source: run from a checkout, "
            "installed by 'make env'"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return importlib.import_module("benchmarks.harness")
