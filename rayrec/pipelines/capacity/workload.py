"""What a step of a run reads, looks up and computes, counted on its own batches, and scaled.

Nothing is started: a few batches go through the run's own reader and features in this process. Between the
sizes that were counted and those of a larger run, distinct ids grow by Heaps' law, U(n) = K n^beta, which is
fitted to parts of the batches.

Axes: M distinct ids of one table.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from rayrec.embeddings.base.row_codec import Wire, narrow_bytes
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.shard.step_buffer import DEFAULT_STEP_BUFFER
from rayrec.embeddings.table.row_operations import RowOperations
from rayrec.models.program.program import ProgramPlacement
from rayrec.pipelines.tasks.assembly import Assembly
from rayrec.pipelines.training.memory_plan import dense_size
from rayrec.platform.arrays import Int64Array
from rayrec.platform.devices import get_device
from rayrec.platform.errors import InputError
from rayrec.samples.reading.reader import SampleReader

Mode = Literal["sync", "exact_prefetch", "bounded_stale"]

PARTS = (0.25, 0.5, 1.0)
"""Of a batch, whose distinct ids are counted for Heaps' law."""
DEFAULT_BATCHES = 6


@dataclass(frozen=True)
class TableWork:
    """One table's part of a step."""

    table: str
    dim: int
    row_bytes: float
    """Weights, optimizer state and stamps of a row on a server."""
    rows: float
    """That training may create."""
    ids: float
    """Distinct ids of one trainer's share of a batch."""
    early: float
    """Share of these that the batch before does not touch, so that `exact_prefetch` reads them ahead."""
    heaps: float
    """Exponent of Heaps' law: distinct ids grow with occurrences to this power."""
    servers: tuple[int, ...] | None = None
    """Numbers of the servers that hold the table, ascending; None: all of them."""
    narrow_id_bytes: float = 4
    """Of an id that travels with rows in a narrow format; hashes do not fit in 4."""

    @property
    def moved_bytes(self) -> float:
        """Rows and gradients of the ids, with the ids, as servers and trainers work with them."""
        return 2 * self.vector_bytes + 16 * self.ids

    def wire_bytes(self, wire: Wire) -> float:
        """The same as they travel between nodes."""
        if wire == "float32":
            return self.moved_bytes
        return self.ids * 2 * (narrow_bytes(wire, 1, self.dim) + self.narrow_id_bytes)

    @property
    def vector_bytes(self) -> float:
        """Of the rows that one trainer's share looks up, or of their gradients."""
        return 4.0 * self.dim * self.ids

    def row_bytes_at(self, dim: int) -> float:
        """Of a row of another width, with the same optimizer and weights as wide as now.

        What is not proportional to the width (a row-wise state, stamps) is taken to be that of now.
        """
        return self.row_bytes + 4.0 * (dim - self.dim)

    def resized(self, grown: float, dim: int, many: float, trainers_now: int, trainers: int) -> TableWork:
        """The same table in a larger run.

        Args:
            grown: times as many rows in a share.
            many: times as many rows in the table.
            trainers_now, trainers: whose shares make up the batch before, which decides what is late.
        """
        late = (1 - self.early) * late_share(trainers, self.heaps)
        if now := late_share(trainers_now, self.heaps):
            late /= now
        rows = self.rows * many
        return replace(
            self,
            dim=dim,
            row_bytes=self.row_bytes_at(dim),
            rows=rows,
            ids=min(self.ids * grown**self.heaps, rows),
            early=1 - min(late, 1.0),
        )


class ServerLoad(NamedTuple):
    """What servers with the same tables get of all callers in a step, each of them."""

    num_servers: int
    ids: float
    num_bytes: float
    wire_bytes: float
    """Of these, what travels where servers are on other nodes."""


@dataclass(frozen=True)
class Scale:
    """Sizes of a larger run; None leaves what the config has."""

    trainers: int | None = None
    servers: int | None = None
    readers: int | None = None
    feature_workers: int | None = None
    batch: float | None = None
    """Rows of the global batch; None: as many for each trainer as now."""
    dense_parameters: float | None = None
    sparse_bytes: float | None = None
    """Of all tables, weights and optimizer state and stamps."""
    table_rows: float | None = None
    dim: int | None = None
    mode: Mode | None = None
    group_size: int | None = None
    """Trainers that share one caller of the servers; see `Workload.group_size`."""


@dataclass(frozen=True)
class Workload:
    """One step of a run, and who takes part in it."""

    rows: float
    """Of the global batch."""
    tokens: float
    """Occurrences of ids in one trainer's share."""
    flops: float
    """Forward and backward of one trainer's share."""
    dense_parameters: float
    tables: tuple[TableWork, ...]
    num_trainers: int = 1
    num_servers: int = 1
    num_readers: int = 1
    num_feature_workers: int = 1
    mode: Mode = "exact_prefetch"
    is_near: bool = True
    """Whether trainers reach servers through shared memory."""
    is_sharded: bool = False
    """Whether trainers split the dense weights (FSDP2)."""
    weight_bytes: int = 4
    """Of a number that the trainers sum over."""
    group_size: int = 1
    """Trainers of a node that share one caller of the servers, which deduplicates and sums for them, and one
    submission by the driver; 1: every trainer for itself."""
    wire: Wire = "float32"
    """How rows and gradients travel."""
    step_buffer: int = DEFAULT_STEP_BUFFER
    """Bytes that a server may keep of gradients whose turn in the sum of a step has not come."""

    @property
    def ids(self) -> float:
        """Distinct ids of one trainer's share, over all tables."""
        return sum(table.ids for table in self.tables)

    @property
    def vector_bytes(self) -> float:
        return sum(table.vector_bytes for table in self.tables)

    @property
    def num_callers(self) -> int:
        """Of the servers."""
        return -(-self.num_trainers // self.group_size)

    @property
    def caller_tables(self) -> tuple[TableWork, ...]:
        """With the distinct ids of one caller's trainers together, by Heaps' law."""
        return self._read_by(self.group_size)

    @property
    def step_tables(self) -> tuple[TableWork, ...]:
        """With the distinct ids of all trainers together, in the same way."""
        return self._read_by(self.num_trainers)

    def _read_by(self, num_trainers: int) -> tuple[TableWork, ...]:
        if num_trainers == 1:
            return self.tables
        return tuple(
            replace(table, ids=min(table.ids * num_trainers**table.heaps, table.rows))
            for table in self.tables
        )

    @property
    def caller_ids(self) -> float:
        return sum(table.ids for table in self.caller_tables)

    @property
    def moved_bytes(self) -> float:
        """Rows and gradients of one caller in a step, with their ids."""
        return sum(table.moved_bytes for table in self.caller_tables)

    @property
    def wire_bytes(self) -> float:
        """The same as they travel to other nodes."""
        return sum(table.wire_bytes(self.wire) for table in self.caller_tables)

    @property
    def server_loads(self) -> list[ServerLoad]:
        """Of all servers: one kind where every table is on all of them, more where some are placed apart."""
        tables = self.caller_tables

        def held_by(number: int) -> tuple[int, ...]:
            return tuple(at for at, table in enumerate(tables) if number in self.holders(table))

        named = {number for table in tables for number in table.servers or () if number < self.num_servers}
        kinds = Counter(map(held_by, sorted(named)))
        if len(named) < self.num_servers:  # all others are alike
            other = next(number for number in range(self.num_servers) if number not in named)
            kinds[held_by(other)] += self.num_servers - len(named)
        shares = [self.num_callers / max(len(self.holders(table)), 1) for table in tables]
        return [
            ServerLoad(
                count,
                sum(shares[at] * tables[at].ids for at in held),
                sum(shares[at] * tables[at].moved_bytes for at in held),
                sum(shares[at] * tables[at].wire_bytes(self.wire) for at in held),
            )
            for held, count in kinds.items()
        ]

    def holders(self, table: TableWork) -> Sequence[int]:
        """Numbers of the servers that hold a table."""
        if table.servers is None or self.num_servers == 1:
            return range(self.num_servers)
        return table.servers

    @property
    def gathered_bytes(self) -> float:
        """Vectors of every occurrence of an id in one trainer's share."""
        mean_dim = sum(table.dim * table.ids for table in self.tables) / max(self.ids, 1.0)
        return 4.0 * mean_dim * self.tokens

    @property
    def early(self) -> float:
        """Share of the ids that can be read ahead in the run's mode."""
        if self.mode == "sync" or not self.ids:
            return 0.0
        if self.mode == "bounded_stale":
            return 1.0
        return sum(table.early * table.ids for table in self.tables) / self.ids

    @property
    def sparse_bytes(self) -> float:
        return sum(table.rows * table.row_bytes for table in self.tables)

    @property
    def rows_per_trainer(self) -> float:
        return self.rows / self.num_trainers

    def among_nodes(self) -> Workload:
        """The same with servers on other nodes than their trainers, as it is on most of a cluster."""
        return replace(self, is_near=False)

    def scaled(self, scale: Scale) -> Workload:
        """The same kind of step at other sizes.

        Distinct ids follow the rows of a share by Heaps' law, FLOPs follow rows and dense parameters, all
        tables grow by the same factor to `sparse_bytes` or `table_rows`.
        """
        trainers = scale.trainers or self.num_trainers
        rows = scale.batch or self.rows * trainers / self.num_trainers
        grown = (rows / trainers) / self.rows_per_trainer
        dense = scale.dense_parameters or self.dense_parameters
        many = self._table_growth(scale)
        dims = [scale.dim or table.dim for table in self.tables]
        tables = tuple(
            table.resized(grown, dim, many, self.num_trainers, trainers)
            for table, dim in zip(self.tables, dims, strict=True)
        )
        return replace(
            self,
            rows=rows,
            tokens=self.tokens * grown,
            flops=self.flops * grown * dense / self.dense_parameters,
            dense_parameters=dense,
            tables=tables,
            num_trainers=trainers,
            num_servers=scale.servers or self.num_servers,
            num_readers=scale.readers or self.num_readers,
            num_feature_workers=scale.feature_workers or self.num_feature_workers,
            mode=scale.mode or self.mode,
            group_size=scale.group_size or self.group_size,
        )

    def _table_growth(self, scale: Scale) -> float:
        """Times as many rows of every table."""
        if scale.table_rows is not None:
            return scale.table_rows / max(sum(table.rows for table in self.tables), 1.0)
        if scale.sparse_bytes is None:
            return 1.0
        now = sum(table.rows * table.row_bytes_at(scale.dim or table.dim) for table in self.tables)
        return scale.sparse_bytes / max(now, 1.0)


def late_share(num_trainers: int, heaps: float) -> float:
    """Share of a share's distinct ids that the global batch before it has, too.

    By Heaps' law U(n) = K n^beta a share of n occurrences and a batch of T n have U(n) + U(T n) - U(T n + n)
    ids in common, so it is 1 + T^beta - (1 + T)^beta of U(n).
    """
    return 1 + num_trainers**heaps - (1 + num_trainers) ** heaps


def heaps_exponent(num_distinct: Sequence[float], parts: Sequence[float] = PARTS) -> float:
    """Slope of log distinct ids over log occurrences, by least squares; between 0 and 1.

    Args:
        num_distinct: in each part of the occurrences.
    """
    if min(num_distinct) < 1:
        return 1.0
    slope = np.polyfit(np.log(parts), np.log(num_distinct), 1)[0]
    return float(min(max(slope, 0.0), 1.0))


def workload_of(assembly: Assembly, num_batches: int = DEFAULT_BATCHES) -> Workload:
    """Count the work of a run's first batches; reads them, and starts nothing.

    Raises:
        InputError: the data has no batch to count, or a followed folder has no rows yet.
    """
    config = assembly.config
    pipeline = config.pipeline
    shares = _batches(assembly, num_batches)
    if not shares:
        raise InputError(f"{config.data.path}: there is no batch of training rows to count the work of")
    tables = tuple(_table_work(table, assembly, shares) for table in assembly.tables)
    rows = statistics.fmean(sum(_num_rows(share) for share in batch) for batch in shares)
    tokens = statistics.fmean(_num_tokens(share) for batch in shares for share in batch)
    return Workload(
        rows=rows,
        tokens=tokens,
        flops=_flops(assembly, shares[0]),
        dense_parameters=dense_size(assembly).num_parameters,
        tables=tables,
        num_trainers=pipeline.num_trainers,
        group_size=pipeline.group_size,
        num_servers=config.num_servers,
        num_readers=pipeline.num_readers,
        num_feature_workers=pipeline.num_feature_workers,
        mode=pipeline.mode,
        is_near=config.sparse.transport != "ray",
        wire=config.sparse.wire,
        step_buffer=config.sparse.step_buffer,
        is_sharded=config.training.compute.is_sharded,
        weight_bytes=4,
    )


def _batches(assembly: Assembly, num_batches: int) -> list[Sequence[Any]]:
    """Shares of the first batches, one per trainer."""
    found = []
    with SampleReader(assembly.plan.spec) as reader:
        for step in range(num_batches):
            batch = assembly.plan.batch(step)
            if batch is None:
                break
            found.append(assembly.features.training(step, reader.read_batch(batch)))
    return found


def _table_work(config: TableConfig, assembly: Assembly, shares: Sequence[Sequence[Any]]) -> TableWork:
    operations = RowOperations(config)
    found = assembly.task.ids_of(config.name)
    num_ids = found if isinstance(found, int) else len(found)
    num_ids = max(num_ids, assembly.config.sparse.expected_rows.get(config.name, 0))
    counted = [
        share.lookups[config.name] for batch in shares for share in batch if config.name in share.lookups
    ]
    if not counted:
        words = operations.num_words
        return TableWork(config.name, config.dim, 4.0 * words, num_ids, 0.0, 1.0, 1.0, config.servers)
    early = [
        1 - np.isin(lookup.ids_M, before[0].lookups[config.name].updated_ids).mean()
        for before, batch in itertools.pairwise(shares)
        for lookup in (share.lookups[config.name] for share in batch)
        if len(lookup.ids_M)
    ]
    parts = [statistics.fmean(_distinct(lookup.inverse, part) for lookup in counted) for part in PARTS]
    return TableWork(
        table=config.name,
        dim=config.dim,
        row_bytes=4.0 * operations.num_words,
        rows=float(num_ids),
        ids=statistics.fmean(len(lookup.ids_M) for lookup in counted),
        early=float(statistics.fmean(early)) if early else 1.0,
        heaps=heaps_exponent(parts),
        servers=config.servers,
        narrow_id_bytes=4 if all(_fit_in_4_bytes(lookup.ids_M) for lookup in counted) else 8,
    )


def _fit_in_4_bytes(ids_M: Int64Array) -> bool:
    return not len(ids_M) or bool(ids_M.min() >= 0 and ids_M.max() < 2**32)


def _distinct(inverse: np.ndarray, part: float) -> int:
    """Distinct ids in the first part of the occurrences."""
    flat = inverse.reshape(-1)
    return len(np.unique(flat[: math.ceil(part * len(flat))]))


def _num_rows(share: Any) -> int:
    return int(share.num_rows)


def _num_tokens(share: Any) -> float:
    """Occurrences of ids, over all tables."""
    return float(sum(lookup.inverse.size for lookup in share.lookups.values()))


def _flops(assembly: Assembly, shares: Sequence[Any]) -> float:
    """Of the first trainer's share; the network is built here."""
    config = assembly.config
    program = assembly.task.program(assembly.dense_optimizer()).build(
        ProgramPlacement(get_device(config.device).torch, config.seed, config.training.compute)
    )
    return program.flops(shares[0], {table.name: table.dim for table in assembly.tables})
