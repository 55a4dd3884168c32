"""`rayrec rl`: train a policy by rewards from a supervised run, and compare the two.

check everything ─► controller: processes ─► evaluate the supervised policy
    ─► PolicyTraining.steps: learn, every so often validate and keep the best ─► evaluate the best ─► report
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

from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.tasks.next_item import check_split
from rayrec.pipelines.training.placements import Placement, on_ray
from rayrec.platform.errors import InputError
from rayrec.platform.metrics import RayMetrics
from rayrec.rl.config import RlConfig
from rayrec.rl.controller import COLOCATED_STAGE, LEARNER_STAGE, SingleController
from rayrec.rl.evaluation import (
    Comparison,
    best_temperature,
    lists_of,
    prompts_of,
    validation_prompts,
    worsened,
)
from rayrec.rl.policy import Policy, Weights
from rayrec.rl.prompts import Prompts, PromptStream, is_held_out
from rayrec.rl.run_folder import RlRunFolder
from rayrec.rl.scoring import RolloutScorer
from rayrec.rl.training import PolicyTraining, StepReport
from rayrec.rl.worker import load_on_host
from rayrec.samples.dataset.manifest import EVALUATION_FILES

logger = logging.getLogger(__name__)

OnStep = Callable[[StepReport, int], None]
"""Called after each step with (report, number of steps of the run)."""


@dataclass(frozen=True)
class RlResult:
    """Result of a run."""

    run: str
    steps: int
    best_step: int
    """0: the supervised policy, if no later one was better in validation."""
    best_metric: str
    best_value: float
    report: dict[str, Any]
    seconds: dict[str, float]
    """Time spent by the processes in each kind of call, and by the run as a `whole`."""


def train_policy(
    config: RlConfig,
    run: str | Path,
    resume: bool = False,
    on_step: OnStep | None = None,
    cluster: Placement = on_ray,
) -> RlResult:
    """Train a policy by rewards; `rayrec rl` calls this.

    Args:
        run: folder of the run.
        resume: continue from the folder's last snapshot.
        cluster: where the processes run: `on_ray`, or `in_process`, which needs no Ray.

    Raises:
        InputError: the config, the supervised run, the data or the folder cannot be used; nothing was
        started. RewardError, DivergedError: the step was not applied; the last snapshot is complete.
        CollapsedError: an alarm; the best snapshot is unchanged.
    """
    config, path = config.with_absolute_paths(), Path(run)
    supervised = RunFolder.open(Path(config.init_from)).config
    if supervised.model.quantization is not None:
        raise InputError(
            f"init_from: {config.init_from} is quantized, and a policy cannot be trained from it; name the "
            "run that it was made of"
        )
    if config.device is not None:
        supervised = supervised.model_copy(update={"device": config.device})
    # The driver computes nothing, and its machine may lack the accelerator.
    policy = load_on_host(config)
    RolloutScorer.of(config.rewards, policy)  # refuses what does not fit, before anything is started
    dataset = policy.task.dataset
    for split in EVALUATION_FILES:
        check_split(dataset, split)  # the report is of test users, and comes when all is trained
    prompts = PromptStream(dataset, config.prompts, config.seed)
    # With times for rewards, even if the model does not read them.
    validation = validation_prompts(dataset, config, dataset.has_times())
    if config.rollout.method == "beam":
        logger.warning(
            "rollout.method: beam takes the likeliest candidates: they are not samples of the policy, so its "
            "gradient is biased"
        )
    if not policy.network.ranks_as_it_generates:
        logger.warning(
            "init_from: candidates are drawn, and learned, by the probabilities of their codes alone; "
            "recommendations are ranked by a softmax over items as well"
        )
    with prompts, RunFolder.locked(path, "run" if resume else "nothing"):
        opened = RlRunFolder.resume if resume else RlRunFolder.create
        folder = opened(path, config, supervised, policy)
        cpus = config.placement.cpus * _num_processes(config)
        with folder.folder.ending(), cluster.joined(supervised.cluster, cpus):
            result = _Run(
                config, supervised.device, folder, policy, prompts, validation, on_step, cluster
            ).run()
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
        cluster: Placement,
    ) -> None:
        self._cluster = cluster
        self._config, self._device, self._folder = config, device, folder
        self._policy, self._prompts, self._validation = policy, prompts, validation
        self._on_step = on_step
        self._best_metric = config.evaluation.metric
        self._best_value, self._best_step = -math.inf, 0
        self._metrics = RayMetrics({"run": folder.folder.name})

    def run(self) -> RlResult:
        config, begun = self._config, time.perf_counter()
        members = {COLOCATED_STAGE: config.placement.learners, LEARNER_STAGE: config.placement.learners}
        host, calls = self._cluster.host(self._folder.folder.name, members)
        with SingleController(config, self._device, host, calls) as controller:
            training = self._training(controller)
            if self._folder.folder.state["last"] is None:
                self._validate(training, controller)
            self._take_steps(training, controller)
            seconds = self._seconds(controller)
            report = self._evaluate(training)
            seconds["whole"] = time.perf_counter() - begun
        self._folder.write_evaluation(report)
        for group, name in (("all", "all users"), ("held_out", "users held out")):
            for sentence in worsened(report[group], config.rewards) if group in report else ():
                logger.warning("%s: %s", name, sentence)
        return RlResult(
            run=str(self._folder.path),
            steps=config.steps,
            best_step=self._best_step,
            best_metric=self._best_metric,
            best_value=self._best_value,
            report=report,
            seconds=seconds,
        )

    def _take_steps(self, training: PolicyTraining, controller: SingleController) -> None:
        """Run steps until the last one or an alarm.

        Raises:
            CollapsedError: an alarm.
        """
        for report in training.steps():
            self._log(report)
            # Before anything is saved: a collapsed policy may well have the highest reward.
            training.alarm.check(report.step, report.metrics)
            if training.is_snapshot_due:
                self._validate(training, controller)

    def _training(self, controller: SingleController) -> PolicyTraining:
        """Make the loop, from the last snapshot if there is one."""
        if (snapshot := self._folder.last()) is None:
            return PolicyTraining(self._config, controller, self._prompts)
        progress = snapshot.state.progress
        controller.load(snapshot.weights, snapshot.optimizer_state, progress["rewards"])
        # Snapshots of version 1.5 and before: one read per step.
        training = PolicyTraining(
            self._config,
            controller,
            self._prompts,
            snapshot.committed_step + 1,
            progress.get("num_reads"),
        )
        training.alarm.load(progress["alarm"])
        self._best_value, self._best_step = progress["best_value"], progress["best_step"]
        logger.info("%s: resumes with step %d", self._folder.path, training.step + 1)
        return training

    def _validate(self, training: PolicyTraining, controller: SingleController) -> None:
        """Evaluate the policy as it is now, and save it."""
        evaluated = training.evaluate(
            self._validation, lists_of(self._config, [self._config.rollout.temperature])
        )
        scores = {name: float(scores_U.mean()) for name, scores_U in evaluated.scores().items()}
        value, step = scores[self._best_metric], training.step
        if is_best := value > self._best_value:
            self._best_value, self._best_step = value, step
        weights, state, rewards = controller.state()
        progress = {
            "best_value": self._best_value,
            "best_step": self._best_step,
            "best_metric": self._best_metric,
            "alarm": training.alarm.state,
            "rewards": rewards,
            "num_reads": training.num_reads,
        }
        position = self._prompts.position(training.num_reads)
        self._folder.save(step, weights.arrays, state, position, progress, is_best)
        seconds = self._seconds(controller)
        self._folder.folder.log(
            {
                "step": step,
                **{f"valid/{name}": each for name, each in scores.items()},
                **{f"seconds/{name}": each for name, each in seconds.items()},
            }
        )
        self._metrics.publish({f"rl_valid_{_as_name(name)}": each for name, each in scores.items()})
        logger.info(
            "step %d: valid recall@10 %.4f, ndcg@10 %.4f, reward of sampled lists %.4f%s",
            step,
            scores["recall@10"],
            scores["ndcg@10"],
            scores["reward"],
            ", the best so far" if is_best else "",
        )

    def _log(self, report: StepReport) -> None:
        self._folder.folder.log({"step": report.step, "seconds": report.seconds, **report.metrics})
        self._metrics.publish({f"rl_{_as_name(name)}": each for name, each in report.metrics.items()})
        for warning in report.warnings:
            logger.warning("step %d: %s", report.step, warning)
        if self._on_step is not None:
            self._on_step(report, self._config.steps)

    def _evaluate(self, training: PolicyTraining) -> dict[str, Any]:
        """Compare the supervised policy and the best one on the test users."""
        config, dataset = self._config, self._policy.task.dataset
        best = read_snapshot(self._folder.folder.chosen_snapshot("best"))
        weights = Weights.of(int(best.optimizer_state["step"]), best.weights)
        tried = lists_of(config, config.evaluation.temperatures)
        before_at = best_temperature(
            training.evaluate_reference(self._validation, tried), tried.temperatures, "the supervised policy"
        )
        after_at = best_temperature(
            training.evaluate(self._validation, tried, weights), tried.temperatures, "the best policy"
        )
        test = prompts_of(dataset, "test", config.evaluation.batch_size, None, dataset.has_times())
        before = training.evaluate_reference(test, lists_of(config, [before_at]))
        after = training.evaluate(test, lists_of(config, [after_at]), weights)
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
        """Publish and return the time spent by the processes in each kind of call."""
        seconds = controller.seconds()
        self._metrics.publish({f"rl_seconds_{_as_name(name)}": each for name, each in seconds.items()})
        return seconds


def _as_name(name: str) -> str:
    """Replace what the names of Prometheus's metrics may not contain."""
    return re.sub(r"\W", "_", name)
