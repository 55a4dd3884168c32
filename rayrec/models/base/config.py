"""Settings of the models and of their dense optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rayrec.platform.config import Config
from rayrec.platform.event_labels import LABELS, Label, Part


class HistoryReaderConfig(Config):
    """What every network that reads a history has."""

    dim: int = Field(64, gt=0)
    """Width of every vector, sparse rows included."""
    num_layers: int = Field(2, gt=0)
    num_heads: int = Field(2, gt=0)
    max_length: int = Field(50, gt=1)
    """Events a history may have; longer ones are cut to the newest."""
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


class HstuBackboneConfig(HistoryReaderConfig):
    """HSTU's layers, which read when events were."""

    attention_dim: int | None = Field(None, gt=0)
    """Width of each head's queries and keys; None is dim / num_heads."""
    value_dim: int | None = Field(None, gt=0)
    """Width of each head's values and gates; None is dim / num_heads."""
    num_time_buckets: int = Field(64, ge=0, le=128)
    """Of seconds between events, each with a bias of its own and 35 % wider than the one before; the last of
    64 begins at five years. 0: no times are read."""


Attention = Literal[
    "auto", "measured", "reference", "sdpa", "flex", "bucketed", "grouped", "triton", "ascend"
]
"""Who computes attention. `auto` goes by a fixed rule of device and lengths, so that runs repeat to the bit.
`measured` times them in each trainer, once for each class of shapes, and writes what it takes into the run's
folder, from which a resumed run reads it. A name demands one backend; see `rayrec.models.attention`."""

SILU_ATTENTIONS = ("reference", "grouped", "triton")
"""Those that have HSTU's scoring and its bias."""


ItemLossName = Literal["cross_entropy", "sampled_softmax", "bce"]


class NextItemConfig(Config):
    """Items are predicted one by one, by inner product."""

    attention: Attention = "auto"
    item_matrix: Literal["dense", "sparse"] = "dense"
    """`dense`: weights of the network. `sparse`: rows of parameter servers, for catalogs of any size."""
    loss: ItemLossName | None = None
    """`cross_entropy`: a softmax over the catalog; needs the dense matrix, whose default it is.
    `sampled_softmax`: one over the target and negatives of the batch; the default of the sparse matrix.
    `bce`: each target apart from negatives of its own, none of them an item of its row."""
    num_negatives: int = Field(1024, gt=0)
    """Of `sampled_softmax`: drawn for each batch."""
    negative_sampling: Literal["uniform", "popularity"] = "popularity"
    """Of `sampled_softmax`. Negatives of `bce` are uniform."""
    negatives_per_event: int = Field(1, gt=0)
    """Of `bce`: drawn for each event."""
    temperature: float | None = Field(None, gt=0.0)
    """None: scores are inner products. A number: those of vectors scaled to length 1, divided by it."""
    user_embedding: bool = False

    @model_validator(mode="after")
    def _loss_has_its_items(self) -> Self:
        if self.loss == "cross_entropy" and self.item_matrix == "sparse":
            raise ValueError(
                "model.loss is 'cross_entropy' and model.item_matrix 'sparse': a softmax over the catalog "
                "reads every item in every step, and servers send a batch's rows; take 'sampled_softmax' or "
                "'bce', or the item_matrix 'dense'"
            )
        return self

    @property
    def input_labels(self) -> tuple[Label, ...]:
        return ()

    @property
    def named_labels(self) -> tuple[Label, ...]:
        return ()

    @property
    def needs_labels(self) -> tuple[Label, ...]:
        return ()

    @property
    def loss_or_default(self) -> ItemLossName:
        return self.loss or ("cross_entropy" if self.item_matrix == "dense" else "sampled_softmax")


class SasRecConfig(NextItemConfig):
    """A causal transformer reads the history."""

    name: Literal["sasrec"]
    backbone: BackboneConfig = BackboneConfig()

    @property
    def needs_times(self) -> bool:
        return False


class HstuConfig(NextItemConfig):
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


class GeneratingConfig(Config):
    """Items are generated code by code; what all networks that do so have in common."""

    attention: Attention = "auto"
    beam_width: int = Field(100, gt=0)
    """Beams of evaluation and serving; never fewer than the items asked for."""
    behavior_weights: dict[str, Annotated[float, Field(ge=0.0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """By name of a behavior, how often the loss of a target with it counts; 1 for others. The sum is still
    divided by the number of targets, so 2 means: as if the event were there twice, at the same rate."""

    @property
    def needs_times(self) -> bool:
        return False

    @property
    def input_labels(self) -> tuple[Label, ...]:
        return ()

    @property
    def named_labels(self) -> tuple[Label, ...]:
        return ()

    @property
    def needs_labels(self) -> tuple[Label, ...]:
        weighted = ("behavior",) if self.behavior_weights else ()
        return tuple(label for label in LABELS if label in (*self.named_labels, *weighted))


class GenerativeConfig(GeneratingConfig):
    """With a network of ours."""

    backbone: BackboneConfig = BackboneConfig()
    user_embedding: bool = False


class PrefixDecoderConfig(GenerativeConfig):
    """A vector for every prefix of a semantic ID, tied between input and output."""

    name: Literal["prefix_decoder"]


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


class ExpertsConfig(Config):
    """A mixture of experts in the place of each decoder layer's feed-forward."""

    count: int = Field(4, ge=2)
    """Experts of a layer, each with `backbone.feedforward_dim`."""
    per_token: Literal[1, 2] = 1
    """Experts that each token goes through."""
    balance_weight: float = Field(0.01, ge=0.0)
    """Factor of the loss that keeps experts equally busy."""


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


class CrossDecoderConfig(GenerativeConfig):
    """What the models have in common whose decoder looks at the history through cross-attention."""

    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    instruction: InstructionConfig | None = None
    """None: the decoder begins with its start token."""
    event_labels: tuple[Label, ...] = ()
    """Labels of the history's events that are part of their vectors."""
    experts: ExpertsConfig | None = None
    """None: one feed-forward for all tokens."""

    @property
    def input_labels(self) -> tuple[Label, ...]:
        return self.event_labels

    @property
    def named_labels(self) -> tuple[Label, ...]:
        parts = () if self.instruction is None else self.instruction.parts
        return tuple(label for label in LABELS if label in (*parts, *self.event_labels))


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


class LightDecoderConfig(GenerativeConfig):
    """Rows for codes, and a feed-forward decoder on top of the history."""

    name: Literal["light_decoder"]
    decoder_dim: int = Field(256, gt=0)
    """Hidden width of the decoder's feed-forward layers."""
    item_embedding: bool = True
    """Whether a history event is its item's row plus its code rows, or those alone."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)


class Qwen3Network(Config):
    """A network in the shape of Qwen3, with random weights."""

    kind: Literal["qwen3"]
    dim: int = Field(64, gt=0)
    num_layers: int = Field(2, gt=0)
    num_heads: int = Field(4, gt=0)
    num_key_heads: int = Field(2, gt=0)
    """Fewer than `num_heads`: several query heads share keys and values, and contexts take less memory."""
    feedforward_dim: int = Field(192, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> Qwen3Network:
        if self.dim % (2 * self.num_heads) or self.num_heads % self.num_key_heads:
            raise ValueError(
                "network.dim must be a multiple of twice network.num_heads, and that one of "
                f"network.num_key_heads, got {self.dim}, {self.num_heads} and {self.num_key_heads}"
            )
        return self


class TransformersNetwork(Config):
    """Any causal language model of the package transformers, with random weights."""

    kind: Literal["transformers"]
    settings: dict[str, Any]
    """Of its configuration, `model_type` among them, as transformers calls them; but for the vocabulary."""


class SavedNetwork(Config):
    """A causal language model that was saved in the format of transformers."""

    kind: Literal["folder"]
    folder: str
    """With `config.json` and safetensors; never a name of a hub."""


class CausalLmBackboneConfig(Config):
    """The language model that reads and continues a history."""

    network: Annotated[Qwen3Network | TransformersNetwork | SavedNetwork, Field(discriminator="kind")] = (
        Qwen3Network(kind="qwen3")
    )
    max_length: int = Field(50, gt=1)
    """Events a history may have, each of as many tokens as an ID has codes."""


class CausalLmConfig(GeneratingConfig):
    """With a language model whose words are the codes."""

    name: Literal["causal_lm"]
    backbone: CausalLmBackboneConfig = CausalLmBackboneConfig()


AnyModelConfig = (
    SasRecConfig
    | HstuConfig
    | PrefixDecoderConfig
    | LightDecoderConfig
    | LazyDecoderConfig
    | EncoderDecoderConfig
    | CausalLmConfig
)
"""Each says by `needs_times` whether the model reads when events were; only then do the rows of a run need
times, and does anybody read them. Likewise the labels, what was done in the events, and where: `needs_labels`
are those that training rows need, `input_labels` those that are read of the events of a history, and
`named_labels` those whose names weights stand for: the others' names may change."""
ModelConfig = Annotated[AnyModelConfig, Field(discriminator="name")]


def sparse_tables(config: AnyModelConfig) -> tuple[str, ...]:
    """Names of the embedding tables whose rows the model reads."""
    if isinstance(config, CausalLmConfig):
        return ()
    tables: tuple[str, ...] = ()
    if isinstance(config, NextItemConfig):
        tables = ("item",) if config.item_matrix == "sparse" else ()
    elif isinstance(config, LightDecoderConfig):
        tables = ("item", "code") if config.item_embedding else ("code",)
    return (*tables, "user") if config.user_embedding else tables


def sparse_dim(config: AnyModelConfig) -> int:
    """Width of the rows of these tables; 0 where there are none."""
    return 0 if isinstance(config, CausalLmConfig) else config.backbone.dim


def history_length(config: AnyModelConfig) -> int:
    """Newest events of a history that the model is given."""
    if isinstance(config, EncoderDecoderConfig) and config.retrieval is not None:
        return config.retrieval.max_length
    return config.backbone.max_length


def with_absolute_paths(config: AnyModelConfig) -> AnyModelConfig:
    """The same model, to be understood from any working directory."""
    if config.name != "causal_lm" or config.backbone.network.kind != "folder":
        return config
    folder = str(Path(config.backbone.network.folder).resolve())
    network = config.backbone.network.model_copy(update={"folder": folder})
    backbone = config.backbone.model_copy(update={"network": network})
    return config.model_copy(update={"backbone": backbone})


class DenseOptimizerConfig(Config):
    """AdamW of the dense weights."""

    learning_rate: float = Field(1e-3, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    max_grad_norm: float | None = Field(None, gt=0.0)
