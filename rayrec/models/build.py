"""From settings to a network with its initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rayrec.models.backbones.transformer import CausalTransformer
from rayrec.models.generative.backbone import GenerativeBackbone
from rayrec.models.generative.light_decoder import CodeDecoder, LightDecoder
from rayrec.models.generative.prefix_decoder import PrefixDecoder
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sasrec import FullSoftmaxSasRec, SampledSoftmaxSasRec
from rayrec.models.sequence_model import SequenceModel

if TYPE_CHECKING:  # the settings are pydantic models, which this room does not need to run
    from rayrec.models.config import BackboneConfig, LightDecoderConfig, ModelConfig, SasRecConfig


@dataclass(frozen=True)
class Catalogue:
    """What a network has to know of the items, by catalogue position."""

    num_items: int
    codes_IL: np.ndarray | None = None
    """Semantic IDs, where the model generates them."""
    level_sizes: tuple[int, ...] = ()
    negative_log_q_I: np.ndarray | None = None
    """Log-probability of drawing each item as a negative, where negatives are sampled."""


def build_model(config: ModelConfig, catalogue: Catalogue, seed: int) -> SequenceModel:
    """The network on the CPU; its initial weights depend on the seed and the shapes alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = _backbone(config.backbone)
        if config.name == "sasrec":
            return _sasrec(config, backbone, catalogue)
        assert catalogue.codes_IL is not None
        codes_IL = torch.tensor(catalogue.codes_IL)
        generator: GenerativeBackbone[Any]
        if config.name == "prefix_decoder":
            generator = PrefixDecoder(backbone, codes_IL, catalogue.level_sizes)
        else:
            generator = _light_decoder(config, backbone, catalogue)
        return GenerativeRecommender(generator, codes_IL, config.beam_width)


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


def _light_decoder(
    config: LightDecoderConfig, backbone: CausalTransformer, catalogue: Catalogue
) -> LightDecoder:
    decoder = CodeDecoder(
        config.backbone.dim,
        catalogue.level_sizes,
        config.decoder_dim,
        config.backbone.dropout,
        backbone.num_dropouts,
    )
    return LightDecoder(backbone, decoder, config.label_smoothing)
