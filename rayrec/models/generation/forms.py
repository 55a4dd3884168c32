"""Forms that answers of a language model are held to, as settings name them.

Imports no torch: settings are read by processes that start within a second. `grammars_of` imports the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rayrec.platform.config import Config

if TYPE_CHECKING:
    from rayrec.models.generation.token_grammar import TokenGrammar


class CopyForm(Config):
    """The text that is asked about, divided into segments with labels; see `copy_grammar`."""

    kind: Literal["copy"]
    labels: tuple[str, ...] = Field(min_length=1)
    """What a segment can be; with one for what is none of the others, since all of the text is labeled."""


class SchemaForm(Config):
    """JSON that satisfies a schema."""

    kind: Literal["json_schema"]
    json_schema: dict[str, Any]


class RegexForm(Config):
    """A text that an expression matches as a whole."""

    kind: Literal["regex"]
    regex: str


AnswerForm = Annotated[CopyForm | SchemaForm | RegexForm, Field(discriminator="kind")]

Begin = Callable[[str], "TokenGrammar"]
"""The grammar of an answer to a text."""


def grammars_of(
    form: CopyForm | SchemaForm | RegexForm, folder: str, ends: Sequence[int], size: int
) -> Begin:
    """What begins a grammar for each answer.

    Args:
        folder: of the tokenizer.
        ends: tokens that end texts.
        size: of the model's vocabulary, which may be larger than the tokenizer's.

    Raises:
        InputError: a package is missing, or the form cannot be held with this tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    from rayrec.models.generation.copy_grammar import CopyLabels
    from rayrec.models.generation.text_grammar import GrammarCompiler

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "tokenizer.json"))
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    compiler = GrammarCompiler(tokenizer, ends, size)
    if isinstance(form, CopyForm):
        return CopyLabels(form.labels, compiler.tokens).begin
    written = form.json_schema if isinstance(form, SchemaForm) else form.regex
    compiled = compiler.compile(form.kind, written)
    return lambda text: compiled.begin()
