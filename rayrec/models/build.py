"""From settings to a network with its initial weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rayrec.models.attention.choice import Choice, choice_named
from rayrec.models.backbones.transformer import CausalTransformer
from rayrec.models.generative.backbone import GenerativeBackbone
from rayrec.models.generative.cross_decoder import CrossDecoder
from rayrec.models.generative.encoder_decoder import EncoderDecoder
from rayrec.models.generative.lazy_decoder import LazyDecoder
from rayrec.models.generative.light_decoder import CodeDecoder, LightDecoder
from rayrec.models.generative.prefix_decoder import PrefixDecoder
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.sasrec import FullSoftmaxSasRec, SampledSoftmaxSasRec
from rayrec.models.sequence_model import SequenceModel

if TYPE_CHECKING:  # the settings are pydantic models, which this room does not need to run
    from rayrec.models.config import (
        BackboneConfig,
        EncoderDecoderConfig,
        LazyDecoderConfig,
        LightDecoderConfig,
        ModelConfig,
        PrefixDecoderConfig,
        SasRecConfig,
    )


@dataclass(frozen=True)
class Catalogue:
    """What a network has to know of the items, by catalogue position."""

    num_items: int
    codes_IL: np.ndarray | None = None
    """Semantic IDs, where the model generates them."""
    level_sizes: tuple[int, ...] = ()
    """Number of codes of each level that is learned: all but one that lists items of a tuple."""
    known_I: np.ndarray | None = None
    """Which items a model was trained on, where the catalogue has grown since; None: all of them."""
    negative_log_q_I: np.ndarray | None = None
    """Log-probability of drawing each item as a negative, where negatives are sampled."""

    @property
    def learned_codes(self) -> Tensor:
        """[I, L] codes without a level that merely lists the items of a tuple."""
        assert self.codes_IL is not None, "the model generates semantic IDs, and there are none"
        return torch.tensor(self.codes_IL[:, : len(self.level_sizes)])


def build_model(
    config: ModelConfig, catalogue: Catalogue, seed: int, attention_file: Path | None = None
) -> SequenceModel:
    """The network on the CPU; its initial weights depend on the seed and the shapes alone.

    Args:
        attention_file: where measured choices of attention backends are kept; need not exist yet.
    """
    choice = choice_named(config.attention, attention_file)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.name == "sasrec":
            return _sasrec(config, catalogue, choice)
        backbone = _GENERATIVE[config.name](config, catalogue, choice)
        codes_IL = torch.tensor(catalogue.codes_IL)
        return GenerativeRecommender(backbone, codes_IL, config.beam_width, len(catalogue.level_sizes))


def _backbone(config: BackboneConfig, choice: Choice) -> CausalTransformer:
    return CausalTransformer(
        config.dim,
        config.num_layers,
        config.num_heads,
        config.feedforward_dim,
        config.max_length,
        config.dropout,
        choice,
    )


def _sasrec(config: SasRecConfig, catalogue: Catalogue, choice: Choice) -> SequenceModel:
    backbone = _backbone(config.backbone, choice)
    if config.item_matrix == "dense":
        return FullSoftmaxSasRec(backbone, catalogue.num_items, config.backbone.dim)
    assert catalogue.negative_log_q_I is not None
    expected_draws_I = catalogue.negative_log_q_I + np.log(config.num_negatives)
    return SampledSoftmaxSasRec(backbone, torch.tensor(expected_draws_I, dtype=torch.float32))


def _prefix_decoder(config: PrefixDecoderConfig, catalogue: Catalogue, choice: Choice) -> PrefixDecoder:
    known_I = None if catalogue.known_I is None else torch.tensor(catalogue.known_I)
    return PrefixDecoder(
        _backbone(config.backbone, choice), catalogue.learned_codes, catalogue.level_sizes, known_I
    )


def _light_decoder(config: LightDecoderConfig, catalogue: Catalogue, choice: Choice) -> LightDecoder:
    settings, backbone = config.backbone, _backbone(config.backbone, choice)
    decoder = CodeDecoder(
        settings.dim, catalogue.level_sizes, config.decoder_dim, settings.dropout, backbone.num_dropouts
    )
    return LightDecoder(backbone, decoder, config.label_smoothing)


def _lazy_decoder(config: LazyDecoderConfig, catalogue: Catalogue, choice: Choice) -> LazyDecoder:
    settings = config.backbone
    decoder = _cross_decoder(settings, settings.num_layers, catalogue.level_sizes, choice)
    return LazyDecoder(
        decoder, catalogue.learned_codes, settings.max_length, settings.dropout, config.label_smoothing
    )


def _encoder_decoder(config: EncoderDecoderConfig, catalogue: Catalogue, choice: Choice) -> EncoderDecoder:
    settings = config.backbone
    return EncoderDecoder(
        _cross_decoder(settings, config.decoder_layers, catalogue.level_sizes, choice),
        catalogue.learned_codes,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        feedforward_dim=settings.feedforward_dim,
        max_length=settings.max_length,
        dropout=settings.dropout,
        label_smoothing=config.label_smoothing,
    )


def _cross_decoder(
    settings: BackboneConfig, num_layers: int, level_sizes: tuple[int, ...], choice: Choice
) -> CrossDecoder:
    return CrossDecoder(
        settings.dim,
        num_layers,
        settings.num_heads,
        settings.feedforward_dim,
        level_sizes,
        settings.dropout,
        choice,
    )


_GENERATIVE: dict[str, Callable[[Any, Catalogue, Choice], GenerativeBackbone[Any]]] = {
    "prefix_decoder": _prefix_decoder,
    "light_decoder": _light_decoder,
    "lazy_decoder": _lazy_decoder,
    "encoder_decoder": _encoder_decoder,
}
"""By name of the config."""
