"""Data sets: importers, preparation, resumable reading, feature operations.

    from rayrec.samples import Dataset, FeatureProgram, OperationSettings

Names are imported when they are first used. `prepare` itself is `rayrec.prepare`: here it is a sub-package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "PrepareConfig": "rayrec.samples.base.config",
    "Dataset": "rayrec.samples.dataset.dataset",
    "ImpressionsConfig": "rayrec.samples.impressions.config",
    "prepare_impressions": "rayrec.samples.impressions.prepare",
    "ImpressionDataset": "rayrec.samples.impressions.dataset",
    "Importer": "rayrec.samples.importers.importer",
    "RawTable": "rayrec.samples.importers.tables",
    "RawTables": "rayrec.samples.importers.tables",
    "read_table": "rayrec.samples.importers.tables",
    "Operation": "rayrec.samples.operations.operation",
    "OperationConfig": "rayrec.samples.operations.config",
    "OperationSettings": "rayrec.samples.operations.operation",
    "RowContext": "rayrec.samples.operations.operation",
    "FeatureProgram": "rayrec.samples.operations.program",
    "input_type": "rayrec.samples.operations.columns",
    "is_number": "rayrec.samples.operations.columns",
    "map_values": "rayrec.samples.operations.columns",
    "with_values": "rayrec.samples.operations.columns",
    "Arrays": "rayrec.samples.reading.stream",
    "Batching": "rayrec.samples.reading.read_plan",
    "Jagged": "rayrec.samples.reading.stream",
    "ParquetSource": "rayrec.samples.reading.sources",
    "ReadPlan": "rayrec.samples.reading.read_plan",
    "ReadSettings": "rayrec.samples.reading.read_plan",
    "RowBatch": "rayrec.samples.base.batches",
    "SampleStream": "rayrec.samples.reading.stream",
    "read_spec": "rayrec.samples.reading.read_plan",
}
"""Public name -> module that defines it."""

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from rayrec.samples.base.batches import RowBatch as RowBatch
    from rayrec.samples.base.config import PrepareConfig as PrepareConfig
    from rayrec.samples.dataset.dataset import Dataset as Dataset
    from rayrec.samples.importers.importer import Importer as Importer
    from rayrec.samples.importers.tables import RawTable as RawTable
    from rayrec.samples.importers.tables import RawTables as RawTables
    from rayrec.samples.importers.tables import read_table as read_table
    from rayrec.samples.impressions.config import ImpressionsConfig as ImpressionsConfig
    from rayrec.samples.impressions.dataset import ImpressionDataset as ImpressionDataset
    from rayrec.samples.impressions.prepare import prepare_impressions as prepare_impressions
    from rayrec.samples.operations.columns import input_type as input_type
    from rayrec.samples.operations.columns import is_number as is_number
    from rayrec.samples.operations.columns import map_values as map_values
    from rayrec.samples.operations.columns import with_values as with_values
    from rayrec.samples.operations.config import OperationConfig as OperationConfig
    from rayrec.samples.operations.operation import Operation as Operation
    from rayrec.samples.operations.operation import OperationSettings as OperationSettings
    from rayrec.samples.operations.operation import RowContext as RowContext
    from rayrec.samples.operations.program import FeatureProgram as FeatureProgram
    from rayrec.samples.reading.read_plan import Batching as Batching
    from rayrec.samples.reading.read_plan import ReadPlan as ReadPlan
    from rayrec.samples.reading.read_plan import ReadSettings as ReadSettings
    from rayrec.samples.reading.read_plan import read_spec as read_spec
    from rayrec.samples.reading.sources import ParquetSource as ParquetSource
    from rayrec.samples.reading.stream import Arrays as Arrays
    from rayrec.samples.reading.stream import Jagged as Jagged
    from rayrec.samples.reading.stream import SampleStream as SampleStream


def __getattr__(name: str) -> Any:
    # Also keeps the room free of cycles: a plug-in may import names from here while the table of operations,
    # which imports the plug-in, is itself being imported.
    if name not in _HOMES:
        raise AttributeError(f"module 'rayrec.samples' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
