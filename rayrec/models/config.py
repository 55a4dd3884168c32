"""Settings of the models and of their dense optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rayrec.platform.config import Config


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


Attention = Literal["auto", "measured", "reference", "sdpa", "flex", "grouped", "triton", "ascend"]
"""Who computes attention. `auto` goes by a fixed rule of device and lengths, so that runs repeat to the bit.
`measured` times them in each trainer, once for each class of shapes, and writes what it takes into the run's
folder, from which a resumed run reads it. A name demands one backend; see `rayrec.models.attention`."""


ItemLossName = Literal["cross_entropy", "sampled_softmax", "bce"]


class NextItemConfig(Config):
    """Items are predicted one by one, by inner product."""

    attention: Attention = "auto"
    item_matrix: Literal["dense", "sparse"] = "dense"
    """`dense`: weights of the network. `sparse`: rows of parameter servers, for catalogues of any size."""
    loss: ItemLossName | None = None
    """`cross_entropy`: a softmax over the catalogue; needs the dense matrix, whose default it is.
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
                "model.loss is 'cross_entropy' and model.item_matrix 'sparse': a softmax over the catalogue "
                "reads every item in every step, and servers send a batch's rows; take 'sampled_softmax' or "
                "'bce', or the item_matrix 'dense'"
            )
        return self

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

    @property
    def needs_times(self) -> bool:
        return self.backbone.num_time_buckets > 0


class GenerativeConfig(Config):
    """Items are generated code by code; what the networks that do so have in common."""

    backbone: BackboneConfig = BackboneConfig()
    attention: Attention = "auto"
    beam_width: int = Field(100, gt=0)
    """Beams of evaluation and serving; never fewer than the items asked for."""
    user_embedding: bool = False

    @property
    def needs_times(self) -> bool:
        return False


class PrefixDecoderConfig(GenerativeConfig):
    """A vector for every prefix of a semantic ID, tied between input and output."""

    name: Literal["prefix_decoder"]


class LazyDecoderConfig(GenerativeConfig):
    """Decoder-only: the backbone's layers look at the history's vectors, and nothing is computed of those."""

    name: Literal["lazy_decoder"]
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)


class EncoderDecoderConfig(GenerativeConfig):
    """An encoder of the history's codes, the backbone, and a decoder of the same width."""

    name: Literal["encoder_decoder"]
    decoder_layers: int = Field(2, gt=0)
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)


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


class CausalLmConfig(Config):
    """Items are generated code by code, by a language model whose words are the codes."""

    name: Literal["causal_lm"]
    backbone: CausalLmBackboneConfig = CausalLmBackboneConfig()
    beam_width: int = Field(100, gt=0)
    """Beams of evaluation and serving; never fewer than the items asked for."""

    @property
    def needs_times(self) -> bool:
        return False


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
times, and does anybody read them."""
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
