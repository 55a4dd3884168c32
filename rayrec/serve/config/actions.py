"""Settings of the actions: how much may be computed of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import yaml
from pydantic import Field, model_validator

from rayrec.platform.config import Config
from rayrec.platform.errors import InputError


class ActionConfig(Config):
    """How much is computed of an answer; null is as much as the model's config says."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=64)
    """That metrics and the request log name it by."""
    max_beams: int | None = Field(None, ge=1)
    """Beams of a generative model, as far as the items asked for allow."""
    max_events: int | None = Field(None, ge=1)
    """Newest events of a history that are read."""
    rank: bool = True
    """Whether a ranking stage ranks, where there is one."""
    near_line: bool = False
    """Whether the answer is one that was computed before the request; without one, the rest holds."""
    popular: bool = False
    """Whether popular items are given and nothing is computed; it finds nothing of what the model gives."""

    @property
    def is_full(self) -> bool:
        """Whether nothing is left out."""
        return self == ActionConfig(name=self.name)

    @model_validator(mode="after")
    def _popular_items_need_nothing(self) -> Self:
        if self.popular and (self.max_beams or self.max_events or self.near_line):
            raise ValueError(
                f"the action {self.name!r} gives popular items and computes nothing; leave out its "
                "max_beams, max_events and near_line"
            )
        return self


def check_actions(actions: Sequence[ActionConfig], where: str) -> None:
    """Refuse actions that cannot be told apart.

    Args:
        where: the setting, for messages.

    Raises:
        ValueError: two have one name, or do the same.
    """
    names, done = set[str](), dict[tuple[object, ...], str]()
    for action in actions:
        does = (action.max_beams, action.max_events, action.rank, action.near_line, action.popular)
        if action.name in names:
            raise ValueError(f"{where}: two actions are called {action.name!r}; give each a name of its own")
        if does in done:
            raise ValueError(f"{where}: {done[does]!r} and {action.name!r} do the same; leave one out")
        names.add(action.name)
        done[does] = action.name


class ActionsConfig(Config):
    """The file that `rayrec value-curves --actions` reads."""

    actions: list[ActionConfig] = Field(min_length=1)
    """What is measured; a handful, from full effort to what costs nearly nothing."""

    @model_validator(mode="after")
    def _actions_can_be_told_apart(self) -> Self:
        check_actions(self.actions, "actions")
        return self


def actions_in(path: Path) -> list[ActionConfig]:
    """The actions of a file: of its own, or those of an admission file, below `allocate`.

    Raises:
        InputError: there is no such file, or no actions in it.
    """
    try:
        values = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); expected a YAML file") from error
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    section = values.get("allocate", values) if isinstance(values, dict) else None
    if not isinstance(section, dict) or "actions" not in section:
        raise InputError(f"{path}: there are no actions in it; expected `actions`, or `allocate` with them")
    return ActionsConfig.parse({"actions": section["actions"]}, source=str(path)).actions
