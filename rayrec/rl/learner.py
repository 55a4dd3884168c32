"""The policy that is trained: the dense program of supervised training, with a policy loss.

    ScoredRollouts, ReferenceLogProbs ─► PolicyBatch ─► PolicyProgram.backward, update ─► next weights

Embedding rows are those of the supervised run and stay frozen, so rollouts of every version read the same
rows.

Axes: U users, G candidates of a user, W candidates and the logged target, L codes of a candidate, E items of
a history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayrec.models.base.compute import ComputeSettings
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.decoding.prefixes import item_code_log_probs
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.program.program import DivergedError, Rows, SumOverTrainers
from rayrec.models.program.torch_program import TorchProgram, TrainableModel
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.devices import device_named
from rayrec.platform.schedule import RateSchedule
from rayrec.rl.config import LearnerConfig, RlConfig
from rayrec.rl.losses.base import LossInputs, PolicyLoss, SampledGroups
from rayrec.rl.losses.terms import has_spread, kl_to_reference
from rayrec.rl.policy import Policy, Weights, distribution
from rayrec.rl.rollouts import ReferenceLogProbs, ScoredRollouts
from rayrec.samples.base.batches import SampleBatch


@dataclass(frozen=True)
class BatchTotals:
    """Numbers of the whole update, of which a learner computes a share."""

    step: int
    num_groups: int
    codes_per_candidate: float


@dataclass(frozen=True)
class PolicyBatch:
    """One learner's share of an update, as tensors; features and batch of `TorchProgram` in one."""

    inputs: TensorBatch
    lookups: Mapping[str, Any]
    seen_UE: Tensor | None
    items_UW: Tensor
    """Candidates, then the logged target; -1 where there is none."""
    groups: SampledGroups
    temperature: float
    totals: BatchTotals

    @property
    def step(self) -> int:
        return self.totals.step

    @property
    def num_targets(self) -> int:
        return self.totals.num_groups

    @property
    def rows(self) -> dict[str, Tensor]:
        return self.inputs.rows

    @property
    def lengths_B(self) -> np.ndarray:
        # Work grows with the number of candidates, which is about the same for all users.
        return np.maximum(self.inputs.lengths_B, 1)

    def some_rows(self, rows: slice) -> PolicyBatch:
        return replace(
            self,
            inputs=self.inputs.some_rows(rows),
            seen_UE=None if self.seen_UE is None else self.seen_UE[rows],
            items_UW=self.items_UW[rows],
            groups=self.groups.of_users(rows),
        )

    def stand_in(self) -> PolicyBatch:
        raise AssertionError("learners hold whole copies of the weights")


@dataclass(frozen=True)
class StepLoss:
    """The loss of a step: policy loss, KL penalty and NLL term.

        loss = - reward_weight · Σ_G w · objective + kl_coefficient · k3(π, π_ref)
               - nll_coefficient · log π(target)

    k3 is `kl_to_reference`: reported as an estimate of KL(π ‖ π_ref), and used as GRPO's penalty.
    """

    policy_loss: PolicyLoss
    kl_coefficient: float = 0.0
    nll_coefficient: float = 0.0
    reward_weight: float = 1.0

    @classmethod
    def of(cls, policy_loss: PolicyLoss, config: LearnerConfig) -> StepLoss:
        return cls(policy_loss, config.kl_coefficient, config.nll_coefficient, config.reward_weight)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute (scalar loss summed over groups, sums over groups of metrics by name)."""
        objective = self.policy_loss.objective(inputs)
        weights_UG = inputs.weights_UG
        value_U = (weights_UG * objective.values_UG).sum(dim=1)
        clipped_U = (weights_UG * objective.is_clipped_UG).sum(dim=1)
        if not self.policy_loss.learns_from_equal_rewards:
            # Their advantages are rounding errors, which a division by the standard deviation would blow up.
            teaches_nothing_U = ~has_spread(inputs.rewards_UG, weights_UG)
            value_U = value_U.masked_fill(teaches_nothing_U, 0.0)
            clipped_U = clipped_U.masked_fill(teaches_nothing_U, 0.0)
        loss_U = -self.reward_weight * value_U
        metrics = {"clip_share": clipped_U.sum()}
        if inputs.reference_log_probs_UGL is not None:
            kl_UGL = kl_to_reference(inputs.log_probs_UGL, inputs.reference_log_probs_UGL)
            kl_U = (weights_UG * kl_UGL.sum(dim=2)).sum(dim=1)
            loss_U = loss_U + self.kl_coefficient * kl_U
            metrics["kl"] = kl_U.sum()
        target_U = torch.where(inputs.has_target_U, inputs.target_likelihood_U, 0.0)
        loss_U = loss_U - self.nll_coefficient * target_U
        metrics["target_log_prob"] = target_U.sum()
        metrics["ratio_deviation"] = (weights_UG * (inputs.log_ratio_UGL.sum(dim=2).exp() - 1.0).abs()).sum()
        return loss_U.sum(), {name: metric.detach() for name, metric in metrics.items()}


class PolicyProgram(TorchProgram):
    """Trains a `GenerativeRecommender` on scored rollouts.

    Dropout is off: with it, the ratio to the policy that sampled would be one of dropout masks.
    """

    def __init__(
        self,
        network: GenerativeRecommender,
        loss: StepLoss,
        settings: DenseOptimizerSettings,
        device: torch.device,
        seed: int,
        sum_over_learners: SumOverTrainers | None,
        compute: ComputeSettings,
    ) -> None:
        super().__init__(network, settings, device, seed, sum_over_learners, compute)
        self._loss = _LossOf(network, loss)

    def _begin_training(self) -> None:
        self._module.eval()
        self._loss.metrics = {}

    @property
    def _trained(self) -> TrainableModel:
        return self._loss

    def _batch(self, features: PolicyBatch, rows: Rows, training: bool) -> PolicyBatch:
        return features  # the learner has made tensors of it already

    def zero_gradients(self) -> None:
        """Take the place of `backward` in a learner that has no groups in an update."""
        for parameter in self._trained_parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def _diverged(self, what: str) -> DivergedError:
        # Reports count steps from 1.
        return DivergedError(
            f"step {self._batch_step + 1}: {what}; the policy diverged: lower learner.learning_rate or set "
            "learner.max_grad_norm",
            self._batch_step,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Sums over the groups of the last `backward`."""
        return {name: metric.item() for name, metric in self._loss.metrics.items()}


class _LossOf:
    """The loss of a network on a batch; adds up metrics over micro-batches."""

    def __init__(self, network: GenerativeRecommender, loss: StepLoss) -> None:
        self._network, self._loss = network, loss
        self.metrics: dict[str, Tensor] = {}

    def loss(self, batch: PolicyBatch) -> Tensor:
        loss, metrics = self._loss(loss_inputs(self._network, batch))
        for name, metric in metrics.items():
            self.metrics[name] = self.metrics.get(name, torch.zeros_like(metric)) + metric
        return loss


def loss_inputs(network: GenerativeRecommender, batch: PolicyBatch) -> LossInputs:
    """Compute what the network says now of sampled candidates."""
    context = network.backbone.encode_context(batch.inputs)

    def log_probs(items_UW: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """0 without a gradient for what is no item, or may not be sampled."""
        given = distribution(network, context, batch.seen_UE, temperature)
        found_UWL = item_code_log_probs(given, items_UW)
        is_given_UW = (found_UWL > -torch.inf).all(dim=2)
        return torch.where(is_given_UW[:, :, None], found_UWL, 0.0).float(), is_given_UW

    log_probs_UWL, is_given_UW = log_probs(batch.items_UW, batch.temperature)
    # The NLL term is at temperature 1, as in supervised training: at the policy's temperature, it would undo
    # what training has sharpened.
    likelihood_U1L = log_probs_UWL[:, -1:]
    if batch.temperature != 1.0:
        likelihood_U1L, _ = log_probs(batch.items_UW[:, -1:], 1.0)
    return LossInputs(
        **vars(batch.groups),
        log_probs_UGL=log_probs_UWL[:, :-1],
        target_log_probs_UL=log_probs_UWL[:, -1],
        has_target_U=is_given_UW[:, -1],
        target_likelihood_U=likelihood_U1L[:, 0].sum(dim=1),
    )


class PolicyLearner:
    """One of the learners that train together, each on its groups of every update."""

    def __init__(self, policy: Policy, program: PolicyProgram, temperature: float) -> None:
        self._policy, self._program, self._temperature = policy, program, temperature
        self.version = 0
        """Optimizer steps taken."""

    @classmethod
    def of(
        cls, config: RlConfig, policy: Policy, sum_over_learners: SumOverTrainers | None = None
    ) -> PolicyLearner:
        """Make a learner that trains the network of `policy`."""
        learner, device = config.learner, device_named(policy.task.config.device)
        program = PolicyProgram(
            policy.network,
            StepLoss.of(config.algorithm, learner),
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
        return cls(policy, program, config.rollout.temperature)

    def update(
        self,
        totals: BatchTotals,
        scored: Sequence[ScoredRollouts],
        reference: Sequence[ReferenceLogProbs],
    ) -> dict[str, float]:
        """Take one optimizer step; returns sums of metrics over this learner's groups.

        Args:
            scored: this learner's chunks; may be empty.
            reference: of the same chunks.

        Raises:
            DivergedError: the loss or a gradient is not finite; no weight has changed.
        """
        if scored:
            batch, rows = self.batch(totals, scored, reference)
            metrics = {"loss": self._program.backward(batch, rows).loss_sum, **self._program.metrics}
        else:  # more learners than chunks; the others still wait for the sum of gradients
            metrics = {}
            self._program.zero_gradients()
        self._program.update()
        # Where the worker also samples, `policy` and the program share one network.
        self._policy.version = self.version = self.version + 1
        return metrics

    def batch(
        self,
        totals: BatchTotals,
        scored: Sequence[ScoredRollouts],
        reference: Sequence[ReferenceLogProbs],
    ) -> tuple[PolicyBatch, Rows]:
        """Concatenate chunks into one batch of tensors; returns it with its embedding rows."""
        rollouts = [each.rollouts for each in scored]
        inputs = self._policy.inputs(concatenated([each.prompts.samples for each in rollouts]))
        device = self._policy.program.device

        def tensor(parts: Sequence[np.ndarray]) -> Tensor:
            return torch.tensor(np.concatenate(parts), device=device)

        groups = SampledGroups(
            old_log_probs_UGL=tensor([each.code_log_probs_UGL for each in rollouts]),
            rewards_UG=tensor([each.rewards_UG for each in scored]).float(),
            weights_UG=tensor([each.weights_UG for each in rollouts]),
            target_rewards_U=tensor([each.target_rewards_U for each in scored]).float(),
            is_target_UG=tensor([each.is_target_UG for each in rollouts]),
            reference_log_probs_UGL=tensor([each.candidates_UGL for each in reference])
            if reference
            else None,
            reference_target_log_probs_UL=tensor([each.targets_UL for each in reference])
            if reference
            else None,
            codes_per_candidate=totals.codes_per_candidate,
        )
        batch = PolicyBatch(
            # Not for training: no event of the history is a target, and rows get no gradient.
            inputs=TensorBatch.build(inputs.features, inputs.rows, 0, device, training=False),
            lookups=inputs.features.lookups,
            seen_UE=None if inputs.seen_UE is None else torch.tensor(inputs.seen_UE, device=device),
            items_UW=tensor([each.items_UW for each in rollouts]),
            groups=groups,
            temperature=self._temperature,
            totals=totals,
        )
        return batch, inputs.rows

    def weights(self) -> Weights:
        """Return the weights of this moment.

        They are copied: where actors share a process, nothing is sent, and a worker that loads them later
        would find those of another step under this version.
        """
        return Weights.of(self.version, self._program.weights())

    def optimizer_state(self) -> dict[str, np.ndarray]:
        return self._program.optimizer_state()

    def load(self, weights: Mapping[str, np.ndarray], optimizer_state: Mapping[str, np.ndarray]) -> None:
        """Continue from a snapshot."""
        self._program.load(weights, optimizer_state)
        self._policy.version = self.version = int(optimizer_state["step"])


def concatenated(parts: Sequence[SampleBatch]) -> SampleBatch:
    """Concatenate the samples of one step."""
    first = parts[0]
    lengths_B = np.concatenate([np.diff(part.offsets_B1) for part in parts])
    times = [part.times_N for part in parts if part.times_N is not None]
    targets = [part.targets_B for part in parts if part.targets_B is not None]
    return SampleBatch(
        step=first.step,
        row_keys_B=np.concatenate([part.row_keys_B for part in parts]),
        user_ids_B=np.concatenate([part.user_ids_B for part in parts]),
        item_ids_N=np.concatenate([part.item_ids_N for part in parts]),
        offsets_B1=np.concatenate([[0], np.cumsum(lengths_B)]),
        targets_B=np.concatenate(targets) if targets else None,
        times_N=np.concatenate(times) if times else None,
        labels={label: np.concatenate([part.labels[label] for part in parts]) for label in first.labels},
    )
