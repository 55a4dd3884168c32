"""Functions of the user's, which settings name as `module:function`."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo

from rayrec.platform.errors import InputError


def _named(value: str, info: ValidationInfo) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", value):
        raise ValueError(f"{info.field_name} must be 'module:function', got {value!r}")
    return value


FunctionName = Annotated[str, AfterValidator(_named)]


def import_function(what: str, function: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import the function that `module:function` names.

    Args:
        what: it is, for messages.
        folder: of the module and of what it imports at its top; None: it is installed.

    Raises:
        InputError: there is no such folder, module or function, or the folder's module has the name of
            another one.
    """
    module_name, _, name = function.partition(":")
    if folder is not None and not folder.is_dir():
        raise InputError(f"{what} {function}: {folder} is no folder; expected the one with its module")
    try:
        with _found_first(folder):
            module = importlib.import_module(module_name)
    # Any exception: the code is not ours.
    except Exception as error:
        where = "" if folder is None else f" from {folder}"
        raise InputError(
            f"{what} {function}: its module cannot be imported{where}: {type(error).__name__}: {error}"
        ) from error
    file = getattr(module, "__file__", None)  # modules that are built in have none
    if folder is not None and not _is_within(folder, file):
        raise InputError(
            f"{what} {function}: {module_name!r} is a module of {file or 'Python itself'}, not of "
            f"{folder}; rename the one in the folder, if it is there"
        )
    found = getattr(module, name, None)
    if not callable(found):
        raise InputError(f"{what} {function}: the module {module_name!r} has no function {name!r}")
    imported: Callable[..., Any] = found
    return imported


@contextlib.contextmanager
def _found_first(folder: Path | None) -> Iterator[None]:
    """Make Python look into the folder first."""
    if folder is None:
        yield
        return
    path = str(folder.resolve())
    sys.path.insert(0, path)
    # A file may have been written since Python last looked.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(path)


def _is_within(folder: Path, file: str | None) -> bool:
    return file is not None and Path(file).resolve().is_relative_to(folder.resolve())
