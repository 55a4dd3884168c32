"""One trial: a training in a folder of its own, and what came of it. Runs wherever it is sent.

TRIAL/            a run's folder, as `rayrec train` makes it
TRIAL/trial.json  the outcome, when it is over
TRIAL.starts.json beside it, until it is over: how often it was started
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.lists import MODEL, MODEL_UNMASKED
from rayrec.pipelines.runs.run_folder import RunFolder, StoppedError
from rayrec.pipelines.training.placements import in_process, on_ray
from rayrec.pipelines.training.train import train
from rayrec.pipelines.tuning.faults import fault_of
from rayrec.pipelines.tuning.outcome import Outcome
from rayrec.pipelines.tuning.pruning import Bounds, stopped_at
from rayrec.pipelines.tuning.starts import Starts
from rayrec.platform.errors import InputError, MachineError
from rayrec.platform.files import write_json
from rayrec.platform.ray_errors import root_cause

logger = logging.getLogger(__name__)

OUTCOME_FILE = "trial.json"
ALIVE_S, LOOK_AGAIN_S = 60.0, 0.5
"""Time in which a process of a search that was killed is gone, and between two looks."""

Train = Callable[..., Any]
"""`rayrec.pipelines.training.train.train`, or what stands for it."""


class MissingMetricError(InputError):
    """A metric of the task that its data give no figure for; no trial of the search would have it."""


@dataclass(frozen=True)
class TrialSpec:
    """Everything that a trial has to know, wherever it runs."""

    number: int
    folder: Path
    config: RunConfig
    metric: str
    is_larger_better: bool
    bounds: Bounds = ()
    """That it has to reach to go on."""
    actors: bool = False
    """Whether it has actors of its own, on the connected cluster."""
    tries: int = 2
    """How often it is started, if each start ends without an outcome and without a new snapshot."""


def run_trial(spec: TrialSpec, train: Train = train, sleep: Callable[[float], None] = time.sleep) -> Outcome:
    """Train a trial, or go on with one that was cut short; one that is over says how it ended.

    What its settings do wrong is the trial's outcome. What has nothing to do with them, such as a disk that
    is full, is raised, and the trial is begun again when the search goes on. An unknown error is raised, too,
    and counts as one of the trial's tries, as a process that dies does.
    """
    file = spec.folder / OUTCOME_FILE
    if file.is_file():
        return Outcome.of_json(json.loads(file.read_bytes()))
    _wait_until_free(spec.folder, sleep)
    starts = Starts(spec.folder)
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    outcome = replace(_outcome(spec, train, starts), minutes=(time.monotonic() - began_s) / 60)
    if not spec.actors:
        outcome = replace(outcome, cpu_minutes=(time.process_time() - began_cpu_s) / 60)
    spec.folder.mkdir(parents=True, exist_ok=True)  # a training that is refused makes none
    write_json(file, outcome.to_json())
    starts.forget()
    return outcome


def judge(trial: Path, metric: str) -> float:
    """A metric of a recommender's best snapshot on all validation users, who are ranked for as in training.

    Raises:
        InputError: the snapshot is not there any more.
    """
    report = evaluate(trial, split="valid", baselines=False)
    ranked = MODEL if RunFolder.open(trial).config.evaluation.exclude_seen else MODEL_UNMASKED
    return float(report.results[ranked][metric].value)


def _outcome(spec: TrialSpec, train: Train, starts: Starts) -> Outcome:
    if starts.number >= spec.tries:
        reason = f"it was started {starts.number} times, and each time {starts.ended}"
        logger.warning("trial %d failed: %s", spec.number, reason)
        values = _validations(spec.folder, spec.metric).values()
        return Outcome("failed", validations=tuple(values), reason=reason)
    starts.count()
    try:
        return _trained(spec, train)
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, MissingMetricError) or fault_of(cause, spec.config) == "machine":
            starts.take_back()
        else:
            starts.note(_said(cause))
        raise
    except BaseException:  # it was interrupted
        starts.take_back()
        raise


def _wait_until_free(folder: Path, sleep: Callable[[float], None]) -> None:
    """Where the search was killed, a process of its cluster may train on for a moment.

    Raises:
        MachineError: it does not end.
    """
    waited_s = 0.0
    while RunFolder(folder).is_alive:
        if waited_s >= ALIVE_S:
            raise MachineError(
                f"{folder}: another process trains this trial; end it, or choose another folder for the "
                "search"
            )
        sleep(LOOK_AGAIN_S)
        waited_s += LOOK_AGAIN_S


def _trained(spec: TrialSpec, train: Train) -> Outcome:
    values = _validations(spec.folder, spec.metric)
    if (early := _pruned(spec, values)) is not None:
        # It was cut short between the decision and its record.
        RunFolder(spec.folder).update(state="stopped", error=early.reason)
        return early

    def on_validation(step: int, figures: dict[str, float]) -> None:
        values[step] = _value_of(figures, spec.metric)
        if (pruned := _pruned(spec, values)) is not None:
            raise StoppedError(pruned.reason)

    try:
        result = train(
            spec.config,
            spec.folder,
            "if_begun",
            on_validation=on_validation,
            cluster=on_ray if spec.actors else in_process,
        )
    except StoppedError:
        pruned = _pruned(spec, values)
        assert pruned is not None, "only that stops a trial"
        return pruned
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, MissingMetricError) or fault_of(cause, spec.config) != "settings":
            raise
        logger.warning("trial %d failed: %s", spec.number, _said(cause))
        return Outcome("failed", validations=tuple(values.values()), reason=_said(cause))
    value = values.get(result.best_step)
    ended = Outcome("complete", value, tuple(values.values()), steps=result.steps, best_step=result.best_step)
    if value is None:
        reason = f"{spec.metric} is no number after {result.best_step:,} steps, at the best snapshot"
        return replace(ended, state="failed", reason=reason)
    return ended


def _pruned(spec: TrialSpec, values: dict[int, float | None]) -> Outcome | None:
    """The outcome of a trial that its validations end; None: it goes on."""
    place = stopped_at(list(values.values()), spec.bounds, spec.is_larger_better)
    if place is None:
        return None
    step, value = list(values.items())[place]
    shown = "no number" if value is None else f"{value:.4g}"
    median = f"the median of earlier trials is {spec.bounds[place]:.4g}"
    reason = f"{spec.metric} {shown} after {step:,} steps: {median}"
    return Outcome("pruned", value, tuple(values.values())[: place + 1], reason, steps=step)


def _validations(folder: Path, metric: str) -> dict[int, float | None]:
    """The metric by the steps of each validation that the folder has a record of."""
    if not (folder / "run.json").is_file():
        return {}
    return {
        record["step"]: _value_of(record["valid"], metric)
        for record in RunFolder(folder).records()
        if "valid" in record
    }


def _value_of(figures: dict[str, Any], metric: str) -> float | None:
    """None for what is no number.

    Raises:
        MissingMetricError: validation has no such figure.
    """
    if metric not in figures:
        raise MissingMetricError(f"validation gives no {metric!r} here; it gives {', '.join(figures)}")
    value = figures[metric]
    return None if value is None or not math.isfinite(value) else float(value)


def _said(cause: BaseException) -> str:
    return str(cause) if isinstance(cause, InputError) else f"{type(cause).__name__}: {cause}"
