"""Typed configuration: one frozen model per component, one YAML file per run."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from rayrec.platform.errors import InputError, looked_in


class Config(BaseModel):
    """Base of every component's settings: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Keys of version 0.1 to what they are called now; files and callers may still use them."""

    @model_validator(mode="before")
    @classmethod
    def _renamed_keys_are_read(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not cls.RENAMED.keys() & values.keys():
            return values
        for old in cls.RENAMED.keys() & values.keys():
            if cls.RENAMED[old] in values:
                raise ValueError(f"{old!r} is called {cls.RENAMED[old]!r} now; keep one of them")
        return {cls.RENAMED.get(name, name): value for name, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_are_there(cls, values: Any) -> Any:
        """YAML reads a section with nothing below its name as null."""
        if not isinstance(values, dict):
            return values
        empty = {name for name, value in values.items() if value is None and _is_section(cls, name)}
        return {name: {} if name in empty else value for name, value in values.items()}

    @model_validator(mode="before")
    @classmethod
    def _a_switch_is_no_number(cls, values: Any) -> Any:
        """YAML reads `on` and `yes` as true, which pydantic takes for 1. As texts, it refuses them."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {
            name: _switches_as_texts(value, fields[name].annotation) if name in fields else value
            for name, value in values.items()
        }

    @classmethod
    def parse(cls, values: dict[str, Any], source: str = "config") -> Self:
        """Build from plain values; every mistake becomes one readable `InputError`."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            found = error.errors()
            # Of a list, pydantic also says that it is too short without the members that it has refused.
            refused = {problem["loc"][:end] for problem in found for end in range(len(problem["loc"]))}
            problems = [
                _explain(cls, values, problem)
                for problem in found
                if problem["type"] != "too_short" or problem["loc"] not in refused
            ]
            raise InputError(f"{source}: " + "; ".join(problems)) from error

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a YAML file, then apply `a.b=value` overrides in order."""
        return cls._overridden(read_values(path), overrides, str(path))

    @classmethod
    def of_overrides(cls, overrides: Sequence[str], source: str) -> Self:
        """Build from `a.b=value` alone, where no file is given."""
        return cls._overridden({}, overrides, source)

    @classmethod
    def _overridden(cls, values: dict[str, Any], overrides: Sequence[str], source: str) -> Self:
        for override in overrides:
            _apply_override(values, override)
        return cls.parse(values, source=source)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def read_values(path: str | Path) -> dict[str, Any]:
    """The mapping that a YAML file holds, as it is written there.

    Raises:
        InputError: there is no such file, or it holds something else.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such config file{looked_in(path)}; expected a YAML file of settings")
    try:
        values = _read_yaml(path.read_bytes(), str(path))
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a mapping of settings, found {type(values).__name__}")
    return values


class _KeysOnce(yaml.constructor.SafeConstructor):
    """YAML's own silently keeps the last of several values of one key."""

    name: str
    checked: set[int]
    """The `id` of each mapping that was looked at. One that is merged into another may be read after it, and
    has the keys that it takes from others written into it by then, which are no repetition."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if id(node) not in self.checked:
            self.checked.add(id(node))
            self._check_keys(node)
        super().flatten_mapping(node)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line, ident = key.start_mark.line + 1, (key.tag, key.value)
            if ident in lines:
                raise InputError(
                    f"{self.name}: the key {key.value!r} in line {line} stands in line {lines[ident]} "
                    "already; keep one of them"
                )
            lines[ident] = line

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As YAML's own, which passes on whatever Python says of a value that there is not."""
        try:
            return super().construct_object(node, deep)
        except InputError:
            raise
        except (ValueError, KeyError, AttributeError) as error:  # 2026-02-30, !!bool maybe
            raise yaml.constructor.ConstructorError(
                None, None, f"there is no such value as {node.value!r} ({error})", node.start_mark
            ) from error


class _Loader(_KeysOnce, yaml.SafeLoader):
    """Names the file and the place of an error."""


_FAST_LOADER: Any = (
    type("_FastLoader", (_KeysOnce, yaml.CSafeLoader), {}) if yaml.__with_libyaml__ else _Loader
)
"""Takes a tenth of the time."""


def differing_keys(first: Config, second: Config) -> list[str]:
    """Dotted names of the settings in which two configs of one type differ; where one of them has a section
    that the other has not, the name of the section. What is missing in a mapping is as null."""
    return sorted(_differing(first.model_dump(mode="json"), second.model_dump(mode="json")))


def _differing(first: dict[str, Any], second: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key in first.keys() | second.keys():
        one, other = first.get(key), second.get(key)
        if key not in first and isinstance(other, dict):
            one = {}
        if key not in second and isinstance(one, dict):
            other = {}
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differing(one, other, f"{prefix}{key}.")
        elif one != other:
            yield f"{prefix}{key}"


def is_among(key: str, names: Collection[str]) -> bool:
    """Whether a dotted key is one of these names, or in a section among them; sections end in a dot.

    A name is that setting alone, not every one that begins like it.
    """
    return key in names or key.startswith(tuple(name for name in names if name.endswith(".")))


def setting_names(config: Config) -> list[str]:
    """Dotted names of all settings of a config and its sections, those left out included."""
    names: list[str] = []
    for name, field in type(config).model_fields.items():
        names.append(name)
        value = getattr(config, name)
        below = [setting_names(value)] if isinstance(value, Config) else []
        if value is None:  # a section that is not there; which of several kinds it would be is open
            below = [list(each.model_fields) for each in _config_types(field.annotation)]
        names += dict.fromkeys(f"{name}.{inner}" for each in below for inner in each)
    return names


def has_setting(config: Config, key: str) -> bool:
    """Whether there is a setting of a dotted name; what a mapping holds has any name."""
    name, _, below = key.partition(".")
    field = type(config).model_fields.get(name)
    if field is None or not below:
        return field is not None
    value = getattr(config, name)
    if isinstance(value, Config):
        return has_setting(value, below)
    if value is None:
        return any(below.partition(".")[0] in each.model_fields for each in _config_types(field.annotation))
    return isinstance(value, Mapping)


def nearest_setting(key: str, names: Sequence[str]) -> str:
    """The dotted name that was probably meant: of like spelling, in the same section or in another."""

    def likeness(name: str) -> float:
        whole, last = (
            difflib.SequenceMatcher(None, one, other).ratio()
            for one, other in ((key, name), (key.rpartition(".")[2], name.rpartition(".")[2]))
        )
        return whole + last

    return max(names, key=likeness)


def set_value(values: dict[str, Any], key: str, value: Any, source: str) -> None:
    """Set what plain values have at a dotted key, whose sections are made where they are missing.

    Args:
        source: of the key, for the message.

    Raises:
        InputError: a part of the key is a value and no section.
    """
    *sections, name = key.split(".")
    target = values
    for section in sections:
        found = target.get(section)
        if found is not None and not isinstance(found, dict):
            raise InputError(f"{source}: {section!r} is a value, not a section")
        # A copy: to YAML, sections that name each other (`*anchor`) are one.
        target[section] = dict(found or {})
        target = target[section]
    target[name] = value


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise InputError(f"--set {override}: expected the form section.key=value")
    try:
        value = _read_yaml(text, f"--set {override}")
    except yaml.YAMLError as error:
        raise InputError(
            f"--set {override}: the value is not valid YAML; quote it if it is a text"
        ) from error
    set_value(values, key, value, f"--set {override}")


def _read_yaml(content: str | bytes, source: str) -> Any:
    """Parse YAML without accepting a key twice.

    Raises:
        InputError: a key stands twice in one section.
        yaml.YAMLError: it is no YAML.
    """
    try:
        return _read_with(_FAST_LOADER, content, source)
    except yaml.YAMLError:
        return _read_with(_Loader, content, source)


def _read_with(kind: Any, content: str | bytes, source: str) -> Any:
    loader = kind(content)
    loader.name, loader.checked = source, set()
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _is_section(model: type[Config], name: Any) -> bool:
    """Whether a setting holds settings, and null is not one of its values."""
    if name not in model.model_fields:
        return False
    annotation = model.model_fields[name].annotation
    if NoneType in get_args(annotation):
        return False
    return get_origin(annotation) is dict or bool(_config_types(annotation))


def _switches_as_texts(value: Any, annotation: Any) -> Any:
    """A value with texts for true and false where its annotation has numbers or nothing; sections have a
    validator of their own."""
    kinds = _members(annotation)
    if isinstance(value, bool):
        takes_numbers = int in kinds or float in kinds
        return str(value) if takes_numbers and bool not in kinds and str not in kinds else value
    for kind in kinds:
        inner = get_args(kind)
        if get_origin(kind) is dict and isinstance(value, dict):
            return {name: _switches_as_texts(each, inner[1]) for name, each in value.items()}
        if get_origin(kind) in (list, tuple) and isinstance(value, list | tuple):
            members = inner if len(inner) > 1 and inner[1] is not Ellipsis else inner[:1] * len(value)
            if len(members) == len(value):  # which is refused otherwise
                return [_switches_as_texts(*each) for each in zip(value, members, strict=True)]
    return value


def _members(annotation: Any) -> tuple[Any, ...]:
    """What a value may be, of a union, without what is said of it besides."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(member for each in get_args(annotation) for member in _members(each))
    return (annotation,)


# A section that is no mapping. Pydantic speaks of dictionaries and objects, which a YAML file does not have.
_NO_MAPPING = ("dict_type", "model_type", "model_attributes_type")


def _explain(root: type[Config], values: dict[str, Any], problem: Any) -> str:
    location = tuple(problem["loc"])
    # Pydantic adds the chosen tag of a union to the location; it is not a key of the file.
    keys = _keys_in_file(values, location)
    name = ".".join(map(str, keys))
    if problem["type"] == "extra_forbidden":
        known = {name for model in _models_at(root, location[:-1]) for name in model.model_fields}
        close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(sorted(known))}"
        return f"there is no setting {name!r}; {hint}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return _explain_tag(root, name, location, problem)
    if problem["type"] == "missing":
        return f"the setting {name!r} is missing"
    if problem["type"] == "value_error":
        return message
    if problem["type"] in _NO_MAPPING:
        return f"{name}: expected a mapping of keys to values, got {problem['input']!r}"
    return f"{name}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"


def _explain_tag(root: type[Config], name: str, location: tuple[Any, ...], problem: Any) -> str:
    """A union's members are chosen by a key that is missing or has an unknown value."""
    key = problem["ctx"]["discriminator"].strip("'")
    choices = ", ".join(
        repr(tag)
        for model in _models_at(root, location)
        for tag in get_args(model.model_fields[key].annotation)
    )
    if problem["type"] == "union_tag_not_found":
        return f"the setting '{name}.{key}' is missing; expected one of {choices}"
    return f"{name}.{key}: expected one of {choices}, got {problem['ctx']['tag']!r}"


def _keys_in_file(values: Any, location: tuple[Any, ...]) -> list[Any]:
    keys: list[Any] = []
    for depth, part in enumerate(location):
        last = depth == len(location) - 1
        if isinstance(values, dict) and (part in values or last):
            keys.append(part)
            values = values.get(part)
        elif isinstance(values, list) and isinstance(part, int) and (part < len(values) or last):
            keys.append(part)
            values = None if last else values[part]
    return keys


def _models_at(root: type[Config], location: tuple[Any, ...]) -> list[type[Config]]:
    """The config at `location`, or the members of a union that is there, following unions by their tag."""
    models: list[type[Config]] = [root]
    for part in location:
        step = [
            nested
            for model in models
            if part in model.model_fields
            for nested in _config_types(model.model_fields[str(part)].annotation)
        ]
        if step:
            models = step
        else:  # a union's tag: keep the members that carry it
            tagged = [m for m in models if part in _tags(m)]
            models = tagged or models
    return models


def _config_types(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _config_types(argument)]


def _tags(model: type[Config]) -> list[Any]:
    return [tag for field in model.model_fields.values() for tag in get_args(field.annotation)]
