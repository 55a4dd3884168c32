"""Public names of a package that are imported when they are first used.

    if TYPE_CHECKING:
        from rayrec.models.sequence.sequence_model import SequenceModel as SequenceModel

    __all__, __getattr__ = lazy_names(__name__, __file__)

The block under `TYPE_CHECKING` is the one list of the names: editors and type checkers read it as code, and
`lazy_names` reads it from the file. So a package that exports much still imports fast, and a part of it that
needs Ray or torch imports that only when it is used.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def lazy_names(
    package: str, file: str, sub_packages: Sequence[str] = ()
) -> tuple[list[str], Callable[[str], Any]]:
    """Return a package's `__all__` and `__getattr__`.

    Args:
        package: its `__name__`.
        file: its `__file__`, with a block `if TYPE_CHECKING:` of imports.
        sub_packages: that may be used as attributes without being imported.
    """
    homes = _homes(Path(file).read_text(encoding="utf-8"))

    def get(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        if name in sub_packages:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return [*homes, *sub_packages], get


def _homes(source: str) -> dict[str, str]:
    """Name to the module that defines it."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for line in node.body:
                if isinstance(line, ast.ImportFrom) and line.module is not None:
                    found |= {alias.name: line.module for alias in line.names}
    return found
