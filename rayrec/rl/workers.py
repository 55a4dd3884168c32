"""The parts of the processes: who draws, who rewards, who refers, who learns; and how each is made.

prompts, weights ─► RolloutWorker.draw ─► Rollouts ─┬─► RewardWorker.score ─► Rewarded ─┐
                                                    └─► ReferenceWorker.log_probs ──────┴─► PolicyLearner
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rayrec.models.base.compute import ComputeSettings
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.program.program import SumOverTrainers
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.platform.devices import HOST, device_named
from rayrec.platform.schedule import RateSchedule
from rayrec.rl.advantages import has_spread
from rayrec.rl.config import RlConfig, RolloutConfig
from rayrec.rl.judging import DrawnLists, JudgedLists, Lists
from rayrec.rl.learner import PolicyLearner, PolicyProgram
from rayrec.rl.loss import PolicyLoss
from rayrec.rl.policy import Policy
from rayrec.rl.prompts import Prompts
from rayrec.rl.reward_inputs import RewardInputs
from rayrec.rl.rewards.build import build_guard
from rayrec.rl.rewards.guard import RewardGuard
from rayrec.rl.rewards.mix import TOTAL, RewardMix
from rayrec.rl.rollouts import ReferenceLogProbs, Rewarded, Rollouts, RolloutSummary
from rayrec.rl.weights import Weights, views_of

UNCHECKED = -1
"""Version of weights of which it is not known yet whether they are those that were sent."""
PARTS = ("learner", "rollouts", "reference", "rewards")


class RolloutWorker:
    """Draws with whatever version of the policy it is told; what comes out hangs on the arguments alone."""

    def __init__(self, policy: Policy, how: RolloutConfig, seed: int) -> None:
        self._policy, self._how, self._seed = policy, how, seed
        self._sync_s = 0.0

    def draw(self, prompts: Prompts, weights: Weights | None) -> tuple[RolloutSummary, Rollouts]:
        """Candidates of a chunk.

        Args:
            weights: None: the policy is the learner's own.
        """
        self.take(weights)
        rollouts = self._policy.draw(prompts, self._how, self._seed)
        return rollouts.summary(), rollouts

    def judge(self, prompts: Prompts, weights: Weights | None, lists: Lists) -> DrawnLists:
        """How this version ranks, and what lists it draws."""
        self.take(weights)
        return self._policy.draw_lists(prompts, lists)

    def process_id(self) -> int:
        """For who wants to know whether it is the process that it was."""
        return os.getpid()

    def sync_seconds(self) -> float:
        """Spent on taking weights."""
        return self._sync_s

    def take(self, weights: Weights | None) -> None:
        """Be this version from now on.

        Raises:
            WeightsChangedError: they did not arrive as they were sent.
        """
        if weights is None or weights.version == self._policy.version:
            return
        begun = time.perf_counter()
        self._policy.load(weights.arrays, UNCHECKED)
        weights.check(views_of(self._policy.network))
        self._policy.version = weights.version
        self._sync_s += time.perf_counter() - begun


class ReferenceWorker:
    """The supervised policy, which never changes."""

    def __init__(self, policy: Policy, temperature: float) -> None:
        self._policy, self._temperature = policy, temperature

    def log_probs(self, rollouts: Rollouts) -> ReferenceLogProbs:
        """What it says of candidates and logged targets."""
        return self._policy.log_probs(rollouts, self._temperature)

    def judge(self, prompts: Prompts, lists: Lists) -> DrawnLists:
        """As `RolloutWorker.judge`."""
        return self._policy.draw_lists(prompts, lists)


@dataclass(frozen=True)
class RewardSummary:
    """What a controller has to know of the rewards of a chunk."""

    figures: Mapping[str, float]
    """Of every part, and of their sum."""
    num_flat: int
    """Groups without spread."""
    warnings: tuple[str, ...]
    """What the guard noticed, each once."""


class RewardWorker:
    """Says what candidates are worth; keeps what rewards are normalized by."""

    def __init__(self, mix: RewardMix, guard: RewardGuard, inputs: RewardInputs) -> None:
        self._mix, self._guard, self._inputs = mix, guard, inputs

    def score(self, rollouts: Rollouts) -> tuple[RewardSummary, Rewarded]:
        """
        Raises:
            RewardError: a part fails, or gives what cannot be learned from; nothing was counted.
        """
        lists = self._inputs.lists(rollouts.prompts, rollouts.items_UG, rollouts.log_probs_UG)
        mixed = self._mix.mix(lists)
        # As one more candidate: what a target is worth may hang on its place in the list.
        with_targets = lists.with_targets(rollouts.target_log_probs_U)
        of_targets = self._mix.mix(with_targets, learns=False)
        has_target_U = with_targets.is_item_UG[:, -1]
        flat_U = ~has_spread(torch.from_numpy(mixed.total_UG), torch.from_numpy(rollouts.weights_UG)).numpy()
        seen = self._guard.watch(mixed)
        rewarded = Rewarded(
            rollouts,
            np.where(rollouts.items_UG >= 0, mixed.total_UG, 0.0),
            np.where(has_target_U, of_targets.total_UG[:, -1], np.nan),
            flat_U,
        )
        summary = RewardSummary({**mixed.figures, **seen.figures}, int(flat_U.sum()), tuple(seen.sentences))
        return summary, rewarded

    def judge(self, drawn: DrawnLists) -> JudgedLists:
        """What drawn lists are worth, by the weights of the parts and nothing else."""
        return drawn.judged(lambda items_UK, log_probs_UK: self._worth(drawn.prompts, items_UK, log_probs_UK))

    def _worth(
        self, prompts: Prompts, items_UK: np.ndarray, log_probs_UK: np.ndarray
    ) -> Mapping[str, np.ndarray]:
        lists = self._inputs.lists(prompts, items_UK, log_probs_UK)
        mixed = self._mix.mix(lists, learns=False, normalizes=False)
        return {
            name: np.where(items_UK >= 0, reward_UK, 0.0)
            for name, reward_UK in {TOTAL: mixed.total_UG, **mixed.parts}.items()
        }

    def state(self) -> dict[str, Any]:
        """Of mix and guard, as JSON has it."""
        return {"mix": self._mix.state(), "guard": self._guard.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._mix.load(state["mix"])
        self._guard.load(state["guard"])


def load_policy(config: RlConfig) -> Policy:
    """The supervised run's.

    Raises:
        InputError: it cannot be loaded, or is not of a generative model.
    """
    model = TrainedModel.load(config.init_from, config.snapshot, config.device)
    return Policy(model, config.rollout.exclude_seen)


def make_parts(
    config: RlConfig, parts: Sequence[str], sum_over_learners: SumOverTrainers | None
) -> Mapping[str, Any]:
    """The parts of one process. Learner and rollouts of one process have one network."""
    policies: dict[str, Policy] = {}

    def policy(name: str) -> Policy:
        if name not in policies:
            policies[name] = load_policy(config)
        return policies[name]

    def asked_by_rewards() -> Policy:
        # For its data set alone; a process that computes nothing with it claims no accelerator.
        if "reference" in parts:
            return policy("supervised")
        return load_policy(config.model_copy(update={"device": HOST.kind}))

    makers: dict[str, Callable[[], Any]] = {
        "learner": lambda: make_learner(config, policy("learning"), sum_over_learners),
        "rollouts": lambda: RolloutWorker(policy("learning"), config.rollout, config.seed),
        "reference": lambda: ReferenceWorker(policy("supervised"), config.rollout.temperature),
        "rewards": lambda: make_rewards(config, asked_by_rewards()),
    }
    return {part: makers[part]() for part in parts}


def make_learner(
    config: RlConfig, policy: Policy, sum_over_learners: SumOverTrainers | None = None
) -> PolicyLearner:
    learner, device = config.learner, device_named(policy.task.config.device)
    program = PolicyProgram(
        policy.network,
        PolicyLoss(config.algorithm, learner.kl_weight, learner.anchor_weight, learner.reward_weight),
        DenseOptimizerSettings(
            learning_rate=learner.learning_rate,
            weight_decay=learner.weight_decay,
            schedule=RateSchedule(learner.warmup_steps),
            max_grad_norm=learner.max_grad_norm,
            fused=device.fused_optimizer,
        ),
        policy.program.device,
        config.seed,
        sum_over_learners,
        ComputeSettings(micro_batches=learner.micro_batches),
    )
    return PolicyLearner(policy, program, config.rollout.temperature)


def make_rewards(config: RlConfig, policy: Policy) -> RewardWorker:
    """
    Raises:
        InputError: a reward does not fit the data set, or its ranker was trained on another catalog.
    """
    inputs = RewardInputs(policy)
    return RewardWorker(inputs.build(config.rewards), build_guard(config.rewards.guard), inputs)
