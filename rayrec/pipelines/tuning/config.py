"""What a YAML file of `rayrec tune` holds."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rayrec.platform.config import Config


def label(value: Any) -> str:
    """A value as text, the same for the same alone: Python takes True for 1, and Optuna no lists."""
    return json.dumps(value, sort_keys=True, default=str)


class FloatRange(Config):
    """Numbers from `low` to `high`, both included."""

    kind: Literal["float"]
    low: float
    high: float
    log: bool = False
    """Whether it is searched by the logarithm, as learning rates are."""
    step: float | None = Field(None, gt=0)
    """None: any number between them."""

    @property
    def not_searched_because(self) -> str | None:
        """Why there is nothing to search; None: there is."""
        return _why_no_range(self.low, self.high, self.log, self.step)


class IntRange(Config):
    """Whole numbers from `low` to `high`, both included."""

    kind: Literal["int"]
    low: int
    high: int
    log: bool = False
    """Whether it is searched by the logarithm, as widths and batch sizes are."""
    step: int = Field(1, ge=1)

    @property
    def not_searched_because(self) -> str | None:
        """Why there is nothing to search; None: there is."""
        return _why_no_range(self.low, self.high, self.log, None if self.step == 1 else self.step)


class Choice(Config):
    """One of several values, in no order."""

    kind: Literal["choice"]
    values: tuple[Any, ...] = Field(min_length=2)
    """Anything that the setting may be, whole sections included."""

    @property
    def not_searched_because(self) -> str | None:
        """Why there is nothing to search; None: there is."""
        for place, value in enumerate(self.values):
            if label(value) in map(label, self.values[:place]):
                return f"the value {value!r} is there twice; name it once"
        return None


def _why_no_range(low: float, high: float, log: bool, step: float | None) -> str | None:
    if low >= high:
        return f"there is nothing between low {low:g} and high {high:g}; raise `high`"
    if log and low <= 0:
        return f"a range with `log` begins above 0, and its low is {low:g}"
    if step is None:
        return None
    if log:
        return "a range has `log` or a `step`, and not both: steps are of equal size"
    num_steps = (high - low) / step
    if abs(num_steps - round(num_steps)) > 1e-6:
        return f"steps of {step:g} from low {low:g} do not meet high {high:g}; change one of them"
    return None


Dimension = Annotated[FloatRange | IntRange | Choice, Field(discriminator="kind")]


class PruneConfig(Config):
    """When a trial ends early: where it is worse than the median of earlier ones after as many validations.

    A trial is compared with those that were told before it was begun, and no others, so that it does not
    depend on which of several finishes first.
    """

    after_validations: int = Field(1, ge=1)
    """No trial ends before so many."""
    after_trials: int = Field(5, ge=2)
    """Trials that have to be there to be compared with."""


class TrialConfig(Config):
    """What one trial takes of a machine or a cluster."""

    actors: bool = False
    """Whether a trial has actors of its own, as `rayrec train` has. Without, it is one process, which takes
    less where trainings are small: the bits are the same."""
    cpus: int = Field(1, ge=1)
    """CPUs of a trial that is one process, and its threads."""
    tries: int = Field(2, ge=1)
    """How often a trial is started whose process dies without a word, or with an error that neither settings
    nor machine explain, and that has no new snapshot, before it counts as failed; also over `--resume`."""


class TuningConfig(Config):
    """Everything that a search depends on."""

    config: str
    """YAML file of the run that every trial begins with."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Dotted keys of the run and their values, other than in the file, for all trials."""
    space: dict[str, Dimension] = Field(min_length=1)
    """What is searched: dotted keys of the run, such as `training.optimizer.learning_rate`."""
    trials: int = Field(20, ge=1)
    """The budget: trainings that are tried, those that fail or end early included."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Of the search; runs have their own, which all trials share."""
    metric: str | None = None
    """Of validation, such as `ndcg@10`: trials are compared by its value at their best snapshots. None: that
    by which runs choose this snapshot."""
    at_once: int = Field(1, ge=1)
    """Trials that run at the same time. The values that are tried depend on it: a later trial is chosen
    without the results of those that still run."""
    random_trials: int = Field(10, ge=1)
    """Trials that are chosen at random, before results say where to look."""
    begin_with_config: bool = True
    """Whether the first trial has the values of the config itself."""
    prune: PruneConfig | None = None
    """None: every trial trains to its end."""
    finalists: int = Field(1, ge=1)
    """Leading trials of recommenders that are judged once more at the end, on all validation users, if
    `evaluation.max_users` left some out; the best of them is the best of the search. The trial of the config
    is judged with them. 1: none is."""
    trial: TrialConfig = TrialConfig()
    keep: Literal["best", "all"] = "best"
    """Whose snapshots stay; until the end, those of finalists do, too. Logs and settings of all trials do."""
    folder: str | None = None
    """Where trials and results lie; None: `runs/` and the name of this file."""

    @model_validator(mode="after")
    def _there_is_something_to_search(self) -> TuningConfig:
        for key, dimension in self.space.items():
            if (reason := dimension.not_searched_because) is not None:
                raise ValueError(f"space.{key}: {reason}")
        return self
