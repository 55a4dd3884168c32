"""Rewards that call other code: a ranking model, or a function of the user's.

# my_rewards.py
def fresh(lists):
    return np.where(lists.items_UG >= 0, freshness[lists.items_UG], 0.0)

{kind: function, function: "my_rewards:fresh", folder: rewards}

Axes: U users, G candidates of a user.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal, Self, cast

import numpy as np
from pydantic import field_validator

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import absolute
from rayrec.rl.rewards.base import (
    CandidateLists,
    Ranker,
    Reward,
    RewardArray,
    RewardContext,
    RewardSettings,
)


class RankerConfig(RewardSettings):
    """The value that a ranking model predicts for showing a candidate."""

    needs_queries: ClassVar[bool] = True

    kind: Literal["ranker"] = "ranker"
    ranking: RankingConfig
    """Which model, and the weights of its labels. The number of candidates and the weight of the
    recommender's own score do not apply here."""

    def build(self, context: RewardContext) -> LearnedRanker:
        assert context.load_ranker is not None, "the context can load ranking models"
        return LearnedRanker(context.load_ranker(self.ranking))

    def with_absolute_paths(self) -> Self:
        ranking, data = self.ranking, self.ranking.data
        found = {"run": absolute(ranking.run), "data": None if data is None else absolute(data)}
        return self.model_copy(update={"ranking": ranking.model_copy(update=found)})


class FunctionConfig(RewardSettings):
    """A function of yours: it takes `CandidateLists` and returns [U, G] numbers."""

    kind: Literal["function"] = "function"
    function: str
    """`module:function`."""
    folder: Path | None = None
    """Folder of its module, if it is not installed."""

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        if not re.fullmatch(r"[\w.]+:\w+", value):
            raise ValueError(f"the function of a reward must be 'module:function', got {value!r}")
        return value

    def build(self, context: RewardContext) -> Reward:
        return imported(self.function, self.folder)

    def with_absolute_paths(self) -> Self:
        return self if self.folder is None else self.model_copy(update={"folder": self.folder.resolve()})


class LearnedRanker:
    """The value that a ranking model predicts for showing a candidate, such as `RankingStage.rewards`."""

    def __init__(self, ranker: Ranker) -> None:
        self._ranker = ranker

    def __call__(self, lists: CandidateLists) -> RewardArray:
        """Score the candidates of users whose queries are given.

        Raises:
            ValueError: the lists have no queries.
        """
        if lists.queries is None:
            raise ValueError("a learned ranker needs the queries of the users, and the lists have none")
        reward_UG = np.asarray(self._ranker(lists.queries, lists.items_UG), dtype=np.float64)
        if reward_UG.shape != lists.items_UG.shape:
            return reward_UG  # the mix says what is wrong with it
        return np.where(lists.is_item_UG, reward_UG, 0.0)


def imported(function: str, folder: Path | None = None) -> Reward:
    """Import the function that `module:function` names.

    Args:
        folder: of the module and of what it imports at its top; None: it is installed.

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
    # Any exception: the code is not ours.
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
