"""What rows have to have when the run's operations are done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pyarrow as pa

from rayrec.platform.errors import InputError
from rayrec.samples.operations.program import FeatureProgram


class WantedColumn(NamedTuple):
    """A column that the model reads."""

    is_right: Callable[[pa.DataType], bool]
    expected: str
    """The types that are, in words."""
    reason: str | None = None
    """Why it is wanted, where not every run does: a sentence."""


def check_columns(program: FeatureProgram, wanted: Mapping[str, WantedColumn]) -> None:
    """Refuse operations that do not make what the model needs.

    Raises:
        InputError: operations do not make a column that the model needs, or make another type of it.
    """
    for name, (is_right, expected, reason) in wanted.items():
        found = program.schema.field(name).type if name in program.schema.names else None
        if found is None or not is_right(found):
            raise InputError(
                f"data.features: rows need a column {name!r} of {expected}"
                + (f", since {reason}, and " if reason else ", and ")
                + (f"it is {found}" if found is not None else f"there are {', '.join(program.schema.names)}")
                + "; add an operation that makes it"
            )
