"""A generative recommender as a policy: it draws candidates, and says how likely it was to draw some.

One object for rollouts, the reference, and judging; the learner computes with the same network and functions.

Axes: U users, G candidates of a user, L codes of a candidate, E items of a history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rayrec.models.decoding.beam import beam_search
from rayrec.models.decoding.leaf_filter import LeafFilter
from rayrec.models.decoding.prefixes import ItemDistribution, item_code_log_probs, item_log_probs
from rayrec.models.decoding.sampling import DistinctItems, constrained_sample, stochastic_beam_search
from rayrec.models.generative.backbone import Context
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.pipelines.inference.item_ranker import item_ranker_of
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64
from rayrec.rl.config import RolloutConfig
from rayrec.rl.judging import DrawnLists, Lists
from rayrec.rl.prompts import Prompts
from rayrec.rl.rollouts import ReferenceLogProbs, Rollouts
from rayrec.samples.base.batches import FeatureBatch, SampleBatch
from rayrec.samples.features.row_features import RowFeatures


@dataclass(frozen=True)
class PolicyInputs:
    """Features and frozen rows of some prompts, and what their users have seen."""

    features: FeatureBatch
    rows: dict[str, np.ndarray]
    seen_UE: Int64Array | None
    """Padded with -1; None: everything may be drawn."""


class Policy:
    """A model of a run, with weights that may be exchanged; its embedding rows stay as they were loaded."""

    def __init__(self, model: TrainedModel, exclude_seen: bool) -> None:
        """
        Raises:
            InputError: the model does not generate semantic IDs.
        """
        program = item_ranker_of(model)
        if not isinstance(program.model, GenerativeRecommender):
            raise InputError(
                f"{model.run}: {model.assembly.config.model.name!r} scores items one by one; reinforcement "
                "learning draws candidates, so init_from has to be a run of a generative model"
            )
        task, features = model.assembly.task, model.assembly.features
        assert isinstance(task, NextItemTask), "it has a ranker"
        assert isinstance(features, RowFeatures), "those of the task"
        self.trained, self.program, self.network = model, program, program.model
        self.task, self._features = task, features
        self._exclude_seen = exclude_seen
        self.version = 0
        """Optimizer steps that its weights have taken."""

    def load(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        """Take over the weights of a version."""
        self.program.load(weights, optimizer_state=None)
        self.version = version

    def inputs(self, samples: SampleBatch) -> PolicyInputs:
        """Features of histories; operations of the run included."""
        # Prompts have whatever the data set says of events, for rewards; a model reads what it knows.
        reads = self._features
        samples = replace(
            samples.instructed(self.task.instruction),
            times_N=samples.times_N if reads.needs_history_times else None,
            labels={label: samples.labels[label] for label in reads.history_labels},
        )
        features = self._features.ranking(samples)
        ids = {name: lookup.ids_M for name, lookup in features.lookups.items()}
        seen_UE = self._features.seen(samples) if self._exclude_seen else None
        return PolicyInputs(features, self.trained.tables.read(ids), seen_UE)

    @torch.no_grad()
    def draw(self, prompts: Prompts, how: RolloutConfig, seed: int) -> Rollouts:
        """Candidates of every user. What comes out follows from weights, prompts, settings and seed."""
        batch, seen_UE = self._batch(self.inputs(prompts.samples))
        context = self.network.backbone.encode_context(batch)
        given = distribution(self.network, context, seen_UE, how.temperature)
        generator = self._noise(prompts, seed)
        if how.draw == "sample":
            drawn = constrained_sample(given, how.group_size, generator)
            items_UG, log_probs_UGL = drawn.items_BW, drawn.code_log_probs_BWL
            weights_UG = _even_weights(items_UG)
        elif how.draw == "stochastic_beam":
            distinct = stochastic_beam_search(given, how.group_size, generator)
            items_UG, log_probs_UGL = distinct.items_BW, distinct.code_log_probs_BWL
            weights_UG = importance_weights(distinct)
        else:
            items_UG = beam_search(given, how.group_size).items_BW
            again = distribution(self.network, context, seen_UE, how.temperature)
            log_probs_UGL = item_code_log_probs(again, items_UG)
            weights_UG = _even_weights(items_UG)
        targets_U1 = torch.tensor(prompts.targets_U, device=self.program.device)[:, None]
        again = distribution(self.network, context, seen_UE, how.temperature)
        target_log_probs_U = item_log_probs(again, targets_U1)[:, 0]
        return Rollouts(
            prompts,
            items_UG.cpu().numpy(),
            log_probs_UGL.masked_fill((items_UG < 0)[:, :, None], 0.0).float().cpu().numpy(),
            weights_UG.float().cpu().numpy(),
            target_log_probs_U.float().cpu().numpy(),
            self.version,
        )

    @torch.no_grad()
    def log_probs(self, rollouts: Rollouts, temperature: float) -> ReferenceLogProbs:
        """Of candidates and logged targets, code by code; 0 where there is none."""
        batch, seen_UE = self._batch(self.inputs(rollouts.prompts.samples))
        items_UW = torch.tensor(_with_targets(rollouts), device=self.program.device)
        context = self.network.backbone.encode_context(batch)
        log_probs_UWL = _finite(
            item_code_log_probs(distribution(self.network, context, seen_UE, temperature), items_UW)
        )
        found_UWL = log_probs_UWL.float().cpu().numpy()
        return ReferenceLogProbs(found_UWL[:, :-1], found_UWL[:, -1])

    @torch.no_grad()
    def draw_lists(self, prompts: Prompts, lists: Lists) -> DrawnLists:
        """Lists as they are shown, with the same noise for every temperature; and how the policy ranks."""
        inputs = self.inputs(prompts.samples)
        ranked = self.program.rank(inputs.features, inputs.rows, LIST_LENGTH, inputs.seen_UE)
        batch, seen_UE = self._batch(inputs)
        context = self.network.backbone.encode_context(batch)

        def drawn(temperature: float) -> tuple[Int64Array, np.ndarray]:
            given = distribution(self.network, context, seen_UE, temperature)
            found = stochastic_beam_search(given, lists.size, self._noise(prompts, lists.seed))
            order_UK = found.log_probs_BW.argsort(dim=1, descending=True, stable=True)
            items_UK = found.items_BW.gather(1, order_UK).cpu().numpy()
            return items_UK, found.log_probs_BW.gather(1, order_UK).float().cpu().numpy()

        return DrawnLists(prompts, ranked.items_BK, tuple(drawn(each) for each in lists.temperatures))

    def _noise(self, prompts: Prompts, seed: int) -> torch.Generator:
        """That of a chunk of a step, whoever draws."""
        generator = torch.Generator(self.program.device)
        generator.manual_seed(int(combine64(seed, prompts.step, prompts.chunk)) >> 1)
        return generator

    def _batch(self, inputs: PolicyInputs) -> tuple[TensorBatch, Tensor | None]:
        """As tensors, for a network that is in the state of computing without dropout."""
        self.program.begin_inference()
        self.network.eval()
        device = self.program.device
        batch = TensorBatch.build(inputs.features, inputs.rows, 0, device, training=False)
        seen_UE = None if inputs.seen_UE is None else torch.tensor(inputs.seen_UE, device=device)
        return batch, seen_UE


def distribution(
    network: GenerativeRecommender, context: Context, seen_UE: Tensor | None, temperature: float
) -> ItemDistribution:
    """What is drawn from: the filter is part of it. Rollouts and learner both call this."""
    leaf_filter = None if seen_UE is None else LeafFilter.excluding(network.trie, seen_UE)
    return network.distribution(context, leaf_filter, temperature, renormalized=True)


def importance_weights(drawn: DistinctItems) -> Tensor:
    """[U, G] p / q of each item of a sample without replacement, divided by their sum over the group.

    Source: Kool, van Hoof and Welling, ICML 2019, arXiv:1903.06059, eq. 10 to 12 (normalized, which is biased
    and varies less).
    """
    is_there_UG = drawn.items_BW >= 0
    # Where nothing is left to draw, every item is included for sure, and p alone is its weight.
    log_weight_UG = torch.where(is_there_UG, drawn.log_probs_BW - drawn.log_inclusion_BW(), -torch.inf)
    weights_UG = log_weight_UG.softmax(dim=1)
    return torch.where(is_there_UG, weights_UG, 0.0).nan_to_num(nan=0.0)


def _even_weights(items_UG: Tensor) -> Tensor:
    is_there_UG = items_UG >= 0
    return is_there_UG / is_there_UG.sum(dim=1, keepdim=True).clamp(min=1)


def _with_targets(rollouts: Rollouts) -> Int64Array:
    """[U, G + 1] candidates, and behind them the logged target."""
    return np.concatenate([rollouts.items_UG, rollouts.prompts.targets_U[:, None]], axis=1)


def _finite(log_probs_UWL: Tensor) -> Tensor:
    """0 for what is no item, or may not be drawn."""
    is_given_UW1 = (log_probs_UWL > -torch.inf).all(dim=2, keepdim=True)
    return torch.where(is_given_UW1, log_probs_UWL, 0.0)
