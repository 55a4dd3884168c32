"""Types of the columns of text files, by all of their values, and one form for what Parquet has in several.

A type is what fits every value of a column, in whatever batches, files or machines they come: `ColumnTypes`
of parts merge. So types depend neither on the size of a file nor on where its odd value stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.errors import InputError

Cast = Callable[[pa.Array], pa.Array]

_LEADING_ZERO = r"^[+-]?0[0-9]"
"""A number would lose these: article numbers, postal codes."""


def _numbers(kind: pa.DataType) -> Cast:
    def cast(texts: pa.Array) -> pa.Array:
        if pc.any(pc.match_substring_regex(texts, _LEADING_ZERO)).as_py():
            raise pa.ArrowInvalid("a leading zero")
        return pc.cast(texts, kind)

    return cast


def _decimal_commas(texts: pa.Array) -> pa.Array:
    if not pc.all(pc.match_substring_regex(texts, r"^[+-]?(0|[1-9][0-9]*)(,[0-9]+)?$"), min_count=0).as_py():
        raise pa.ArrowInvalid("no decimal comma")
    return pc.cast(pc.replace_substring(texts, ",", "."), pa.float64())


_DECIMAL = r"(^[+-]?0,)|([0-9]{4},)|(,([0-9]{1,2}|[0-9]{4,})$)"


def _has_decimal(texts: pa.Array | pa.ChunkedArray) -> bool:
    return bool(pc.any(pc.match_substring_regex(texts, _DECIMAL), min_count=0).as_py())


_CASTS: dict[str, Cast] = {
    "integer": _numbers(pa.int64()),
    "boolean": lambda texts: pc.cast(texts, pa.bool_()),
    "date": lambda texts: pc.cast(texts, pa.date32()),
    "time": lambda texts: pc.cast(texts, pa.timestamp("s")),
    "float": _numbers(pa.float64()),
    "decimal comma": _decimal_commas,
}
"""In the order in which they are taken; a text fits everything."""
DECIMAL_COMMA = "decimal comma"
FLOATS = ("float", DECIMAL_COMMA)


@dataclass
class ColumnTypes:
    """Which types fit every value of each column that was seen so far."""

    fitting: dict[str, set[str]] = field(default_factory=dict)
    empty: set[str] = field(default_factory=set)
    """Columns without a single value so far."""
    decimals: set[str] = field(default_factory=set)
    """Columns with a comma that is no separator of thousands: where all might be, `1,500` stays a text."""

    def add(self, batch: pa.RecordBatch | pa.Table) -> None:
        """Take a batch of texts into account."""
        for name in batch.schema.names:
            texts = batch.column(name)
            if name not in self.fitting:
                self.fitting[name] = set(_CASTS)
                self.empty.add(name)
            if texts.null_count == len(texts):
                continue
            self.empty.discard(name)
            trimmed = pc.utf8_trim_whitespace(texts.drop_null())
            if DECIMAL_COMMA in self.fitting[name] and _has_decimal(trimmed):
                self.decimals.add(name)
            self.fitting[name] = {kind for kind in self.fitting[name] if _fits(_CASTS[kind], trimmed)}

    def unclear(self) -> list[str]:
        """Columns whose numbers have either decimal commas or separators of thousands; they stay texts."""
        return [
            name
            for name, kinds in self.fitting.items()
            if kinds == {DECIMAL_COMMA} and name not in self.decimals | self.empty
        ]

    def merge(self, other: ColumnTypes) -> None:
        """Take what another one saw into account."""
        for name, kinds in other.fitting.items():
            self.empty -= {name} if name in self.fitting and name not in other.empty else set()
            if name not in self.fitting and name in other.empty:
                self.empty.add(name)
            self.fitting[name] = self.fitting.get(name, set(_CASTS)) & kinds
        self.decimals |= other.decimals

    def kind_of(self, name: str) -> str | None:
        """The type that is taken of a column; None is text, which a column without values is, too."""
        if name in self.empty:
            return None
        kinds = self.fitting[name] - (set() if name in self.decimals else {DECIMAL_COMMA})
        return next((kind for kind in _CASTS if kind in kinds), None)


def typed(column: pa.ChunkedArray, kind: str | None) -> pa.ChunkedArray:
    """Texts as `ColumnTypes.kind_of` says."""
    if kind is None:
        return column
    cast = _CASTS[kind]
    chunks = [cast(pc.utf8_trim_whitespace(chunk)) for chunk in column.chunks]
    return pa.chunked_array(chunks, None if chunks else cast(pa.array([], pa.string())).type)


def _fits(cast: Cast, texts: pa.Array) -> bool:
    try:
        cast(texts)
    except pa.ArrowInvalid:
        return False
    return True


def plain(table: pa.Table) -> pa.Table:
    """A table of Parquet in the forms that the rest of the code knows: no dictionaries, one kind of string.

    Writers differ in these, and a column may change between the parts of one table.
    """
    for at, field_ in enumerate(table.schema):
        kind = _plain_type(field_.type)
        if kind != field_.type:
            column = table.column(at)
            if pa.types.is_dictionary(field_.type):
                # Chunk by chunk: the parts of a table have dictionaries of their own.
                column = pa.chunked_array(
                    [chunk.dictionary_decode() for chunk in column.chunks], field_.type.value_type
                )
            table = table.set_column(at, pa.field(field_.name, kind), _as_type(column, kind))
    return table


def _as_type(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    try:
        return column.cast(kind)
    except pa.ArrowException:  # it has no cast for some nested types
        return pa.chunked_array([pa.array(column.to_pylist(), kind)])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_struct(kind):
        return pa.struct([pa.field(one.name, _plain_type(one.type)) for one in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    return kind


def without_nulls_type(table: pa.Table) -> pa.Table:
    """A table whose columns without any value, also inside of lists and structs, are texts: Arrow cannot do
    much with its type `null`."""
    for at, field_ in enumerate(table.schema):
        kind = _valued(field_.type)
        if kind != field_.type:
            table = table.set_column(at, pa.field(field_.name, kind), _as_type(table.column(at), kind))
    return table


def _valued(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_null(kind):
        return pa.string()
    if types.is_list(kind):
        return pa.list_(_valued(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([pa.field(one.name, _valued(one.type)) for one in kind])
    return kind


def joined(tables: list[pa.Table], files: list[str], name: str) -> pa.Table:
    """The parts of one table, with types that all of them fit.

    Raises:
        InputError: a column holds things of two kinds.
    """
    try:
        return without_nulls_type(pa.concat_tables(tables, promote_options="permissive"))
    except pa.ArrowException as error:
        for column in tables[0].schema.names:
            fields = [table.schema.field(column) for table in tables]
            try:
                pa.unify_schemas([pa.schema([one]) for one in fields], promote_options="permissive")
            except pa.ArrowException:
                kinds = {str(one.type): file for one, file in zip(fields, files, strict=True)}
                found = " and ".join(f"{kind} in {file}" for kind, file in list(kinds.items())[:2])
                raise InputError(
                    f"{name}: column {column} differs in type between the files: {found}; write it as one "
                    "type"
                ) from error
        raise InputError(f"{name}: its files cannot be put together: {error}") from error
