"""An embedded model as it serves: network, tokenizer, chat template, grammars, and the engine over them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rayrec.models.decoding.trie import CodeTrie
from rayrec.models.generation.item_grammar import ItemTokens
from rayrec.models.generation.text_grammar import GrammarCompiler
from rayrec.models.language.networks import Wanted, network_from_folder
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.inference.export import export_run
from rayrec.platform.devices import get_device
from rayrec.platform.errors import InputError
from rayrec.samples.text.chat import ChatTemplate, read_json, special_tokens
from rayrec.samples.text.tokens import INFO_FILE, TextTokenizer
from rayrec.serve.language.config import EmbeddedModel
from rayrec.serve.language.engine import EmbeddedEngine


@dataclass(frozen=True)
class LanguageModelHere:
    """What answers for one embedded model."""

    settings: EmbeddedModel
    network: Any
    text: TextTokenizer
    template: ChatTemplate | None
    """None: the folder has none, and conversations are refused."""
    engine: EmbeddedEngine
    _lock: threading.Lock

    @property
    def name(self) -> str:
        return self.settings.name

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Made when the first grammar is asked for: it takes a second, and most models need none.

        Raises:
            InputError: the package is missing.
        """
        from transformers import PreTrainedTokenizerFast

        with self._lock:
            if (made := self.__dict__.get("_made")) is None:
                ends = self.text.info.ends
                wrapped = PreTrainedTokenizerFast(
                    tokenizer_object=self.text.tokenizer, eos_token=self.text.tokenizer.id_to_token(ends[0])
                )
                made = GrammarCompiler(wrapped, ends, self.engine.num_tokens, self.settings.grammar)
                self.__dict__["_made"] = made
            return made

    @cached_property
    def items(self) -> ItemTokens:
        """Tokens of items.

        Raises:
            InputError: the settings name no semantic IDs.
        """
        info, source = self.text.info, self.settings.semantic_ids
        if source is None or not info.code_sizes:
            raise InputError(
                f"{self.name} knows no items: its settings name no semantic_ids, or its tokenizer no codes"
            )
        registry = SemanticIdRegistry.load(source)
        if info.semantic_ids_version not in (None, registry.version):
            raise InputError(f"{self.name}: {source} has other semantic IDs than the tokenizer was made for")
        first, starts = info.first_new, []
        for size in info.code_sizes:
            starts.append(first)
            first += size
        unsaid = frozenset({info.pad, *info.ends, *range(first, self.engine.num_tokens)})
        trie = CodeTrie.from_codes(registry.codes_IL, may_share=True)
        return ItemTokens(trie, starts, info.code_sizes, self.engine.num_tokens, unsaid)

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int]) -> list[float]:
        """The mean of the last hidden states of a text's tokens."""
        base = self.network.base_model
        implementation = self.network.config._attn_implementation
        assert implementation == "sdpa", "which reads plain rows as well as pages"
        ids_1T = torch.tensor([tokens], device=self.network.device)
        hidden_1TD = base(input_ids=ids_1T, use_cache=False).last_hidden_state
        mean: list[float] = hidden_1TD[0].float().mean(dim=0).cpu().tolist()
        return mean


def exported(settings: EmbeddedModel, folder: Path) -> EmbeddedModel:
    """The settings with a folder; a run's model is exported there.

    Raises:
        InputError: it is no language run, or cannot be exported.
    """
    if settings.run is None:
        return settings
    export_run(settings.run, folder)
    return settings.model_copy(update={"folder": str(folder), "run": None})


def load_model(settings: EmbeddedModel) -> LanguageModelHere:
    """Load a model; its engine is not started.

    Raises:
        InputError: the folder lacks something, or does not fit the settings.
    """
    assert settings.folder is not None, "runs are exported"
    folder = Path(settings.folder)
    device = get_device(settings.device).torch
    text = TextTokenizer.load(folder) if (folder / INFO_FILE).is_file() else TextTokenizer.extended(folder)
    wanted = Wanted(settings.context_length, f"models.{settings.name}", packed=False)
    network: Any = network_from_folder(folder, wanted, getattr(torch, settings.dtype)).to(device).eval()
    network.set_attn_implementation("sdpa")
    if network.get_input_embeddings().num_embeddings < text.info.first_new:
        raise InputError(
            f"{folder}: the network knows {network.get_input_embeddings().num_embeddings:,} tokens, and its "
            f"tokenizer has {text.info.first_new:,}; give the tokenizer that it was trained with"
        )
    template = ChatTemplate.of_folder(folder, settings.date) if _has_template(folder) else None
    silent = _silent_tokens(folder, text)
    engine = EmbeddedEngine(network, text.tokenizer, text.info.ends, silent, settings)
    return LanguageModelHere(settings, network, text, template, engine, threading.Lock())


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    return read_json(folder / "tokenizer_config.json").get("chat_template") is not None


def _silent_tokens(folder: Path, text: TextTokenizer) -> list[int]:
    """Special tokens, but for the codes of items, which are something to say."""
    named = special_tokens(read_json(folder / "tokenizer_config.json")).values()
    added = text.tokenizer.get_added_tokens_decoder()
    special = [token for token, value in added.items() if value.special and token < text.info.first_new]
    return [*special, *(token for name in named if (token := text.tokenizer.token_to_id(name)) is not None)]
