"""The loop over steps, as one process would run it; where its parts run is the placement's business.

    for every step:
        begin batches, as far as their age allows     prompts ─► candidates ─► rewards, reference (`batches`)
        take the oldest                               waits for it, and fills it up
        learn                                         one optimizer step of all learners, or several
        send weights                                  to the rollout workers, every so many steps

    placement        begins a batch when
    colocated        the learner has no other work: sampling and learning take turns
    disaggregated    the policy that samples has taken all steps, or all but one (`max_policy_lag`)
    async            it will be at most `max_staleness` steps old when it is learned from

Batches are learned from in the order in which they were begun, so their age is known in advance
(`rollout_queue`). Where a snapshot is due, no batch is begun ahead and weights are sent, so that a resumed
run samples what this one would have sampled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.rl.batches import Batch, BatchSource, CompleteBatch, LearnedChunk
from rayrec.rl.config import AlarmConfig, RlConfig
from rayrec.rl.controller import Promise, SingleController
from rayrec.rl.learner import BatchTotals
from rayrec.rl.list_metrics import EvaluatedLists, ListSettings
from rayrec.rl.policy import Weights
from rayrec.rl.prompts import Prompts, PromptStream
from rayrec.rl.rollout_queue import RolloutQueue

NUM_INITIAL_STEPS = 5
"""Steps over which the initial entropy is averaged."""


class CollapsedError(RuntimeError):
    """The policy has collapsed: it is far from the supervised one, or samples the same items all the time."""


@dataclass(frozen=True)
class StepReport:
    """Metrics of a step."""

    step: int
    """Batches that were learned from, this one included."""
    metrics: dict[str, float]
    warnings: tuple[str, ...]
    seconds: float


class PolicyTraining:
    """The loop over the steps of one run."""

    def __init__(
        self,
        config: RlConfig,
        controller: SingleController,
        prompts: PromptStream,
        done_steps: int = 0,
        num_reads: int | None = None,
    ) -> None:
        """
        Args:
            done_steps: batches that the learner has learned from.
            num_reads: reads of prompts that these have consumed (default: one each).
        """
        self._config, self._controller = config, controller
        self._source = BatchSource(
            config, controller, prompts, done_steps if num_reads is None else num_reads
        )
        self.step = done_steps
        bound, self._updates = config.max_staleness, config.learner.updates_per_batch
        self._queue: RolloutQueue[Batch] = RolloutQueue(
            bound // self._updates + 1, bound, done_steps, self._updates
        )
        self._weights: Promise[Weights] | None = None
        """What was sent last; None where rollouts use the learner's own weights."""
        self._sent_version = self._learned_version
        self.alarm = Alarm(config.alarms)
        if not controller.is_colocated:
            self._send()

    def steps(self) -> Iterator[StepReport]:
        """Take all steps that are left; in between, the caller may evaluate the policy and check the alarm.

        Raises:
            RewardError: a reward failed; the step is not applied.
            DivergedError: a gradient is not finite; the update is not applied.
        """
        sync_every = self._config.placement.sync_every if self._config.placement.kind == "async" else 1
        while self.step < self._config.steps:
            begun = time.perf_counter()
            self._begin_ahead()
            batch = self._source.complete(self._queue.take(self._learned_version))
            metrics = self._learn(batch)
            warnings = tuple(warning for chunk in batch.sampled for warning in chunk.warnings)
            self.step += 1
            sends = self.step % sync_every == 0 or self.is_snapshot_due
            if not self._controller.is_colocated and sends:
                self._send()
            yield StepReport(self.step, metrics, warnings, time.perf_counter() - begun)

    def evaluate(
        self, prompts: Sequence[Prompts], lists: ListSettings, weights: Weights | None = None
    ) -> EvaluatedLists:
        """Evaluate the policy as it is now.

        Args:
            weights: of another version, once training has ended.
        """
        sent: Promise[Weights] | None = None if weights is None else self._controller.put(weights)
        if sent is None and not self._controller.is_colocated:
            # Where a snapshot is due, they have been sent already.
            is_sent = self._sent_version == self._learned_version
            sent = self._weights if is_sent else self._controller.weights()
        return EvaluatedLists.concatenate(self._controller.evaluate(prompts, sent, lists))

    def evaluate_reference(self, prompts: Sequence[Prompts], lists: ListSettings) -> EvaluatedLists:
        """Evaluate the supervised policy."""
        return EvaluatedLists.concatenate(self._controller.evaluate_reference(prompts, lists))

    @property
    def is_snapshot_due(self) -> bool:
        """Whether the policy is to be evaluated and saved after this step."""
        config = self._config
        return self.step % config.evaluation.every_steps == 0 or self.step == config.steps

    def _begin_ahead(self) -> None:
        every = self._config.evaluation.every_steps
        end = min(self._config.steps, (self.step // every + 1) * every)
        while self._queue.next_batch < end and self._queue.may_begin(self._version):
            batch = self._source.begin(self._queue.next_batch, self._version, self._weights)
            self._queue.put(self._version, batch)

    @property
    def num_reads(self) -> int:
        """Reads of prompts that batches have consumed, those in flight included."""
        return self._source.num_reads

    @property
    def _learned_version(self) -> int:
        """Optimizer steps that the learner has taken."""
        return self.step * self._updates

    @property
    def _version(self) -> int:
        """Version of the policy that samples next."""
        return self._learned_version if self._controller.is_colocated else self._sent_version

    def _learn(self, batch: CompleteBatch) -> dict[str, float]:
        # Learners work in the order of the calls, so all updates can be asked for at once.
        num_groups, promises = 0, []
        for update in range(self._updates):
            chunks = self._share_of(batch.learned, update)
            totals = self._totals(chunks)
            num_groups += totals.num_groups
            promises += self._controller.update(
                totals, [chunk.scored for chunk in chunks], [chunk.reference for chunk in chunks]
            )
        reports = self._controller.get(promises)
        names = {name for report in reports for name in report}
        sums = {name: sum(report.get(name, 0.0) for report in reports) for name in sorted(names)}
        return {
            **{name: value / num_groups for name, value in sums.items()},
            **batch.metrics(),
            "staleness": float(self._queue.observed_staleness[-1]),
        }

    def _share_of(self, chunks: Sequence[LearnedChunk], update: int) -> Sequence[LearnedChunk]:
        """The chunks of one of a batch's updates."""
        # With fewer chunks than updates, some are used twice: an update without any would still move the
        # weights, by the optimizer's momentum.
        return chunks[update % len(chunks) :: self._updates]

    def _totals(self, chunks: Sequence[LearnedChunk]) -> BatchTotals:
        summaries = [chunk.summary for chunk in chunks]
        num_candidates = sum(each.num_candidates for each in summaries)
        return BatchTotals(
            self.step,
            sum(each.num_groups for each in summaries),
            sum(each.num_choices for each in summaries) / max(num_candidates, 1),
        )

    def _send(self) -> None:
        """From now on, batches are sampled with the learner's weights of this moment."""
        self._weights = self._controller.weights()
        self._sent_version = self._learned_version


class Alarm:
    """Stops a run whose policy has collapsed."""

    def __init__(self, config: AlarmConfig) -> None:
        self._config = config
        self._first: list[float] = []
        """Entropies of the initial steps."""

    def check(self, step: int, metrics: dict[str, float]) -> None:
        """Check the metrics of a step.

        Raises:
            CollapsedError: the policy is too far from the supervised one, or its entropy is too low.
        """
        kl, entropy = metrics["kl"], metrics["entropy"]
        if not kl <= self._config.max_kl:
            raise CollapsedError(
                f"step {step}: the KL divergence to the supervised policy is {kl:.2f} nats, the bound "
                f"(alarms.max_kl) is {self._config.max_kl}; lower learner.learning_rate, or raise "
                "learner.kl_coefficient"
            )
        if len(self._first) < NUM_INITIAL_STEPS:
            self._first.append(entropy)
            return
        least = self._config.min_entropy_share * float(np.mean(self._first))
        if not entropy >= least:
            raise CollapsedError(
                f"step {step}: the entropy of a candidate is {entropy:.2f} nats, the bound is {least:.2f} "
                "(alarms.min_entropy_share of that of the first steps); lower learner.learning_rate, or "
                "raise learner.kl_coefficient or nll_coefficient"
            )

    @property
    def state(self) -> list[float]:
        return self._first

    def load(self, state: list[float]) -> None:
        self._first = list(state)
