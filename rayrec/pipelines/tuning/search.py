"""The order in which trials are chosen, begun and told, which decides what is tried.

    ask(n) ─► begin(n)      as soon as trials 0 … n − at_once were told, and before any later one is
    outcome(n) ─► tell(n)   in the order of the numbers, whichever is over first

So trial n is chosen, and its bounds for ending early are drawn, with the outcomes of exactly those trials
that were told by then: how fast others are changes nothing. A search that goes on asks and tells again what
its journal has, which costs nothing, and is then where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayrec.pipelines.tuning.config import TuningConfig, label
from rayrec.pipelines.tuning.folder import Entry
from rayrec.pipelines.tuning.outcome import Outcome
from rayrec.pipelines.tuning.pruning import Bounds, bounds_of
from rayrec.pipelines.tuning.running import Trials
from rayrec.pipelines.tuning.sampling import Sampler
from rayrec.pipelines.tuning.space import Settings
from rayrec.pipelines.tuning.trial import TrialSpec
from rayrec.platform.errors import InputError


@dataclass(frozen=True)
class Tried:
    """A trial that was told."""

    number: int
    settings: Settings
    outcome: Outcome
    is_new: bool
    """Whether it is not in the journal yet."""


class Search:
    """Tries settings, and remembers what came of them."""

    def __init__(
        self,
        tuning: TuningConfig,
        is_larger_better: bool,
        sampler: Sampler,
        trials: Trials,
        spec_of: Callable[[int, Settings, Bounds], TrialSpec],
        on_told: Callable[[Tried, Sequence[Tried]], None],
        before: Sequence[Entry] = (),
        num_finalists: int = 1,
    ) -> None:
        """
        Args:
            spec_of: what a trial of this number and these settings has to know. An `InputError` is how the
                trial ends.
            on_told: called with every trial, in order, also those of the journal, and those that lead then.
            before: the journal of the search that goes on.
            num_finalists: trials that lead.
        """
        self._tuning = tuning
        self._is_larger_better = is_larger_better
        self._sampler = sampler
        self._trials = trials
        self._spec_of = spec_of
        self._on_told = on_told
        self._before = before
        self._num_finalists = num_finalists
        self._asked: list[Settings] = []
        self._refused: dict[int, Outcome] = {}
        """Of trials that no run can be made of."""
        self.tried: list[Tried] = []
        """In order."""

    def run(self) -> None:
        """Try until the budget is used up.

        Raises:
            InputError: the journal has other settings than are suggested now.
        """
        for number in range(self._tuning.trials):
            while len(self.tried) <= number - self._tuning.at_once:
                self._tell_next()
            self._begin(number)
        while len(self.tried) < self._tuning.trials:
            self._tell_next()

    @property
    def leading(self) -> list[Tried]:
        """The finalists, best first: of complete trials the best, of equal ones the first, and that of the
        config itself."""
        sign = -1.0 if self._is_larger_better else 1.0
        complete = [
            tried
            for tried in self.tried
            if tried.outcome.state == "complete" and tried.outcome.same_as is None
        ]
        complete.sort(key=lambda tried: sign * (tried.outcome.value or 0.0))
        leading, others = complete[: self._num_finalists], complete[self._num_finalists :]
        if self._tuning.begin_with_config and self._num_finalists > 1:
            leading += [tried for tried in others if tried.number == 0]
        return leading

    def _begin(self, number: int) -> None:
        settings = self._sampler.ask()
        if number < len(self._before) and label(self._before[number].settings) != label(settings):
            raise InputError(
                f"trial {number} of the journal has {self._before[number].settings}, and {settings} is "
                "suggested now: the search was begun with another version of Optuna or numpy, which the "
                "first line of the journal names; install that, or start again in another folder"
            )
        self._asked.append(settings)
        if number >= len(self._before) and self._same_as(number) is None:
            bounds = bounds_of(
                (tried.outcome for tried in self.tried), self._tuning.prune, self._is_larger_better
            )
            try:
                spec = self._spec_of(number, settings, bounds)
            except InputError as error:  # values that do not go together, each of which is one alone
                self._refused[number] = Outcome("failed", reason=str(error))
                return
            self._trials.begin(spec)

    def _tell_next(self) -> None:
        number = len(self.tried)
        settings = self._asked[number]
        is_new = number >= len(self._before)
        if not is_new:
            outcome = self._before[number].outcome
        elif (earlier := self._same_as(number)) is not None:
            known = self.tried[earlier].outcome
            outcome = Outcome(
                known.state, known.value, known.validations, known.reason, known.steps, known.best_step,
                same_as=earlier,
            )  # fmt: skip
        elif number in self._refused:
            outcome = self._refused.pop(number)
        else:
            outcome = self._trials.outcome(number)
        self._sampler.tell(number, outcome)
        self.tried.append(Tried(number, settings, outcome, is_new))
        self._on_told(self.tried[-1], self.leading)

    def _same_as(self, number: int) -> int | None:
        """Number of the first trial before this one that has its settings: trainings repeat to the bit."""
        first = [label(settings) for settings in self._asked].index(label(self._asked[number]))
        return first if first < number else None
