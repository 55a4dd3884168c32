"""Named implementations of one kind: our own, and those that other packages bring.

    MODELS = Registry("rayrec.models", "model", {"sasrec": "rayrec.models.sequence.config:SasRecConfig"})
    MODELS["sasrec"]        imports the module when it is first asked for; `settings_union` asks for all

Another package adds one by an entry point of the registry's group:

    [project.entry-points."rayrec.models"]
    tiny = "my_package.tiny:TinyConfig"

Entry points belong to installed packages, so every process of a run finds the same ones.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, TypeVar, Union, cast, get_args

from pydantic import Field

from rayrec.platform.errors import InputError

T = TypeVar("T", covariant=True)


class Registry(Mapping[str, T]):
    """A mapping from names to implementations, which are imported when they are first asked for."""

    def __init__(self, group: str, what: str, own: Mapping[str, str]) -> None:
        """
        Args:
            group: of entry points, by which other packages add to the registry.
            what: an implementation is called in messages: "model", "reward", ...
            own: name to `module:attribute` of those that come with RayRec.
        """
        self.group = group
        self.what = what
        self._own = dict(own)
        self._loaded: dict[str, T] = {}

    @functools.cached_property
    def _others(self) -> dict[str, EntryPoint]:
        found: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            earlier = found.get(point.name)
            if point.name in self._own or (earlier is not None and earlier.value != point.value):
                taken = "RayRec itself" if earlier is None else _package_of(earlier)
                raise InputError(
                    f"{_package_of(point)} brings a {self.what} called {point.name!r}, which {taken} has "
                    f"already; rename its entry point in the group {self.group!r}"
                )
            found[point.name] = point
        return found

    def names(self) -> tuple[str, ...]:
        """All names: our own in their order, then those of other packages."""
        return (*self._own, *sorted(self._others))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._others

    def __getitem__(self, name: str) -> T:
        """Look up, and if necessary import, what has a name.

        Raises:
            InputError: nothing has this name, or the package that brings it cannot be imported.
        """
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def all(self) -> dict[str, T]:
        """Every implementation by name; imports all of them."""
        return {name: self[name] for name in self.names()}

    def _load(self, name: str) -> T:
        if name in self._own:
            module, _, attribute = self._own[name].partition(":")
            return cast(T, getattr(importlib.import_module(module), attribute))
        if name not in self._others:
            raise InputError(f"there is no {self.what} {name!r}; known: {', '.join(self.names())}")
        point = self._others[name]
        try:
            return cast(T, point.load())
        except Exception as error:
            raise InputError(
                f"the {self.what} {name!r} of {_package_of(point)} cannot be imported "
                f"({point.value}): {type(error).__name__}: {error}"
            ) from error


def _package_of(point: EntryPoint) -> str:
    distribution: Any = point.dist
    return "a package" if distribution is None else f"the package {distribution.name!r}"


def settings_union(registry: Registry[Any], bases: type | tuple[type, ...], key: str) -> Any:
    """The pydantic type of settings of any class of a registry, chosen by the field `key`.

    Args:
        bases: every class has to be a subclass of one of them.

    Raises:
        InputError: a class of another package is not one of settings, or does not have its own name as `key`.
    """
    classes = registry.all()
    expected = " or ".join(base.__name__ for base in (bases if isinstance(bases, tuple) else (bases,)))
    for name, settings in classes.items():
        if not (isinstance(settings, type) and issubclass(settings, bases)):
            raise InputError(
                f"the {registry.what} {name!r} is {settings!r}, expected a subclass of {expected}"
            )
        if get_args(cast(Any, settings).model_fields[key].annotation) != (name,):
            raise InputError(
                f"the {registry.what} {name!r} needs the field `{key}: Literal[{name!r}] = {name!r}` in "
                f"{settings.__module__}.{settings.__name__}: configs choose it by this name"
            )
    union: Any = Union[tuple(classes.values())]  # noqa: UP007 - of classes that are known only now
    return Annotated[union, Field(discriminator=key)]
