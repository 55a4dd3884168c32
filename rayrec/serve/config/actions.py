"""Settings of the actions: how much may be computed of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from rayrec.platform.config import Config


class ActionConfig(Config):
    """How much is computed of an answer; null is as much as the model's config says."""

    name: str = Field(min_length=1)
    """That metrics and the request log name it by."""
    max_beams: int | None = Field(None, ge=1)
    """Beams of a generative model, as far as the items asked for allow."""
    max_events: int | None = Field(None, ge=1)
    """Newest events of a history that are read."""
    rank: bool = True
    """Whether a ranking stage ranks, where there is one."""
    near_line: bool = False
    """Whether the answer is one that was computed before the request, where there is one."""


def check_actions(actions: Sequence[ActionConfig], where: str) -> None:
    """Refuse actions that cannot be told apart.

    Args:
        where: the setting, for messages.

    Raises:
        ValueError: two have one name, or do the same.
    """
    names, done = set[str](), dict[tuple[object, ...], str]()
    for action in actions:
        does = (action.max_beams, action.max_events, action.rank, action.near_line)
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
