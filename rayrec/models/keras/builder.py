"""Finds the function that makes a Keras model, and says in a sentence what goes wrong inside of it.

A module of a folder is of that folder alone, whatever else goes by its name: of two folders with a `model.py`
and a `layers.py` each, the modules of one are put aside when the other's turn comes. It finds its neighbors
before packages that are installed, and behind the standard library; nothing else of the process finds them
there.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema


class Builder:
    """What `model.builder` names."""

    def __init__(self, name: str, folder: Path | None) -> None:
        """
        Args:
            name: `module:function`.
            folder: where the module is; None: where Python finds it.
        """
        self.name = name
        self._folder = None if folder is None else _folder_at(folder)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around whatever runs code of the builder: its neighbors can be imported, and its errors are said
        in one sentence that names it.

        Raises:
            InputError: the code inside raised anything.
        """
        with _in_use(self._folder):
            try:
                yield
            except InputError:
                raise
            # Whatever it is: the code is not ours, and a traceback of Keras's own depths would hide its name.
            except Exception as error:
                raise InputError(f"model.builder: {self.name} failed: {in_one_line(error)}") from error

    def __call__(self, schema: ImpressionSchema, dim: int, arguments: Mapping[str, Any]) -> Any:
        """What the function returns; to be called while it is `running`.

        Raises:
            InputError: there is no such function, or it takes other arguments.
        """
        function = self._function()
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # made in C; it judges by itself
            return function(schema, dim, **arguments)
        try:
            signature.bind(schema, dim, **arguments)
        except TypeError as error:
            raise InputError(
                f"model.builder: {self.name} takes {_named(signature)} and is called with the schema, the "
                f"dim and model.arguments ({', '.join(arguments) or 'none'}): {error}; change one of them"
            ) from error
        return function(schema, dim, **arguments)

    def _function(self) -> Callable[..., Any]:
        module_name, _, function_name = self.name.partition(":")
        if self._folder is not None:
            self._folder.check_has(module_name)
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            advice = "set model.folder to the folder it is in, or " if self._folder is None else ""
            raise InputError(
                f"model.builder: the module {module_name!r} cannot be imported ({in_one_line(error)}); "
                f"{advice}install what it needs"
            ) from error
        except Exception as error:
            raise InputError(
                f"model.builder: the module {module_name!r} cannot be imported ({in_one_line(error)}); "
                "mend it"
            ) from error
        function = getattr(module, function_name, None)
        if not callable(function):
            raise InputError(f"model.builder: the module {module_name!r} has no function {function_name!r}")
        found: Callable[..., Any] = function
        return found


class BuilderFolder:
    """A folder of builders; Python asks it for modules while one of them runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: set[str] = set()
        """Modules of the folder itself that were asked for."""
        self._aside: dict[str, ModuleType] = {}
        """Those and what is below them, while another folder is in use."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """What Python calls of a finder."""
        if path is not None or name in sys.stdlib_module_names:
            return None
        if (spec := PathFinder.find_spec(name, [str(self._path)])) is not None:
            self._found.add(name)
        return spec

    def put_back(self) -> None:
        sys.modules.update(self._aside)
        self._aside = {}

    def put_aside(self) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in self._found]:
            self._aside[name] = sys.modules.pop(name)

    def check_has(self, module_name: str) -> None:
        """Refuse a module that the folder does not have.

        Raises:
            InputError: the folder has no such module, or its name is that of another one.
        """
        first = module_name.partition(".")[0]
        spec = PathFinder.find_spec(first, [str(self._path)])
        if spec is None:
            raise InputError(
                f"model.builder: there is no module {first!r} in {self._path}; set model.folder to the "
                "folder it is in, or leave it out if the module is installed"
            )
        loaded = sys.modules.get(first)
        if first in sys.stdlib_module_names or (loaded is not None and not _is_of(loaded, spec)):
            other = getattr(loaded, "__file__", None) or "of Python itself"
            raise InputError(
                f"model.builder: the module {first!r} of {self._path} has the name of another one ({other}); "
                "rename it"
            )


_folders: dict[Path, BuilderFolder] = {}
_newest: BuilderFolder | None = None
"""The folder whose modules `sys.modules` has."""


def _folder_at(path: Path) -> BuilderFolder:
    return _folders.setdefault(path.resolve(), BuilderFolder(path.resolve()))


@contextlib.contextmanager
def _in_use(folder: BuilderFolder | None) -> Iterator[None]:
    """Its modules can be imported, and those of no other folder.

    What has been imported stays: a layer may import its neighbors again whenever it is called.
    """
    global _newest
    if _newest is not folder:
        if _newest is not None:
            _newest.put_aside()
        if folder is not None:
            folder.put_back()
        _newest = folder
    if folder is None:
        yield
        return
    sys.meta_path.insert(0, folder)
    try:
        yield
    finally:
        sys.meta_path.remove(folder)


def _is_of(loaded: ModuleType, spec: ModuleSpec) -> bool:
    """Whether a module is what the finder has found; it may have been imported by other ways."""
    its = loaded.__spec__
    if its is None:
        return False
    if spec.origin is not None:
        return its.origin is not None and Path(its.origin).resolve() == Path(spec.origin).resolve()
    places = set(its.submodule_search_locations or ())
    return places >= set(spec.submodule_search_locations or ())


def in_one_line(error: BaseException) -> str:
    """`KeyError: 'color'`; what users know by its text alone has no name before it."""
    text = " ".join(str(error).split())
    if text and isinstance(error, ImportError | ValueError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _named(signature: inspect.Signature) -> str:
    names = []
    for parameter in signature.parameters.values():
        optional = parameter.default is not parameter.empty
        names.append(f"{parameter.name} (or its default)" if optional else str(parameter).split(":")[0])
    return ", ".join(names) or "no arguments"
