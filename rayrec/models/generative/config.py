"""Settings of models that generate the next item code by code, with networks of ours.

Imports no torch, as `rayrec.models.sequence.config`.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rayrec.models.sequence.config import (
    DEFAULT_MAX_LENGTH,
    AttentionSettings,
    BackboneConfig,
    ContentConfig,
    LongHistoryConfig,
    Negatives,
    SequenceModelConfig,
    built_content,
)
from rayrec.platform.config import Config
from rayrec.platform.event_labels import LABELS, Label, Part

if TYPE_CHECKING:
    from rayrec.models.attention.choice import Choice
    from rayrec.models.generative.backbone import GenerativeBackbone
    from rayrec.models.generative.chunk_summaries import SummarySettings
    from rayrec.models.generative.code_softmax import CodeSoftmax
    from rayrec.models.generative.cross_decoder import CrossDecoder
    from rayrec.models.generative.experts import ExpertSettings
    from rayrec.models.generative.instruction import EventLabels, InstructionPrefix
    from rayrec.models.generative.prefix_decoder import PrefixBackbone, PrefixDecoder
    from rayrec.models.generative.retrieval import HistoryRetrieval
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


class PrefixDecoderConfig(GenerativeConfig):
    """A vector for every prefix of a semantic ID, tied between input and output."""

    name: Literal["prefix_decoder"]
    softmax: Literal["levels", "items", "hybrid"] = "levels"
    """`levels`: over the next codes of a prefix, one level after the other; items are generated. `items`: one
    over all items, each scored by the sum of its prefixes' vectors, with the same weights: what the
    hierarchical softmax and its beams are compared with. `hybrid`: both losses on the same weights; beams
    find items code by code, and those that they found are ranked by both."""
    num_negatives: int = Field(1024, gt=0)
    """Of the softmax `hybrid` with the sparse matrix, whose loss over items is a sampled softmax: drawn for
    each batch by popularity, with replacement; an item that is drawn twice counts once."""
    prefix_matrix: Literal["dense", "sparse"] = "dense"
    """`dense`: vectors of prefixes are weights of the network. `sparse`: rows of the table `prefix` of
    parameter servers, for catalogs of any size; a step reads those of its items and those that its targets
    compete with."""
    composed: int | None = Field(None, ge=1)
    """Of the dense matrix: inner width of a network that makes a prefix's vector of its codes, in place of a
    weight for each prefix; then no weight belongs to one item, and weights do not grow with the catalog. The
    vectors of all prefixes of a depth are computed at each step, and for each request and depth: that work
    and memory grow with the catalog (with three levels of 128 components each, 1.5 GB
    for a million items). It is meant for catalogs of up to some 100,000 items."""
    content: ContentConfig | None = None
    """Of the dense matrix: what the catalog says of the items below a prefix, added to its vector. None:
    prefixes are known by their codes and by events alone."""
    num_siblings: int | None = Field(None, ge=1)
    """Of the sparse matrix: children that are sampled of each prefix on the path of a target, for the loss to
    tell the target from; None: all of them."""
    held_prefixes: int = Field(1_000_000, ge=0)
    """Of the sparse matrix: rows that a process may hold to generate items, of the shortest prefixes, whole
    levels alone. Rows of longer ones are read as beams reach them."""

    @model_validator(mode="after")
    def _siblings_are_of_rows(self) -> Self:
        if self.prefix_matrix == "dense" and (own := self._given("num_siblings", "held_prefixes")):
            raise ValueError(
                f"model.{own} is of the prefix_matrix 'sparse', and this one is 'dense', whose vectors "
                "are all in the network; leave it out, or set prefix_matrix: sparse"
            )
        return self

    @model_validator(mode="after")
    def _negatives_are_of_sampled_items(self) -> Self:
        if not self._samples_items and (own := self._given("num_negatives")):
            raise ValueError(
                f"model.{own} is of the softmax 'hybrid' with the prefix_matrix 'sparse', whose loss over "
                "items has negatives; leave it out"
            )
        return self

    def _given(self, *names: str) -> str | None:
        """The first of these settings that is not its default, None where all are."""
        # By value: a run's folder has all settings, also those that nobody gave.
        fields = type(self).model_fields
        return next((name for name in names if getattr(self, name) != fields[name].default), None)

    @model_validator(mode="after")
    def _network_makes_what_it_holds(self) -> Self:
        for name in ("composed", "content"):
            if getattr(self, name) is not None and self.prefix_matrix == "sparse":
                raise ValueError(
                    f"model.{name} is set and the prefix_matrix is 'sparse', whose vectors are rows of "
                    f"servers alone; leave {name} out, or set prefix_matrix: dense"
                )
        return self

    @model_validator(mode="after")
    def _one_softmax_reads_all_prefixes(self) -> Self:
        if self.softmax == "levels":
            return self
        if self.softmax == "items" and self.prefix_matrix == "sparse":
            raise ValueError(
                "model.softmax is 'items' and prefix_matrix 'sparse': a softmax over all items reads the "
                "vectors of all prefixes at every step; set prefix_matrix: dense, or another softmax"
            )
        if self.behavior_weights:
            raise ValueError(
                f"model.behavior_weights are of softmax 'levels', and this one is {self.softmax!r}, in which "
                "every target counts alike; leave them out, or set softmax: levels"
            )
        return self

    def build(self, catalog: Catalog, attention_file: Path | None = None) -> SequenceModel:
        if self.softmax == "levels":
            return super().build(catalog, attention_file)
        import torch

        from rayrec.models.attention.choice import choice_named
        from rayrec.models.generative.flat_softmax import FlatPrefixModel
        from rayrec.models.generative.hybrid_recommender import HybridRecommender
        from rayrec.models.sequence.item_losses import CrossEntropy, ItemLoss, SampledSoftmax

        choice = choice_named(self.attention, attention_file)
        item_loss: ItemLoss
        if self._samples_items:
            assert catalog.negative_log_q_I is not None, "the model reads negatives"
            item_loss = SampledSoftmax.of_draws(catalog.negative_log_q_I, self.num_negatives)
        else:
            item_loss = CrossEntropy(None if catalog.trained_I is None else torch.tensor(catalog.trained_I))
        if self.softmax == "items":
            return FlatPrefixModel(self._build_dense(catalog, choice), item_loss)
        backbone, num_levels = self.build_backbone(catalog, choice), len(catalog.level_sizes)
        return HybridRecommender(
            backbone, item_loss, catalog.codes, self.beam_width, num_levels, catalog.trie
        )

    @property
    def _samples_items(self) -> bool:
        """Whether the loss over items is one of negatives."""
        return self.softmax == "hybrid" and self.prefix_matrix == "sparse"

    @property
    def negatives(self) -> Negatives:
        if self._samples_items:
            # Not uniform: items without a training event are no negatives of the other softmax either.
            return Negatives(per_batch=self.num_negatives, sampling="popularity")
        return super().negatives

    @property
    def item_content(self) -> ContentConfig | None:
        return self.content

    @property
    def tables(self) -> dict[str, int]:
        prefixes = {"prefix": self.backbone.dim} if self.prefix_matrix == "sparse" else {}
        return prefixes | super().tables

    @property
    def init_scales(self) -> dict[str, float]:
        # A prefix that nothing was learned of is what its codes are, as one that the dense matrix lacks.
        return {"prefix": 0.0}

    @property
    def siblings_per_prefix(self) -> int | None:
        return self.num_siblings

    @property
    def table_of_catalog(self) -> str | None:
        return "prefix" if self.prefix_matrix == "sparse" else None

    def build_backbone(self, catalog: Catalog, choice: Choice) -> PrefixBackbone[Any]:
        if self.prefix_matrix == "dense":
            return self._build_dense(catalog, choice)
        import torch

        from rayrec.models.generative.prefix_rows import SparsePrefixDecoder

        known_I = None if catalog.known_I is None else torch.tensor(catalog.known_I)
        return SparsePrefixDecoder(
            self.backbone.build(choice),
            catalog.learned_codes,
            catalog.level_sizes,
            known_I,
            self.held_prefixes,
        )

    def _build_dense(self, catalog: Catalog, choice: Choice) -> PrefixDecoder:
        import torch

        from rayrec.models.generative.prefix_composer import PrefixComposer
        from rayrec.models.generative.prefix_decoder import PrefixDecoder

        known_I, trained_I = (
            None if chosen_I is None else torch.tensor(chosen_I)
            for chosen_I in (catalog.known_I, catalog.trained_I)
        )
        content = None
        if self.content is not None:
            assert catalog.content is not None, "the model reads what is said of items"
            content = catalog.content, self.content.buckets
        dim = self.backbone.dim
        return PrefixDecoder(
            self.backbone.build(choice),
            catalog.learned_codes,
            catalog.level_sizes,
            known_I,
            trained_I,
            None if self.composed is None else PrefixComposer(catalog.level_sizes, self.composed, dim),
            content,
        )


class LightDecoderConfig(CodeSoftmaxSettings, GenerativeConfig):
    """Rows for codes, and a feed-forward decoder on top of the history."""

    name: Literal["light_decoder"]
    decoder_dim: int = Field(256, gt=0)
    """Hidden width of the decoder's feed-forward layers."""
    item_embedding: bool = True
    """Whether a history event is its item's row plus its code rows, or those alone."""
    content: ContentConfig | None = None
    """What is said of the items of a history, added to their vectors. None: nothing."""

    @property
    def item_content(self) -> ContentConfig | None:
        return self.content

    @property
    def tables(self) -> dict[str, int]:
        names = ("item", "code") if self.item_embedding else ("code",)
        return dict.fromkeys(names, self.backbone.dim) | super().tables

    def build_backbone(self, catalog: Catalog, choice: Choice) -> GenerativeBackbone[Any]:
        from rayrec.models.generative.light_decoder import CodeDecoder, LightDecoder

        settings, backbone = self.backbone, self.backbone.build(choice)
        decoder = CodeDecoder(
            settings.dim, catalog.level_sizes, self.decoder_dim, settings.dropout, backbone.num_dropouts
        )
        content = built_content(self.content, catalog, settings.dim)
        return LightDecoder(backbone, decoder, self.build_softmax(catalog), content)


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


def summary_settings(
    config: LongHistoryConfig, num_heads: int, feedforward_dim: int, dropout: float
) -> SummarySettings:
    """What `ChunkSummaries` needs to know, beside the width."""
    from rayrec.models.generative.chunk_summaries import SummarySettings

    return SummarySettings(
        config.chunk_events, config.summary_tokens, config.num_layers, num_heads, feedforward_dim, dropout
    )
