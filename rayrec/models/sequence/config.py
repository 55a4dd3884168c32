"""Settings of models that predict the next item of a history, and of SASRec, BSARec and HSTU.

Imports no torch: feature workers read these settings, and start within a second. `build` imports the network.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from rayrec.models.base.config import Attention, ModelConfig
from rayrec.platform.config import Config
from rayrec.platform.devices import Device
from rayrec.platform.event_labels import Label, Part

if TYPE_CHECKING:
    from torch import Tensor

    from rayrec.models.attention.choice import Choice
    from rayrec.models.sequence.backbones.bsarec import BsaRec
    from rayrec.models.sequence.backbones.history import HistoryReader
    from rayrec.models.sequence.backbones.hstu import Hstu
    from rayrec.models.sequence.backbones.transformer import CausalTransformer
    from rayrec.models.sequence.catalog import Catalog
    from rayrec.models.sequence.item_content import ItemContent
    from rayrec.models.sequence.item_losses import ItemLoss
    from rayrec.models.sequence.neighbor_pooling import NeighborPooling
    from rayrec.models.sequence.sequence_model import SequenceModel

NegativeSampling = Literal["uniform", "popularity"]


class Negatives(NamedTuple):
    """Items that feature workers sample beside the targets of a training batch."""

    per_batch: int = 0
    """Shared by all events of a global batch."""
    per_event: int = 0
    """For each event, none of them an item of its row. At most one of the two numbers is positive."""
    sampling: NegativeSampling = "uniform"
    """Of those per batch."""


class NeighborsConfig(Config):
    """Which items are read beside an event: those that users met most beside its item, before it.

    The defaults are those of the baseline *co-visitation*."""

    count: int = Field(20, gt=0)
    """Of an event at most."""
    window: int = Field(5, gt=0)
    """Items that a user met at most so many events apart are neighbors; nearer ones weigh more."""
    most_users: int = Field(200, gt=0)
    """Users of an item that are looked at, the newest."""
    most_events: int = Field(200, gt=0)
    """Events of a user that are looked at, the newest."""


class LongHistoryConfig(Config):
    """How a model reads more events than it reads one by one: summaries of the old ones."""

    chunk_events: int = Field(256, gt=0)
    """Events of a chunk. Chunks are cut from a user's oldest event on, so a full one never changes."""
    summary_tokens: int = Field(8, gt=0)
    """Vectors that the model makes of a chunk, of its events alone, and reads in their place."""
    newest: int = Field(256, gt=1)
    """Newest events that are read one by one at least: up to a chunk more, until the oldest of them are a
    full chunk."""
    max_chunks: int = Field(64, gt=0)
    """Newest chunks that are read; what is older is not."""
    num_layers: int = Field(1, gt=0)
    """Of the network that makes the vectors of a chunk, each with the backbone's sizes."""

    @property
    def most_read(self) -> int:
        """Events that are read one by one at most."""
        return self.newest + self.chunk_events - 1


class ContentConfig(Config):
    """What is said of items, as part of their vectors: words of their text and values of columns, each with a
    vector that items share. A catalog that says nothing leaves vectors as they are."""

    columns: tuple[str, ...] | None = None
    """Of the catalog; of `text`, words are read. None: the text, and those that usually say what kind of
    thing an item is (`category`, `genres`, `attributes`, `brand` and such)."""
    buckets: int = Field(16_384, ge=1)
    """Vectors, which words and values find by a hash."""
    min_items: int = Field(5, ge=1)
    """A word or value that fewer items have is not read: it would be known of these alone."""


class SequenceModelConfig(ModelConfig):
    """Settings of a model that recommends the next item of a user's history.

    The smallest has a `name`, `history_length` and `build`. The other properties say what the model reads
    besides the items of a history: only that is read, computed and sent to trainers.
    """

    kind: ClassVar[Literal["next_item"]] = "next_item"
    needs_semantic_ids: ClassVar[bool] = False
    """Whether the catalog that `build` is given has semantic IDs (`rayrec tokenize`)."""

    window_step: int = Field(1, ge=1)
    """Events by which the beginning of what is read of a longer history moves, in training and serving; it
    divides the length that is read. 1: the newest are read. With more, up to that many fewer are read, and
    the prefix cache serves users who have more events than are read, too. It counts from the oldest event
    that is known: a state of the newest events alone (`events.last`) has another one with each event, and
    nothing is reused; keep as many as users have."""

    @model_validator(mode="after")
    def _steps_divide_windows(self) -> Self:
        if self.history_length % self.window_step:
            raise ValueError(
                f"model.window_step is {self.window_step}; it must divide the {self.history_length} events "
                "of a history that the model reads"
            )
        return self

    @property
    @abstractmethod
    def history_length(self) -> int:
        """Newest events of a history that the model is given, those of `summarized` chunks aside."""

    @property
    def summarized(self) -> LongHistoryConfig | None:
        """How older events are read; None: they are not."""
        return None

    @property
    def windows_begin_at(self) -> int:
        """What is read of a history begins at a multiple of it."""
        return self.window_step if self.summarized is None else self.summarized.chunk_events

    @abstractmethod
    def build(self, catalog: Catalog, attention_file: Path | None = None) -> SequenceModel:
        """The network with its initial weights, from torch's default generator, which is seeded.

        Args:
            attention_file: where measured choices of attention backends are kept; need not exist yet.

        Raises:
            InputError: a file that the settings name is missing or does not fit.
        """

    @property
    def table_of_catalog(self) -> str | None:
        """The table whose rows of all items, or of their prefixes, the model needs to recommend; None where
        it needs none."""
        return None

    @property
    def negatives(self) -> Negatives:
        """What is sampled beside the targets."""
        return Negatives()

    @property
    def siblings_per_prefix(self) -> int | None:
        """Of models that read the table `prefix`: prefixes that each one on the path of a target is told
        apart from, at most; None: all that there are."""
        return None

    @property
    def item_content(self) -> ContentConfig | None:
        """What is read of the catalog's text and columns; None: nothing."""
        return None

    @property
    def has_item_vectors(self) -> bool:
        """Whether items are scored by inner products with vectors, those of `SequenceModel.item_vectors`."""
        return False

    @property
    def learns_words_alone(self) -> bool:
        """Whether items without a training event have a vector of what is said of them: they were no
        negatives."""
        return False

    @property
    def event_neighbors(self) -> NeighborsConfig | None:
        """Which neighbors are found for each event of a history; None: none. They need times."""
        return None

    @property
    def needs_times(self) -> bool:
        """Whether the model reads when events were."""
        return False

    @property
    def needs_labels(self) -> tuple[Label, ...]:
        """Labels of events (what was done, and where) that training rows need."""
        return ()

    @property
    def input_labels(self) -> tuple[Label, ...]:
        """Those that are read from the events of a history."""
        return ()

    @property
    def named_labels(self) -> tuple[Label, ...]:
        """Those whose names weights stand for; the others' names may change."""
        return ()

    @property
    def instruction_parts(self) -> tuple[Part, ...]:
        """What a request may say about the next item."""
        return ()

    @property
    def weighted_behaviors(self) -> tuple[str, ...]:
        """Names of behaviors in the settings, which the data set must have."""
        return ()

    def notes(self) -> list[str]:
        """Sentences for a run's log about settings that have no effect.

        Raises:
            InputError: a file that would say so cannot be read.
        """
        return []


class AttentionSettings(Config):
    """The setting of models whose attention `rayrec.models.attention` computes."""

    attention: Attention = "auto"

    def check_device(self, device: Device) -> None:
        able = [b for b in device.attention_backends if b not in device.attention_without_backward]
        if self.attention not in ("auto", "measured", *able):
            raise ValueError(
                f"model.attention is {self.attention!r} and device {device.kind!r}, for which it has no "
                f"kernels to train with; take 'auto', 'measured' or one of {', '.join(able)}"
            )

    def for_inference(self) -> Self:
        """Inference may be on another device, where the attention that training used has no kernels."""
        return self.model_copy(update={"attention": "auto"})


DEFAULT_MAX_LENGTH = 50
"""Events of a history that a backbone reads unless it is told another number."""


class HistoryReaderConfig(Config):
    """What every network that reads a history has."""

    dim: int = Field(64, gt=0)
    """Width of every vector, sparse rows included."""
    num_layers: int = Field(2, gt=0)
    num_heads: int = Field(2, gt=0)
    max_length: int = Field(DEFAULT_MAX_LENGTH, gt=1)
    """Events a history may have; longer ones are truncated to the newest."""
    dropout: float = Field(0.2, ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> Self:
        if self.dim % self.num_heads:
            raise ValueError(
                f"backbone.dim must be a multiple of backbone.num_heads, got {self.dim} and {self.num_heads}"
            )
        return self


class BackboneConfig(HistoryReaderConfig):
    """The causal transformer that reads a history."""

    feedforward_dim: int = Field(256, gt=0)

    def build(self, choice: Choice) -> CausalTransformer:
        from rayrec.models.sequence.backbones.transformer import CausalTransformer

        return CausalTransformer(
            self.dim,
            self.num_layers,
            self.num_heads,
            self.feedforward_dim,
            self.max_length,
            self.dropout,
            choice,
        )


class BsaRecBackboneConfig(BackboneConfig):
    """A causal transformer whose layers also rescale the frequencies of a history."""

    num_low: int = Field(3, gt=0)
    """Slowest frequencies of a history that count as low, its mean among them; the others are rescaled."""
    frequency_share: float = Field(0.7, ge=0.0, le=1.0)
    """Of the frequencies in what a layer adds; attention has the rest."""

    def build(self, choice: Choice) -> BsaRec:
        from rayrec.models.sequence.backbones.bsarec import BsaRec

        return BsaRec(
            self.dim,
            self.num_layers,
            self.num_heads,
            self.feedforward_dim,
            self.max_length,
            self.dropout,
            self.num_low,
            self.frequency_share,
            choice,
        )


class HstuBackboneConfig(HistoryReaderConfig):
    """HSTU's layers, which read when events were."""

    attention_dim: int | None = Field(None, gt=0)
    """Width of each head's queries and keys; None is dim / num_heads."""
    value_dim: int | None = Field(None, gt=0)
    """Width of each head's values and gates; None is dim / num_heads."""
    num_time_buckets: int = Field(64, ge=0, le=128)
    """Of seconds between events, each with a bias of its own and 35 % wider than the one before; the last of
    64 begins at five years. 0: no times are read."""

    def build(self, choice: Choice) -> Hstu:
        from rayrec.models.sequence.backbones.hstu import Hstu

        return Hstu(
            self.dim,
            self.num_layers,
            self.num_heads,
            self.max_length,
            self.dropout,
            self.attention_dim,
            self.value_dim,
            self.num_time_buckets,
            choice,
        )


ItemLossName = Literal["cross_entropy", "sampled_softmax", "bce"]
_READ_BY: dict[str, ItemLossName] = {
    "num_negatives": "sampled_softmax",
    "negative_sampling": "sampled_softmax",
    "negatives_per_event": "bce",
}
"""Settings that one loss alone reads."""


class ItemScoringConfig(AttentionSettings, SequenceModelConfig):
    """Every item is scored by an inner product with what was read of the history."""

    item_matrix: Literal["dense", "sparse"] = "dense"
    """`dense`: weights of the network. `sparse`: rows of parameter servers, for catalogs of any size."""
    loss: ItemLossName | None = None
    """`cross_entropy`: a softmax over the catalog; needs the dense matrix, whose default it is.
    `sampled_softmax`: one over the target, the items of its row and negatives of the batch; the default of
    the sparse matrix.
    `bce`: each target apart from negatives of its own, none of them an item of its row."""
    num_negatives: int = Field(1024, gt=0)
    """Of `sampled_softmax`: drawn for each batch, with replacement; an item that is drawn twice counts
    once."""
    negative_sampling: NegativeSampling = "popularity"
    """Of `sampled_softmax`. Negatives of `bce` are uniform."""
    negatives_per_event: int = Field(1, gt=0)
    """Of `bce`: sampled for each event."""
    temperature: float | None = Field(None, gt=0.0)
    """None: scores are inner products. A number: those of vectors scaled to length 1, divided by it."""
    user_embedding: bool = False
    content: ContentConfig | None = None
    """Of the dense matrix: what is added to the vectors of items, those that are read and those that are
    scored. None: they are known by their ids alone."""
    backbone: BackboneConfig | BsaRecBackboneConfig | HstuBackboneConfig

    @model_validator(mode="after")
    def _loss_has_its_items(self) -> Self:
        if self.loss == "cross_entropy" and self.item_matrix == "sparse":
            raise ValueError(
                "model.loss is 'cross_entropy' and model.item_matrix 'sparse': a softmax over the catalog "
                "reads every item in every step, and servers send a batch's rows; take 'sampled_softmax' or "
                "'bce', or the item_matrix 'dense'"
            )
        return self

    @model_validator(mode="after")
    def _content_is_of_the_dense_matrix(self) -> Self:
        if self.content is not None and self.item_matrix == "sparse":
            raise ValueError(
                "model.content is set and model.item_matrix 'sparse', whose rows servers send as they are; "
                "take the item_matrix 'dense', or leave content out"
            )
        return self

    @property
    def item_content(self) -> ContentConfig | None:
        return self.content

    @property
    def has_item_vectors(self) -> bool:
        return True

    @property
    def learns_words_alone(self) -> bool:
        return self.content is not None and self.loss_or_default != "bce"

    @property
    def history_length(self) -> int:
        return self.backbone.max_length

    def notes(self) -> list[str]:
        fields = type(self).model_fields
        unread = [
            f"model.{name}"
            for name, loss in _READ_BY.items()
            if loss != self.loss_or_default and getattr(self, name) != fields[name].default
        ]
        said = [f"the loss {self.loss_or_default!r} does not read {', '.join(unread)}"] if unread else []
        return super().notes() + said

    @property
    def loss_or_default(self) -> ItemLossName:
        return self.loss or ("cross_entropy" if self.item_matrix == "dense" else "sampled_softmax")

    @property
    def tables(self) -> dict[str, int]:
        items = ("item",) if self.item_matrix == "sparse" else ()
        users = ("user",) if self.user_embedding else ()
        return dict.fromkeys((*items, *users), self.backbone.dim)

    @property
    def table_of_catalog(self) -> str | None:
        return "item" if self.item_matrix == "sparse" else None

    @property
    def negatives(self) -> Negatives:
        match self.loss_or_default:
            case "sampled_softmax":
                return Negatives(per_batch=self.num_negatives, sampling=self.negative_sampling)
            case "bce":
                return Negatives(per_event=self.negatives_per_event)
        return Negatives()

    def build(self, catalog: Catalog, attention_file: Path | None = None) -> SequenceModel:
        import torch

        from rayrec.models.attention.choice import choice_named
        from rayrec.models.sequence.next_item import DenseNextItemModel, SparseNextItemModel

        backbone: HistoryReader = self.backbone.build(choice_named(self.attention, attention_file))
        competing_I = self._competing(catalog)
        loss = self._item_loss(catalog, competing_I)
        pooling = self._pooling()
        if self.item_matrix == "dense":
            model = DenseNextItemModel(
                backbone,
                loss,
                catalog.num_items,
                self.backbone.dim,
                self.temperature,
                pooling,
                built_content(self.content, catalog, self.backbone.dim),
                None if catalog.known_I is None else torch.from_numpy(catalog.known_I),
            )
            if competing_I is not None:
                with torch.no_grad():
                    model.items_ID[~competing_I] = 0.0  # nothing would train them: their words stand alone
            return model
        return SparseNextItemModel(backbone, loss, self.temperature, pooling)

    def _competing(self, catalog: Catalog) -> Tensor | None:
        """[I] bool, the items that are negatives of a softmax over the catalog; None: all are.

        As negatives alone, items that nobody has met would learn no more than that, and lose what their words
        say. Items without a word that others have lose nothing, and must not stay where they began.
        """
        if self.loss_or_default != "cross_entropy" or self.content is None or catalog.trained_I is None:
            return None
        assert catalog.content is not None, "the model reads what is said of items"
        import torch

        trained_I = catalog.trained_I
        return torch.from_numpy(trained_I | ~catalog.content.share_features_with(trained_I))

    def _pooling(self) -> NeighborPooling | None:
        """What joins an event and its neighbors; None for models that read none."""
        return None

    def _item_loss(self, catalog: Catalog, competing_I: Tensor | None) -> ItemLoss:
        from rayrec.models.sequence.item_losses import BinaryCrossEntropy, CrossEntropy, SampledSoftmax

        match self.loss_or_default:
            case "cross_entropy":
                return CrossEntropy(competing_I)
            case "bce":
                return BinaryCrossEntropy()
        assert catalog.negative_log_q_I is not None
        return SampledSoftmax.of_draws(catalog.negative_log_q_I, self.num_negatives)


def built_content(settings: ContentConfig | None, catalog: Catalog, dim: int) -> ItemContent | None:
    """What makes vectors of what is said of items; None where nothing is read of it."""
    if settings is None:
        return None
    from rayrec.models.sequence.item_content import ItemContent

    assert catalog.content is not None, "the model reads what is said of items"
    return ItemContent(catalog.content, settings.buckets, dim)


class SasRecConfig(ItemScoringConfig):
    """A causal transformer reads the history."""

    name: Literal["sasrec"]
    backbone: BackboneConfig = BackboneConfig()


class BsaRecConfig(ItemScoringConfig):
    """A causal transformer whose layers also rescale frequencies reads the history."""

    name: Literal["bsarec"]
    backbone: BsaRecBackboneConfig = BsaRecBackboneConfig()


SILU_ATTENTIONS = ("reference", "grouped", "triton")
"""Attention backends that have HSTU's scoring and its bias."""


class HstuConfig(ItemScoringConfig):
    """HSTU reads the history."""

    name: Literal["hstu"]
    backbone: HstuBackboneConfig = HstuBackboneConfig()

    @model_validator(mode="after")
    def _attention_has_its_scoring(self) -> Self:
        if self.attention not in ("auto", "measured", *SILU_ATTENTIONS):
            raise ValueError(
                f"model.attention is {self.attention!r}, which has no scoring but the softmax, and HSTU's is "
                f"not one; take 'auto', 'measured' or one of {', '.join(SILU_ATTENTIONS)}"
            )
        return self

    @property
    def needs_times(self) -> bool:
        return self.backbone.num_time_buckets > 0


class GnnConfig(ItemScoringConfig):
    """Each event is read with the items that others met beside its item before it, two hops away in the graph
    of users and items; then a transformer reads the history."""

    name: Literal["gnn"]
    backbone: BackboneConfig = BackboneConfig()
    neighbors: NeighborsConfig = NeighborsConfig()

    @property
    def event_neighbors(self) -> NeighborsConfig:
        return self.neighbors

    @property
    def needs_times(self) -> bool:
        return True

    def _pooling(self) -> NeighborPooling:
        from rayrec.models.sequence.neighbor_pooling import NeighborPooling

        return NeighborPooling(self.backbone.dim)
