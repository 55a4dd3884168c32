"""Which trainer is slow, by the time that each needs for its own work.

Trainers wait for each other in every step, so the time of a step is the same for all of them and blames
nobody. What differs is the time without waiting, over the tokens that a trainer had: of each trainer its
median over a window of steps. A trainer much slower than the median of the others is a straggler.

Source: the relative and individual scores of nvidia-resiliency-ext's straggler detection (a ratio of medians,
threshold 0.7). There the reference is the fastest rank; here it is the median of the others, since among few
trainers the fastest one's luck made every other one look slow: with lasting differences of 3 % and drifts of
5 %, 8 % of simulated hours had an alarm instead of none. Work and waiting are kept apart as in ByteRobust
(arXiv:2509.16293).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, model_validator

from rayrec.actors.trainer import StepWork
from rayrec.platform.config import Config


class StragglerConfig(Config):
    """When a trainer counts as slow."""

    window_steps: int = Field(50, ge=5)
    """Steps that a median is taken of: fewer are noise, more are late."""
    threshold: float = Field(0.77, gt=0, lt=1)
    """Share of the others' speed below which a window counts."""
    windows: int = Field(3, ge=1)
    """The last ones that are looked at."""
    slow_windows: int = Field(2, ge=1)
    """Of those, in which a trainer has to be slow."""

    @model_validator(mode="after")
    def _windows_suffice(self) -> StragglerConfig:
        if self.slow_windows > self.windows:
            raise ValueError(
                f"slow_windows is {self.slow_windows} of {self.windows} windows; lower it, or look at more"
            )
        return self


@dataclass(frozen=True)
class Straggler:
    """A trainer that is slow."""

    member: int
    slowdown: float
    """Its time per token over the median of the others', in the last window."""


@dataclass(frozen=True)
class WindowScores:
    """What a window of steps says of all trainers."""

    relative: tuple[float, ...]
    """By trainer: median time of the others over its own; below 1 is slower than they are."""
    individual: tuple[float, ...]
    """By trainer: its own best window so far over this one."""
    slow: tuple[Straggler, ...]
    """Those that are stragglers now."""
    found: tuple[Straggler, ...]
    """Of them, those that were none before."""


def relative_scores(seconds_T: Sequence[float]) -> tuple[float, ...]:
    """Each trainer's speed as a share of the others'.

    Args:
        seconds_T: time per token of each of at least two trainers, above 0.
    """
    return tuple(
        statistics.median([*seconds_T[:member], *seconds_T[member + 1 :]]) / seconds
        for member, seconds in enumerate(seconds_T)
    )


class StragglerWatch:
    """Collects steps into windows; one object per attempt. It has no clock."""

    def __init__(self, num_trainers: int, config: StragglerConfig | None = None) -> None:
        self._config = config or StragglerConfig()
        self._rates: list[list[float]] = [[] for _ in range(num_trainers)]
        """Seconds per token of each step of this window."""
        self._num_steps = 0
        self._slow: list[deque[bool]] = [deque(maxlen=self._config.windows) for _ in range(num_trainers)]
        self._best = [float("inf")] * num_trainers
        self._known: set[int] = set()

    def add(self, work_T: Sequence[StepWork]) -> WindowScores | None:
        """Take in one step; returns scores when it completes a window, else None.

        A window in which a trainer had nothing to do says nothing of anyone.
        """
        if len(work_T) != len(self._rates) or len(work_T) < 2:
            return None
        for rates, work in zip(self._rates, work_T, strict=True):
            if work.num_tokens > 0 and work.own_s > 0:
                rates.append(work.own_s / work.num_tokens)
        self._num_steps += 1
        if self._num_steps < self._config.window_steps:
            return None
        window, self._rates = self._rates, [[] for _ in self._rates]
        self._num_steps = 0
        if min(map(len, window)) < self._config.window_steps // 2:
            return None
        return self._judge([statistics.median(rates) for rates in window])

    def _judge(self, seconds_T: Sequence[float]) -> WindowScores:
        relative = relative_scores(seconds_T)
        self._best = [min(best, seconds) for best, seconds in zip(self._best, seconds_T, strict=True)]
        for slow, score in zip(self._slow, relative, strict=True):
            slow.append(score < self._config.threshold)
        now = tuple(
            Straggler(member, 1 / relative[member])
            for member, slow in enumerate(self._slow)
            if sum(slow) >= self._config.slow_windows
        )
        found = tuple(each for each in now if each.member not in self._known)
        self._known = {each.member for each in now}
        individual = tuple(best / seconds for best, seconds in zip(self._best, seconds_T, strict=True))
        return WindowScores(relative, individual, now, found)
