"""From a run's settings to the rows of impressions and their features.

Imports no torch: feature workers make their features with this, and start within a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.types as pt

from rayrec.models.ctr.config import ImpressionModelConfig
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.training_rows import compiled
from rayrec.pipelines.tasks.wanted_columns import WantedColumn
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.features import ImpressionFeatures
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.reading.read_plan import ReadPlan


@dataclass(frozen=True)
class ImpressionRows:
    """The rows of a data set of impressions, and what a model reads of them."""

    config: RunConfig
    dataset: ImpressionDataset
    schema: ImpressionSchema

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    @property
    def wanted_columns(self) -> Mapping[str, WantedColumn]:
        return impression_columns(self.schema)

    def own_rows(self) -> ReadPlan:
        config = self.config
        return ReadPlan.of_files(
            self.dataset.root,
            self.dataset.train_files,
            config.training.batch_size,
            config.seed,
            config.data.window_rows,
        )


def impression_rows(config: RunConfig, model: ImpressionModelConfig) -> ImpressionRows:
    """The rows of impressions that a config trains on.

    Raises:
        InputError: there is no such data set, or it lacks a column.
    """
    dataset = ImpressionDataset.open(config.data.path, checksums=False)
    return ImpressionRows(config, dataset, schema_of(config, dataset))


def schema_of(config: RunConfig, dataset: ImpressionDataset) -> ImpressionSchema:
    """The columns that a model reads: all that the data set has, and numbers that operations make.

    Raises:
        InputError: such a number is a column of the data set already.
    """
    schema, more = dataset.schema, config.data.numbers
    for name in more:
        if name in (*schema.features, *schema.labels):
            raise InputError(
                f"data.numbers: {name!r} is a column of {dataset.root} already, which is read; leave it out "
                "here, or name what an operation makes otherwise"
            )
    return replace(schema, numbers=(*schema.numbers, *dict.fromkeys(more)))


def impression_columns(schema: ImpressionSchema) -> Mapping[str, WantedColumn]:
    """Labels, numbers, ids and lists of ids."""
    label = WantedColumn(_is_label, "0, 1 or null", "the model learns what is to be predicted")
    number = WantedColumn(_is_number, "numbers")
    one, several = WantedColumn(pt.is_int64, "64-bit ids"), WantedColumn(_is_id_list, "lists of 64-bit ids")
    return {
        **dict.fromkeys(schema.labels, label),
        **dict.fromkeys(schema.numbers, number),
        **dict.fromkeys(schema.ids, one),
        **dict.fromkeys(schema.lists, several),
    }


def impression_features_of(
    config: RunConfig, model: ImpressionModelConfig, columns: pa.Schema
) -> ImpressionFeatures:
    """For the process of a feature worker, whenever it starts."""
    schema = impression_rows(config, model).schema
    return impression_features(config, schema, compiled(config, impression_columns(schema), columns))


def impression_features(
    config: RunConfig, schema: ImpressionSchema, program: FeatureProgram
) -> ImpressionFeatures:
    return ImpressionFeatures(
        schema,
        program,
        seed=config.seed,
        num_trainers=config.pipeline.num_trainers,
        is_prepared=config.data.cache is not None,
    )


def _is_label(dtype: pa.DataType) -> bool:
    return pt.is_integer(dtype) or pt.is_floating(dtype) or pt.is_boolean(dtype)


def _is_number(dtype: pa.DataType) -> bool:
    return pt.is_integer(dtype) or pt.is_floating(dtype)


def _is_id_list(dtype: pa.DataType) -> bool:
    return (pt.is_list(dtype) or pt.is_large_list(dtype)) and pt.is_int64(dtype.value_type)
