"""`rayrec rl`: from a supervised run to a policy that was rewarded, judged before and after.

check everything ─► controller: processes ─► judge the supervised policy
    ─► PolicyTraining.steps: learn, every so often validate and keep the best ─► judge the best ─► report
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.platform.cluster import ray_cluster
from rayrec.platform.devices import HOST
from rayrec.platform.metrics import RayMetrics
from rayrec.platform.ray_errors import root_cause
from rayrec.rl.config import RlConfig
from rayrec.rl.controller import SingleController
from rayrec.rl.evaluation import (
    Comparison,
    best_temperature,
    lists_of,
    prompts_of,
    validation_prompts,
    worsened,
)
from rayrec.rl.policy import Policy
from rayrec.rl.prompts import Prompts, PromptStream, is_held_out
from rayrec.rl.run_folder import RlRunFolder
from rayrec.rl.training import PolicyTraining, StepReport
from rayrec.rl.weights import Weights
from rayrec.rl.workers import load_policy, make_rewards

logger = logging.getLogger(__name__)

OnStep = Callable[[StepReport, int], None]
"""(report, steps of the run)."""


@dataclass(frozen=True)
class RlResult:
    """What came of a run."""

    run: str
    steps: int
    best_step: int
    """0: the supervised policy, which no later one was better than in validation."""
    best_metric: str
    best_value: float
    report: dict[str, Any]
    seconds: dict[str, float]
    """Of the processes, by what they did; and of the run as a whole."""


def train_policy(
    config: RlConfig,
    run: str | Path,
    resume: bool = False,
    on_step: OnStep | None = None,
) -> RlResult:
    """
    Raises:
        InputError: the config, the supervised run, the data or the folder cannot be used; nothing began.
        RewardError, DivergedError: the step was not applied; the last snapshot is whole.
        CollapsedError: an alarm; the best snapshot stays what it was.
    """
    config, path = config.with_absolute_paths(), Path(run)
    supervised = RunFolder.open(Path(config.init_from)).config
    if config.device is not None:
        supervised = supervised.model_copy(update={"device": config.device})
    # The driver computes nothing, and may be on a machine that lacks the accelerator.
    policy = load_policy(config.model_copy(update={"device": HOST.kind}))
    make_rewards(config, policy)  # which refuses what does not fit, before anything is started
    dataset = policy.task.dataset
    prompts = PromptStream(dataset, config.prompts, config.seed)
    # With times, for rewards, whatever the model reads.
    validation = validation_prompts(dataset, config, dataset.has_times())
    if config.rollout.draw == "beam":
        logger.warning(
            "rollout.draw: beam takes the likeliest candidates: they have no probability of having been "
            "drawn, and what is learned of them is biased"
        )
    with RunFolder.locked(path, "run" if resume else "nothing"):
        opened = RlRunFolder.resume if resume else RlRunFolder.create
        folder = opened(path, config, supervised, policy)
        cpus = config.placement.cpus * _num_processes(config)
        try:
            with ray_cluster(supervised.cluster, cpus):
                result = _Run(config, supervised.device, folder, policy, prompts, validation, on_step).run()
        except (KeyboardInterrupt, SystemExit):
            folder.folder.update(state="stopped", error="interrupted")
            raise
        except Exception as error:
            cause = root_cause(error)
            folder.folder.update(state="failed", error=f"{type(cause).__name__}: {cause}")
            if cause is error:
                raise
            raise cause from error
        folder.folder.update(state="finished", error=None)
        return result


def _num_processes(config: RlConfig) -> int:
    placement = config.placement
    return placement.learners + (0 if placement.kind == "colocated" else placement.rollouts + 1)


class _Run:
    """One attempt."""

    def __init__(
        self,
        config: RlConfig,
        device: str,
        folder: RlRunFolder,
        policy: Policy,
        prompts: PromptStream,
        validation: list[Prompts],
        on_step: OnStep | None,
    ) -> None:
        self._config, self._device, self._folder = config, device, folder
        self._policy, self._prompts, self._validation = policy, prompts, validation
        self._on_step = on_step
        self._metric = config.evaluation.metric
        self._best_value, self._best_step = -math.inf, 0
        self._figures = RayMetrics({"run": folder.folder.name})

    def run(self) -> RlResult:
        config, begun = self._config, time.perf_counter()
        with SingleController(self._folder.folder.name, config, self._device) as controller:
            done = self._go_on(controller)
            training = PolicyTraining(config, controller, self._prompts, done)
            self._load_state(training, controller)
            if self._folder.folder.state["last"] is None:
                self._validate(training, controller)
            self._take_steps(training, controller)
            seconds = self._seconds(controller)
            report_of_run = self._judge(training)
            seconds["whole"] = time.perf_counter() - begun
        self._folder.write_evaluation(report_of_run)
        for who, name in (("all", "all users"), ("held_out", "users held out")):
            for sentence in worsened(report_of_run[who]) if who in report_of_run else ():
                logger.warning("%s: %s", name, sentence)
        return RlResult(
            run=str(self._folder.path),
            steps=config.steps,
            best_step=self._best_step,
            best_metric=self._metric,
            best_value=self._best_value,
            report=report_of_run,
            seconds=seconds,
        )

    def _take_steps(self, training: PolicyTraining, controller: SingleController) -> None:
        """
        Raises:
            CollapsedError: an alarm.
        """
        for report in training.steps():
            self._tell(report)
            # Before anything is kept: a collapsed policy may well be the best one by reward.
            training.alarm.check(report.step, report.figures)
            if training.is_snapshot_due:
                self._validate(training, controller)

    def _go_on(self, controller: SingleController) -> int:
        """Steps that were taken before; learners have their weights."""
        if (snapshot := self._folder.last()) is None:
            return 0
        weights, state = snapshot.weights, snapshot.optimizer_state
        ray.get(controller.learner.one_to_all("load", ray.put(weights), ray.put(state)))
        return snapshot.committed_step + 1

    def _load_state(self, training: PolicyTraining, controller: SingleController) -> None:
        """What else a run that goes on has to know of itself."""
        if (snapshot := self._folder.last()) is None:
            return
        progress = snapshot.state.progress
        training.alarm.load(progress["alarm"])
        ray.get(controller.rewards.rank_zero("load", progress["rewards"]))
        self._best_value, self._best_step = progress["best_value"], progress["best_step"]
        logger.info("%s: goes on with step %d", self._folder.path, training.step + 1)

    def _validate(self, training: PolicyTraining, controller: SingleController) -> None:
        """Judge the policy as it is now, and write it down."""
        judged = training.judge(self._validation, lists_of(self._config, [self._config.rollout.temperature]))
        scores = {name: float(scores_U.mean()) for name, scores_U in judged.scores().items()}
        value, step = scores[self._metric], training.step
        if is_best := value > self._best_value:
            self._best_value, self._best_step = value, step
        weights, state, rewards = ray.get(
            [
                controller.learner.rank_zero("weights"),
                controller.learner.rank_zero("optimizer_state"),
                controller.rewards.rank_zero("state"),
            ]
        )
        progress = {
            "best_value": self._best_value,
            "best_step": self._best_step,
            "best_metric": self._metric,
            "alarm": training.alarm.state,
            "rewards": rewards,
        }
        self._folder.save(step, weights.arrays, state, self._prompts.position(step), progress, is_best)
        seconds = self._seconds(controller)
        self._folder.folder.log(
            {
                "step": step,
                **{f"valid/{name}": each for name, each in scores.items()},
                **{f"seconds/{name}": each for name, each in seconds.items()},
            }
        )
        self._figures.publish({f"rl_valid_{_as_name(name)}": each for name, each in scores.items()})
        logger.info(
            "step %d: valid recall@10 %.4f, ndcg@10 %.4f, reward of drawn lists %.4f%s",
            step,
            scores["recall@10"],
            scores["ndcg@10"],
            scores["reward"],
            ", the best so far" if is_best else "",
        )

    def _tell(self, report: StepReport) -> None:
        self._folder.folder.log({"step": report.step, "seconds": report.seconds, **report.figures})
        self._figures.publish({f"rl_{_as_name(name)}": each for name, each in report.figures.items()})
        for warning in report.warnings:
            logger.warning("step %d: %s", report.step, warning)
        if self._on_step is not None:
            self._on_step(report, self._config.steps)

    def _judge(self, training: PolicyTraining) -> dict[str, Any]:
        """The supervised policy and the best one, on the users that are tested."""
        config, dataset = self._config, self._policy.task.dataset
        best = read_snapshot(self._folder.folder.chosen_snapshot("best"))
        weights = Weights.of(int(best.optimizer_state["step"]), best.weights)
        tried = lists_of(config, config.evaluation.temperatures)
        before_at = best_temperature(
            training.judge_reference(self._validation, tried), tried.temperatures, "the supervised policy"
        )
        after_at = best_temperature(
            training.judge(self._validation, tried, weights), tried.temperatures, "the best policy"
        )
        test = prompts_of(dataset, "test", config.evaluation.batch_size, None, dataset.has_times())
        before = training.judge_reference(test, lists_of(config, [before_at]))
        after = training.judge(test, lists_of(config, [after_at]), weights)
        codes_IL = np.asarray(self._policy.task.catalog.codes_IL)
        behaviors = dataset.manifest.labels["behavior"]
        held_out_U = is_held_out(before.user_ids_U, config.prompts.held_out_share)
        report = {
            "algorithm": config.algorithm.name,
            "seed": config.seed,
            "best_step": self._best_step,
            "temperature": {"before": before_at, "after": after_at},
            "all": Comparison(before, after, codes_IL, behaviors).report(),
        }
        if held_out_U.any():
            held_out = Comparison(before.some(held_out_U), after.some(held_out_U), codes_IL, behaviors)
            report["held_out"] = held_out.report()
        return report

    def _seconds(self, controller: SingleController) -> dict[str, float]:
        """Spent by the processes, by what they did."""
        seconds = controller.seconds()
        seconds["sync"] = sum(ray.get(controller.rollouts.one_to_all("sync_seconds")))
        self._figures.publish({f"rl_seconds_{_as_name(name)}": each for name, each in seconds.items()})
        return seconds


def _as_name(name: str) -> str:
    """As names of Prometheus's metrics are."""
    return re.sub(r"\W", "_", name)
