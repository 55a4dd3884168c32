"""From settings to a network with its initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rayrec.models.backbones.hstu import Hstu
from rayrec.models.backbones.transformer import CausalTransformer
from rayrec.models.generative.light_decoder import CodeDecoder, LightDecoder
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.item_losses import BinaryCrossEntropy, CrossEntropy, ItemLoss, SampledSoftmax
from rayrec.models.next_item import DenseNextItemModel, SparseNextItemModel
from rayrec.models.sequence_model import SequenceModel

if TYPE_CHECKING:  # the settings are pydantic models, which this room does not need to run
    from rayrec.models.config import (
        AnyModelConfig,
        BackboneConfig,
        GenerativeConfig,
        HstuBackboneConfig,
        HstuConfig,
        SasRecConfig,
    )


@dataclass(frozen=True)
class Catalogue:
    """What a network has to know of the items, by catalogue position."""

    num_items: int
    codes_IL: np.ndarray | None = None
    """Semantic IDs, where the model generates them."""
    level_sizes: tuple[int, ...] = ()
    negative_log_q_I: np.ndarray | None = None
    """Log-probability of drawing each item as a negative, where negatives are sampled."""


def build_model(config: AnyModelConfig, catalogue: Catalogue, seed: int) -> SequenceModel:
    """The network on the CPU; its initial weights depend on the seed and the shapes alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.name == "sasrec":
            return _next_item(config, _transformer(config.backbone), catalogue)
        if config.name == "hstu":
            return _next_item(config, _hstu(config.backbone), catalogue)
        return _generative(config, _transformer(config.backbone), catalogue)


def _transformer(config: BackboneConfig) -> CausalTransformer:
    return CausalTransformer(
        config.dim,
        config.num_layers,
        config.num_heads,
        config.feedforward_dim,
        config.max_length,
        config.dropout,
    )


def _hstu(config: HstuBackboneConfig) -> Hstu:
    return Hstu(
        config.dim,
        config.num_layers,
        config.num_heads,
        config.max_length,
        config.dropout,
        config.attention_dim,
        config.value_dim,
        config.num_time_buckets,
    )


def _next_item(
    config: SasRecConfig | HstuConfig, backbone: CausalTransformer | Hstu, catalogue: Catalogue
) -> SequenceModel:
    loss = _item_loss(config, catalogue)
    if config.item_matrix == "dense":
        return DenseNextItemModel(
            backbone, loss, catalogue.num_items, config.backbone.dim, config.temperature
        )
    return SparseNextItemModel(backbone, loss, config.temperature)


def _item_loss(config: SasRecConfig | HstuConfig, catalogue: Catalogue) -> ItemLoss:
    name = config.loss_or_default
    if name == "cross_entropy":
        return CrossEntropy()
    if name == "bce":
        return BinaryCrossEntropy()
    assert catalogue.negative_log_q_I is not None
    expected_draws_I = catalogue.negative_log_q_I + np.log(config.num_negatives)
    return SampledSoftmax(torch.tensor(expected_draws_I, dtype=torch.float32))


def _generative(config: GenerativeConfig, backbone: CausalTransformer, catalogue: Catalogue) -> SequenceModel:
    assert catalogue.codes_IL is not None
    decoder = CodeDecoder(
        config.backbone.dim,
        catalogue.level_sizes,
        config.decoder_dim,
        config.backbone.dropout,
        backbone.num_dropouts,
    )
    codes_IL = torch.tensor(catalogue.codes_IL)
    light = LightDecoder(backbone, decoder, config.label_smoothing)
    return GenerativeRecommender(light, codes_IL, config.beam_width)
