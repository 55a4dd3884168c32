"""Which settings are tried next: Optuna's tree-structured Parzen estimator, asked and told in a fixed order.

Trials that were asked for and not told yet count as bad ones (Optuna's constant liar), so that those that run
at the same time differ. What is suggested is a function of the seed and of the order of the calls.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rayrec.pipelines.tuning.config import Choice, Dimension, FloatRange, label
from rayrec.pipelines.tuning.outcome import Outcome
from rayrec.pipelines.tuning.space import Settings
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.distributions import BaseDistribution


def check_installed() -> None:
    """Refuse to search without Optuna.

    Raises:
        InputError: says how to install it.
    """
    if importlib.util.find_spec("optuna") is None:
        raise InputError(
            "rayrec tune needs Optuna, which is not installed; install the extra with: pip install "
            "'rayrec[tune]'"
        )


class Sampler:
    """Suggests the settings of trials, from the first on."""

    def __init__(
        self,
        space: Mapping[str, Dimension],
        seed: int,
        random_trials: int,
        is_larger_better: bool,
        first: Settings | None = None,
    ) -> None:
        """
        Args:
            random_trials: that have to be complete before results say where to look.
            first: settings of the first trial; None: as of the others.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = space
        self._distributions = {key: _distribution(dimension) for key, dimension in space.items()}
        self._study = optuna.create_study(
            direction="maximize" if is_larger_better else "minimize",
            sampler=optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=random_trials, multivariate=True, constant_liar=True
            ),
        )
        self._asked: list[Trial] = []
        if first is not None:
            self._study.enqueue_trial({key: _sampled(space[key], value) for key, value in first.items()})

    def ask(self) -> Settings:
        """Settings of the next trial."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of features that Optuna may change: versions are compared
            trial = self._study.ask(self._distributions)
        self._asked.append(trial)
        return {key: _plain(self._space[key], trial.params[key]) for key in self._space}

    def tell(self, number: int, outcome: Outcome) -> None:
        """How a trial ended that was asked for."""
        from optuna.trial import TrialState

        trial = self._asked[number]
        if outcome.state == "complete":
            self._study.tell(trial, outcome.value)
            return
        if outcome.state == "pruned":
            for place, value in enumerate(outcome.validations):
                trial.report(float("nan") if value is None else value, place)
        self._study.tell(trial, state=TrialState.PRUNED if outcome.state == "pruned" else TrialState.FAIL)

    def importances(self) -> dict[str, float]:
        """How much each setting decides whether a trial is among the best, as shares of 1; empty where too
        few trials are complete to say (PED-ANOVA, Watanabe et al., IJCAI 2023)."""
        from optuna.trial import TrialState

        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len({trial.value for trial in complete}) < _FEWEST_FOR_IMPORTANCE:
            return {}
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get_param_importances(self._study, evaluator=PedAnovaImportanceEvaluator())


_FEWEST_FOR_IMPORTANCE = 10
"""Complete trials of different values."""


def _distribution(dimension: Dimension) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(dimension, Choice):
        return CategoricalDistribution([label(value) for value in dimension.values])
    if isinstance(dimension, FloatRange):
        return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)
    return IntDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def _sampled(dimension: Dimension, value: Any) -> Any:
    return label(value) if isinstance(dimension, Choice) else value


def _plain(dimension: Dimension, sampled: Any) -> Any:
    if isinstance(dimension, Choice):
        return next(value for value in dimension.values if label(value) == sampled)
    return sampled
