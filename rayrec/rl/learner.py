"""The policy that learns: the same dense program as in supervised training, with a policy's loss.

    Rewarded, ReferenceLogProbs ─► PolicyShare ─► PolicyProgram.backward, update ─► next weights

Embedding rows are those of the supervised run and stay as they are: rollouts of any version read the same.

Axes: U users, G candidates of a user, L codes of a candidate, E items of a history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayrec.models.base.compute import ComputeSettings
from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.decoding.prefixes import item_code_log_probs
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.program.program import DivergedError, Rows, SumOverTrainers
from rayrec.models.program.torch_program import TorchProgram, TrainedModel
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.arrays import Int64Array
from rayrec.rl.loss import PolicyLoss
from rayrec.rl.policy import Policy, distribution
from rayrec.rl.rollouts import ReferenceLogProbs, Rewarded
from rayrec.rl.sampled import Sampled
from rayrec.rl.weights import Weights, views_of
from rayrec.samples.base.batches import FeatureBatch, SampleBatch


@dataclass(frozen=True)
class StepTotals:
    """What a learner has to know of the whole update, of which it has a share."""

    step: int
    num_groups: int
    codes_per_candidate: float


@dataclass(frozen=True)
class PolicyShare:
    """One learner's groups of a step; what `TorchProgram` asks of features."""

    features: FeatureBatch
    seen_UE: Int64Array | None
    items_UG: Int64Array
    targets_U: Int64Array
    old_log_probs_UGL: np.ndarray
    weights_UG: np.ndarray
    rewards_UG: np.ndarray
    target_rewards_U: np.ndarray
    reference: ReferenceLogProbs | None
    temperature: float
    totals: StepTotals

    @property
    def step(self) -> int:
        return self.totals.step

    @property
    def num_targets(self) -> int:
        return self.totals.num_groups

    @property
    def lookups(self) -> Mapping[str, Any]:
        return self.features.lookups


@dataclass(frozen=True)
class PolicyBatch:
    """The same as tensors."""

    batch: TensorBatch
    seen_UE: Tensor | None
    items_UG: Tensor
    targets_U: Tensor
    old_log_probs_UGL: Tensor
    weights_UG: Tensor
    rewards_UG: Tensor
    target_rewards_U: Tensor
    reference_UWL: Tensor | None
    """Of the candidates, and behind them of the target."""
    temperature: float
    codes_per_candidate: float

    @property
    def rows(self) -> dict[str, Tensor]:
        return self.batch.rows

    @property
    def lengths_B(self) -> np.ndarray:
        # Work grows with the candidates, of which all users have about as many.
        return np.maximum(self.batch.lengths_B, 1)

    def some_rows(self, rows: slice) -> PolicyBatch:
        return PolicyBatch(
            batch=self.batch.some_rows(rows),
            seen_UE=None if self.seen_UE is None else self.seen_UE[rows],
            items_UG=self.items_UG[rows],
            targets_U=self.targets_U[rows],
            old_log_probs_UGL=self.old_log_probs_UGL[rows],
            weights_UG=self.weights_UG[rows],
            rewards_UG=self.rewards_UG[rows],
            target_rewards_U=self.target_rewards_U[rows],
            reference_UWL=None if self.reference_UWL is None else self.reference_UWL[rows],
            temperature=self.temperature,
            codes_per_candidate=self.codes_per_candidate,
        )

    def stand_in(self) -> PolicyBatch:
        raise AssertionError("learners hold whole copies of the weights")


class PolicyProgram(TorchProgram):
    """Trains a `GenerativeRecommender` on what was drawn. Without dropout: the ratio to the policy that drew
    is of two policies, and not of two masks."""

    def __init__(
        self,
        network: GenerativeRecommender,
        loss: PolicyLoss,
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
        self._loss.figures = {}

    @property
    def _trained(self) -> TrainedModel:
        return self._loss

    def add_nothing(self) -> None:
        """In place of `backward`, where there is nothing to learn from."""
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    def _diverged(self, what: str) -> DivergedError:
        # Reports count steps from 1.
        return DivergedError(
            f"step {self._batch_step + 1}: {what}; the policy diverged: lower learner.learning_rate or set "
            "learner.max_grad_norm",
            self._batch_step,
        )

    @property
    def figures(self) -> dict[str, float]:
        """Sums over the groups of the last `backward`."""
        return {name: figure.item() for name, figure in self._loss.figures.items()}

    def _batch(self, features: PolicyShare, rows: Rows, training: bool) -> PolicyBatch:
        device, share = self._device, features

        def tensor(array: np.ndarray) -> Tensor:
            return torch.tensor(array, device=device)

        reference = share.reference
        return PolicyBatch(
            # Not as in training: nothing of these events is a target, and no gradient goes to the rows.
            batch=TensorBatch.build(share.features, rows, self._seed, device, training=False),
            seen_UE=None if share.seen_UE is None else tensor(share.seen_UE),
            items_UG=tensor(share.items_UG),
            targets_U=tensor(share.targets_U),
            old_log_probs_UGL=tensor(share.old_log_probs_UGL),
            weights_UG=tensor(share.weights_UG),
            rewards_UG=tensor(share.rewards_UG).float(),
            target_rewards_U=tensor(share.target_rewards_U).float(),
            reference_UWL=None
            if reference is None
            else tensor(np.concatenate([reference.candidates_UGL, reference.targets_UL[:, None]], axis=1)),
            temperature=share.temperature,
            codes_per_candidate=share.totals.codes_per_candidate,
        )


class _LossOf:
    """A policy's loss of a batch."""

    def __init__(self, network: GenerativeRecommender, loss: PolicyLoss) -> None:
        self._network, self._loss = network, loss
        self.figures: dict[str, Tensor] = {}

    def loss(self, batch: PolicyBatch) -> Tensor:
        loss, figures = self._loss(sampled_of(self._network, batch))
        for name, figure in figures.items():
            self.figures[name] = self.figures.get(name, torch.zeros_like(figure)) + figure
        return loss


def sampled_of(network: GenerativeRecommender, batch: PolicyBatch) -> Sampled:
    """What the network says now of what was drawn."""
    context = network.backbone.encode_context(batch.batch)

    def log_probs(items_UW: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """What is no item, or may not be drawn, has neither a value nor a gradient."""
        given = distribution(network, context, batch.seen_UE, temperature)
        found_UWL = item_code_log_probs(given, items_UW)
        is_given_UW = (found_UWL > -torch.inf).all(dim=2)
        return torch.where(is_given_UW[:, :, None], found_UWL, 0.0).float(), is_given_UW

    items_UW = torch.cat([batch.items_UG, batch.targets_U[:, None]], dim=1)
    log_probs_UWL, is_given_UW = log_probs(items_UW, batch.temperature)
    # As in supervised training: at the temperature of the policy, it would undo what that has sharpened.
    likelihood_U1L = log_probs_UWL[:, -1:]
    if batch.temperature != 1.0:
        likelihood_U1L, _ = log_probs(batch.targets_U[:, None], 1.0)
    reference_UWL = batch.reference_UWL
    return Sampled(
        log_probs_UGL=log_probs_UWL[:, :-1],
        old_log_probs_UGL=batch.old_log_probs_UGL,
        rewards_UG=batch.rewards_UG,
        weights_UG=batch.weights_UG,
        target_rewards_U=batch.target_rewards_U,
        target_log_probs_UL=log_probs_UWL[:, -1],
        has_target_U=is_given_UW[:, -1],
        target_likelihood_U=likelihood_U1L[:, 0].sum(dim=1),
        reference_log_probs_UGL=None if reference_UWL is None else reference_UWL[:, :-1],
        reference_target_log_probs_UL=None if reference_UWL is None else reference_UWL[:, -1],
        codes_per_candidate=batch.codes_per_candidate,
    )


class PolicyLearner:
    """One of several that learn together, each from its groups of every step."""

    def __init__(self, policy: Policy, program: PolicyProgram, temperature: float) -> None:
        self._policy, self._program, self._temperature = policy, program, temperature
        self.version = 0
        """Optimizer steps that were taken."""

    def update(
        self,
        totals: StepTotals,
        *parts: Rewarded | ReferenceLogProbs,
    ) -> dict[str, float]:
        """One optimizer step; sums over this learner's groups of what is reported.

        Args:
            parts: chunks with their rewards, and behind them as many with what the reference says. One by
                one, since Ray keeps promises that are arguments themselves, and no others.

        Raises:
            DivergedError: the loss or a gradient is not finite; no weight has changed.
        """
        rewarded = [part for part in parts if isinstance(part, Rewarded)]
        reference = [part for part in parts if isinstance(part, ReferenceLogProbs)]
        if rewarded:
            share, rows = self._share(totals, rewarded, reference)
            figures = {"loss": self._program.backward(share, rows).loss_sum, **self._program.figures}
        else:  # there are more learners than chunks; the sum over them is waited for all the same
            figures = {}
            self._program.add_nothing()
        self._program.update()
        self._policy.version = self.version = self.version + 1  # one network, whoever asks it
        return figures

    def _share(
        self,
        totals: StepTotals,
        rewarded: Sequence[Rewarded],
        reference: Sequence[ReferenceLogProbs],
    ) -> tuple[PolicyShare, dict[str, np.ndarray]]:
        rollouts = [each.rollouts for each in rewarded]
        samples = concatenated([each.prompts.samples for each in rollouts])
        inputs = self._policy.inputs(samples)
        share = PolicyShare(
            features=inputs.features,
            seen_UE=inputs.seen_UE,
            items_UG=np.concatenate([each.items_UG for each in rollouts]),
            targets_U=np.concatenate([each.prompts.targets_U for each in rollouts]),
            old_log_probs_UGL=np.concatenate([each.code_log_probs_UGL for each in rollouts]),
            weights_UG=np.concatenate([each.weights_UG for each in rollouts]),
            rewards_UG=np.concatenate([each.rewards_UG for each in rewarded]),
            target_rewards_U=np.concatenate([each.target_rewards_U for each in rewarded]),
            reference=None
            if not reference
            else ReferenceLogProbs(
                np.concatenate([each.candidates_UGL for each in reference]),
                np.concatenate([each.targets_UL for each in reference]),
            ),
            temperature=self._temperature,
            totals=totals,
        )
        return share, inputs.rows

    def steps_taken(self) -> int:
        """Of the optimizer."""
        return self.version

    def weights(self) -> Weights:
        """As they are at this moment: whoever keeps them, and does not send them, makes copies."""
        return Weights.of(self.version, views_of(self._policy.network))

    def optimizer_state(self) -> dict[str, np.ndarray]:
        return self._program.optimizer_state()

    def load(self, weights: Mapping[str, np.ndarray], optimizer_state: Mapping[str, np.ndarray]) -> None:
        """Go on from a snapshot."""
        self._program.load(weights, optimizer_state)
        self._policy.version = self.version = int(optimizer_state["step"])


def concatenated(parts: Sequence[SampleBatch]) -> SampleBatch:
    """Samples of one step, one after the other."""
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
