"""From what a search may change to the settings of one trial, and whether that makes sense at all."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tuning.config import Choice, Dimension, FloatRange, TuningConfig
from rayrec.platform.config import (
    differing_keys,
    has_setting,
    nearest_setting,
    read_values,
    set_value,
    setting_names,
)
from rayrec.platform.errors import InputError

WHAT_IS_VALIDATED = ("data.path", "evaluation")
"""Keys and sections that decide what a value is measured on: with others, values of trials could not be
compared."""
FREE_IN_VALIDATION = frozenset(
    f"evaluation.{name}" for name in ("every_epochs", "every_steps", "patience", "batch_size")
)
"""The keys below these that only say when to measure, and how many users at once."""
WHEN_IS_VALIDATED = frozenset({"training.epochs", "evaluation.every_epochs", "evaluation.every_steps"})
"""Keys that decide how far a training is at its n-th validation."""
_INSIDE = 0.381966
"""Where between the bounds of a range a value is tried, too: one that is no round number."""

Settings = dict[str, Any]
"""Of one trial: dotted keys of the space to values."""


@dataclass(frozen=True)
class SearchSpace:
    """What trials have in common, and in what they may differ."""

    values: dict[str, Any]
    """Of the run, as its file and the settings for all trials say them."""
    dimensions: Mapping[str, Dimension]

    @classmethod
    def of(cls, tuning: TuningConfig) -> SearchSpace:
        """Read the config that a search begins with, and check the keys and bounds of what is searched.

        Raises:
            InputError: a key or a bound that a run cannot have, or with which trials could not be compared.
        """
        values = read_values(tuning.config)
        in_file = RunConfig.parse(copy.deepcopy(values), tuning.config)
        for key in tuning.settings:
            _check_there(key, in_file, "settings", tuning.config)
            _check_kept(key, tuning.space)
        _set_all(values, tuning.settings, "settings")
        space = cls(values, tuning.space)
        base = space.base
        for key in tuning.space:
            _check_there(key, base, "space", tuning.config)
            _check_comparable(key)
            if tuning.prune is not None:
                _check_in_step(key, base)
        space._check_bounds()
        return space

    @cached_property
    def base(self) -> RunConfig:
        """The config that a search begins with."""
        return RunConfig.parse(copy.deepcopy(self.values), "config with settings")

    def values_of(self, settings: Settings) -> dict[str, Any]:
        """Plain values of a trial's run: what its YAML file would hold."""
        values = copy.deepcopy(self.values)
        _set_all(values, settings, "space")
        return values

    def config_of(self, settings: Settings) -> RunConfig:
        """The run of a trial.

        Raises:
            InputError: values that do not go together.
        """
        said = ", ".join(f"{key}={value}" for key, value in settings.items())
        return RunConfig.parse(self.values_of(settings), f"space, {said}")

    def settings_of_base(self) -> Settings:
        """Where in the space the config itself lies.

        Raises:
            InputError: it lies outside.
        """
        return {key: self._base_value(key, dimension) for key, dimension in self.dimensions.items()}

    def _base_value(self, key: str, dimension: Dimension) -> Any:
        if isinstance(dimension, Choice):
            for value in dimension.values:
                if not differing_keys(self.config_of({key: value}), self.base):
                    return value
        else:
            value = _value_at(self.base, key)
            if isinstance(value, int | float) and _is_within(dimension, value):
                return float(value) if isinstance(dimension, FloatRange) else value
        raise InputError(
            f"begin_with_config: {key} of the config is {_value_at(self.base, key)!r}, which space.{key} "
            "does not have; add it there, or set begin_with_config to false"
        )

    def _check_bounds(self) -> None:
        for key, dimension in self.dimensions.items():
            for value in _probes(dimension):
                self.config_of({key: value})


def _set_all(values: dict[str, Any], settings: Settings, source: str) -> None:
    """Set what plain values have at dotted keys.

    Sections come before what is in them, which they would take away again; and they are copied, since
    what is set in them is not to change the values of a search.
    """
    for key in sorted(settings, key=lambda key: key.count(".")):
        set_value(values, key, copy.deepcopy(settings[key]), f"{source}.{key}")


def _check_kept(key: str, space: Mapping[str, Dimension]) -> None:
    """Refuse a setting for all trials that each of them would lose."""
    for searched in space:
        if key.startswith(f"{searched}."):
            raise InputError(
                f"settings: {key} is a part of {searched}, which is searched as a whole, so that no "
                f"trial would have it; write it into the values of space.{searched}"
            )


def _check_there(key: str, config: RunConfig, source: str, file: str) -> None:
    if not has_setting(config, key):
        raise InputError(
            f"{source}: there is no setting {key!r} in the run of {file}; did you mean "
            f"{nearest_setting(key, setting_names(config))!r}?"
        )


def _check_comparable(key: str) -> None:
    if key == "seed":
        raise InputError(
            "space: trials that differ in their seed alone differ by chance; leave seed out, and train the "
            "best settings with several seeds"
        )
    if key not in FREE_IN_VALIDATION and any(_meet(key, fixed) for fixed in WHAT_IS_VALIDATED):
        raise InputError(
            f"space: {key} decides what is validated, so that trials could not be compared; set it for all "
            "of them, in settings"
        )


def _meet(key: str, other: str) -> bool:
    """Whether one of two dotted keys is the other, or a section around it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _check_in_step(key: str, base: RunConfig) -> None:
    counted_in_steps = base.evaluation.every_steps is not None and key == "training.batch_size"
    if counted_in_steps or any(_meet(key, each) for each in WHEN_IS_VALIDATED):
        raise InputError(
            f"prune: with {key} in the space, trials are not equally far at their n-th validation; leave one "
            "of the two out"
        )


def _probes(dimension: Dimension) -> list[Any]:
    """Values of a dimension of which each has to be one that a run can have."""
    if isinstance(dimension, Choice):
        return list(dimension.values)
    probes: list[Any] = [dimension.low, dimension.high]
    if isinstance(dimension, FloatRange) and dimension.step is None:
        probes.append(dimension.low + _INSIDE * (dimension.high - dimension.low))
    return probes


def _is_within(dimension: Dimension, value: float) -> bool:
    assert not isinstance(dimension, Choice)
    if not dimension.low <= value <= dimension.high:
        return False
    step = dimension.step
    return step is None or abs(round((value - dimension.low) / step) * step - (value - dimension.low)) < 1e-9


def _value_at(config: RunConfig, key: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
