"""A generative recommender as a policy: it samples candidates and computes their log-probabilities.

One class for rollouts, the reference and evaluation; the learner uses the same network and functions.

Axes: U users, G candidates of a user, W candidates and the logged target, L codes of a candidate, E items of
a history.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash
from torch import Tensor

from rayrec.models.decoding.beam import beam_search
from rayrec.models.decoding.leaf_filter import LeafFilter
from rayrec.models.decoding.prefixes import ItemDistribution, item_code_log_probs, item_log_probs
from rayrec.models.decoding.sampling import DistinctItems, constrained_sample, stochastic_beam_search
from rayrec.models.generative.backbone import Context
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.pipelines.inference.item_ranker import give_catalog, item_ranker_of
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH
from rayrec.pipelines.tasks.next_item import NextItemTask
from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64
from rayrec.rl.config import RlConfig, RolloutConfig
from rayrec.rl.list_metrics import ListSettings, SampledLists
from rayrec.rl.prompts import Prompts
from rayrec.rl.rollouts import ReferenceLogProbs, Rollouts
from rayrec.samples.base.batches import FeatureBatch, SampleBatch
from rayrec.samples.features.row_features import RowFeatures

UNCHECKED = -1
"""Version of a policy while its weights are not verified yet."""


class WeightsChangedError(RuntimeError):
    """Weights differ from those that were sent."""


@dataclass(frozen=True)
class Weights:
    """A version of a policy's weights, with a checksum of their bytes."""

    version: int
    """Optimizer steps taken."""
    arrays: dict[str, np.ndarray]
    checksum: str

    @classmethod
    def of(cls, version: int, arrays: Mapping[str, np.ndarray]) -> Weights:
        """Describe named arrays, without copying them."""
        return cls(version, dict(arrays), checksum_of(arrays))

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Verify that these arrays are the ones that were sent.

        Raises:
            WeightsChangedError: they are not.
        """
        if (found := checksum_of(arrays)) != self.checksum:
            raise WeightsChangedError(
                f"the weights of version {self.version} have the checksum {found}, sent were {self.checksum}"
            )


def checksum_of(arrays: Mapping[str, np.ndarray]) -> str:
    """Hash names, shapes and bytes, independent of their order."""
    hashed = xxhash.xxh3_128()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        hashed.update(f"{name}{array.shape}{array.dtype}".encode())
        hashed.update(array.reshape(-1).view(np.uint8).data)
    return hashed.hexdigest()


@dataclass(frozen=True)
class PolicyInputs:
    """Features and frozen rows of some prompts, and what their users have seen."""

    features: FeatureBatch
    rows: dict[str, np.ndarray]
    seen_UE: Int64Array | None
    """Padded with -1; None: everything may be sampled."""


class Policy:
    """A model of a run whose dense weights can be replaced; its embedding rows stay as they were loaded."""

    def __init__(self, model: TrainedModel, exclude_seen: bool) -> None:
        """
        Raises:
            InputError: the model does not generate semantic IDs.
        """
        program = item_ranker_of(model)
        if not isinstance(program.model, GenerativeRecommender):
            raise InputError(
                f"{model.run}: {model.assembly.config.model.name!r} scores items one by one; reinforcement "
                "learning samples candidates, so init_from has to be a run of a generative model"
            )
        task, features = model.assembly.task, model.assembly.features
        assert isinstance(task, NextItemTask), "it has a ranker"
        assert isinstance(features, RowFeatures), "those of the task"
        give_catalog(program, model)
        self.trained, self.program, self.network = model, program, program.model
        self.task, self._features = task, features
        self._exclude_seen = exclude_seen
        self.version = 0
        """Optimizer steps that its weights have taken."""

    @classmethod
    def load(cls, config: RlConfig) -> Policy:
        """Load the supervised run's model.

        Raises:
            InputError: it cannot be loaded, or is not a generative model.
        """
        model = TrainedModel.load(config.init_from, config.snapshot, config.device)
        return cls(model, config.rollout.exclude_seen)

    def take(self, weights: Weights) -> None:
        """Replace the weights by another version.

        Raises:
            WeightsChangedError: they did not arrive as they were sent.
        """
        self.version = UNCHECKED
        self.program.load(weights.arrays, optimizer_state=None)
        weights.check(self.program.views())
        self.version = weights.version

    def inputs(self, samples: SampleBatch) -> PolicyInputs:
        """Compute features of histories, with the feature operations of the run."""
        # Prompts have all columns of events, for rewards; the model reads those that it was trained with.
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
    def sample(self, prompts: Prompts, how: RolloutConfig, seed: int) -> Rollouts:
        """Sample candidates for every user: a function of weights, prompts, settings and seed."""
        batch, seen_UE = self._batch(self.inputs(prompts.samples))
        context = self.network.backbone.encode_context(batch)
        given = distribution(self.network, context, seen_UE, how.temperature)
        generator = self._noise(prompts, seed)
        if how.method == "sample":
            found = constrained_sample(given, how.group_size, generator)
            items_UG, log_probs_UGL = found.items_BW, found.code_log_probs_BWL
            weights_UG = _even_weights(items_UG)
        elif how.method == "stochastic_beam":
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
        """Compute log-probabilities of candidates and logged targets, code by code; 0 where there is none."""
        batch, seen_UE = self._batch(self.inputs(rollouts.prompts.samples))
        items_UW = torch.tensor(rollouts.items_UW, device=self.program.device)
        context = self.network.backbone.encode_context(batch)
        log_probs_UWL = _finite(
            item_code_log_probs(distribution(self.network, context, seen_UE, temperature), items_UW)
        )
        found_UWL = log_probs_UWL.float().cpu().numpy()
        return ReferenceLogProbs(found_UWL[:, :-1], found_UWL[:, -1])

    @torch.no_grad()
    def sample_lists(self, prompts: Prompts, lists: ListSettings) -> SampledLists:
        """Sample lists of distinct items, with the same noise at every temperature; also rank all items."""
        inputs = self.inputs(prompts.samples)
        ranked = self.program.recommend(inputs.features, inputs.rows, LIST_LENGTH, inputs.seen_UE)
        batch, seen_UE = self._batch(inputs)
        context = self.network.backbone.encode_context(batch)

        def sampled(temperature: float) -> tuple[Int64Array, np.ndarray]:
            given = distribution(self.network, context, seen_UE, temperature)
            found = stochastic_beam_search(given, lists.size, self._noise(prompts, lists.seed))
            order_UK = found.log_probs_BW.argsort(dim=1, descending=True, stable=True)
            items_UK = found.items_BW.gather(1, order_UK).cpu().numpy()
            return items_UK, found.log_probs_BW.gather(1, order_UK).float().cpu().numpy()

        return SampledLists(prompts, ranked.items_BK, tuple(sampled(each) for each in lists.temperatures))

    def _noise(self, prompts: Prompts, seed: int) -> torch.Generator:
        """Noise keyed by seed, step and chunk: the same on every worker."""
        generator = torch.Generator(self.program.device)
        generator.manual_seed(int(combine64(seed, prompts.step, prompts.chunk)) >> 1)
        return generator

    def _batch(self, inputs: PolicyInputs) -> tuple[TensorBatch, Tensor | None]:
        """Make tensors of inputs, and put the network in inference mode."""
        self.program.begin_inference()
        self.network.eval()
        device = self.program.device
        batch = TensorBatch.build(inputs.features, inputs.rows, 0, device, training=False)
        seen_UE = None if inputs.seen_UE is None else torch.tensor(inputs.seen_UE, device=device)
        return batch, seen_UE


def distribution(
    network: GenerativeRecommender, context: Context, seen_UE: Tensor | None, temperature: float
) -> ItemDistribution:
    """The distribution that candidates are sampled from, filter included; rollouts and learner share it."""
    leaf_filter = None if seen_UE is None else LeafFilter.excluding(network.trie, seen_UE)
    return network.distribution(context, leaf_filter, temperature, renormalized=True)


def importance_weights(sampled: DistinctItems) -> Tensor:
    """[U, G] importance weights p / q of a sample without replacement, normalized within each group.

    Source: Kool, van Hoof and Welling, ICML 2019, arXiv:1903.06059, eq. 10 to 12 (normalized, which is biased
    and varies less).
    """
    is_there_UG = sampled.items_BW >= 0
    # Where no item is left out, the inclusion probability is 1, and the weight is p alone.
    log_weight_UG = torch.where(is_there_UG, sampled.log_probs_BW - sampled.log_inclusion_BW(), -torch.inf)
    weights_UG = log_weight_UG.softmax(dim=1)
    return torch.where(is_there_UG, weights_UG, 0.0).nan_to_num(nan=0.0)


def _even_weights(items_UG: Tensor) -> Tensor:
    is_there_UG = items_UG >= 0
    return is_there_UG / is_there_UG.sum(dim=1, keepdim=True).clamp(min=1)


def _finite(log_probs_UWL: Tensor) -> Tensor:
    """Replace the -inf of missing items, and of those that may not be sampled, by 0."""
    is_given_UW1 = (log_probs_UWL > -torch.inf).all(dim=2, keepdim=True)
    return torch.where(is_given_UW1, log_probs_UWL, 0.0)
