"""Work by partitions: all rows of one key in one call.

A partition is a range of `mix64(key)`: partitions are alike in size, and their results one after
the other are in the order of `mix64(key)`, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import pyarrow as pa

from rayrec.platform.arrays import Int64Array
from rayrec.platform.hashing import mix64

PartitionFunction = Callable[[pa.Table], pa.Table]


class RunPartitions(Protocol):
    """Apply `function` to every partition of `table`; yield the results in order of the partitions.

    Rows keep their order within a partition; partitions without rows are left out.
    """

    def __call__(
        self, table: pa.Table, key: str, num_partitions: int, function: PartitionFunction
    ) -> Iterator[pa.Table]: ...


def run_partitions_locally(
    table: pa.Table, key: str, num_partitions: int, function: PartitionFunction
) -> Iterator[pa.Table]:
    """`RunPartitions` in this process, one partition after the other."""
    for part in split_by_key(table, key, num_partitions):
        yield function(part)


def split_by_key(table: pa.Table, key: str, num_partitions: int) -> Iterator[pa.Table]:
    """The partitions that have rows, in order."""
    partition_R = partition_numbers(table[key].to_numpy(), num_partitions)
    order_R = np.argsort(partition_R, kind="stable")
    bounds = np.searchsorted(partition_R[order_R], np.arange(num_partitions + 1))
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if start < stop:
            yield table.take(order_R[start:stop])


def partition_numbers(ids: Int64Array, num_partitions: int) -> Int64Array:
    """The partition of each id."""
    high_bits = mix64(ids) >> np.uint64(32)
    return ((high_bits * np.uint64(num_partitions)) >> np.uint64(32)).astype(np.int64)
