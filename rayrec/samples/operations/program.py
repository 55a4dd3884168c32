"""Feature operations in a row: checked once against the columns there are, then run on every batch.

    rows as read ─► operation 0 ─► operation 1 ─► ... ─► rows with the columns they wrote

An operation sees what those before it wrote. The same program runs on a training batch and, in serving,
on rows that come as Python values (`one`).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.platform.errors import InputError
from rayrec.samples.operations.columns import input_type, normal_type
from rayrec.samples.operations.operation import Operation, OperationSettings, RowContext
from rayrec.samples.operations.python_values import batch_of

VERSION = 1
"""Of what the operations compute; to be raised when one of them gives other results for the same settings."""

ALONE = RowContext(row_keys_B=np.zeros(1, dtype=np.int64), seed=0, step=0)
"""Of a row in serving, which comes from no data set."""


@dataclass(frozen=True)
class _Step:
    label: str
    operation: Operation
    described: list[Any]
    """All that its results depend on: settings, content of files, code of another package."""


class FeatureProgram:
    """Rows with the columns of `input_schema` -> rows with those of `schema`; row-wise.

    Columns that no operation writes pass unchanged, type included.
    """

    def __init__(self, steps: tuple[_Step, ...], input_schema: pa.Schema, schema: pa.Schema) -> None:
        """Use `compile`."""
        self._steps = steps
        self.input_schema = input_schema
        self.schema = schema

    @classmethod
    def compile(cls, configs: Sequence[OperationSettings], schema: pa.Schema) -> FeatureProgram:
        """Bind operations, in this order, to the columns of `schema`.

        Raises:
            InputError: an operation reads what is not there or what it cannot take, or replaces a
                column that it does not read.
        """
        schema = schema.remove_metadata()
        for name, times in Counter(schema.names).items():
            if times > 1:
                raise InputError(f"{times} columns have the name {name!r}; every column needs its own")
        written = schema
        steps = []
        for index, config in enumerate(configs):
            label = f"data.features.{index} ({config.op})"
            try:
                operation = config.bind(_normal(written))
                described = [config.model_dump(mode="json"), config.content(), *_foreign_code(config)]
                for name in operation.outputs:
                    if name in written.names and name not in operation.inputs:
                        raise InputError(
                            f"there is a column {name!r} already, which this operation does not read; "
                            "give the output another name"
                        )
            except InputError as error:
                raise InputError(f"{label}: {error}") from error
            written = _with(written, operation.outputs)
            steps.append(_Step(label, operation, described))
        return cls(tuple(steps), schema, written)

    def narrowed(self, wanted: Sequence[str]) -> FeatureProgram:
        """The program that gives these columns, in this order, and reads and computes nothing else.

        Raises:
            InputError: there is no such column.
        """
        needed, used = self._live(wanted)
        steps = tuple(step for step, is_used in zip(self._steps, used, strict=True) if is_used)
        return FeatureProgram(
            steps,
            pa.schema([field for field in self.input_schema if field.name in needed]),
            pa.schema([self.schema.field(name) for name in wanted]),
        )

    def unused(self, wanted: Iterable[str]) -> tuple[str, ...]:
        """The operations that nothing of this depends on, each as `data.features.2 (log)`."""
        _, used = self._live(wanted)
        return tuple(step.label for step, is_used in zip(self._steps, used, strict=True) if not is_used)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations, bound to their columns, in order."""
        return tuple(step.operation for step in self._steps)

    @property
    def is_empty(self) -> bool:
        """Whether there is no operation: columns pass unchanged."""
        return not self._steps

    @property
    def fingerprint(self) -> str:
        """Hex sha256 of all that the result of a row depends on, but for the row and the run's seed."""
        described = {
            "version": VERSION,
            "input": [[field.name, str(field.type)] for field in self.input_schema],
            "output": [[field.name, str(field.type)] for field in self.schema],
            "operations": [step.described for step in self._steps],
        }
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def __call__(self, rows: pa.RecordBatch, context: RowContext) -> pa.RecordBatch:
        """Run the operations on a batch.

        Args:
            rows: at least the columns of `input_schema`; others are left out.
            context: of these rows.

        Raises:
            InputError: a row has values that an operation refuses, or a function of the user's fails.
        """
        assert len(context.row_keys_B) == rows.num_rows, "one key per row"
        columns = {field.name: rows.column(field.name) for field in self.input_schema}
        normal: dict[str, pa.Array] = {}
        for step in self._steps:
            for name in step.operation.inputs:
                if name not in normal:
                    normal[name] = _in_normal_form(columns[name])
            try:
                made = step.operation(normal, context)
            except InputError as error:
                raise InputError(f"{step.label}: {error}") from error
            normal |= made
            columns |= made
        return pa.RecordBatch.from_arrays([columns[name] for name in self.schema.names], schema=self.schema)

    def one(self, row: Mapping[str, Any], context: RowContext = ALONE) -> dict[str, Any]:
        """One row by field name to the columns of `schema`; a field it lacks is null.

        Raises:
            InputError: a field is unknown, missing though it may not be null, or of the wrong type.
        """
        (result,) = self(batch_of(self.input_schema, [row]), context).to_pylist()
        return result

    def _live(self, wanted: Iterable[str]) -> tuple[set[str], list[bool]]:
        """(columns to read, which steps to run): from the last step to the first."""
        needed = set()
        for name in wanted:
            input_type(self.schema, name, lambda _: True, "")
            needed.add(name)
        used = []
        for step in reversed(self._steps):
            outputs = set(step.operation.outputs)
            used.append(bool(outputs & needed))
            if used[-1]:
                needed = (needed - outputs) | set(step.operation.inputs)
        return needed, used[::-1]


def _foreign_code(config: OperationSettings) -> list[str]:
    """Hex sha256 of the module of another package's operation.

    Our own operations have `VERSION`. Others need no number: prepared rows are computed again when the code
    changes.
    """
    module = sys.modules[type(config).__module__]
    if module.__name__.startswith("rayrec."):
        return []
    if (file := getattr(module, "__file__", None)) is None:
        raise InputError(
            f"the code of {type(config).__name__} is not in a file, so its changes cannot be noticed; define "
            "it in a module"
        )
    return [hashlib.sha256(Path(file).read_bytes()).hexdigest()]


def _normal(schema: pa.Schema) -> pa.Schema:
    return pa.schema([(field.name, normal_type(field.type)) for field in schema])


def _in_normal_form(column: pa.Array) -> pa.Array:
    dtype = normal_type(column.type)
    return column if column.type == dtype else column.cast(dtype)


def _with(schema: pa.Schema, outputs: Mapping[str, pa.DataType]) -> pa.Schema:
    for name, dtype in outputs.items():
        field = pa.field(name, dtype)
        index = schema.get_field_index(name)
        schema = schema.append(field) if index < 0 else schema.set(index, field)
    return schema
