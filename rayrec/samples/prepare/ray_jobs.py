"""The partitions of `partitions` as a Ray Data job."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray

from rayrec.samples.prepare.partitions import PartitionFunction, split_by_key

_NUMBER = "__partition"


@dataclass(frozen=True)
class _OnePartition:
    """The function, with the number of the partition carried past it."""

    function: PartitionFunction

    def __call__(self, block: pa.Table) -> pa.Table:
        number = block[_NUMBER][0]
        result = self.function(block.drop_columns([_NUMBER]))
        return result.append_column(_NUMBER, pa.repeat(number, len(result)))


def run_partitions_on_ray(
    table: pa.Table, key: str, num_partitions: int, function: PartitionFunction
) -> Iterator[pa.Table]:
    """`RunPartitions` on the cluster; needs `ray.init` and a function that pickles."""
    # One by one into the object store: beside the log, the driver then holds one partition, not all.
    parts: list[Any] = [  # Ray declares two types of references
        ray.put(part.append_column(_NUMBER, pa.repeat(pa.scalar(number, pa.int32()), len(part))))
        for number, part in enumerate(split_by_key(table, key, num_partitions))
    ]
    dataset = ray.data.from_arrow_refs(parts)
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it announces every plan
    dataset.context.execution_options.preserve_order = True
    dataset.context.enable_progress_bars = False  # the caller shows its own
    # One block is one partition: batch_size=None hands over whole blocks.
    results = dataset.map_batches(_OnePartition(function), batch_format="pyarrow", batch_size=None)
    pending: list[pa.Table] = []
    for block in results.iter_batches(batch_format="pyarrow", batch_size=None, prefetch_batches=1):
        # A large result may come back as several blocks.
        if pending and block[_NUMBER][0] != pending[0][_NUMBER][0]:
            yield pa.concat_tables(pending).drop_columns([_NUMBER])
            pending = []
        pending.append(block)
    if pending:
        yield pa.concat_tables(pending).drop_columns([_NUMBER])
