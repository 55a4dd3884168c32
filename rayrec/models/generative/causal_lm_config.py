"""Settings of causal language models as recommenders.

Imports no torch, as `rayrec.models.sequence.config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rayrec.models.generative.config import (
    CodeSoftmaxSettings,
    GeneratingConfig,
    LongHistorySettings,
    summary_settings,
)
from rayrec.models.sequence.config import DEFAULT_MAX_LENGTH
from rayrec.platform.config import Config

if TYPE_CHECKING:
    from torch import nn

    from rayrec.models.attention.choice import Choice
    from rayrec.models.generative.backbone import GenerativeBackbone
    from rayrec.models.sequence.catalog import Catalog


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
    def _heads_divide(self) -> Self:
        if self.dim % (2 * self.num_heads) or self.num_heads % self.num_key_heads:
            raise ValueError(
                "network.dim must be a multiple of twice network.num_heads, and that one of "
                f"network.num_key_heads, got {self.dim}, {self.num_heads} and {self.num_key_heads}"
            )
        return self

    def build(self, num_codes: int, num_positions: int) -> tuple[nn.Module, int]:
        """(The network, the token of its first code)."""
        from rayrec.models.language.networks import Wanted, network_from_settings

        settings = {
            "model_type": "qwen3",
            "hidden_size": self.dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_key_heads,
            "head_dim": self.dim // self.num_heads,
            "intermediate_size": self.feedforward_dim,
            "tie_word_embeddings": True,
        }
        return network_from_settings(settings, num_codes, Wanted(num_positions)), 0


class TransformersNetwork(Config):
    """Any causal language model of the package transformers, with random weights."""

    kind: Literal["transformers"]
    settings: dict[str, Any]
    """Of its configuration, `model_type` among them, as transformers calls them; but for the vocabulary."""

    def build(self, num_codes: int, num_positions: int) -> tuple[nn.Module, int]:
        """As `Qwen3Network.build`."""
        from rayrec.models.language.networks import Wanted, network_from_settings

        return network_from_settings(self.settings, num_codes, Wanted(num_positions)), 0


class SavedNetwork(Config):
    """A causal language model that was saved in the format of transformers."""

    kind: Literal["folder"]
    folder: str
    """With `config.json` and safetensors; never a name of a hub."""

    def build(self, num_codes: int, num_positions: int) -> tuple[nn.Module, int]:
        """As `Qwen3Network.build`.

        Raises:
            InputError: the folder has no such network.
        """
        from rayrec.models.language.networks import Wanted, network_from_folder, num_tokens_of, resize_tokens

        network = network_from_folder(self.folder, Wanted(num_positions))
        first_token = num_tokens_of(network)
        resize_tokens(network, first_token + num_codes)
        return network, first_token


class CausalLmBackboneConfig(Config):
    """The language model that reads and continues a history."""

    network: Annotated[Qwen3Network | TransformersNetwork | SavedNetwork, Field(discriminator="kind")] = (
        Qwen3Network(kind="qwen3")
    )
    max_length: int = Field(DEFAULT_MAX_LENGTH, gt=1)
    """Events a history may have, each of as many tokens as an ID has codes."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Of vectors of tokens and of what each layer adds to them, in training."""


class CausalLmConfig(LongHistorySettings, CodeSoftmaxSettings, GeneratingConfig):
    """A language model whose words are the codes."""

    not_compiled_because: ClassVar[str | None] = (
        "of whose layers, which are those of transformers, it reaches none"
    )

    name: Literal["causal_lm"]
    backbone: CausalLmBackboneConfig = CausalLmBackboneConfig()

    @property
    def window_length(self) -> int:
        return self.backbone.max_length

    def with_absolute_paths(self) -> Self:
        network = self.backbone.network
        if network.kind != "folder":
            return self
        network = network.model_copy(update={"folder": str(Path(network.folder).resolve())})
        return self.model_copy(update={"backbone": self.backbone.model_copy(update={"network": network})})

    def notes(self) -> list[str]:
        from rayrec.models.language.networks import ignored_generation_settings

        if self.backbone.network.kind != "folder":
            return []
        note = ignored_generation_settings(self.backbone.network.folder)
        return [] if note is None else [note]

    def build_backbone(self, catalog: Catalog, choice: Choice) -> GenerativeBackbone[Any]:
        from rayrec.models.generative.causal_lm import CausalLmBackbone

        # Training reads a history of the longest and the item that follows it.
        num_positions = (self.history_length + 1) * len(catalog.level_sizes)
        if self.long_history is not None:
            num_positions += self.long_history.max_chunks * self.long_history.summary_tokens
        network, first_token = self.backbone.network.build(sum(catalog.level_sizes), num_positions)
        summaries = None
        if self.long_history is not None:
            sizes: Any = network.config
            num_heads, width = sizes.num_attention_heads, sizes.hidden_size
            # As wide inside as the usual feed-forward: networks give that number different names.
            dropout = self.backbone.dropout
            summaries = summary_settings(self.long_history, num_heads, 4 * width, dropout)
        return CausalLmBackbone(
            network,
            catalog.learned_codes,
            catalog.level_sizes,
            first_token,
            choice,
            summaries,
            self.build_softmax(catalog),
            self.backbone.dropout,
        )
