"""The actor of reinforcement learning: one process with one or several roles, a typed method for each call.

sample: Prompts, Weights ─► Rollouts ─┬─► score: ScoredRollouts ──────────────┐
                                      └─► reference_log_probs: ReferenceLogProbs ─┴─► update: next weights
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rayrec.actors.rl_worker import RlProcess
from rayrec.actors.spawning import ActorRole
from rayrec.platform.devices import HOST
from rayrec.rl.config import RlConfig
from rayrec.rl.learner import BatchTotals, PolicyLearner
from rayrec.rl.list_metrics import EvaluatedLists, ListSettings, SampledLists
from rayrec.rl.policy import Policy, Weights
from rayrec.rl.prompts import Prompts
from rayrec.rl.rollouts import ChunkSummary, ReferenceLogProbs, Rollouts, ScoredRollouts
from rayrec.rl.scoring import RolloutScorer

Role = Literal["learner", "rollouts", "reference", "rewards"]
ROLES: tuple[Role, ...] = ("learner", "rollouts", "reference", "rewards")


class RlWorker(RlProcess):
    """One process. Calls of a role that it does not have fail."""

    def __init__(
        self,
        role: ActorRole,
        config: RlConfig,
        roles: Sequence[Role],
        num_workers: int = 1,
        threads: int = 1,
        meets: bool = False,
    ) -> None:
        super().__init__(role, num_workers, threads, meets)
        self._config = config
        self._sync_s = 0.0
        # The learner and the rollouts of one process share a network; so do the reference and the rewards.
        if "learner" in roles or "rollouts" in roles:
            self._policy = Policy.load(config)
        if "learner" in roles:
            self._learner = PolicyLearner.of(config, self._policy, self.sum_over_workers)
        if "reference" in roles:
            self._reference = Policy.load(config)
        if "rewards" in roles:
            policy = self._reference if "reference" in roles else load_on_host(config)
            self._scorer = RolloutScorer.of(config.rewards, policy)

    def sample(self, prompts: Prompts, weights: Weights | None) -> Rollouts:
        """Sample candidates for a chunk. The result depends on the arguments alone.

        Args:
            weights: of the policy to sample from; None: the learner's own, of this process.
        """
        with self.timed("rollouts.sample"):
            self._sync(weights)
            return self._policy.sample(prompts, self._config.rollout, self._config.seed)

    def sample_lists(self, prompts: Prompts, weights: Weights | None, lists: ListSettings) -> SampledLists:
        """Rank items and sample lists for evaluation."""
        with self.timed("rollouts.sample_lists"):
            self._sync(weights)
            return self._policy.sample_lists(prompts, lists)

    def take(self, weights: Weights) -> None:
        """Load weights ahead of the next call."""
        with self.timed("rollouts.take"):
            self._sync(weights)

    def _sync(self, weights: Weights | None) -> None:
        if weights is None or weights.version == self._policy.version:
            return
        begun = time.perf_counter()
        self._policy.take(weights)
        self._sync_s += time.perf_counter() - begun

    def sync_seconds(self) -> float:
        """Return the time spent on loading weights."""
        return self._sync_s

    def process_id(self) -> int:
        """Return the process id, by which a restarted process can be told from the one before."""
        return os.getpid()

    def reference_log_probs(self, rollouts: Rollouts) -> ReferenceLogProbs:
        """Compute the supervised policy's log-probabilities of candidates and targets."""
        with self.timed("reference.log_probs"):
            return self._reference.log_probs(rollouts, self._config.rollout.temperature)

    def reference_lists(self, prompts: Prompts, lists: ListSettings) -> SampledLists:
        """As `sample_lists`, with the supervised policy."""
        with self.timed("reference.sample_lists"):
            return self._reference.sample_lists(prompts, lists)

    def score(self, rollouts: Rollouts) -> tuple[ChunkSummary, ScoredRollouts]:
        """Compute the rewards of a chunk."""
        with self.timed("rewards.score"):
            return self._scorer.score(rollouts)

    def score_lists(self, sampled: SampledLists) -> EvaluatedLists:
        """Compute rewards and metrics of sampled lists."""
        with self.timed("rewards.score_lists"):
            return self._scorer.evaluate(sampled)

    def reward_state(self) -> dict[str, Any]:
        return self._scorer.state()

    def load_reward_state(self, state: Mapping[str, Any]) -> None:
        self._scorer.load(state)

    def update(self, totals: BatchTotals, *parts: ScoredRollouts | ReferenceLogProbs) -> dict[str, float]:
        """Take one optimizer step; returns sums of metrics over this learner's groups.

        Args:
            parts: scored chunks, then the reference's log-probabilities of each. One by one, since Ray
                resolves promises only where they are arguments themselves.
        """
        with self.timed("learner.update"):
            scored = [part for part in parts if isinstance(part, ScoredRollouts)]
            reference = [part for part in parts if isinstance(part, ReferenceLogProbs)]
            return self._learner.update(totals, scored, reference)

    def weights(self) -> Weights:
        with self.timed("learner.weights"):
            return self._learner.weights()

    def optimizer_state(self) -> dict[str, np.ndarray]:
        return self._learner.optimizer_state()

    def load(self, weights: Mapping[str, np.ndarray], optimizer_state: Mapping[str, np.ndarray]) -> None:
        """Continue from a snapshot."""
        self._learner.load(weights, optimizer_state)


def load_on_host(config: RlConfig) -> Policy:
    """Load the supervised run for its data set alone, in a process that claims no accelerator."""
    return Policy.load(config.model_copy(update={"device": HOST.kind}))
