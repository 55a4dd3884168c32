"""Which rows are read, as settings say it.

`[["price", ">", 3], ["country", "in", ["de", "fr"]]]`: rows for which all of it holds. A list of such lists:
rows for which one of these holds (as in `pyarrow.parquet.read_table`). A condition on a column that is null
in a row does not hold for it. Times and dates are ISO texts, or what YAML makes of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from functools import reduce
from operator import and_, or_
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.types as pt
from pyarrow import compute as pc

from rayrec.platform.errors import InputError
from rayrec.samples.reading.sources import columns_of, found_columns, is_of_folder

_ISO_DATE = re.compile(r"\d{4}-\d{2}(-\d{2})?")

Condition = tuple[str, str, Any]
"""Column, operator, value (of `in` and `not in`: values)."""
Filters = tuple[tuple[Condition, ...], ...]
"""All conditions of one of these hold for a row that is read; empty: every row is."""


def as_filters(given: Sequence[Any], source: str) -> Filters:
    """Conditions, or lists of conditions, as they stand in settings.

    Raises:
        InputError: it is neither.
    """
    alternatives = [given] if given and all(_is_condition(one) for one in given) else given
    for alternative in alternatives:
        if isinstance(alternative, str) or not all(_is_condition(one) for one in alternative):
            raise InputError(
                f'{source}: expected filters like [["price", ">", 3]], found {alternative!r}; '
                "a condition has a column, an operator and a value"
            )
    return tuple(
        tuple((column, operator, _plain(value)) for column, operator, value in alternative)
        for alternative in alternatives
    )


def _plain(value: Any) -> Any:
    """As JSON has it, since filters are part of what a run's order of rows is told by."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.isoformat() if isinstance(value, date) else value  # a datetime is a date


def _is_condition(given: Any) -> bool:
    return not isinstance(given, str) and len(given) == 3 and all(isinstance(part, str) for part in given[:2])


def filter_columns(filters: Filters) -> tuple[str, ...]:
    """Columns that the filters read, each once."""
    return tuple(dict.fromkeys(column for conditions in filters for column, _, _ in conditions))


def filter_expression(filters: Filters, schema: pa.Schema, source: str) -> pc.Expression:
    """The filters as one Arrow expression.

    Args:
        filters: not empty.
        source: where the rows are; messages begin with it.

    Raises:
        InputError: there is no such column, or two of one name, or its type does not go with operator or
            value.
    """
    return reduce(
        or_,
        [reduce(and_, [_bound(condition, schema, source) for condition in one]) for one in filters],
    )


def _bound(condition: Condition, schema: pa.Schema, source: str) -> pc.Expression:
    column, operator, value = condition
    if column not in schema.names:
        raise InputError(
            f"{source}: a filter asks for column {column!r}, which is not there; "
            f"{found_columns(schema, column)}"
        )
    field = columns_of(schema, [column], source).field(0)
    kind = field.type
    if is_of_folder(field) and not _compares_texts(operator, value):
        raise InputError(
            f"{source}: the filter {column} {operator} {value!r} is of a key of folders, which is a text: "
            "'10' would come before '2'; name the values with 'in' and texts, or write the column into the "
            "files (dates such as '2024-01-31' can be compared)"
        )
    try:
        expression = _condition(pc.field(column), operator, value, kind)
        ds.dataset(pa.schema([field]).empty_table()).to_table(filter=expression)  # binds it to the types
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{source}: the filter {column} {operator} {value!r} cannot be applied to a column of type "
            f"{kind} ({error})"
        ) from error
    return expression


def _compares_texts(operator: str, value: Any) -> bool:
    """Whether it means the same of texts as of what they say."""
    if operator in ("==", "!="):
        return isinstance(value, str)
    if operator in ("in", "not in"):
        return not isinstance(value, str) and all(isinstance(one, str) for one in value)
    return isinstance(value, str) and _ISO_DATE.match(value) is not None


def _condition(column: pc.Expression, operator: str, value: Any, kind: pa.DataType) -> pc.Expression:
    if operator in ("in", "not in"):
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            raise ValueError("'in' takes a list of values")
        values = pa.array(list(value)).cast(kind) if pt.is_temporal(kind) else pa.array(list(value), kind)
        found = column.isin(values)
        return found if operator == "in" else ~found & column.is_valid()
    scalar = pa.scalar(value)
    if pt.is_temporal(kind):
        scalar = scalar.cast(kind)
    match operator:
        case "==":
            return column == scalar
        case "!=":
            return column != scalar
        case "<":
            return column < scalar
        case "<=":
            return column <= scalar
        case ">":
            return column > scalar
        case ">=":
            return column >= scalar
    raise ValueError("operators are ==, !=, <, <=, >, >=, in, not in")
