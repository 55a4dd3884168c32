"""Rewards that users write.

# my_rewards.py
def fresh(lists):
    return np.where(lists.items_UG >= 0, freshness[lists.items_UG], 0.0)

{kind: function, function: "my_rewards:fresh", folder: rewards}
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from rayrec.platform.errors import InputError
from rayrec.rl.rewards.candidates import Reward


def imported(function: str, folder: Path | None = None) -> Reward:
    """The function that `module:function` names.

    Args:
        folder: where the module is and what it imports of its own, at its top; None: where Python finds it.

    Raises:
        InputError: there is no such folder, module or function, or the folder's module has the name of
            another one.
    """
    module_name, _, name = function.partition(":")
    if folder is not None and not folder.is_dir():
        raise InputError(f"the reward {function}: {folder} is no folder; expected the one with its module")
    try:
        with _found_first(folder):
            module = importlib.import_module(module_name)
    # Whatever it is: the code is not ours.
    except Exception as error:
        where = "" if folder is None else f" from {folder}"
        raise InputError(
            f"the reward {function}: its module cannot be imported{where}: {type(error).__name__}: {error}"
        ) from error
    file = getattr(module, "__file__", None)  # modules that are built in have none
    if folder is not None and not _is_within(folder, file):
        raise InputError(
            f"the reward {function}: {module_name!r} is a module of {file or 'Python itself'}, not of "
            f"{folder}; rename the one in the folder, if it is there"
        )
    found = getattr(module, name, None)
    if not callable(found):
        raise InputError(f"the reward {function}: the module {module_name!r} has no function {name!r}")
    return cast(Reward, found)


@contextlib.contextmanager
def _found_first(folder: Path | None) -> Iterator[None]:
    """Python looks into the folder before anywhere else."""
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
