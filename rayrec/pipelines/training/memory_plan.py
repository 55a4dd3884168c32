"""What every process of a run will hold in memory, said and judged before any is started.

The tables' part is in `rayrec.embeddings.capacity`. Not counted are the activations of dense compute, which
depend on how the framework goes about it.

Axes: I items of the catalog, D numbers of a row.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass
from typing import Any

from rayrec.embeddings.capacity import (
    CACHE_RECORDS,
    HELD_RECORDS,
    ShardPlan,
    batch_bytes,
    cache_bytes,
    caller_bytes,
    count_by_shard,
    device_batch_bytes,
    device_cache_bytes,
    plan_shards,
    spread,
)
from rayrec.embeddings.config import DiskConfig
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.assembly import Assembly
from rayrec.pipelines.tasks.task import GRAPH
from rayrec.platform.cluster import starts_cluster
from rayrec.platform.devices import device_memory_bytes, device_named
from rayrec.platform.errors import InputError
from rayrec.platform.files import check_on_disk
from rayrec.platform.memory import human_size, machine_bytes

logger = logging.getLogger(__name__)

PROCESS_BYTES = 120 * 2**20
"""Python and its libraries in a server, reader or feature worker (private memory, measured on Linux)."""
TRAINER_PROCESS_BYTES = 320 * 2**20
"""The same with PyTorch."""
DRIVER_BYTES = 430 * 2**20
"""The driver, with a small data set."""
RAY_BYTES = 550 * 2**20
"""Ray's own processes on a machine, with the dashboard and without the object store."""


@dataclass(frozen=True)
class DenseSize:
    """A network without its sparse tables, in bytes."""

    num_parameters: int
    weights_bytes: int
    """Of weights that are trained."""
    buffers_bytes: int
    """What a network holds and does not train, such as the codes of items, and frozen weights."""


@dataclass(frozen=True)
class TrainerPlan:
    """What one trainer will hold, in bytes."""

    dense: DenseSize
    batch_bytes: int
    """Rows and gradients of one batch."""
    cache_bytes: int
    """Of its cache of rows, of all tables (`sparse.cache_rows`), what is in host memory."""
    catalog_bytes: int
    """While it ranks: the rows of every item, for models that rank by them."""
    num_trainers: int
    device_cache_bytes: int
    """Of the cache, what is in the memory of its accelerator, where it has one."""
    device_batch_bytes: int
    """There, too: rows and gradients of one batch, and what changing them takes."""
    is_sharded: bool = False
    """Whether each trainer holds a part of the dense weights, its gradients and its optimizer state."""
    has_masters: bool = False
    """Whether the model has its matrices in 16 bits besides."""

    @property
    def gradients_bytes(self) -> int:
        """Where several trainers sum them, also in one flat array; of shards, before they are summed."""
        return self.dense.weights_bytes * (2 if self.num_trainers > 1 else 1)

    @property
    def optimizer_bytes(self) -> int:
        """Two moments of AdamW."""
        return self._held(2 * self.dense.weights_bytes)

    @property
    def weights_bytes(self) -> int:
        """Held; of shards with all that they may be gathered to, as while ranking."""
        gathered = self.dense.weights_bytes if self.is_sharded else 0
        narrow = self.dense.weights_bytes // 2 if self.has_masters else 0
        return self._held(self.dense.weights_bytes) + gathered + narrow

    def _held(self, num_bytes: int) -> int:
        return -(-num_bytes // self.num_trainers) if self.is_sharded else num_bytes

    @property
    def held_bytes(self) -> int:
        return self.weights_bytes + self.dense.buffers_bytes + self.optimizer_bytes + self.cache_bytes

    @property
    def peak_bytes(self) -> int:
        """Most at any time: in a step, while ranking, or while it copies weights and state for a snapshot."""
        step = self.gradients_bytes + self.batch_bytes
        # The catalog arrives in pieces, is put together, and copied to the device.
        ranking = self.gradients_bytes + 3 * self.catalog_bytes
        saving = self.gradients_bytes + self.catalog_bytes + 3 * self.dense.weights_bytes
        return self.held_bytes + max(step, ranking, saving)

    @property
    def device_bytes(self) -> int:
        """Most in the memory of an accelerator, dense activations aside."""
        dense = self.weights_bytes + self.dense.buffers_bytes + self.optimizer_bytes
        step = self.gradients_bytes + self.device_batch_bytes
        return dense + self.device_cache_bytes + max(step, self.gradients_bytes + self.catalog_bytes)


@dataclass(frozen=True)
class MemoryPlan:
    """A run's memory."""

    shards: tuple[ShardPlan, ...]
    trainer: TrainerPlan
    server_limit: int | None
    """`sparse.server_memory`."""
    machine_limit: int | None
    """What this machine has; None where the run joins a cluster, whose machines are not known here."""
    device_limit: int | None
    """What a trainer's accelerator has; None without one, or where it is not on this machine."""
    num_readers: int
    num_workers: int
    worker_holds: dict[str, int]
    """What each feature worker makes and holds: bytes by what it is."""
    num_callers: int
    """Processes that call for a group of trainers; none where each calls for itself."""
    caller_bytes: int
    """What each of them holds of the steps of its trainers."""
    object_store_bytes: int
    disks: dict[str, DiskConfig]
    """By table, where rows go that memory has no room for, if servers are here."""

    @property
    def worker_bytes(self) -> int:
        """Of what each feature worker makes and holds."""
        return sum(self.worker_holds.values())

    @property
    def machine_bytes(self) -> int:
        """All processes at their peaks, where one machine has them all."""
        return (
            sum(shard.peak_bytes for shard in self.shards)
            + self.trainer.num_trainers * (self.trainer.peak_bytes + TRAINER_PROCESS_BYTES)
            + (len(self.shards) + self.num_readers + self.num_workers + self.num_callers) * PROCESS_BYTES
            + self.num_callers * self.caller_bytes
            + self.num_workers * self.worker_bytes
            + DRIVER_BYTES
            + RAY_BYTES
            + self.object_store_bytes
        )

    @property
    def fullest(self) -> ShardPlan | None:
        """The server that needs most; None of a model without tables, which has none."""
        return max(self.shards, key=lambda shard: shard.peak_bytes, default=None)

    def check(self) -> None:
        """Refuse a run that does not fit.

        Raises:
            InputError: a server, a trainer's accelerator, or all processes on this machine, need more than
                there is; names what takes most of it and what to change. Or a table's folder on disk is not
                there, takes no files, or is in memory itself.
        """
        for name, disk in self.disks.items():
            try:
                check_on_disk(disk.folder_path, disk.may_be_memory)
            except InputError as error:
                raise InputError(f"table {name!r}: {error}") from None
        for shard in self.shards:
            for table in shard.tables:
                if table.memory_limit is not None and table.least_bytes > table.memory_limit:
                    raise InputError(
                        f"table {table.table!r} needs {human_size(table.least_bytes)} of memory on parameter "
                        f"server {shard.shard} to find {table.num_rows:,} rows and to move them between disk "
                        f"and memory; its disk.memory is {human_size(table.memory_limit)}: raise it, or use "
                        "more servers (sparse.num_servers)"
                    )
        largest = self.fullest
        if largest is not None and self.server_limit is not None and largest.peak_bytes > self.server_limit:
            raise InputError(
                f"parameter server {largest.shard} (of {len(self.shards)}) would need "
                f"{_described(largest)}; sparse.server_memory allows {human_size(self.server_limit)}: "
                f"{self._remedy_of_a_server(largest)}"
            )
        trainer = self.trainer
        if self.device_limit is not None and trainer.device_bytes > self.device_limit:
            raise InputError(
                f"a trainer would need {human_size(trainer.device_bytes)} of its device, which has "
                f"{human_size(self.device_limit)}: {human_size(trainer.device_cache_bytes)} for its cache of "
                f"rows, {human_size(trainer.device_batch_bytes)} for rows and gradients of a batch, "
                f"{human_size(trainer.dense.weights_bytes)} for dense weights (activations aside); lower "
                "sparse.cache_rows, training.batch_size or model.backbone.dim"
            )
        if self.machine_limit is not None and self.machine_bytes > self.machine_limit:
            servers = ""
            if largest is not None:
                servers = (
                    f"{len(self.shards)} parameter servers need "
                    f"{human_size(sum(shard.peak_bytes for shard in self.shards))} (the largest, number "
                    f"{largest.shard}, {_described(largest)}), "
                )
            workers, remedy = "", ""
            if self.worker_bytes:
                of_workers = human_size(self.num_workers * self.worker_bytes)
                held = " and ".join(self.worker_holds)
                workers = f"{self.num_workers} feature workers {of_workers} for {held} each, "
                if GRAPH in self.worker_holds:
                    remedy = "let feature workers share a saved graph (data.graph), "
            if self.num_callers:
                callers = human_size(self.num_callers * self.caller_bytes)
                workers += f"{self.num_callers} callers of groups {callers} for what trainers read and send, "
            trainers = self.trainer.num_trainers * self.trainer.peak_bytes
            raise InputError(
                f"the run would need {human_size(self.machine_bytes)} and this machine has "
                f"{human_size(self.machine_limit)}: {servers}{self.trainer.num_trainers} trainer(s) "
                f"{human_size(trainers)}, {workers}processes and Ray the rest; {remedy}lower "
                "model.backbone.dim, take an optimizer with less state (sparse.optimizer.kind), or join a "
                "cluster (cluster.address)"
            )

    def log(self) -> None:
        """One line for the run's log."""
        largest, trainer = self.fullest, self.trainer
        parts = []
        if largest is not None and largest.num_rows:
            parts.append(
                f"{len(self.shards)} servers hold up to {human_size(largest.num_bytes)} each "
                f"({human_size(largest.peak_bytes)} while {largest.peak_phase})"
            )
        parts.append(
            f"{trainer.num_trainers} trainers need up to {human_size(trainer.peak_bytes)} each, dense "
            "activations aside"
        )
        if self.num_callers:
            parts.append(
                f"{self.num_callers} callers of groups hold up to {human_size(self.caller_bytes)} each"
            )
        if self.worker_bytes:
            held = [f"{what} of {human_size(num_bytes)}" for what, num_bytes in self.worker_holds.items()]
            share = " (with data.graph, they share the files of one)" if GRAPH in self.worker_holds else ""
            parts.append(f"{self.num_workers} feature workers hold {' and '.join(held)} each{share}")
        if self.machine_limit is not None:
            parts.append(
                f"in all {human_size(self.machine_bytes)} of this machine's {human_size(self.machine_limit)}"
            )
        logger.info("memory: %s", ", ".join(parts))

    def to_json(self) -> dict[str, Any]:
        return {
            "servers": [
                {
                    "shard": shard.shard,
                    "num_bytes": shard.num_bytes,
                    "step_bytes": shard.step_bytes,
                    "peak_bytes": shard.peak_bytes,
                    "peak_phase": shard.peak_phase,
                    "loading_bytes": shard.loading_bytes,
                    "tables": [asdict(table) | {"num_bytes": table.num_bytes} for table in shard.tables],
                }
                for shard in self.shards
            ],
            "trainer": asdict(self.trainer)
            | {
                "gradients_bytes": self.trainer.gradients_bytes,
                "optimizer_bytes": self.trainer.optimizer_bytes,
                "peak_bytes": self.trainer.peak_bytes,
                "device_bytes": self.trainer.device_bytes,
            },
            "num_callers": self.num_callers,
            "caller_bytes": self.caller_bytes,
            "worker_bytes": self.worker_bytes,
            "server_limit": self.server_limit,
            "device_limit": self.device_limit,
            "machine_limit": self.machine_limit,
            "machine_bytes": self.machine_bytes,
        }

    def _remedy_of_a_server(self, largest: ShardPlan) -> str:
        assert self.server_limit is not None
        needed, shared = largest.peak_bytes, largest.shared_bytes
        remedies = [f"raise it to {human_size(1.05 * needed)}"]
        if needed - shared < self.server_limit:
            share = shared / (self.server_limit - (needed - shared))
            remedies.append(f"set sparse.num_servers to {math.ceil(1.1 * len(self.shards) * share)}")
        if any(table.memory_limit is not None for table in largest.tables):
            remedies.append("lower the disk.memory of a table")
        remedies.append("lower model.backbone.dim")
        return ", ".join(remedies) + " or take an optimizer with less state (sparse.optimizer.kind)"


def plan_memory(assembly: Assembly, is_here: bool | None = None) -> MemoryPlan:
    """Plan what the run needs; starts nothing and raises nothing that `assemble` would not have.

    Args:
        is_here: whether its actors will run on this machine; None: as the settings of the cluster say.
    """
    config = assembly.config
    pipeline, sparse = config.pipeline, config.sparse
    tables = [table.name for table in assembly.tables]
    holders = {table.name: table.servers for table in assembly.tables}
    ids = {name: assembly.task.ids_of(name) for name in tables}
    known = {name: found if isinstance(found, int) else len(found) for name, found in ids.items()}
    num_ids = {name: max(known[name], sparse.expected_rows.get(name, 0)) for name in tables}
    ids_by_shard = {
        name: spread(num_ids[name], sparse.num_servers, holders[name])
        if isinstance(found, int) or num_ids[name] > len(found)
        else count_by_shard(found, sparse.num_servers, holders[name])
        for name, found in ids.items()
    }
    # A batch has no more distinct ids than there are.
    batch_ids = {name: min(assembly.task.most_batch_ids(name), num_ids[name]) for name in tables}
    group_size = pipeline.group_size
    max_staleness = pipeline.max_staleness if pipeline.mode == "bounded_stale" else 0
    num_callers = 0 if group_size == 1 or not tables else -(-pipeline.num_trainers // group_size)
    # Servers are called by groups: with the distinct ids of all their trainers.
    caller_ids = {name: min(group_size * most, num_ids[name]) for name, most in batch_ids.items()}
    if is_here is None:
        is_here = starts_cluster(config.cluster)
    # Then the cache is there; everything else of a batch crosses the host's memory, as without one.
    on_device = device_named(config.device).has_own_memory
    return MemoryPlan(
        shards=plan_shards(
            assembly.tables,
            ids_by_shard,
            caller_ids,
            sparse.num_servers,
            num_callers or pipeline.num_trainers,
            max_staleness,
            sparse.step_buffer,
            held_rows=sparse.cache_rows if _records_in_flight(config) else None,
        ),
        trainer=TrainerPlan(
            dense=dense_size(assembly),
            batch_bytes=batch_bytes(
                assembly.tables, batch_ids, pipeline.mode != "sync", _records_in_flight(config)
            ),
            cache_bytes=sum(
                cache_bytes(
                    assembly.tables, num_ids, sparse.cache_rows, pipeline.num_trainers, on_device
                ).values()
            ),
            catalog_bytes=assembly.task.catalog_bytes,
            num_trainers=pipeline.num_trainers,
            device_cache_bytes=sum(device_cache_bytes(assembly.tables, sparse.cache_rows).values())
            if on_device
            else 0,
            device_batch_bytes=device_batch_bytes(assembly.tables, batch_ids, sparse.cache_rows)
            if on_device
            else 0,
            is_sharded=config.training.compute.is_sharded,
            has_masters=config.training.compute.has_masters,
        ),
        server_limit=None if sparse.server_memory is None else int(sparse.server_memory),
        machine_limit=machine_bytes() if is_here else None,
        device_limit=device_memory_bytes(config.device) if is_here else None,
        num_readers=pipeline.num_readers,
        num_workers=pipeline.num_feature_workers,
        num_callers=num_callers,
        caller_bytes=caller_bytes(assembly.tables, batch_ids, group_size, max_staleness)
        if num_callers
        else 0,
        worker_holds=assembly.task.worker_holds,
        object_store_bytes=config.cluster.object_store_bytes if is_here else 0,
        disks={table.name: table.disk for table in assembly.tables if is_here and table.disk is not None},
    )


def dense_size(assembly: Assembly) -> DenseSize:
    """Of the network that the trainers will build."""
    network = assembly.task.network()
    parameters = list(network.parameters())
    held = [*network.buffers(), *(one for one in parameters if not one.requires_grad)]
    return DenseSize(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        weights_bytes=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
        buffers_bytes=sum(each.nbytes for each in held),
    )


def _records_in_flight(config: RunConfig) -> int:
    """How often a trainer has whole records of a batch, whatever cache there is."""
    if config.pipeline.mode != "exact_prefetch":
        return 0
    if config.sparse.cache_rows:
        return CACHE_RECORDS
    return HELD_RECORDS if config.pipeline.num_trainers == 1 else 0


def _described(shard: ShardPlan) -> str:
    tables = ", ".join(
        f"table {table.table!r} {human_size(table.num_bytes)} for {table.num_rows:,} rows"
        for table in shard.tables
    )
    return f"{human_size(shard.peak_bytes)} at its peak ({tables}; the peak is while {shard.peak_phase})"
