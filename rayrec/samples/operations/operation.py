"""What a feature operation is: settings that are bound to the columns they find, then called per batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.config import Config


@dataclass(frozen=True)
class RowContext:
    """What the rows of a batch are, beyond their columns. Axis: B rows.

    Random numbers are derived from seed and row key alone, so that a row gets the same ones in any batch, at
    any step and in the cache of prepared rows.
    """

    row_keys_B: Int64Array
    seed: int
    """Of the run."""
    step: int


class Operation(Protocol):
    """Columns in, columns out; row-wise: what a row gets does not depend on the rows around it."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns it reads."""

    @property
    def outputs(self) -> Mapping[str, pa.DataType]:
        """Columns it writes, with their types in the form of `columns.normal_type`."""

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        """Compute the output columns of a batch.

        Args:
            columns: at least `inputs`, of one length, in the form of `columns.normal_type`.

        Raises:
            InputError: values that no row may have, such as parallel lists of different lengths.
        """


class OperationSettings(Config, ABC):
    """Base of every operation's settings; `op` says which operation it is."""

    op: str

    @abstractmethod
    def bind(self, schema: pa.Schema) -> Operation:
        """The operation on these columns, which are in the form of `columns.normal_type`.

        Raises:
            InputError: a column is missing or has a type that the operation does not take.
        """

    def with_absolute_paths(self) -> Self:
        """The same settings, to be understood from any working directory."""
        return self

    def content(self) -> str:
        """What results depend on beyond these settings: a file's content, a function's source."""
        return ""
