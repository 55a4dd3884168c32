"""The feature operation `standardize`: numbers minus their mean, divided by their standard deviation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from rayrec.samples import OperationSettings, RowContext, input_type, is_number, map_values, with_values


class StandardizeConfig(OperationSettings):
    """(x - mean) / std as float32; a null stays null."""

    op: Literal["standardize"] = "standardize"
    input: str
    """A column of numbers, or of lists of numbers."""
    output: str
    mean: float
    std: float = Field(gt=0)

    def bind(self, schema: pa.Schema) -> "Standardize":
        dtype = input_type(schema, self.input, is_number, "numbers")
        return Standardize(
            inputs=(self.input,),
            outputs={self.output: with_values(dtype, pa.float32())},
            mean=self.mean,
            std=self.std,
        )


@dataclass(frozen=True)
class Standardize:
    inputs: tuple[str, ...]
    outputs: Mapping[str, pa.DataType]
    mean: float
    std: float

    def __call__(self, columns: Mapping[str, pa.Array], context: RowContext) -> dict[str, pa.Array]:
        (output,) = self.outputs
        return {output: map_values(columns[self.inputs[0]], self._standardized)}

    def _standardized(self, values: pa.Array) -> pa.Array:
        centered = pc.subtract(values.cast(pa.float64()), self.mean)
        return pc.divide(centered, self.std).cast(pa.float32())
