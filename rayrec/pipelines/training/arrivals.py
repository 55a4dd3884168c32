"""How far a run can train now: to its end, or to the last row that a growing folder has brought."""

from __future__ import annotations

import time
from collections.abc import Callable

from rayrec.pipelines.config.sections import DataConfig
from rayrec.pipelines.tasks.training_rows import TrainingRows
from rayrec.samples.reading.followed_plan import FollowedPlan

WAIT_S = 0.5
"""Longest between two looks at wishes for snapshots."""


class Arrivals:
    """How far there are rows, waiting for some where a folder grows."""

    def __init__(
        self,
        rows: TrainingRows,
        data: DataConfig,
        total_steps: int | None,
        on_wait: Callable[[int], None],
        on_arrival: Callable[[], None],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            total_steps: where training ends; None where the folder grows.
            on_wait: called now and then while nothing comes, with the step that is waited for.
            on_arrival: called when files have been accepted, before a row of theirs is planned for.
        """
        self._plan = rows.plan
        self._follow = data.follow
        self._total_steps = total_steps
        self._on_wait = on_wait
        self._on_arrival = on_arrival
        self._sleep = sleep
        self._clock = clock
        self._listed_s = clock()

    def after(self, step: int) -> int:
        """Steps that there are rows for: more than `step`, or as many, if nothing more will come.

        Raises:
            InputError: a new file does not fit, or the folder cannot be listed.
        """
        if self._follow is None:
            assert self._total_steps is not None, "it has epochs"
            return self._total_steps
        assert isinstance(self._plan, FollowedPlan)
        waits_since = self._clock()
        while True:
            now = self._clock()
            patience_s = self._follow.stop_after_s
            is_last_look = patience_s is not None and now - waits_since >= patience_s
            if is_last_look or now - self._listed_s >= self._follow.every_s:
                before = self._plan.num_segments
                self._plan.refresh()
                self._listed_s = now
                if self._plan.num_segments > before:
                    self._on_arrival()
            if self._plan.known_steps > step:
                return self._plan.known_steps
            if is_last_look:
                return step
            self._on_wait(step)
            self._sleep(min(self._follow.every_s, WAIT_S))
