"""Serves one shard of every embedding table; all arithmetic is in `EmbeddingShard`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rayrec.actors.spawning import ActorRole, Host
from rayrec.actors.stage_actor import StageActor
from rayrec.actors.transport import Listening, ServerPlace
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.shard.shard import EmbeddingShard, LookupRequest, ShardStats
from rayrec.embeddings.shard.step_buffer import DEFAULT_STEP_BUFFER
from rayrec.embeddings.snapshot.saved_files import SavedFile
from rayrec.embeddings.snapshot.snapshot import load_tables, write_table
from rayrec.embeddings.transport.protocol import Empty, ReplyT, ShardCall
from rayrec.platform.errors import InputError
from rayrec.platform.metrics import MeterClock, StageTimes

SERVER_STAGE = "parameter_server"


@dataclass(frozen=True)
class ServerSpec:
    """What one parameter server has to know."""

    tables: tuple[TableConfig, ...]
    """Of the run."""
    num_shards: int
    shard: int
    num_trainers: int
    """Or groups of them, that call it for their trainers."""
    wait_timeout_s: float
    max_staleness: int = 0
    """Steps that a trainer may be ahead of its updates."""
    memory_limit: int | None = None
    """Most bytes that its tables may take."""
    num_threads: int = 1
    """That one of its calls may use."""
    called_by: Literal["trainer", "group"] = "trainer"
    step_buffer: int = DEFAULT_STEP_BUFFER
    """Bytes for gradients that come before their turn in the sum of a step."""

    @property
    def held(self) -> tuple[TableConfig, ...]:
        """Tables of which it has a part."""
        shard_map = ShardMap(self.num_shards)
        return tuple(one for one in self.tables if shard_map.among(one.servers).buckets(self.shard))


@dataclass(frozen=True)
class ServerStats:
    """Where a server's time went, and what its shard holds."""

    stage: StageTimes
    shard: ShardStats


class ParameterServer(StageActor[MeterClock]):
    """A thin shell; its methods run on several threads, since lookups wait for updates."""

    def __init__(self, role: ActorRole, spec: ServerSpec) -> None:
        # The shard works under one lock, so its busy seconds do not overlap however many threads call it.
        super().__init__(role, MeterClock(lambda: self._shard.stats().busy_s))
        self._spec = spec
        self._shard = EmbeddingShard(
            spec.held,
            spec.shard,
            spec.num_trainers,
            wait_timeout_s=spec.wait_timeout_s,
            max_staleness=spec.max_staleness,
            memory_limit=spec.memory_limit,
            num_threads=spec.num_threads,
            called_by=spec.called_by,
            step_buffer=spec.step_buffer,
        )
        self._listening = Listening(role.actor_name, self.answer)

    def place(self) -> ServerPlace:
        """Where this server runs; from now on it listens for processes of its node, too."""
        return self._listening.place()

    def abort(self, error: BaseException) -> None:
        """Let go the calls that wait for a trainer which has failed, or for who waits for a lost server."""
        self._shard.abort(error)

    def check_sees(self, file: str) -> None:
        """Before a run begins whose snapshots this server is to write.

        Raises:
            InputError: a file of the run's folder is not here.
        """
        if not Path(file).exists():
            raise InputError(
                f"{self!r} on {socket.gethostname()} does not see {file}: servers write their part of every "
                "snapshot, so the run's folder has to be on a disk that all nodes share; choose another with "
                "--run"
            )

    def prefetch(self, request: LookupRequest) -> None:
        self._shard.prefetch(request)

    def answer(self, call: ShardCall[ReplyT], empty: Empty = np.empty) -> ReplyT:
        """Carry out a trainer's call.

        Args:
            empty: makes the large arrays of the reply, called as `np.empty`.
        """
        reply = call.carry_out(self._shard, empty)
        if call.commits(reply):
            self._metrics.after_batch(self._times(), lambda: table_figures(self._shard.stats()))
        return reply

    def stats(self) -> ServerStats:
        times = self._times()
        shard = self._shard.stats()
        self._metrics.publish(times, table_figures(shard))
        return ServerStats(times, shard)

    def _times(self) -> StageTimes:
        return self._clock.times(num_batches=self._shard.committed_step + 1)

    def begin_snapshot(self, step: int) -> None:
        """Begin a snapshot of the tables after a step, which `save` can write while steps go on.

        To be called before anything of the next step is sent.
        """
        self._shard.begin_snapshot(step)

    def save(
        self, folder: str, step: int, since: int | None = None, incarnation: int | None = None
    ) -> list[SavedFile]:
        """Write every table's rows as they were after a step with a snapshot, and release it.

        Args:
            folder: where the files appear.
            since: step of an earlier snapshot: only what steps after it have changed, where that is known.
            incarnation: that the snapshot was begun in: a call that comes only after a return reads nothing.
                None: that of now.

        Raises:
            InputError, OSError: the files cannot be written.
            RuntimeError: no snapshot was begun after that step, or it was given up; steps went on.
        """
        incarnation = self._shard.incarnation if incarnation is None else incarnation
        try:
            shard_map, shard = ShardMap(self._spec.num_shards), self._spec.shard
            files = []
            for table in self._spec.held:
                with closing(self._shard.export_snapshot(table.name, step, since, incarnation)) as parts:
                    files += write_table(Path(folder), table, shard_map, shard, step, parts)
            return files
        finally:
            self._shard.release(step, incarnation)

    def release(self, step: int, incarnation: int | None = None) -> None:
        """Give up the snapshot after this step, if there is one of this incarnation; None: of any."""
        self._shard.release(step, incarnation)

    def load(
        self,
        chain: Sequence[Sequence[str]],
        committed_step: int,
        incarnation: int,
        weights_only: bool = False,
    ) -> None:
        """Take this shard's rows out of the files of snapshots, whatever number of shards wrote them.

        Where the shard has the rows of a later step of the same run, only those are read that have changed
        since, as far as that is known.

        Args:
            chain: files of a snapshot of all rows, then of increments, each since the step before.
            incarnation: the new one, the same for all servers: updates of any other are refused from now on.
            weights_only: the rows are what another run begins with; see `load_tables`.

        Raises:
            ValueError: the server has been in this incarnation, or a later one, already.
        """
        if incarnation <= self._shard.incarnation:
            raise ValueError(
                f"{self!r} is in incarnation {self._shard.incarnation} and cannot begin {incarnation}; "
                "every recovery raises the number"
            )
        if self._spec.tables:
            read = partial(
                load_tables,
                [[Path(file) for file in files] for files in chain],
                self._spec.tables,
                ShardMap(self._spec.num_shards),
                self._spec.shard,
            )
            if not weights_only and self._shard.roll_back(
                committed_step, incarnation, lambda changed: read(only=changed)
            ):
                return
            self._shard.restore(read(weights_only=weights_only))
        self._shard.begin(committed_step, incarnation)


def table_figures(stats: ShardStats) -> dict[str, float]:
    """What a server's tables hold, and what has become of ids, over all of them."""
    counts = stats.counts.values()
    return {
        "table_rows": sum(stats.num_rows.values()),
        "table_bytes": stats.num_bytes,
        "table_disk_bytes": stats.disk_bytes,
        "table_rows_created": sum(table.num_created for table in counts),
        "table_rows_evicted": sum(table.num_evicted for table in counts),
        "table_gradients_not_admitted": sum(table.num_not_admitted for table in counts),
        "table_ids_waiting": sum(table.num_waiting for table in counts),
        "step_buffer_bytes": stats.step_buffer_bytes,
        "step_parts_held_back": stats.num_held_back,
    }


def spawn_parameter_servers(host: Host, spec: ServerSpec, num_cpus: float) -> list[Any]:
    """Start the parameter servers of a run, one for each shard.

    Args:
        spec: of any of them; they differ in `shard` alone.
    """
    return [spawn_parameter_server(host, spec, shard, num_cpus) for shard in range(spec.num_shards)]


def spawn_parameter_server(host: Host, spec: ServerSpec, shard: int, num_cpus: float) -> Any:
    """Start one of them."""
    return host.spawn(
        ParameterServer,
        SERVER_STAGE,
        shard,
        (replace(spec, shard=shard),),
        # Of every trainer, two reads (or heads of steps) and a question for evictions may wait for a
        # step, whose update, or the question for room before it, needs a thread to arrive on; a snapshot is
        # written, and may be released.
        {"num_cpus": num_cpus, "max_concurrency": (4 + spec.max_staleness) * spec.num_trainers + 4},
    )
