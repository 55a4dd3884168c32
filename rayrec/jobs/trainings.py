"""Trainings as jobs: the gangs that settings of runs ask for, and what the folders of runs tell of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rayrec.jobs.job import Size
from rayrec.jobs.runner import TRAINERS
from rayrec.pipelines.cluster.placement import actor_groups
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshot_requests import request_snapshot
from rayrec.platform.errors import InputError

logger = logging.getLogger(__name__)

MEASURED_S = 60.0
"""Time for which steps are counted before they say when a run ends."""


def training_sizes(
    config_file: Path, overrides: Sequence[str], min_trainers: int | None = None
) -> tuple[Size, ...]:
    """The gangs of a training, from the number of trainers of its settings down to the least.

    Args:
        min_trainers: None: it has one size.

    Raises:
        InputError: settings that are none, with some number of trainers.
    """
    config = RunConfig.load(config_file, overrides)
    most = config.pipeline.num_trainers
    least = most if min_trainers is None else min_trainers
    if not 1 <= least <= most:
        raise InputError(
            f"--min-trainers {least}: it must be from 1 to pipeline.num_trainers, which is {most} in "
            f"{config_file}"
        )
    sizes = []
    for number in range(most, least - 1, -1):
        try:
            of_number = RunConfig.load(config_file, [*overrides, f"{TRAINERS}={number}"])
        except InputError as error:
            raise InputError(f"--min-trainers {least}, with {number} trainers: {error}") from error
        sizes.append(Size(actor_groups(of_number), number / most))
    return tuple(sizes)


@dataclass(frozen=True)
class Asked:
    """What became of a request for a snapshot."""

    snapshot: str | None
    error: str | None = None


class Trainings(Protocol):
    """What the queue asks of runs that train."""

    def ask_snapshot(self, submission: str, run: Path) -> Asked | None:
        """Ask an attempt's run for a snapshot, if that was not done; None while there is no answer."""

    def lost_s(self, run: Path, since: float, now: float) -> float:
        """Seconds of work since the last snapshot, or since the attempt began."""

    def left_s(self, submission: str, run: Path, now: float) -> float | None:
        """Seconds until the run is over at the pace of this attempt; None: not known yet."""


class RunFolders:
    """The real ones, through the files of their folders.

    These are the users', so nothing that is in one of them ends the queue for all others.
    """

    def __init__(self, timeout_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        """
        Args:
            timeout_s: time in which a snapshot has to be there.
        """
        self._timeout_s, self._sleep = timeout_s, sleep
        self._asked: dict[str, Asked | None] = {}
        self._first: dict[str, tuple[int, float]] = {}
        """By attempt, the step at which it was seen first, and when."""

    def ask_snapshot(self, submission: str, run: Path) -> Asked | None:
        if submission not in self._asked:
            self._asked[submission] = None
            threading.Thread(target=self._ask, args=(submission, run), daemon=True).start()
        return self._asked[submission]

    def _ask(self, submission: str, run: Path) -> None:
        try:
            answer = Asked(request_snapshot(run, self._timeout_s, self._sleep).name)
        except Exception as error:
            answer = Asked(None, str(error))
        self._asked[submission] = answer

    def lost_s(self, run: Path, since: float, now: float) -> float:
        try:
            folder = RunFolder.open(run)
            last = folder.state["last"]
            if last is not None:
                since = max(since, (folder.snapshots / str(last) / "manifest.json").stat().st_mtime)
        except Exception as error:  # it has not begun yet, or cannot be understood
            logger.debug("%s: %r", run, error)
        return max(0.0, now - since)

    def left_s(self, submission: str, run: Path, now: float) -> float | None:
        try:
            state = RunFolder.open(run).state
            progress = state.get("now") or {}
            if state.get("state") != "running" or not progress.get("is_total"):
                return None
            step, total = int(progress["step"]), int(progress["steps"])
        except Exception as error:  # it has not begun yet, or cannot be understood
            logger.debug("%s: %r", run, error)
            return None
        if not total:
            return None
        first_step, first_at = self._first.setdefault(submission, (step, now))
        if step < first_step:  # it went back to a snapshot
            self._first[submission] = step, now
            return None
        if now < first_at + MEASURED_S or step == first_step:
            return None
        return max(0.0, total - step) * (now - first_at) / (step - first_step)
