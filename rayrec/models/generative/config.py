"""Settings that models share which generate the next item code by code.

Imports no torch, as `rayrec.models.sequence.config`.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rayrec.models.sequence.config import (
    DEFAULT_MAX_LENGTH,
    AttentionSettings,
    BackboneConfig,
    LongHistoryConfig,
    SequenceModelConfig,
)
from rayrec.platform.event_labels import LABELS, Label

if TYPE_CHECKING:
    from rayrec.models.attention.choice import Choice
    from rayrec.models.generative.backbone import GenerativeBackbone
    from rayrec.models.generative.chunk_summaries import SummarySettings
    from rayrec.models.generative.code_softmax import CodeSoftmax
    from rayrec.models.sequence.catalog import Catalog
    from rayrec.models.sequence.sequence_model import SequenceModel


class LongHistorySettings(SequenceModelConfig):
    """The setting of models that read summaries of old events."""

    long_history: LongHistoryConfig | None = None
    """None: a history's newest `backbone.max_length` events are read, and no older ones."""

    @property
    def summarized(self) -> LongHistoryConfig | None:
        return self.long_history

    @property
    @abstractmethod
    def window_length(self) -> int:
        """`backbone.max_length`."""

    @property
    def history_length(self) -> int:
        return self.window_length if self.long_history is None else self.long_history.most_read

    @model_validator(mode="after")
    def _one_setting_says_what_is_read(self) -> Self:
        if self.long_history is None:
            return self
        if self.window_step > 1:
            raise ValueError(
                "model.window_step and model.long_history both say where what is read begins: that of "
                "long_history is a multiple of chunk_events; leave window_step out"
            )
        if self.window_length not in (DEFAULT_MAX_LENGTH, self.long_history.most_read):
            raise ValueError(
                f"model.backbone.max_length is {self.window_length}, and with model.long_history up to "
                f"{self.long_history.most_read} events are read one by one (newest + chunk_events - 1); "
                "leave max_length out"
            )
        return self


def summary_settings(
    config: LongHistoryConfig, num_heads: int, feedforward_dim: int, dropout: float
) -> SummarySettings:
    """What `ChunkSummaries` needs to know, beside the width."""
    from rayrec.models.generative.chunk_summaries import SummarySettings

    return SummarySettings(
        config.chunk_events, config.summary_tokens, config.num_layers, num_heads, feedforward_dim, dropout
    )


class GeneratingConfig(AttentionSettings, SequenceModelConfig):
    """What all networks that generate semantic IDs have in common."""

    needs_semantic_ids: ClassVar[bool] = True

    beam_width: int = Field(100, gt=0)
    """Beams of evaluation and serving; never fewer than the items asked for."""
    behavior_weights: dict[str, Annotated[float, Field(ge=0.0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """By name of a behavior, how often the loss of a target with it counts; 1 for others. The sum is still
    divided by the number of targets, so 2 means: as if the event were there twice, at the same rate."""

    @property
    def needs_labels(self) -> tuple[Label, ...]:
        weighted = ("behavior",) if self.behavior_weights else ()
        return tuple(label for label in LABELS if label in (*self.named_labels, *weighted))

    @property
    def weighted_behaviors(self) -> tuple[str, ...]:
        return tuple(self.behavior_weights)

    def for_inference(self) -> Self:
        return super().for_inference().model_copy(update={"behavior_weights": {}})

    def build(self, catalog: Catalog, attention_file: Path | None = None) -> SequenceModel:
        import torch

        from rayrec.models.attention.choice import choice_named
        from rayrec.models.generative.recommender import GenerativeRecommender

        backbone = self.build_backbone(catalog, choice_named(self.attention, attention_file))
        weights = None
        if self.behavior_weights:
            names = catalog.labels["behavior"]
            weights = torch.tensor([self.behavior_weights.get(name, 1.0) for name in names])
        return GenerativeRecommender(
            backbone,
            catalog.codes,
            self.beam_width,
            len(catalog.level_sizes),
            weights,
            catalog.trie,
        )

    @abstractmethod
    def build_backbone(self, catalog: Catalog, choice: Choice) -> GenerativeBackbone[Any]:
        """The network that gives each code its probability."""


class CodeSoftmaxSettings(SequenceModelConfig):
    """Of networks that give every code of a level a logit."""

    softmax: Literal["codes", "children"] = "codes"
    """`codes`: trained over all codes of a level. `children`: over those that lead to an item of the catalog
    after the codes before them, as items are found. Under a prefix, a code is then compared with its
    siblings alone: what comes into the catalog later has not been pushed away there, nor learned."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    """Of the softmax over all codes."""

    @model_validator(mode="after")
    def _smoothing_is_over_all_codes(self) -> Self:
        if self.softmax == "children" and self.label_smoothing:
            raise ValueError(
                "model.label_smoothing is of the softmax 'codes', and this one is 'children'; leave it out"
            )
        return self

    def for_inference(self) -> Self:
        # Items are found among children either way, by the recommender's own trie.
        return super().for_inference().model_copy(update={"softmax": "codes", "label_smoothing": 0.0})

    def build_softmax(self, catalog: Catalog) -> CodeSoftmax:
        """What the network is trained by."""
        from rayrec.models.generative.code_softmax import CodeSoftmax

        # A level that numbers the items of a tuple is the trie's last, and is not scored.
        return CodeSoftmax(catalog.trie if self.softmax == "children" else None, self.label_smoothing)


class GenerativeConfig(GeneratingConfig):
    """With a network of ours."""

    backbone: BackboneConfig = BackboneConfig()
    user_embedding: bool = False

    @property
    def history_length(self) -> int:
        return self.backbone.max_length

    @property
    def tables(self) -> dict[str, int]:
        return {"user": self.backbone.dim} if self.user_embedding else {}
