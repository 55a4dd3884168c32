"""Settings of the models whose decoder looks at the history through cross-attention.

Imports no torch, as `rayrec.models.sequence.config`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rayrec.models.generative.config import (
    CodeSoftmaxSettings,
    GenerativeConfig,
    LongHistorySettings,
    summary_settings,
)
from rayrec.models.sequence.config import ContentConfig, Negatives, built_content
from rayrec.platform.config import Config
from rayrec.platform.event_labels import LABELS, Label, Part

if TYPE_CHECKING:
    from rayrec.models.attention.choice import Choice
    from rayrec.models.generative.backbone import GenerativeBackbone
    from rayrec.models.generative.chunk_summaries import SummarySettings
    from rayrec.models.generative.cross_decoder import CrossDecoder
    from rayrec.models.generative.experts import ExpertSettings
    from rayrec.models.generative.instruction import EventLabels, InstructionPrefix
    from rayrec.models.generative.retrieval import HistoryRetrieval
    from rayrec.models.sequence.catalog import Catalog


class InstructionConfig(Config):
    """What the decoder is told of the next item before it begins."""

    parts: tuple[Part, ...] = Field(("behavior",), min_length=1)
    """`scenario`, `behavior`: those that the next event is to have. `trigger_item`: the item that the user is
    looking at, which is the newest one of the history."""
    drop: float = Field(0.2, gt=0.0, lt=1.0)
    """Probability with which training leaves each part of each target out, and as often all of them, as
    requests may."""

    @field_validator("parts")
    @classmethod
    def _no_part_twice(cls, value: tuple[Part, ...]) -> tuple[Part, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"instruction.parts names a part twice: {', '.join(value)}; name each once")
        return value

    def build(self, dim: int, catalog: Catalog) -> InstructionPrefix:
        from rayrec.models.generative.instruction import InstructionPrefix

        sizes = {label: len(catalog.labels[label]) for label in LABELS if label in self.parts}
        return InstructionPrefix(dim, sizes, "trigger_item" in self.parts, self.drop)


class ExpertsConfig(Config):
    """A mixture of experts in the place of each decoder layer's feed-forward."""

    count: int = Field(4, ge=2)
    """Experts of a layer, each with `backbone.feedforward_dim`."""
    per_token: Literal[1, 2] = 1
    """Experts that each token goes through."""
    balance_weight: float = Field(0.01, ge=0.0)
    """Factor of the loss that keeps experts equally busy."""

    def build(self) -> ExpertSettings:
        from rayrec.models.generative.experts import ExpertSettings

        return ExpertSettings(self.count, self.per_token, self.balance_weight)


class TargetExpertsConfig(ExpertsConfig):
    """The same where rows are of one target, in whose few tokens there is nothing to balance."""

    balance_weight: float = Field(0.0, ge=0.0)
    """Always 0."""

    @field_validator("balance_weight")
    @classmethod
    def _nothing_is_balanced(cls, value: float) -> float:
        if value:
            raise ValueError(
                f"experts.balance_weight is {value}: the balance is that of a row's tokens, and a row of "
                "encoder_decoder is one target of a few codes; all of its experts would be demanded of each "
                "item, whatever the others get; set it to 0, or take lazy_decoder"
            )
        return value


class CrossDecoderConfig(LongHistorySettings, CodeSoftmaxSettings, GenerativeConfig):
    """What the models have in common whose decoder looks at the history through cross-attention."""

    instruction: InstructionConfig | None = None
    """None: the decoder begins with its start token."""
    event_labels: tuple[Label, ...] = ()
    """Labels of the history's events that are part of their vectors."""
    content: ContentConfig | None = None
    """What is said of the items of the history, added to their vectors. None: nothing."""
    experts: ExpertsConfig | None = None
    """None: one feed-forward for all tokens."""

    @property
    def window_length(self) -> int:
        return self.backbone.max_length

    @property
    def item_content(self) -> ContentConfig | None:
        return self.content

    @property
    def input_labels(self) -> tuple[Label, ...]:
        return self.event_labels

    @property
    def named_labels(self) -> tuple[Label, ...]:
        parts = () if self.instruction is None else self.instruction.parts
        return tuple(label for label in LABELS if label in (*parts, *self.event_labels))

    @property
    def instruction_parts(self) -> tuple[Part, ...]:
        return () if self.instruction is None else self.instruction.parts

    def _build_decoder(self, num_layers: int, catalog: Catalog, choice: Choice) -> CrossDecoder:
        from rayrec.models.generative.cross_decoder import CrossDecoder

        settings = self.backbone
        return CrossDecoder(
            settings.dim,
            num_layers,
            settings.num_heads,
            settings.feedforward_dim,
            catalog.level_sizes,
            settings.dropout,
            choice,
            None if self.experts is None else self.experts.build(),
        )

    def _build_instruction(self, catalog: Catalog) -> InstructionPrefix | None:
        return None if self.instruction is None else self.instruction.build(self.backbone.dim, catalog)

    def _summary_settings(self) -> SummarySettings | None:
        if self.long_history is None:
            return None
        backbone = self.backbone
        return summary_settings(
            self.long_history, backbone.num_heads, backbone.feedforward_dim, backbone.dropout
        )

    def _build_event_labels(self, catalog: Catalog) -> EventLabels | None:
        from rayrec.models.generative.instruction import EventLabels

        if not self.event_labels:
            return None
        sizes = {label: len(catalog.labels[label]) for label in LABELS if label in self.event_labels}
        return EventLabels(self.backbone.dim, sizes)


class LazyDecoderConfig(CrossDecoderConfig):
    """Decoder-only: the backbone's layers look at the history's vectors, and nothing is computed of those."""

    name: Literal["lazy_decoder"]

    @model_validator(mode="after")
    def _newest_event_is_not_said_twice(self) -> Self:
        if self.instruction is not None and "trigger_item" in self.instruction.parts:
            raise ValueError(
                "instruction.parts has 'trigger_item', and lazy_decoder begins every ID with the newest "
                "event of the history, which the trigger is: it would be told the same twice; leave it out, "
                "or take encoder_decoder"
            )
        return self

    def build_backbone(self, catalog: Catalog, choice: Choice) -> GenerativeBackbone[Any]:
        from rayrec.models.generative.lazy_decoder import LazyDecoder

        # In this order: initial weights come from one stream of random numbers.
        return LazyDecoder(
            self._build_decoder(self.backbone.num_layers, catalog, choice),
            catalog.learned_codes,
            self.history_length,
            self.backbone.dropout,
            self.build_softmax(catalog),
            self._build_instruction(catalog),
            self._build_event_labels(catalog),
            self._summary_settings(),
            built_content(self.content, catalog, self.backbone.dim),
        )


class RetrievalConfig(Config):
    """Which events of a long history are encoded: the newest, and those that fit what is wanted."""

    max_length: int = Field(500, gt=1)
    """Newest events that are looked at."""
    num_events: int = Field(50, gt=1)
    """Events that are encoded."""
    num_recent: int = Field(20, gt=0)
    """Newest events, which are always among them; their mean is part of what is looked for."""
    q2i_weight: float = Field(0.1, ge=0.0)
    """Factor of the loss by which is learned what fits: a softmax over the target and negatives."""
    q2i_temperature: float = Field(1.0, gt=0.0)
    """Inner products are divided by it."""
    q2i_negatives: int = Field(256, gt=0)
    """Drawn for each batch, every item alike."""

    @model_validator(mode="after")
    def _there_is_something_to_choose(self) -> Self:
        if not self.num_recent < self.num_events < self.max_length:
            raise ValueError(
                "retrieval needs num_recent < num_events < max_length, got "
                f"{self.num_recent}, {self.num_events} and {self.max_length}: otherwise nothing is chosen"
            )
        return self

    def build(self, dim: int, with_instruction: bool) -> HistoryRetrieval:
        from rayrec.models.generative.retrieval import HistoryRetrieval, RetrievalSettings

        settings = RetrievalSettings(self.num_events, self.num_recent, self.q2i_weight, self.q2i_temperature)
        return HistoryRetrieval(dim, settings, with_instruction)


class EncoderDecoderConfig(CrossDecoderConfig):
    """An encoder of the history's codes, the backbone, and a decoder of the same width."""

    name: Literal["encoder_decoder"]
    decoder_layers: int = Field(2, gt=0)
    experts: TargetExpertsConfig | None = None
    retrieval: RetrievalConfig | None = None
    """None: the newest `backbone.max_length` events are encoded."""

    @model_validator(mode="after")
    def _what_is_chosen_has_places(self) -> Self:
        if self.retrieval is not None and self.retrieval.num_events > self.backbone.max_length:
            raise ValueError(
                f"retrieval.num_events is {self.retrieval.num_events} and backbone.max_length "
                f"{self.backbone.max_length}: the encoder has no places for so many events; set one of them"
            )
        return self

    @model_validator(mode="after")
    def _old_events_are_read_in_one_way(self) -> Self:
        if self.retrieval is not None and self.long_history is not None:
            raise ValueError(
                "model.retrieval chooses among old events and model.long_history summarizes them; set one of "
                "the two"
            )
        return self

    @property
    def history_length(self) -> int:
        return super().history_length if self.retrieval is None else self.retrieval.max_length

    @property
    def negatives(self) -> Negatives:
        if self.retrieval is None or not self.retrieval.q2i_weight:
            return Negatives()
        return Negatives(per_batch=self.retrieval.q2i_negatives)

    def build_backbone(self, catalog: Catalog, choice: Choice) -> GenerativeBackbone[Any]:
        from rayrec.models.generative.encoder_decoder import EncoderDecoder

        settings = self.backbone
        return EncoderDecoder(
            self._build_decoder(self.decoder_layers, catalog, choice),
            catalog.learned_codes,
            num_layers=settings.num_layers,
            num_heads=settings.num_heads,
            feedforward_dim=settings.feedforward_dim,
            max_length=settings.max_length if self.long_history is None else self.history_length,
            dropout=settings.dropout,
            code_softmax=self.build_softmax(catalog),
            instruction=self._build_instruction(catalog),
            event_labels=self._build_event_labels(catalog),
            retrieval=None
            if self.retrieval is None
            else self.retrieval.build(settings.dim, self.instruction is not None),
            summaries=self._summary_settings(),
            content=built_content(self.content, catalog, settings.dim),
        )
