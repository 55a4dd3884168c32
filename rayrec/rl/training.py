"""The algorithm, as one process would do it; where its parts run is the placement's business.

    for every step:
        begin batches, as far as their age allows     prompts ─► candidates ─► rewards, reference
        take the oldest                               waits for it
        learn                                         one optimizer step of all learners, or several
        send weights                                  to those who draw, every so many steps

    placement        begins a batch when
    colocated        the learner has no other work: drawing and learning take turns
    disaggregated    the policy that draws has seen all steps, or all but one (`max_policy_lag`)
    async            it will be no more than `max_staleness` steps old when it is learned from

Batches are learned from in the order in which they were begun: none is too old by chance (`rollout_queue`).
Where a snapshot is due, none is begun ahead, and weights are sent: a run that goes on begins as this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from rayrec.rl.config import AlarmConfig, RlConfig
from rayrec.rl.controller import SingleController
from rayrec.rl.judging import JudgedLists, Lists
from rayrec.rl.learner import StepTotals
from rayrec.rl.prompts import Prompts, PromptStream
from rayrec.rl.rollout_queue import RolloutQueue
from rayrec.rl.rollouts import RolloutSummary
from rayrec.rl.weights import Weights
from rayrec.rl.workers import RewardSummary

FIRST_FIGURES = 5
"""Steps over which the entropy of the beginning is taken."""


class CollapsedError(RuntimeError):
    """The policy is no longer one that anybody wants."""


@dataclass(frozen=True)
class StepReport:
    """What became of a step."""

    step: int
    """Batches that were learned from, this one included."""
    figures: dict[str, float]
    warnings: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class _Begun:
    """A batch on its way: promises, chunk by chunk."""

    version: int
    summaries: list[Any]
    rewarded: list[Any]
    reward_summaries: list[Any]
    reference: list[Any]


class PolicyTraining:
    """The loop over the steps of one run."""

    def __init__(
        self, config: RlConfig, controller: SingleController, prompts: PromptStream, done_steps: int = 0
    ) -> None:
        """
        Args:
            done_steps: batches that the learner has learned from.
        """
        self._config, self._controller, self._prompts = config, controller, prompts
        self.step = done_steps
        bound, self._updates = config.max_staleness, config.learner.updates_per_batch
        self._queue: RolloutQueue[_Begun] = RolloutQueue(
            bound // self._updates + 1, bound, done_steps, self._updates
        )
        self._weights: Any = None
        """Promise of what was sent last; None where those who draw have the learner's own."""
        self._sent_version = self._learned_version
        self.alarm = Alarm(config.alarms)
        if not controller.is_colocated:
            self._send()

    def steps(self) -> Iterator[StepReport]:
        """Every step that is left; the caller looks at the policy in between, and asks the alarm.

        Raises:
            RewardError: a reward failed; the step is not applied.
            DivergedError: a gradient is not finite; the update is not applied.
        """
        while self.step < self._config.steps:
            begun = time.perf_counter()
            self._begin_what_may_begin()
            figures, warnings = self._learn(self._queue.take(self._learned_version))
            self.step += 1
            sends = self.step % self._config.placement.syncs_every == 0 or self.is_snapshot_due
            if not self._controller.is_colocated and sends:
                self._send()
            yield StepReport(self.step, figures, warnings, time.perf_counter() - begun)

    def judge(self, prompts: Sequence[Prompts], lists: Lists, weights: Weights | None = None) -> JudgedLists:
        """The policy as it is now.

        Args:
            weights: of another one, when nothing is to be learned any more.
        """
        sent: Any = None if weights is None else ray.put(weights)
        if sent is None and not self._controller.is_colocated:
            # Where a snapshot is due, they are on their way already.
            is_sent = self._sent_version == self._learned_version
            sent = self._weights if is_sent else self._controller.learner.rank_zero("weights")
        drawn = self._controller.rollouts.spread("judge", [(each, sent, lists) for each in prompts])
        return self._judged(drawn)

    def judge_reference(self, prompts: Sequence[Prompts], lists: Lists) -> JudgedLists:
        """The supervised policy."""
        return self._judged(self._controller.reference.spread("judge", [(each, lists) for each in prompts]))

    def _judged(self, drawn: Sequence[Any]) -> JudgedLists:
        judged = [self._controller.rewards.rank_zero("judge", each) for each in drawn]
        return JudgedLists.concatenate(ray.get(judged))

    @property
    def is_snapshot_due(self) -> bool:
        """Whether the policy is to be judged and kept as it is now."""
        config = self._config
        return self.step % config.evaluation.every_steps == 0 or self.step == config.steps

    def _begin_what_may_begin(self) -> None:
        every = self._config.evaluation.every_steps
        end = min(self._config.steps, (self.step // every + 1) * every)
        while self._queue.next_batch < end and self._queue.may_begin(self._version):
            self._queue.put(self._version, self._begin(self._queue.next_batch))

    @property
    def _learned_version(self) -> int:
        """Optimizer steps that the learner has taken."""
        return self.step * self._updates

    @property
    def _version(self) -> int:
        """Of the policy that draws next."""
        return self._learned_version if self._controller.is_colocated else self._sent_version

    def _begin(self, step: int) -> _Begun:
        controller, prompts = self._controller, self._prompts.step(step)
        chunks = prompts.chunks(self._config.rollout.chunk_users, multiple_of=self._updates)
        drawn = controller.rollouts.spread(
            "draw", [(chunk, self._weights) for chunk in chunks], num_returns=2
        )
        scored = [controller.rewards.rank_zero("score", rollouts, num_returns=2) for _, rollouts in drawn]
        reference = controller.reference.spread("log_probs", [(rollouts,) for _, rollouts in drawn])
        return _Begun(
            self._version,
            [summary for summary, _ in drawn],
            [rewarded for _, rewarded in scored],
            [summary for summary, _ in scored],
            reference,
        )

    def _learn(self, batch: _Begun) -> tuple[dict[str, float], tuple[str, ...]]:
        drawn: list[RolloutSummary] = ray.get(batch.summaries)
        for summary in drawn:
            if summary.policy_version != batch.version:
                raise AssertionError(f"drawn by version {summary.policy_version}, asked was {batch.version}")
        scored: list[RewardSummary] = ray.get(batch.reward_summaries)
        num_users = sum(summary.num_users for summary in drawn)
        shares = [self._shares(batch, drawn, update) for update in range(self._updates)]
        # Learners do what they are asked to in this order: nobody has to wait in between.
        updates = [self._controller.learner.each("update", of_update) for of_update in shares]
        reports: list[dict[str, float]] = ray.get([report for update in updates for report in update])
        names = {name for report in reports for name in report}
        sums = {name: sum(report.get(name, 0.0) for report in reports) for name in sorted(names)}
        num_groups = sum(of_update[0][0].num_groups for of_update in shares)
        figures = {name: value / num_groups for name, value in sums.items()}
        figures |= _mean_figures(scored, [summary.num_users for summary in drawn])
        figures["flat_share"] = sum(summary.num_flat for summary in scored) / num_users
        figures["entropy"] = sum(summary.entropy_sum for summary in drawn) / num_users
        figures["staleness"] = float(self._queue.observed_staleness[-1])
        return figures, tuple(sentence for summary in scored for sentence in summary.warnings)

    def _shares(self, batch: _Begun, drawn: Sequence[RolloutSummary], update: int) -> list[tuple[Any, ...]]:
        """What every learner is told, by rank, for one of a batch's updates."""
        # With fewer chunks than updates, some are learned from again: without any, an optimizer would still
        # move, by what it remembers.
        some = slice(update % len(drawn), None, self._updates)
        num_learners = len(self._controller.learner)
        of_update, rewarded, reference = drawn[some], batch.rewarded[some], batch.reference[some]
        num_candidates = sum(summary.num_candidates for summary in of_update)
        totals = StepTotals(
            self.step,
            sum(summary.num_users for summary in of_update),
            sum(summary.num_choices for summary in of_update) / max(num_candidates, 1),
        )
        return [
            (totals, *rewarded[rank::num_learners], *reference[rank::num_learners])
            for rank in range(num_learners)
        ]

    def _send(self) -> None:
        """From now on, batches are drawn with the learner's weights of this moment."""
        self._weights = self._controller.learner.rank_zero("weights")
        self._sent_version = self._learned_version


class Alarm:
    """Stops a run whose policy has collapsed."""

    def __init__(self, config: AlarmConfig) -> None:
        self._config = config
        self._first: list[float] = []
        """Entropies of the first steps."""

    def check(self, step: int, figures: dict[str, float]) -> None:
        """
        Raises:
            CollapsedError: the policy is too far from the supervised one, or draws the same again and again.
        """
        kl, entropy = figures["kl"], figures["entropy"]
        if not kl <= self._config.max_kl:
            raise CollapsedError(
                f"step {step}: the KL divergence to the supervised policy is {kl:.2f} nats, the bound "
                f"(alarms.max_kl) is {self._config.max_kl}; lower learner.learning_rate, or raise "
                "learner.kl_weight"
            )
        if len(self._first) < FIRST_FIGURES:
            self._first.append(entropy)
            return
        least = self._config.min_entropy_share * float(np.mean(self._first))
        if not entropy >= least:
            raise CollapsedError(
                f"step {step}: the entropy of a candidate is {entropy:.2f} nats, the bound is {least:.2f} "
                "(alarms.min_entropy_share of that of the first steps); lower learner.learning_rate, or "
                "raise learner.kl_weight or anchor_weight"
            )

    @property
    def state(self) -> list[float]:
        return self._first

    def load(self, state: list[float]) -> None:
        self._first = list(state)


def _mean_figures(scored: Sequence[RewardSummary], num_users: Sequence[int]) -> dict[str, float]:
    """Of the rewards, over the chunks of a step."""
    names = scored[0].figures
    total = sum(num_users)
    return {
        f"reward/{name}": sum(
            summary.figures[name] * users for summary, users in zip(scored, num_users, strict=True)
        )
        / total
        for name in names
    }
