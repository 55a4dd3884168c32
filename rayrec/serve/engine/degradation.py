"""Less is computed while there is much to do, before anybody is refused.

A policy of steps: each is entered at one load and left below a lower one. Between the two nothing changes, or
a load near the threshold would change the answers from one request to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from rayrec.pipelines.inference.answers import FULL_BUDGET, Budget
from rayrec.serve.config.admission import StepConfig, StepName


@dataclass(frozen=True)
class DegradationLevel:
    """What is computed of an answer, by the steps in force."""

    budget: Budget = FULL_BUDGET
    ranks: bool = True
    """Whether a ranking stage ranks."""
    asks_model: bool = True
    """Whether anything is computed; popular items otherwise."""
    takes_cached: bool = False
    """Whether a cached answer will do."""


NOT_DEGRADED = DegradationLevel()


def combined(level: DegradationLevel, other: DegradationLevel) -> DegradationLevel:
    """What is computed where both hold: the less of each."""
    if level in (NOT_DEGRADED, other):
        return other
    budgets = (level.budget, other.budget)
    return DegradationLevel(
        Budget(
            *(
                min(
                    (most for most in (getattr(each, field.name) for each in budgets) if most is not None),
                    default=None,
                )
                for field in fields(Budget)
            )
        ),
        level.ranks and other.ranks,
        level.asks_model and other.asks_model,
        level.takes_cached or other.takes_cached,
    )


class DegradationPolicy:
    """Which steps are in force. Not thread-safe."""

    def __init__(self, steps: Sequence[StepConfig]) -> None:
        """
        Args:
            steps: neither `enter` nor `leave` falls from one to the next.
        """
        self._steps = list(steps)
        self._levels = [NOT_DEGRADED]
        for step in self._steps:
            self._levels.append(_after(self._levels[-1], step))
        self._level = 0

    def update(self, load: float) -> DegradationLevel:
        """Enter and leave steps; what is in force now."""
        self._level = self._level_at(load)
        return self._levels[self._level]

    def at(self, load: float) -> list[StepName]:
        """The steps that would be in force, in the order in which they are entered; changes nothing."""
        return [step.do for step in self._steps[: self._level_at(load)]]

    def _level_at(self, load: float) -> int:
        level = self._level
        while level < len(self._steps) and load >= self._steps[level].enter:
            level += 1
        while level and load < self._steps[level - 1].leave:
            level -= 1
        return level

    @property
    def level(self) -> int:
        """Number of steps in force."""
        return self._level


def _after(before: DegradationLevel, step: StepConfig) -> DegradationLevel:
    budget = before.budget
    if step.do == "fewer_beams":
        return replace(before, budget=replace(budget, max_beams=step.to))
    if step.do == "shorter_history":
        return replace(before, budget=replace(budget, max_events=step.to))
    if step.do == "no_ranking":
        return replace(before, ranks=False)
    if step.do == "cached_answer":
        return replace(before, takes_cached=True)
    return replace(before, asks_model=False)
