"""Settings of the models and of their dense optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rayrec.platform.config import Config


class BackboneConfig(Config):
    """The causal transformer that reads a history."""

    dim: int = Field(64, gt=0)
    """Width of every vector, sparse rows included."""
    num_layers: int = Field(2, gt=0)
    num_heads: int = Field(2, gt=0)
    feedforward_dim: int = Field(256, gt=0)
    max_length: int = Field(50, gt=1)
    """Events a history may have; longer ones are cut to the newest."""
    dropout: float = Field(0.2, ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _heads_divide_width(self) -> BackboneConfig:
        if self.dim % self.num_heads:
            raise ValueError(
                f"backbone.dim must be a multiple of backbone.num_heads, got {self.dim} and {self.num_heads}"
            )
        return self


Attention = Literal["auto", "measured", "reference", "sdpa", "flex", "grouped", "triton", "npu"]
"""Who computes attention. `auto` goes by a fixed rule of device and lengths, so that runs repeat to the bit.
`measured` times them in each trainer, once for each class of shapes, and writes what it takes into the run's
folder, from which a resumed run reads it. A name demands one backend; see `rayrec.models.attention`."""


class SasRecConfig(Config):
    """Items are predicted one by one, by inner product."""

    name: Literal["sasrec"]
    backbone: BackboneConfig = BackboneConfig()
    attention: Attention = "auto"
    item_matrix: Literal["dense", "sparse"] = "dense"
    """`dense`: weights of the network and a full softmax. `sparse`: rows of the
    parameter servers and a sampled softmax, for catalogues of any size."""
    num_negatives: int = Field(1024, gt=0)
    """Sampled for each batch where the item matrix is sparse."""
    negative_sampling: Literal["uniform", "popularity"] = "popularity"
    user_embedding: bool = False


class GenerativeConfig(Config):
    """Items are generated code by code; what the networks that do so have in common."""

    backbone: BackboneConfig = BackboneConfig()
    attention: Attention = "auto"
    beam_width: int = Field(100, gt=0)
    """Beams of evaluation and serving; never fewer than the items asked for."""
    user_embedding: bool = False


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


ModelConfig = Annotated[
    SasRecConfig | PrefixDecoderConfig | LightDecoderConfig | LazyDecoderConfig | EncoderDecoderConfig,
    Field(discriminator="name"),
]


def sparse_tables(config: ModelConfig) -> tuple[str, ...]:
    """Names of the embedding tables whose rows the model reads."""
    tables: tuple[str, ...] = ()
    if isinstance(config, SasRecConfig):
        tables = ("item",) if config.item_matrix == "sparse" else ()
    elif isinstance(config, LightDecoderConfig):
        tables = ("item", "code") if config.item_embedding else ("code",)
    return (*tables, "user") if config.user_embedding else tables


class DenseOptimizerConfig(Config):
    """AdamW of the dense weights."""

    learning_rate: float = Field(1e-3, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    max_grad_norm: float | None = Field(None, gt=0.0)
