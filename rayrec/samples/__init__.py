"""Data sets: importers, preparation, resumable reading, feature operations.

    from rayrec.samples import Dataset, FeatureProgram, OperationSettings

Names are imported when they are first used. `prepare` itself is `rayrec.prepare`: here it is a sub-package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec.platform.lazy_names import lazy_names

if TYPE_CHECKING:
    from rayrec.platform.ray_tasks import run_tasks_on_ray as run_tasks_on_ray
    from rayrec.samples.base.batches import RowBatch as RowBatch
    from rayrec.samples.base.config import PrepareConfig as PrepareConfig
    from rayrec.samples.dataset.dataset import Dataset as Dataset
    from rayrec.samples.importers.importer import Importer as Importer
    from rayrec.samples.importers.tables import RawTable as RawTable
    from rayrec.samples.importers.tables import RawTables as RawTables
    from rayrec.samples.importers.tables import read_table as read_table
    from rayrec.samples.impressions.config import ImpressionsConfig as ImpressionsConfig
    from rayrec.samples.impressions.dataset import ImpressionDataset as ImpressionDataset
    from rayrec.samples.impressions.distributed import (
        prepare_impressions_distributed as prepare_impressions_distributed,
    )
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
    from rayrec.samples.prepare.distributed.run import prepare_distributed as prepare_distributed
    from rayrec.samples.prepare.ray_jobs import run_partitions_on_ray as run_partitions_on_ray
    from rayrec.samples.reading.read_plan import Batching as Batching
    from rayrec.samples.reading.read_plan import ReadPlan as ReadPlan
    from rayrec.samples.reading.read_plan import ReadSettings as ReadSettings
    from rayrec.samples.reading.read_plan import read_spec as read_spec
    from rayrec.samples.reading.sources import ParquetSource as ParquetSource
    from rayrec.samples.reading.stream import Arrays as Arrays
    from rayrec.samples.reading.stream import Jagged as Jagged
    from rayrec.samples.reading.stream import SampleStream as SampleStream

# Lazy also so that a plug-in may import names from here while the table that imports it is being imported.
__all__, __getattr__ = lazy_names(__name__, __file__)
