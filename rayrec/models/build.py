"""From settings to a network with its initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rayrec.models.backbones.transformer import CausalTransformer
from rayrec.models.generative import CodeDecoder, GenerativeRecommender
from rayrec.models.sasrec import FullSoftmaxSasRec, SampledSoftmaxSasRec
from rayrec.models.sequence_model import SequenceModel

if TYPE_CHECKING:  # the settings are pydantic models, which this room does not need to run
    from rayrec.models.config import BackboneConfig, GenerativeConfig, SasRecConfig


@dataclass(frozen=True)
class Catalogue:
    """What a network has to know of the items, by catalogue position."""

    num_items: int
    codes_IL: np.ndarray | None = None
    """Semantic IDs, where the model generates them."""
    level_sizes: tuple[int, ...] = ()
    """Number of codes of each level that is learned: all but one that lists items of a tuple."""
    negative_log_q_I: np.ndarray | None = None
    """Log-probability of drawing each item as a negative, where negatives are sampled."""


def build_model(config: SasRecConfig | GenerativeConfig, catalogue: Catalogue, seed: int) -> SequenceModel:
    """The network on the CPU; its initial weights depend on the seed and the shapes alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = _backbone(config.backbone)
        if config.name == "sasrec":
            return _sasrec(config, backbone, catalogue)
        return _generative(config, backbone, catalogue)


def _backbone(config: BackboneConfig) -> CausalTransformer:
    return CausalTransformer(
        config.dim,
        config.num_layers,
        config.num_heads,
        config.feedforward_dim,
        config.max_length,
        config.dropout,
    )


def _sasrec(config: SasRecConfig, backbone: CausalTransformer, catalogue: Catalogue) -> SequenceModel:
    if config.item_matrix == "dense":
        return FullSoftmaxSasRec(backbone, catalogue.num_items, config.backbone.dim)
    assert catalogue.negative_log_q_I is not None
    expected_draws_I = catalogue.negative_log_q_I + np.log(config.num_negatives)
    return SampledSoftmaxSasRec(backbone, torch.tensor(expected_draws_I, dtype=torch.float32))


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
    return GenerativeRecommender(backbone, decoder, codes_IL, config.beam_width, config.label_smoothing)
