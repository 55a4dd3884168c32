"""`prompt`: rows become prompts of a language model, as tokens.

Axes: R rows, E events of all histories, N tokens of all rows, P places that stand for rows of a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.types as pt
from pydantic import Field, model_validator

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.prompt_template import PromptTemplate
from rayrec.samples.base.jagged import offsets_from_lengths
from rayrec.samples.operations.columns import input_type, is_list, list_column, list_type, lists_of
from rayrec.samples.operations.operation import OperationSettings, RowContext
from rayrec.samples.operations.prompt_items import ItemFile, facts_of_file
from rayrec.samples.text.item_facts import ItemFacts
from rayrec.samples.text.prompts import Prompted, PromptWriter
from rayrec.samples.text.tokens import INFO_FILE, TextTokenizer


class PromptConfig(OperationSettings):
    """The tokens of a prompt and of what is to be said, for every row.

    A history longer than `max_events`, or than there is room for in `max_tokens`, is cut from its oldest item
    on; items that are not known are left out of it. A row has null where the item that it is about is null or
    unknown. Where a template has a slot of an item and no column names it, that is the newest event of the
    history, and the history is what comes before.
    """

    op: Literal["prompt"] = "prompt"
    prompt: str
    """Text with slots: {title}, {category}, {codes}, {table:item}, {table:user}, and one history: {history},
    {history.codes}, {history.titles} or {history.categories}."""
    completion: str = ""
    """What is to be said: text with the slots {title}, {category} and {codes}."""
    event: str = "{codes}"
    """What {history} says of an event: text with slots of an item."""
    items: ItemFile
    semantic_ids: str | None = None
    """Folder that `rayrec tokenize` wrote, for the slot {codes}."""
    tokenizer: str
    """Folder with the tokenizer of a base model, which gets a token for each code; or one that has them."""
    user: str = "user_id"
    """Column of users' ids, for {table:user}."""
    history: str = "item_ids"
    """Column of lists of items' ids, oldest first."""
    item: str | None = None
    """Column of the item that a row is about; None: the newest event of the history."""
    max_events: int = Field(50, ge=1)
    max_tokens: int = Field(1024, ge=1)
    title_characters: int | None = Field(200, ge=1)
    """Of a title or category that is written out; None: all."""
    output: str = "prompt"
    """Beginning of the names of the columns to write: `prompt_token_ids`, `prompt_is_completion`, and for
    each table, `prompt_user_ids` and `prompt_user_places`: the rows, and which tokens stand for them."""

    @model_validator(mode="after")
    def _templates_can_be_read(self) -> Self:
        _ = self.template
        return self

    @cached_property
    def template(self) -> PromptTemplate:
        return PromptTemplate.parse(self.prompt, self.completion, self.event)

    def bind(self, schema: pa.Schema) -> Prompts:
        template = self.template
        inputs = []
        if "table:user" in template.slots:
            dtype = input_type(schema, self.user, pt.is_integer, "integers")
            if is_list(dtype):
                raise InputError(f"column {self.user!r} holds lists; expected one user in each row")
            inputs.append(self.user)
        if template.event is not None or (template.of_item and self.item is None):
            list_type(schema, self.history, pt.is_integer, " of integers")
            inputs.append(self.history)
        if template.of_item and self.item is not None:
            dtype = input_type(schema, self.item, pt.is_integer, "integers")
            if is_list(dtype):
                raise InputError(f"column {self.item!r} holds lists; expected one item in each row")
            inputs.append(self.item)
        if not inputs:
            raise InputError("the templates have no slots: every row would say the same; name some")
        integers = pa.list_(pa.int64())
        outputs = {f"{self.output}_token_ids": integers, f"{self.output}_is_completion": pa.list_(pa.bool_())}
        for table in template.tables:
            outputs |= {f"{self.output}_{table}_{what}": integers for what in ("ids", "places")}
        return Prompts(self, tuple(dict.fromkeys(inputs)), outputs, self._writer())

    def with_absolute_paths(self) -> Self:
        paths: dict[str, Any] = {
            "items": self.items.model_copy(update={"path": str(Path(self.items.path).resolve())}),
            "tokenizer": str(Path(self.tokenizer).resolve()),
        }
        if self.semantic_ids is not None:
            paths["semantic_ids"] = str(Path(self.semantic_ids).resolve())
        return self.model_copy(update=paths)

    def content(self) -> str:
        """Of the tokenizer and of all that is said of items."""
        writer = self._writer()
        return f"{writer.tokenizer.version} {writer.items.digest}"

    def _writer(self) -> PromptWriter:
        items = facts_of_file(self.items, self.semantic_ids, self.template.slots)
        tokenizer = tokenizer_with_codes(self.tokenizer, items)
        return PromptWriter(self.template, tokenizer, items, self.max_tokens, self.title_characters)


def tokenizer_with_codes(folder: str | Path, items: ItemFacts) -> TextTokenizer:
    """The tokenizer of a folder, with tokens for the codes of items, if there are any.

    Raises:
        InputError: there is none, it splits a code, or it has the codes of other semantic IDs.
    """
    if not (Path(folder) / INFO_FILE).is_file():
        return TextTokenizer.extended(folder, items.code_sizes, 1, items.semantic_ids_version)
    tokenizer = TextTokenizer.load(folder)
    info = tokenizer.info
    found, wanted = info.semantic_ids_version, items.semantic_ids_version
    if items.code_sizes and (info.code_sizes != items.code_sizes or found not in (None, wanted)):
        raise InputError(
            f"{folder}: the tokenizer has tokens for codes of sizes {list(info.code_sizes)} (semantic IDs "
            f"{found or 'not named'}), and the semantic IDs {wanted} have {list(items.code_sizes)}; make it "
            "of these, or give the tokenizer of the base itself"
        )
    return tokenizer


@dataclass
class Prompts:
    """See `PromptConfig`. It travels between processes; each encodes texts for itself."""

    config: PromptConfig
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    _held: PromptWriter | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "_index"}
        return kept | {"_held": None}

    @property
    def _writer(self) -> PromptWriter:
        if self._held is None:
            self._held = self.config._writer()
        return self._held

    @cached_property
    def _index(self) -> pd.Index:
        return pd.Index(self._writer.items.ids_I)

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        """Write the prompts of a batch.

        Raises:
            InputError: a row has too many tokens even without a history.
        """
        config, writer = self.config, self._writer
        num_rows = len(context.row_keys_B)
        is_there_R = np.ones(num_rows, dtype=np.bool_)
        users_R = np.zeros(num_rows, dtype=np.int64)
        if config.user in self.inputs:
            users = columns[config.user]
            is_there_R &= users.is_valid().to_numpy(zero_copy_only=False)
            users_R = users.fill_null(0).to_numpy(zero_copy_only=False).view(np.int64)
        history_E, offsets_R1 = np.zeros(0, dtype=np.int64), np.zeros(num_rows + 1, dtype=np.int64)
        if config.history in self.inputs:
            history_E, offsets_R1 = self._history(columns[config.history])
        items_R = np.zeros(num_rows, dtype=np.int64)
        if writer.template.of_item:
            if config.item is not None:
                items = columns[config.item]
                known = items.is_valid().to_numpy(zero_copy_only=False)
                items_R = self._positions(items.fill_null(0).to_numpy(zero_copy_only=False))
                items_R[~known] = -1
            else:
                history_E, offsets_R1, items_R = _newest_apart(history_E, offsets_R1)
            is_there_R &= items_R >= 0
        lengths_R = np.diff(offsets_R1)
        chosen_R = np.minimum(lengths_R, config.max_events)
        chosen_R[~is_there_R] = 0
        age_E = np.repeat(offsets_R1[1:], lengths_R) - np.arange(len(history_E))
        history_E = history_E[age_E <= np.repeat(chosen_R, lengths_R)]
        made = writer(users_R, history_E, offsets_from_lengths(chosen_R), np.maximum(items_R, 0))
        if made.is_too_long_R[is_there_R].any():
            raise InputError(
                f"row {int(np.flatnonzero(made.is_too_long_R & is_there_R)[0]) + 1} of a batch has more than "
                f"{config.max_tokens} tokens without any history; raise max_tokens, or lower title_characters"
            )
        return self._columns(made, is_there_R)

    def _history(self, column: pa.Array) -> tuple[Int64Array, Int64Array]:
        """Positions of the items that are known, oldest first."""
        lists = lists_of(column)
        valid_E = lists.values.is_valid().to_numpy(zero_copy_only=False)
        found_E = self._positions(lists.values.fill_null(0).to_numpy(zero_copy_only=False))
        known_E = valid_E & (found_E >= 0)
        return found_E[known_E], offsets_from_lengths(known_E)[lists.offsets_R1]

    def _positions(self, ids: np.ndarray) -> Int64Array:
        found: Int64Array = self._index.get_indexer(pd.Index(ids)).astype(np.int64)
        return found

    def _columns(self, made: Prompted, is_there_R: BoolArray) -> dict[str, pa.Array]:
        begin, offsets_R1 = self.config.output, made.offsets_R1
        row_N = np.repeat(np.arange(len(is_there_R)), np.diff(offsets_R1))

        def lists(values_N: np.ndarray, chosen_N: np.ndarray) -> pa.Array:
            row_P = row_N[chosen_N]
            is_kept_P = is_there_R[row_P]
            ends_R1 = offsets_from_lengths(np.bincount(row_P[is_kept_P], minlength=len(is_there_R)))
            valid_R = None if is_there_R.all() else is_there_R
            return list_column(pa.array(values_N[is_kept_P]), ends_R1.astype(np.int32), valid_R)

        everything = np.arange(len(row_N))
        found = {
            f"{begin}_token_ids": lists(made.tokens_N, everything),
            f"{begin}_is_completion": lists(made.is_answer_N, everything),
        }
        for table, places_P in made.places_P.items():
            within_P = places_P - offsets_R1[row_N[places_P]]
            found[f"{begin}_{table}_ids"] = lists(made.ids_P[table], places_P)
            found[f"{begin}_{table}_places"] = lists(within_P, places_P)
        return found


def _newest_apart(history_E: Int64Array, offsets_R1: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(Histories without their newest events, their offsets, those events; -1 of an empty history)."""
    lengths_R = np.diff(offsets_R1)
    has_any_R = lengths_R > 0
    newest_R = np.full(len(lengths_R), -1, dtype=np.int64)
    newest_R[has_any_R] = history_E[offsets_R1[1:][has_any_R] - 1]
    is_older_E = np.ones(len(history_E), dtype=np.bool_)
    is_older_E[offsets_R1[1:][has_any_R] - 1] = False
    return history_E[is_older_E], offsets_from_lengths(lengths_R - has_any_R), newest_R
