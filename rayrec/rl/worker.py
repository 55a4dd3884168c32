"""The actor of reinforcement learning: one process with one or several roles, a typed method for each call.

sample: Prompts, Weights ─► Rollouts ─┬─► score: ScoredRollouts ──────────────┐
                                      └─► reference_log_probs: ReferenceLogProbs ─┴─► update: next weights
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from rayrec.actors.collective import Address, Meeting, TrainerGroup
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


class RlWorker:
    """One process. Calls of a role that it does not have fail."""

    def __init__(
        self, role: ActorRole, config: RlConfig, roles: Sequence[Role], num_learners: int = 1
    ) -> None:
        """
        Args:
            num_learners: processes that sum their gradients with this one, itself included.
        """
        torch.set_num_threads(config.placement.threads)
        self._role = role
        self._config = config
        self._group = TrainerGroup(num_learners, role.member) if num_learners > 1 else None
        self._seconds: dict[str, float] = defaultdict(float)
        # The learner and the rollouts of one process share a network; so do the reference and the rewards.
        if "learner" in roles or "rollouts" in roles:
            self._policy = Policy.load(config)
        if "learner" in roles:
            sum_over_learners = None if self._group is None else self._group.begin_all_reduce
            self._learner = PolicyLearner.of(config, self._policy, sum_over_learners)
        if "reference" in roles:
            self._reference = Policy.load(config)
        if "rewards" in roles:
            policy = self._reference if "reference" in roles else load_on_host(config)
            keeps_only_signal = config.rollout.dynamic is not None
            self._scorer = RolloutScorer.of(config.rewards, policy, keeps_only_signal)

    def __repr__(self) -> str:
        return self._role.actor_name

    def open_group(self) -> Address:
        """Return where the learners can meet; asked of the first one."""
        assert self._group is not None, "it is alone"
        return self._group.open()

    def join(self, where: Address | Meeting, backend: str) -> None:
        """Meet the other learners."""
        assert self._group is not None, "it is alone"
        self._group.join(where, backend)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the time of a block to `seconds`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - begun

    def seconds(self) -> Mapping[str, float]:
        """Return the time spent in each kind of call so far, and on loading weights (`sync`)."""
        return dict(self._seconds)

    def sample(self, prompts: Prompts, weights: Weights | None) -> Rollouts:
        """Sample candidates for a chunk. The result depends on the arguments alone.

        Args:
            weights: of the policy to sample from; None: the learner's own, of this process.
        """
        with self._timed("rollouts.sample"):
            self._sync(weights)
            return self._policy.sample(prompts, self._config.rollout, self._config.seed)

    def sample_lists(self, prompts: Prompts, weights: Weights | None, lists: ListSettings) -> SampledLists:
        """Rank items and sample lists for evaluation."""
        with self._timed("rollouts.sample_lists"):
            self._sync(weights)
            return self._policy.sample_lists(prompts, lists)

    def _sync(self, weights: Weights | None) -> None:
        if weights is not None and weights.version != self._policy.version:
            with self._timed("sync"):
                self._policy.take(weights)

    def reference_log_probs(self, sampled: Rollouts | ScoredRollouts) -> ReferenceLogProbs:
        """Compute the supervised policy's log-probabilities of candidates and targets."""
        rollouts = sampled.rollouts if isinstance(sampled, ScoredRollouts) else sampled
        with self._timed("reference.log_probs"):
            return self._reference.log_probs(rollouts, self._config.rollout.temperature)

    def reference_lists(self, prompts: Prompts, lists: ListSettings) -> SampledLists:
        """As `sample_lists`, with the supervised policy."""
        with self._timed("reference.sample_lists"):
            return self._reference.sample_lists(prompts, lists)

    def score(self, rollouts: Rollouts) -> tuple[ChunkSummary, ScoredRollouts]:
        """Compute the rewards of a chunk."""
        with self._timed("rewards.score"):
            return self._scorer.score(rollouts)

    def score_lists(self, sampled: SampledLists) -> EvaluatedLists:
        """Compute rewards and metrics of sampled lists."""
        with self._timed("rewards.score_lists"):
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
        with self._timed("learner.update"):
            scored = [part for part in parts if isinstance(part, ScoredRollouts)]
            reference = [part for part in parts if isinstance(part, ReferenceLogProbs)]
            return self._learner.update(totals, scored, reference)

    def weights(self) -> Weights:
        with self._timed("learner.weights"):
            return self._learner.weights()

    def optimizer_state(self) -> dict[str, np.ndarray]:
        return self._learner.optimizer_state()

    def load(self, weights: Mapping[str, np.ndarray], optimizer_state: Mapping[str, np.ndarray]) -> None:
        """Continue from a snapshot."""
        self._learner.load(weights, optimizer_state)


def load_on_host(config: RlConfig) -> Policy:
    """Load the supervised run for its data set alone, in a process that claims no accelerator."""
    return Policy.load(config.model_copy(update={"device": HOST.kind}))
