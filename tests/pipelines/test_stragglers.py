"""Who is slow: found when it is so, and nobody else, in spite of noise with heavy tails."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from benchmarks.health_simulation import STEP_S, simulated_work
from rayrec.actors.trainer import StepWork
from rayrec.models.program.torch_program import TorchProgram
from rayrec.pipelines.metrics.stragglers import (
    StragglerConfig,
    StragglerWatch,
    WindowScores,
    relative_scores,
)
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from tests.helpers.training_runs import settings, walks

SMALL = StragglerConfig(window_steps=5)


def windows_of(watch: StragglerWatch, steps: Iterable[list[StepWork]]) -> list[WindowScores]:
    return [scores for step in steps if (scores := watch.add(step)) is not None]


def steps_of(*seconds_T: float, num_steps: int = 5) -> list[list[StepWork]]:
    return num_steps * [[StepWork(seconds, 10) for seconds in seconds_T]]


def test_scores_compare_with_the_others_and_with_ones_own_best():
    watch = StragglerWatch(3, SMALL)

    first, second = windows_of(watch, [*steps_of(1.0, 2.0, 4.0), *steps_of(2.0, 2.0, 2.0)])

    assert relative_scores([1.0, 2.0, 4.0]) == (3.0, 1.25, 0.375)
    assert first.relative == pytest.approx((3.0, 1.25, 0.375))
    assert first.individual == (1.0, 1.0, 1.0)
    assert second.relative == (1.0, 1.0, 1.0)
    assert second.individual == (0.5, 1.0, 1.0)


def test_a_straggler_is_told_once_with_its_slowdown_and_again_when_it_was_well_between():
    watch = StragglerWatch(2, SMALL)
    slow, well = steps_of(1.0, 1.5), steps_of(1.0, 1.0)

    windows = windows_of(watch, [*slow, *slow, *slow, *well, *well, *slow, *slow])

    assert [[each.member for each in window.found] for window in windows] == [[], [1], [], [], [], [], [1]]
    assert [[each.member for each in window.slow] for window in windows] == [[], [1], [1], [1], [], [], [1]]
    assert windows[1].found[0].slowdown == pytest.approx(1.5)


def test_one_slow_window_is_no_straggler():
    watch = StragglerWatch(2, SMALL)
    slow, well = steps_of(1.0, 9.0), steps_of(1.0, 1.0)

    assert not any(window.slow for window in windows_of(watch, [*slow, *well, *well, *slow, *well]))


def test_more_tokens_are_no_slowness_and_waiting_is_not_there_to_be_counted():
    watch = StragglerWatch(2, SMALL)
    steps = 20 * [[StepWork(1.0, 100), StepWork(3.0, 300)]]

    assert all(window.relative == (1.0, 1.0) for window in windows_of(watch, steps))


@pytest.mark.parametrize("work", [[], [StepWork(1.0, 10)], [StepWork(1.0, 10)] * 3])
def test_one_trainer_alone_or_another_number_is_not_compared(work):
    watch = StragglerWatch(max(len(work) - 1, 1), SMALL)

    assert windows_of(watch, 20 * [work]) == []


def test_a_window_in_which_a_trainer_had_nothing_to_do_says_nothing():
    watch = StragglerWatch(2, SMALL)

    assert windows_of(watch, 10 * [[StepWork(1.0, 10), StepWork(0.1, 0)]]) == []


@pytest.mark.parametrize("slow_member", range(4))
def test_one_of_four_at_two_thirds_of_the_speed_is_found_within_three_windows(slow_member):
    config = StragglerConfig()
    steps = config.windows * config.window_steps
    for seed in range(10):
        windows = windows_of(StragglerWatch(4), simulated_work(seed, 4, steps, slow_member))

        assert [one.member for window in windows for one in window.found] == [slow_member], seed


def test_nobody_is_blamed_in_an_hour_without_a_slow_one():
    hour = simulated_work(1, 4, int(3600 / STEP_S))

    assert not any(window.slow for window in windows_of(StragglerWatch(4), hour))


def test_settings_that_could_never_find_anyone_are_refused():
    with pytest.raises(ValueError, match="slow_windows is 4 of 3 windows"):
        StragglerConfig(slow_windows=4)


@pytest.mark.slow
def test_a_run_says_which_trainer_is_slow_and_where_though_all_steps_take_as_long(
    tmp_path, monkeypatch, caplog
):
    backward, slow = TorchProgram.backward, []

    def delayed(self: TorchProgram, *arguments: Any, **named: Any) -> Any:
        if not slow:
            slow.append(self)
        if self is slow[0]:
            time.sleep(0.15)
        return backward(self, *arguments, **named)

    monkeypatch.setattr(TorchProgram, "backward", delayed)
    watch = partial(StragglerWatch, config=SMALL)
    monkeypatch.setattr("rayrec.pipelines.training.run.StragglerWatch", watch)

    with caplog.at_level("WARNING", logger="rayrec"):
        train(settings(walks(tmp_path), pipeline__num_trainers=3), tmp_path / "run", cluster=in_process)

    (said,) = [line for line in caplog.messages if "is slow" in line]
    # Its node by Ray's name where a cluster has been joined, else by that of the machine.
    assert re.match(r"trainer \d on .*\S is slow: its own work takes ", said)
