"""Pictures of a plan: where a step goes, what it depends on, and how it grows with the trainers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayrec.pipelines.capacity.planner import Change, ClusterPlan
from rayrec.pipelines.capacity.report import STAGE_WORDS
from rayrec.pipelines.capacity.workload import Scale
from rayrec.platform.errors import InputError

BARS = 8
"""Sensitivities and changes that are shown."""
FRACTIONS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Of the trainers, with as large a part of readers and feature workers, and all servers."""


def draw_plan(plan: ClusterPlan, changes: Sequence[Change], folder: Path) -> list[Path]:
    """Draw a plan as SVG files: `stages`, `sensitivity` and `scaling`.

    Args:
        changes: of the run, with their steps.
        folder: made if it is not there; files of these names are replaced.

    Raises:
        InputError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--pictures needs matplotlib, which is not installed; pip install matplotlib")
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"stages": _stages(plan), "sensitivity": _sensitivity(plan, changes), "scaling": _scaling(plan)}
    paths = []
    for name, figure in drawn.items():
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        paths.append(path)
    return paths


def _figure(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(7.2, height), layout="constrained")


def _stages(plan: ClusterPlan) -> Any:
    """How long each stage is busy in a step, and the step with its range."""
    figure = _figure(2.8)
    axes = figure.subplots()
    stages = plan.step.stages
    names = list(reversed(plan.step.order))
    axes.barh([STAGE_WORDS[name] for name in names], [stages[name] for name in names], color="#4a7fb5")
    axes.axvline(plan.step.seconds, color="black")
    axes.axvspan(plan.low_s, plan.high_s, color="black", alpha=0.1)
    axes.set(title="A step (line), its range, and its stages", xlabel="seconds", xlim=(0, None))
    return figure


def _sensitivity(plan: ClusterPlan, changes: Sequence[Change]) -> Any:
    """What a fifth more or less of a number does, and what changes of the run do."""
    figure = _figure(4.4)
    numbers, run = figure.subplots(2, 1, height_ratios=(3, 2))
    shown = list(reversed(plan.sensitivities[:BARS]))
    words = [each.what for each in shown]
    numbers.barh(words, [100 * each.lower for each in shown], color="#c0504d", label="20 % less")
    numbers.barh(words, [100 * each.higher for each in shown], color="#4a7fb5", alpha=0.8, label="20 % more")
    numbers.set(title="A step, if a number is off", xlabel="% of a step")
    numbers.legend()
    tried = list(reversed(changes[:BARS]))
    run.barh([each.what for each in tried], [plan.step.seconds / each.step.seconds for each in tried])
    run.axvline(1.0, color="black", linewidth=0.8)
    run.set(title="With one change of the run", xlabel="times as fast")
    return figure


def _scaling(plan: ClusterPlan) -> Any:
    """Rows a second by the number of trainers, with as many readers and feature workers for each."""
    figure = _figure(3.0)
    axes = figure.subplots()
    work, counts, rates = plan.work, [], []
    for fraction in FRACTIONS:
        trainers = round(fraction * work.num_trainers)
        if trainers < 1 or trainers in counts:
            continue
        part = work.scaled(
            Scale(
                trainers=trainers,
                readers=max(1, round(fraction * work.num_readers)),
                feature_workers=max(1, round(fraction * work.num_feature_workers)),
            )
        )
        counts.append(trainers)
        rates.append(part.rows / plan.calibration.plan(part, plan.cluster).seconds)
    axes.plot(counts, rates, marker="o", label="planned")
    axes.plot(counts, [rates[0] * count / counts[0] for count in counts], linestyle="--", label="linear")
    axes.set(title="Rows a second, with the same servers", xlabel="trainers", xscale="log", yscale="log")
    axes.legend()
    return figure
