"""What prompts may say of the items of a catalog: titles, categories, codes.

Axes: I items, L code levels that are learned.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from numpy.typing import NDArray

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.prompt_template import CATEGORY, CODES, TITLE


@dataclass(frozen=True)
class ItemFacts:
    """Items by position."""

    ids_I: Int64Array
    codes_IL: NDArray[np.integer] | None = None
    code_sizes: tuple[int, ...] = ()
    semantic_ids_version: str | None = None
    texts: dict[str, pa.Array] = field(default_factory=dict)
    """By slot (`title`, `category`): [I] strings, null where nothing is known."""

    def known(self, slots: tuple[str, ...]) -> BoolArray:
        """[I] whether an item has what these slots say."""
        known_I = np.ones(len(self.ids_I), dtype=np.bool_)
        for name in slots:
            if name in self.texts:
                known_I &= self.texts[name].is_valid().to_numpy(zero_copy_only=False)
        return known_I

    @property
    def digest(self) -> str:
        """Hex sha256 of all that prompts may say."""
        digest = hashlib.sha256(self.ids_I.tobytes())
        digest.update(repr((self.code_sizes, self.semantic_ids_version)).encode())
        for slot, column in sorted(self.texts.items()):
            digest.update(slot.encode())
            for text in column.to_pylist():
                digest.update(b"\0" if text is None else b"\1" + text.encode() + b"\0")
        return digest.hexdigest()

    def check(self, slots: tuple[str, ...], source: str) -> None:
        """Refuse slots of which nothing is known.

        Raises:
            InputError: no item has what a slot says.
        """
        for name in slots:
            if name == CODES and self.codes_IL is None:
                raise InputError(
                    f"{source}: a template has the slot {{{CODES}}}, and there are no semantic IDs; name them"
                )
            if name in (TITLE, CATEGORY):
                column = self.texts.get(name)
                if column is None or column.null_count == len(column):
                    raise InputError(
                        f"{source}: a template has the slot {{{name}}}, and no item has a {name}; prepare "
                        "the data with one, or name its column"
                    )


def text_column(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Strings of a column of texts, or of lists of them, which are joined by commas; empty ones are null."""
    column = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if pt.is_list(column.type) or pt.is_large_list(column.type):
        column = pc.binary_join(column.cast(pa.list_(pa.string())), ", ")
    column = pc.utf8_trim_whitespace(column.cast(pa.string()))
    return pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
