"""Search for the settings of a run: a tuning file in, a folder with trials and the best config out.

tune ─► Search.run ─► Sampler.ask ─► Trials.begin ─► run_trial ─► train
             ▲                                           │
             └── journal, best.yaml, trials.csv ◄────────┘ outcome
Trials.judged ─► winner of the leading trials ─► best.yaml
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from rayrec import __version__
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.assembly import open_task
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.pipelines.tasks.sizes import with_sizes
from rayrec.pipelines.tasks.task import Task
from rayrec.pipelines.tuning.config import TrialConfig, TuningConfig
from rayrec.pipelines.tuning.finalists import judged, restore, winner
from rayrec.pipelines.tuning.folder import Entry, TuningFolder
from rayrec.pipelines.tuning.pruning import Bounds
from rayrec.pipelines.tuning.results import Results
from rayrec.pipelines.tuning.running import Trials, trials_on_ray
from rayrec.pipelines.tuning.sampling import Sampler, check_installed
from rayrec.pipelines.tuning.search import Search, Tried
from rayrec.pipelines.tuning.space import SearchSpace, Settings
from rayrec.pipelines.tuning.trial import TrialSpec
from rayrec.platform.errors import InputError

logger = logging.getLogger(__name__)

OpenTrials = Callable[[RunConfig, TrialConfig, int], AbstractContextManager[Trials]]
"""`trials_on_ray` or `trials_here`: with the config, what a trial takes, and how many run at once."""
OnTrial = Callable[[Tried, "Tried | None"], None]
"""Called with every trial that is told, in order, and the best one so far."""


@dataclass(frozen=True)
class TuningResult:
    """What a search has found."""

    folder: str
    metric: str
    is_larger_better: bool
    best: int
    """Number of the best trial."""
    best_value: float
    """As trials are compared, perhaps on a part of the users."""
    best_settings: Settings
    trials: list[dict[str, Any]]
    """In order: number, settings and outcome."""
    judged: dict[int, float]
    """The metric of finalists on all validation users, by number; empty where none were judged again."""
    importances: dict[str, float]
    """How much each setting decides whether a trial is among the best; empty where too few are complete."""


def tune(
    tuning: TuningConfig,
    folder: str | Path,
    resume: bool | Literal["if_begun"] = False,
    open_trials: OpenTrials = trials_on_ray,
    on_trial: OnTrial | None = None,
) -> TuningResult:
    """Try settings of a run, as many as the budget allows, and keep the best.

    Args:
        folder: of the search; new or empty, unless it goes on.
        resume: go on with the search that the folder holds: trials that were told are not trained again, and
            those that were cut short go on from their snapshots. `if_begun`: if it holds one. Of a folder
            that has lost its trials, the journal is enough: only those that lead are trained again.
        open_trials: where trials run; the outcomes are the same.

    Raises:
        InputError: a key, a bound or a metric that does not exist, or a folder that cannot be used: nothing
            was started. Or all trials failed; names the first reason.
    """
    check_installed()
    space = SearchSpace.of(tuning)
    task = _opened(space.base)
    metric, is_larger_better = _metric_of(tuning, task)
    first = space.settings_of_base() if tuning.begin_with_config else None
    there = TuningFolder(Path(folder).absolute())
    if resume == "if_begun":
        resume = there.holds_search
    if resume:
        there.check_continues(tuning, space)
    else:
        there.check_free()
    with there.locked():
        before = _begun(there, tuning, space, _begins_with(task, metric), bool(resume))
        results = Results(there, tuning, space, metric)
        there.read_judged()  # it is looked at before trials are trained
        num_finalists = tuning.finalists if _leaves_users_out(task, space.base) else 1

        def told(tried: Tried, leading: Sequence[Tried]) -> None:
            results.told(tried, leading)
            if on_trial is not None:
                on_trial(tried, leading[0] if leading else None)

        def spec_of(number: int, settings: Settings, bounds: Bounds) -> TrialSpec:
            return TrialSpec(
                number,
                there.trial_path(number),
                _config_of_trial(space.config_of(settings), tuning.trial),
                metric,
                is_larger_better,
                bounds,
                tuning.trial.actors,
                tuning.trial.tries,
            )

        sampler = Sampler(tuning.space, tuning.seed, tuning.random_trials, is_larger_better, first)
        with open_trials(space.base, tuning.trial, tuning.at_once) as trials:
            search = Search(tuning, is_larger_better, sampler, trials, spec_of, told, before, num_finalists)
            search.run()
            leading, values = search.leading, dict[int, float]()
            if not leading:
                reasons = [tried.outcome.reason for tried in search.tried]
                raise InputError(
                    f"{folder}: all {len(reasons)} trials failed, the first one because: {reasons[0]}"
                )

            def spec_again(tried: Tried) -> TrialSpec:
                return spec_of(tried.number, tried.settings, ())

            if len(leading) > 1:
                known = there.read_judged()
                restore([each for each in leading if each.number not in known], there, trials, spec_again)
                values = judged(leading, there, trials, metric)
            best = winner(leading, values, is_larger_better)
            restore([best], there, trials, spec_again)
            if num_finalists > 1:
                results.won(best, values.get(best.number))
    assert best.outcome.value is not None, "it is complete"
    return TuningResult(
        str(folder),
        metric,
        is_larger_better,
        best.number,
        best.outcome.value,
        best.settings,
        [
            {"trial": tried.number, "settings": tried.settings, **tried.outcome.to_json()}
            for tried in search.tried
        ],
        values,
        sampler.importances(),
    )


def _leaves_users_out(task: Task, base: RunConfig) -> bool:
    most = base.evaluation.max_users
    if most is None or not isinstance(task, NextItemTask):
        return False
    return most < task.dataset.manifest.counts["valid_rows"]


def _opened(base: RunConfig) -> Task:
    """The run's data and what is asked of them.

    Raises:
        InputError: the data cannot be used.
    """
    if base.data.follow is not None:
        raise InputError(
            "config: data.follow is set, and a run that follows a folder has no end to be judged at; leave "
            "it out"
        )
    task = open_task(with_sizes(base.with_absolute_paths()), checksums=False)
    task.check_validation()
    return task


def _metric_of(tuning: TuningConfig, task: Task) -> tuple[str, bool]:
    """The metric of the search, and whether larger values are better.

    Raises:
        InputError: validation gives no such metric.
    """
    known, metric = task.judged_by, tuning.metric or task.metric
    if metric not in known:
        close = difflib.get_close_matches(metric, known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}? It can by" if close else "it can by"
        raise InputError(
            f"metric: validation of {task.config.model.name!r} cannot compare runs by {metric!r}; "
            f"{hint} {', '.join(known)}"
        )
    if metric != task.metric:
        logger.info(
            "trials are compared by %s, each at the snapshot that is the best by %s", metric, task.metric
        )
    return metric, known[metric]


def _begins_with(task: Task, metric: str) -> dict[str, Any]:
    """What trials depend on besides settings, as the journal's first line has it."""
    return {
        "rayrec": __version__,
        **{name: version(name) for name in ("optuna", "numpy")},
        "metric": metric,
        "data": task.fingerprint,
        "semantic_ids": task.semantic_ids_version,
    }


def _begun(
    there: TuningFolder, tuning: TuningConfig, space: SearchSpace, how: dict[str, Any], resume: bool
) -> Sequence[Entry]:
    """Begin a search, or go on with one: its journal."""
    if not resume:
        there.begin(tuning, space, how)
        return ()
    begun, before = there.read_journal()
    differing = [
        f"{name} ({begun.get(name, 'not noted')} then, {value} now)"
        for name, value in how.items()
        if name not in begun or begun[name] != value
    ]
    if differing:
        raise InputError(
            f"{there.path}: the search was begun with another {', another '.join(differing)}, so that its "
            "trials cannot be compared with new ones; go on with what it was begun with, or start again in "
            "another folder"
        )
    if len(before) > tuning.trials:
        raise InputError(
            f"trials is {tuning.trials}, and the search in {there.path} has tried {len(before)} already; a "
            "search that goes on may have more, not less"
        )
    there.go_on(tuning)
    return before


def _config_of_trial(config: RunConfig, trial: TrialConfig) -> RunConfig:
    """A run that others do not see, with the threads that it gets."""
    pipeline = config.pipeline
    threads = max(1, int(pipeline.cpus_per_trainer)) if trial.actors else trial.cpus
    changed: dict[str, Any] = {
        "snapshots": config.snapshots.model_copy(update={"copy_to": None, "publish": None}),
        "pipeline": pipeline.model_copy(update={"trainer_threads": pipeline.trainer_threads or threads}),
    }
    return config.model_copy(update=changed).with_absolute_paths()
