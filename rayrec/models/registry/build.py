"""From settings to a network with its initial weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rayrec.models.attention.choice import Choice, choice_named
from rayrec.models.generative.backbone import GenerativeBackbone
from rayrec.models.generative.causal_lm import CausalLmBackbone
from rayrec.models.generative.cross_decoder import CrossDecoder
from rayrec.models.generative.encoder_decoder import EncoderDecoder
from rayrec.models.generative.experts import ExpertSettings
from rayrec.models.generative.instruction import EventLabels, InstructionPrefix
from rayrec.models.generative.lazy_decoder import LazyDecoder
from rayrec.models.generative.light_decoder import CodeDecoder, LightDecoder
from rayrec.models.generative.prefix_decoder import PrefixDecoder
from rayrec.models.generative.recommender import GenerativeRecommender
from rayrec.models.generative.retrieval import HistoryRetrieval, RetrievalSettings
from rayrec.models.generative.transformers_network import network_from_folder, network_from_settings
from rayrec.models.sequence.backbones.hstu import Hstu
from rayrec.models.sequence.backbones.transformer import CausalTransformer
from rayrec.models.sequence.item_losses import BinaryCrossEntropy, CrossEntropy, ItemLoss, SampledSoftmax
from rayrec.models.sequence.next_item import DenseNextItemModel, SparseNextItemModel
from rayrec.models.sequence.sequence_model import SequenceModel
from rayrec.platform.event_labels import LABELS, Label

if TYPE_CHECKING:  # the settings are pydantic models, which this room does not need to run
    from rayrec.models.base.config import (
        AnyModelConfig,
        BackboneConfig,
        CausalLmBackboneConfig,
        CausalLmConfig,
        CrossDecoderConfig,
        EncoderDecoderConfig,
        GeneratingConfig,
        HstuBackboneConfig,
        HstuConfig,
        LazyDecoderConfig,
        LightDecoderConfig,
        PrefixDecoderConfig,
        SasRecConfig,
    )


@dataclass(frozen=True)
class Catalog:
    """What a network has to know of the items, by catalog position."""

    num_items: int
    codes_IL: np.ndarray | None = None
    """Semantic IDs, where the model generates them."""
    level_sizes: tuple[int, ...] = ()
    """Number of codes of each level that is learned: all but one that lists items of a tuple."""
    known_I: np.ndarray | None = None
    """Which items a model was trained on, where the catalog has grown since; None: all of them."""
    negative_log_q_I: np.ndarray | None = None
    """Log-probability of drawing each item as a negative, where negatives are sampled."""
    labels: Mapping[Label, tuple[str, ...]] = field(default_factory=dict)
    """Names of the codes of each label of events."""

    @property
    def learned_codes(self) -> Tensor:
        """[I, L] codes without a level that merely lists the items of a tuple."""
        assert self.codes_IL is not None, "the model generates semantic IDs, and there are none"
        return torch.tensor(self.codes_IL[:, : len(self.level_sizes)])


def build_model(
    config: AnyModelConfig, catalog: Catalog, seed: int, attention_file: Path | None = None
) -> SequenceModel:
    """The network on the CPU; its initial weights depend on the seed and the shapes alone.

    Args:
        attention_file: where measured choices of attention backends are kept; need not exist yet.

    Raises:
        InputError: a causal language model that is not there or cannot be adapted.
    """
    choice = choice_named(config.attention, attention_file)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.name == "sasrec":
            return _next_item(config, _transformer(config.backbone, choice), catalog)
        if config.name == "hstu":
            return _next_item(config, _hstu(config.backbone, choice), catalog)
        backbone = _GENERATIVE[config.name](config, catalog, choice)
        codes_IL = torch.tensor(catalog.codes_IL)
        num_levels, weights = len(catalog.level_sizes), _behavior_weights(config, catalog)
        return GenerativeRecommender(backbone, codes_IL, config.beam_width, num_levels, weights)


def _behavior_weights(config: GeneratingConfig, catalog: Catalog) -> Tensor | None:
    if not config.behavior_weights:
        return None
    return torch.tensor([config.behavior_weights.get(name, 1.0) for name in catalog.labels["behavior"]])


def _transformer(config: BackboneConfig, choice: Choice) -> CausalTransformer:
    return CausalTransformer(
        config.dim,
        config.num_layers,
        config.num_heads,
        config.feedforward_dim,
        config.max_length,
        config.dropout,
        choice,
    )


def _hstu(config: HstuBackboneConfig, choice: Choice) -> Hstu:
    return Hstu(
        config.dim,
        config.num_layers,
        config.num_heads,
        config.max_length,
        config.dropout,
        config.attention_dim,
        config.value_dim,
        config.num_time_buckets,
        choice,
    )


def _next_item(
    config: SasRecConfig | HstuConfig, backbone: CausalTransformer | Hstu, catalog: Catalog
) -> SequenceModel:
    loss = _item_loss(config, catalog)
    if config.item_matrix == "dense":
        return DenseNextItemModel(backbone, loss, catalog.num_items, config.backbone.dim, config.temperature)
    return SparseNextItemModel(backbone, loss, config.temperature)


def _item_loss(config: SasRecConfig | HstuConfig, catalog: Catalog) -> ItemLoss:
    name = config.loss_or_default
    if name == "cross_entropy":
        return CrossEntropy()
    if name == "bce":
        return BinaryCrossEntropy()
    assert catalog.negative_log_q_I is not None
    expected_draws_I = catalog.negative_log_q_I + np.log(config.num_negatives)
    return SampledSoftmax(torch.tensor(expected_draws_I, dtype=torch.float32))


def _prefix_decoder(config: PrefixDecoderConfig, catalog: Catalog, choice: Choice) -> PrefixDecoder:
    known_I = None if catalog.known_I is None else torch.tensor(catalog.known_I)
    return PrefixDecoder(
        _transformer(config.backbone, choice), catalog.learned_codes, catalog.level_sizes, known_I
    )


def _light_decoder(config: LightDecoderConfig, catalog: Catalog, choice: Choice) -> LightDecoder:
    settings, backbone = config.backbone, _transformer(config.backbone, choice)
    decoder = CodeDecoder(
        settings.dim, catalog.level_sizes, config.decoder_dim, settings.dropout, backbone.num_dropouts
    )
    return LightDecoder(backbone, decoder, config.label_smoothing)


def _lazy_decoder(config: LazyDecoderConfig, catalog: Catalog, choice: Choice) -> LazyDecoder:
    settings = config.backbone
    return LazyDecoder(
        _cross_decoder(config, settings.num_layers, catalog, choice),
        catalog.learned_codes,
        settings.max_length,
        settings.dropout,
        config.label_smoothing,
        _instruction(config, catalog),
        _event_labels(config, catalog),
    )


def _encoder_decoder(config: EncoderDecoderConfig, catalog: Catalog, choice: Choice) -> EncoderDecoder:
    settings = config.backbone
    return EncoderDecoder(
        _cross_decoder(config, config.decoder_layers, catalog, choice),
        catalog.learned_codes,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        feedforward_dim=settings.feedforward_dim,
        max_length=settings.max_length,
        dropout=settings.dropout,
        label_smoothing=config.label_smoothing,
        instruction=_instruction(config, catalog),
        event_labels=_event_labels(config, catalog),
        retrieval=_retrieval(config),
    )


def _cross_decoder(
    config: CrossDecoderConfig, num_layers: int, catalog: Catalog, choice: Choice
) -> CrossDecoder:
    settings, experts = config.backbone, None
    if config.experts is not None:
        mixture = config.experts
        experts = ExpertSettings(mixture.count, mixture.per_token, mixture.balance_weight)
    return CrossDecoder(
        settings.dim,
        num_layers,
        settings.num_heads,
        settings.feedforward_dim,
        catalog.level_sizes,
        settings.dropout,
        choice,
        experts,
    )


def _instruction(config: CrossDecoderConfig, catalog: Catalog) -> InstructionPrefix | None:
    if config.instruction is None:
        return None
    parts = config.instruction.parts
    sizes = {label: len(catalog.labels[label]) for label in LABELS if label in parts}
    return InstructionPrefix(config.backbone.dim, sizes, "trigger_item" in parts, config.instruction.drop)


def _event_labels(config: CrossDecoderConfig, catalog: Catalog) -> EventLabels | None:
    if not config.event_labels:
        return None
    sizes = {label: len(catalog.labels[label]) for label in LABELS if label in config.event_labels}
    return EventLabels(config.backbone.dim, sizes)


def _retrieval(config: EncoderDecoderConfig) -> HistoryRetrieval | None:
    chosen = config.retrieval
    if chosen is None:
        return None
    settings = RetrievalSettings(
        chosen.num_events, chosen.num_recent, chosen.q2i_weight, chosen.q2i_temperature
    )
    return HistoryRetrieval(config.backbone.dim, settings, config.instruction is not None)


def _causal_lm(config: CausalLmConfig, catalog: Catalog, choice: Choice) -> CausalLmBackbone:
    network, first_token = _language_model(config.backbone, catalog.level_sizes)
    return CausalLmBackbone(network, catalog.learned_codes, catalog.level_sizes, first_token, choice)


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


_GENERATIVE: dict[str, Callable[[Any, Catalog, Choice], GenerativeBackbone[Any]]] = {
    "prefix_decoder": _prefix_decoder,
    "light_decoder": _light_decoder,
    "lazy_decoder": _lazy_decoder,
    "encoder_decoder": _encoder_decoder,
    "causal_lm": _causal_lm,
}
"""By name of the config."""
