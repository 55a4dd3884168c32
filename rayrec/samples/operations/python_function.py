"""`python`: a function of the user's, on whole columns."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field, field_validator

from rayrec.platform.errors import InputError
from rayrec.platform.functions import FunctionName, import_function
from rayrec.samples.operations.columns import input_type
from rayrec.samples.operations.operation import OperationSettings, RowContext

_VALUES = {
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
}
TYPES = {**_VALUES, **{f"list<{name}>": pa.list_(dtype) for name, dtype in _VALUES.items()}}
"""What a function may give, by the name in a config."""


class PythonConfig(OperationSettings):
    """A function that takes Arrow arrays, one per input, and gives one per output.

    It gives an array, or a mapping from the names of the outputs to arrays. Nulls come as Arrow's and
    may be given. It must be row-wise and repeatable: what a row gets may depend on nothing but the row.
    Integers come as int64 and lists as `list_`, whatever the file has. It is called once with no rows
    before a run, to check what it gives.
    """

    op: Literal["python"] = "python"
    function: FunctionName
    """`package.module:name`."""
    inputs: tuple[str, ...] = Field(min_length=1)
    outputs: dict[str, str] = Field(min_length=1)
    """Column -> its type, such as `int64`, `float32`, `string` or `list<int64>`."""

    @field_validator("outputs")
    @classmethod
    def _types_are_known(cls, value: dict[str, str]) -> dict[str, str]:
        for name, dtype in value.items():
            if dtype not in TYPES:
                raise ValueError(f"output {name!r} has no type {dtype!r}; types are {', '.join(TYPES)}")
        return value

    def bind(self, schema: pa.Schema) -> PythonFunction:
        types = [input_type(schema, name, lambda _: True, "") for name in self.inputs]
        operation = PythonFunction(
            inputs=self.inputs,
            outputs={name: TYPES[dtype] for name, dtype in self.outputs.items()},
            name=self.function,
            function=import_function("the function", self.function),
        )
        operation.checked([pa.array([], dtype) for dtype in types])
        return operation

    def content(self) -> str:
        """sha256 of the source of the function's module, with what else it may call there."""
        module = inspect.getmodule(import_function("the function", self.function))
        try:
            source = inspect.getsource(module)  # type: ignore[arg-type]
        except (OSError, TypeError) as error:
            raise InputError(
                f"the source of {self.function} cannot be read, so its changes would not be noticed; define "
                "it in a module that is a file"
            ) from error
        return hashlib.sha256(source.encode()).hexdigest()


@dataclass(frozen=True)
class PythonFunction:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    name: str
    function: Callable[..., Any]

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        return self.checked([columns[name] for name in self.inputs])

    def checked(self, given: list[pa.Array]) -> dict[str, pa.Array]:
        """What the function gives for these columns.

        Raises:
            InputError: it fails, or gives something else than the outputs.
        """
        try:
            made = self.function(*given)
        except Exception as error:
            raise InputError(
                f"the function {self.name} failed on {len(given[0])} rows: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, Mapping):
            made = dict.fromkeys(self.outputs, made) if len(self.outputs) == 1 else {}
        if set(made) != set(self.outputs):
            raise InputError(
                f"the function {self.name} must give a mapping with arrays for {', '.join(self.outputs)}"
                + (f", and gave {', '.join(map(str, made))}" if made else "")
            )
        for name, dtype in self.outputs.items():
            array = made[name]
            if not isinstance(array, pa.Array):
                raise InputError(
                    f"the function {self.name} must give a pyarrow.Array for {name!r}, and gave "
                    f"{type(array).__name__}"
                )
            if array.type != dtype or len(array) != len(given[0]):
                raise InputError(
                    f"the function {self.name} must give {len(given[0])} values of {dtype} for {name!r}, and "
                    f"gave {len(array)} of {array.type}"
                )
        return {name: made[name] for name in self.outputs}
