"""Where trials run: in this process, one after the other, or as tasks of a Ray cluster, several at once.

Both give the same outcomes. A search says when a trial may begin, and waits for them in their order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tuning.config import TrialConfig
from rayrec.pipelines.tuning.outcome import Outcome
from rayrec.pipelines.tuning.starts import Starts
from rayrec.pipelines.tuning.trial import TrialSpec, judge, run_trial
from rayrec.platform.cluster import check_accelerators, ray_cluster, starts_cluster
from rayrec.platform.devices import ray_claim
from rayrec.platform.ray_errors import root_cause

logger = logging.getLogger(__name__)

RunTrial = Callable[[TrialSpec], Outcome]
"""`run_trial`, or what stands for it: a function of a module."""
JudgeTrial = Callable[[Path, str], float]
"""`judge`, likewise."""


class Trials(Protocol):
    """Runs trials that it is given."""

    def begin(self, spec: TrialSpec) -> None:
        """Start a trial as soon as there is room for it; returns at once."""

    def outcome(self, number: int) -> Outcome:
        """How a trial ended that was begun; waits for that."""

    def judged(self, trials: Sequence[Path], metric: str) -> Iterator[float]:
        """A metric of trials that are over, on all validation users, one after the other."""


class TrialsHere:
    """Trials of this process: each is run when its outcome is asked for."""

    def __init__(self, run: RunTrial = run_trial, judge: JudgeTrial = judge) -> None:
        self._run, self._judge = run, judge
        self._waiting: dict[int, TrialSpec] = {}

    def begin(self, spec: TrialSpec) -> None:
        self._waiting[spec.number] = spec

    def outcome(self, number: int) -> Outcome:
        return self._run(self._waiting.pop(number))

    def judged(self, trials: Sequence[Path], metric: str) -> Iterator[float]:
        return (self._judge(trial, metric) for trial in trials)


class TrialsOnRay:
    """Trials that are tasks of the connected cluster, each in a process of its own."""

    def __init__(
        self,
        trial: TrialConfig,
        device: str,
        run: RunTrial = run_trial,
        judge: JudgeTrial = judge,
    ) -> None:
        import ray

        from rayrec.platform.ray_tasks import interruptible

        # Ray's own repetitions do not count, and of a process that ran out of memory there is no end of them.
        options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "max_calls": 1}
        if not trial.actors:
            options |= {"num_cpus": trial.cpus, **ray_claim(device)}
        self._remote = ray.remote(**options)(interruptible(run))
        alone = {"num_cpus": 1 if trial.actors else trial.cpus, **ray_claim(device)}  # it has no actors
        self._remote_judge = ray.remote(**options | alone)(interruptible(judge))
        self._tries = trial.tries
        self._running: dict[int, tuple[TrialSpec, Any]] = {}
        self._judging: list[Any] = []

    def begin(self, spec: TrialSpec) -> None:
        self._running[spec.number] = spec, self._remote.options(name=f"trial {spec.number}").remote(spec)

    def outcome(self, number: int) -> Outcome:
        import ray

        for left in reversed(range(self._tries)):
            spec, promise = self._running[number]
            try:
                outcome: Outcome = ray.get(promise)
            except ray.exceptions.RayTaskError as error:
                raise root_cause(error) from error
            except ray.exceptions.RayError as error:
                # Killed, out of memory or with its node: its settings may be at fault, or not.
                reason = f"its process died: {' '.join(str(error).split())[:300]}"
                if left:
                    logger.warning("trial %d: %s; it goes on from its last snapshot", number, reason)
                    self.begin(spec)
                    continue
                outcome = Outcome("failed", reason=reason)
                Starts(spec.folder).forget()
            del self._running[number]
            return outcome
        raise AssertionError("there is at least one try")

    def judged(self, trials: Sequence[Path], metric: str) -> Iterator[float]:
        import ray

        self._judging = [
            self._remote_judge.options(name=f"judge {trial.name}").remote(trial, metric) for trial in trials
        ]
        for promise in self._judging:
            try:
                yield ray.get(promise)
            except ray.exceptions.RayTaskError as error:
                raise root_cause(error) from error

    def close(self) -> None:
        """End the trials that run."""
        import ray

        promises = [*(promise for _, promise in self._running.values()), *self._judging]
        for promise in promises:
            ray.cancel(promise)
        if promises:
            ray.wait(promises, num_returns=len(promises), timeout=_ENDING_S)


_ENDING_S = 30.0
"""Time for trainings to say that they were stopped."""


@contextmanager
def trials_here(config: RunConfig, trial: TrialConfig, at_once: int) -> Iterator[Trials]:
    """Run trials in this process, without Ray."""
    yield TrialsHere()


@contextmanager
def trials_on_ray(config: RunConfig, trial: TrialConfig, at_once: int) -> Iterator[Trials]:
    """Run trials on the cluster of a run's config, which is joined, or started on this machine.

    Raises:
        InputError: it has too little for one trial.
    """
    each = config.cpus_needed if trial.actors else float(trial.cpus)
    # In a cluster that is joined, trials wait for each other; one that is started is for all of them.
    num_trials = at_once if starts_cluster(config.cluster) else 1
    with ray_cluster(config.cluster, num_trials * each):
        if not trial.actors:
            remedy = "set another device in settings, or join a larger cluster"
            check_accelerators(ray_claim(config.device), 1, "trials", remedy)
        trials = TrialsOnRay(trial, config.device)
        try:
            yield trials
        finally:
            trials.close()
