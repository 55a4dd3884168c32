"""Settings of the models and of their dense optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

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


class SasRecConfig(Config):
    """Items are predicted one by one, by inner product."""

    name: Literal["sasrec"]
    backbone: BackboneConfig = BackboneConfig()
    item_matrix: Literal["dense", "sparse"] = "dense"
    """`dense`: weights of the network and a full softmax. `sparse`: rows of the
    parameter servers and a sampled softmax, for catalogues of any size."""
    num_negatives: int = Field(1024, gt=0)
    """Sampled for each batch where the item matrix is sparse."""
    negative_sampling: Literal["uniform", "popularity"] = "popularity"
    user_embedding: bool = False


class GenerativeConfig(Config):
    """Items are generated code by code."""

    name: Literal["generative"]
    backbone: BackboneConfig = BackboneConfig()
    decoder_dim: int = Field(256, gt=0)
    """Hidden width of the decoder's feed-forward layers."""
    item_embedding: bool = True
    """Whether a history event is its item's row plus its code rows, or those alone."""
    user_embedding: bool = False
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    beam_width: int = Field(100, gt=0)
    """Beams of evaluation and serving; never fewer than the items asked for."""


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


AnyModelConfig = SasRecConfig | GenerativeConfig | CausalLmConfig
ModelConfig = Annotated[AnyModelConfig, Field(discriminator="name")]


def sparse_tables(config: AnyModelConfig) -> tuple[str, ...]:
    """Names of the embedding tables whose rows the model reads."""
    tables: tuple[str, ...]
    if config.name == "causal_lm":
        return ()
    if config.name == "sasrec":
        tables = ("item",) if config.item_matrix == "sparse" else ()
    else:
        tables = ("item", "code") if config.item_embedding else ("code",)
    return (*tables, "user") if config.user_embedding else tables


def sparse_dim(config: AnyModelConfig) -> int:
    """Width of the rows of these tables; 0 where there are none."""
    return 0 if config.name == "causal_lm" else config.backbone.dim


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
