"""From settings to a network with its initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from rayrec.models.backbones.transformer import CausalTransformer
from rayrec.models.generative.causal_lm import CausalLmBackbone
from rayrec.models.generative.light_decoder import CodeDecoder, LightDecoder
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.generative.transformers_network import network_from_folder, network_from_settings
from rayrec.models.sasrec import FullSoftmaxSasRec, SampledSoftmaxSasRec
from rayrec.models.sequence_model import SequenceModel

if TYPE_CHECKING:  # the settings are pydantic models, which this room does not need to run
    from rayrec.models.config import (
        AnyModelConfig,
        BackboneConfig,
        CausalLmBackboneConfig,
        CausalLmConfig,
        GenerativeConfig,
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
    """The network on the CPU; its initial weights depend on the seed and the shapes alone.

    Raises:
        InputError: a causal language model that is not there or cannot be adapted.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.name == "causal_lm":
            return _causal_lm(config, catalogue)
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
    light = LightDecoder(backbone, decoder, config.label_smoothing)
    return GenerativeRecommender(light, codes_IL, config.beam_width)


def _causal_lm(config: CausalLmConfig, catalogue: Catalogue) -> SequenceModel:
    assert catalogue.codes_IL is not None
    codes_IL, level_sizes = torch.tensor(catalogue.codes_IL), catalogue.level_sizes
    network, first_token = _language_model(config.backbone, level_sizes)
    backbone = CausalLmBackbone(network, codes_IL, level_sizes, first_token)
    return GenerativeRecommender(backbone, codes_IL, config.beam_width)


def _language_model(config: CausalLmBackboneConfig, level_sizes: tuple[int, ...]) -> tuple[nn.Module, int]:
    """(The network, the token of its first code)."""
    # Training reads a history of the longest and the item that follows it.
    num_codes, num_positions = sum(level_sizes), (config.max_length + 1) * len(level_sizes)
    network = config.network
    if network.kind == "folder":
        return network_from_folder(network.folder, num_codes, num_positions)
    if network.kind == "transformers":
        return network_from_settings(network.settings, num_codes, num_positions), 0
    settings = {
        "model_type": "qwen3",
        "hidden_size": network.dim,
        "num_hidden_layers": network.num_layers,
        "num_attention_heads": network.num_heads,
        "num_key_value_heads": network.num_key_heads,
        "head_dim": network.dim // network.num_heads,
        "intermediate_size": network.feedforward_dim,
        "tie_word_embeddings": True,
    }
    return network_from_settings(settings, num_codes, num_positions), 0
