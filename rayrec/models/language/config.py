"""Settings of language models.

Imports no torch: feature workers read these settings, and start within a second. `build` imports the network.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rayrec.models.base.config import Attention, ModelConfig
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
    from rayrec.models.language.held_answers import HeldForm
    from rayrec.models.language.language_model import LanguageModel
    from rayrec.models.language.networks import Wanted
    from rayrec.models.language.vocabulary import Vocabulary
    from rayrec.models.program.program import ProgramSpec


class SettingsBase(Config):
    """A network with random weights."""

    kind: Literal["settings"]
    settings: dict[str, Any]
    """Of its configuration, `model_type` among them, as the package transformers calls them; but for the
    vocabulary."""

    def network(self, vocabulary: Vocabulary, wanted: Wanted) -> nn.Module:
        from rayrec.models.language.networks import network_from_settings

        return network_from_settings(self.settings, vocabulary.num_tokens, wanted)


class FolderBase(Config):
    """A network that was saved in the format of transformers."""

    kind: Literal["folder"]
    folder: str
    """With `config.json` and safetensors; never a name of a hub. Code in it is never run."""

    def network(self, vocabulary: Vocabulary, wanted: Wanted) -> nn.Module:
        from rayrec.models.language.networks import network_from_folder

        return network_from_folder(self.folder, wanted)


class GgufBase(Config):
    """A network in llama.cpp's format, whose quantized weights become float32."""

    kind: Literal["gguf"]
    file: str

    def network(self, vocabulary: Vocabulary, wanted: Wanted) -> nn.Module:
        from rayrec.models.language.networks import network_from_gguf

        return network_from_gguf(self.file, wanted)


class LoraConfig(Config):
    """Low-rank adapters beside a frozen base."""

    rank: int = Field(16, gt=0)
    scale: float = Field(2.0, gt=0.0)
    """Factor of what adapters add: alpha / rank of the paper."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of linear layers, such as `q_proj`; without, all but the matrix of outputs."""


class TunedBase(Config):
    """What models have in common that are a base model, tuned."""

    base: Annotated[SettingsBase | FolderBase | GgufBase, Field(discriminator="kind")]
    lora: LoraConfig | None = None
    """None: all weights are trained."""
    tokenizer: str | None = None
    """Folder with the tokenizer, where that is not the base's own."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Of vectors of tokens and of what each layer adds to them, in training, adapters or not."""

    def with_absolute_paths(self) -> Self:
        base = self.base
        if base.kind == "folder":
            base = base.model_copy(update={"folder": str(Path(base.folder).resolve())})
        elif base.kind == "gguf":
            base = base.model_copy(update={"file": str(Path(base.file).resolve())})
        tokenizer = None if self.tokenizer is None else str(Path(self.tokenizer).resolve())
        return self.model_copy(update={"base": base, "tokenizer": tokenizer})

    def network(self, vocabulary: Vocabulary, wanted: Wanted) -> nn.Module:
        """The base, with rows for the tokens that were added, and adapters if there are any.

        Raises:
            InputError: the base is missing, does not fit, or knows fewer tokens than its tokenizer.
        """
        from rayrec.models.language.adapters import add_adapters
        from rayrec.models.language.networks import num_tokens_of, resize_tokens

        network = self.base.network(vocabulary, wanted)
        if (known := num_tokens_of(network)) < vocabulary.first_new:
            raise InputError(
                f"model.base: the network knows {known:,} tokens, and its tokenizer has "
                f"{vocabulary.first_new:,}; give the tokenizer that it was trained with"
            )
        # A base may know more than its tokenizer has, to make a round number.
        if known < vocabulary.num_tokens:
            resize_tokens(network, vocabulary.num_tokens)
        if self.lora is not None:
            lora = self.lora
            add_adapters(network, lora.rank, lora.scale, lora.targets, vocabulary.new_tokens)
        return network


class LanguageModelConfig(TunedBase, ModelConfig):
    """A language model that is tuned on texts."""

    kind: ClassVar[Literal["language"]] = "language"
    not_compiled_because: ClassVar[str | None] = (
        "of whose layers, which are those of transformers, it reaches none"
    )

    name: Literal["language_model"]
    max_length: int = Field(1024, gt=1)
    """Tokens that a row may have."""
    rows: Literal["packed", "padded"] = "packed"
    """Packed rows have no padding, and attend by our attention. For a network that it does not fit, which is
    refused by its name, padded rows go through the code of transformers alone."""
    attention: Attention = "auto"
    """Of packed rows."""
    template: Literal["chat", "plain"] = "plain"
    """How what is asked and answered becomes a text: by the chat template of the tokenizer's folder, or one
    after the other. An instruction-tuned base knows its template."""
    learn: Literal["all", "last"] = "all"
    """Which turns of an assistant are learned."""
    long_rows: Literal["refuse", "cut", "drop"] = "refuse"
    """What becomes of a record of more tokens than `max_length`: an error, the beginning of what is asked cut
    off, or nothing, which is counted."""

    @model_validator(mode="after")
    def _dropout_has_keys(self) -> Self:
        if self.dropout and self.rows == "padded":
            raise ValueError(
                "model.dropout: padded rows go through the code of transformers alone, which has no keyed "
                "dropout; set model.rows to packed, or dropout to 0"
            )
        return self

    def build(self, vocabulary: Vocabulary) -> LanguageModel:
        """The network with its initial weights; random ones from torch's default generator.

        Raises:
            InputError: as `network`.
        """
        from rayrec.models.attention.choice import choice_named
        from rayrec.models.language.language_model import LanguageModel
        from rayrec.models.language.networks import Wanted

        packed = self.rows == "packed"
        otherwise = "choose another model_type, or set model.rows to padded"
        network = self.network(vocabulary, Wanted(self.max_length, "model.base", packed, otherwise))
        choice = choice_named(self.attention)
        return LanguageModel(network, packed=packed, choice=choice, dropout=self.dropout)

    def program(
        self, vocabulary: Vocabulary, optimizer: DenseOptimizerSettings, form: HeldForm | None = None
    ) -> ProgramSpec:
        """What trainers build.

        Args:
            form: that answers are held to.
        """
        from rayrec.models.language.text_program import TextProgramSpec

        return TextProgramSpec(self, vocabulary, optimizer, form)
