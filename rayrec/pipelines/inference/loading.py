"""What a trained run needs in one process, without Ray: its inputs, a snapshot, its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import safetensors
import safetensors.numpy

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.snapshot.snapshot import load_tables
from rayrec.embeddings.transport.client import LocalTransport, ShardClient
from rayrec.pipelines.runs.method import Method
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import WEIGHTS, RunState, Snapshot, SnapshotName, read_snapshot
from rayrec.pipelines.tasks.assembly import Assembly, assemble, open_earlier_task
from rayrec.platform.arrays import Int64Array


class RowReader(Protocol):
    """Tables that are read."""

    def read(self, ids: Mapping[str, Int64Array]) -> dict[str, np.ndarray]:
        """[M, D] rows of distinct ids by table."""
        ...


@dataclass(frozen=True)
class TrainedModel:
    """Inputs, weights and rows of one moment of a run, which belong together."""

    run: str
    """Its name."""
    assembly: Assembly
    state: RunState
    """Of the run, at that moment."""
    weights: Mapping[str, np.ndarray]
    tables: RowReader
    version: int | None = None
    """Number of a published version; None of a run's snapshot."""
    snapshot: SnapshotName | None = None
    """None of a published version."""
    method: Method | None = None
    """Of the run's settings as it was trained; None of what was not loaded from a run's folder."""

    @classmethod
    def load(
        cls,
        run: str | Path,
        which: str = "best",
        device: str | None = None,
        data: str | Path | None = None,
        with_rows: bool = True,
        with_weights: bool = True,
    ) -> TrainedModel:
        """A run's snapshot, checked against the run's inputs.

        Args:
            which: snapshot, as `RunFolder.chosen_snapshot` knows it.
            device: overrides the device that the run was trained on.
            data: where the run's data set lies now, if it was moved; or a later one with all of its items and
                further ones, whose semantic IDs extend those of the run, or which the model knows by their
                words. The run's own data set has to be there then, too, if the model has no semantic IDs.
            with_rows: False leaves the tables empty, for who reads none of them.
            with_weights: False takes their shapes alone, see `weights_in`.

        Raises:
            InputError: no such run, an incomplete or changed snapshot, or one of other data.
        """
        folder = RunFolder.open(Path(run))
        config = folder.config
        if device is not None:
            config = config.model_copy(update={"device": device})
        if data is not None:
            config = config.with_data(data)
        snapshot = read_snapshot(folder.chosen_snapshot(which))
        # Neither columns nor rates are asked of the training rows: they may be gone.
        assembly = assemble(config.for_inference(), checksums=False, columns=folder.columns)
        if data is not None:
            assembly = knowing_items_of(folder, snapshot.state, str(snapshot.path), assembly)
        model = cls.of(folder.name, assembly, snapshot, with_rows, with_weights)
        return replace(model, method=Method.of_run(folder))

    @classmethod
    def of(
        cls,
        run: str,
        assembly: Assembly,
        snapshot: Snapshot,
        with_rows: bool = True,
        with_weights: bool = True,
    ) -> TrainedModel:
        """Take the weights of a run's snapshot.

        Raises:
            InputError: the snapshot is one of other data.
        """
        assembly.task.check_state(snapshot.state, str(snapshot.path))
        tables = local_tables(assembly, snapshot if with_rows else None)
        weights = weights_in(snapshot.path / WEIGHTS, with_weights)
        return cls(run, assembly, snapshot.state, weights, tables, snapshot=snapshot.name)


def knowing_items_of(run: RunFolder, state: RunState, where: str, assembly: Assembly) -> Assembly:
    """Inputs of a run on another data set than it says, whose items it knows by what is said of them.

    Args:
        state: of the run, at a snapshot or version of it.
        where: that is, for messages.
        assembly: of its settings, on that data set; returned as it is where the run's data set is not needed.

    Raises:
        InputError: the run's own data set is not there any more, or has items that the other one lacks.
    """
    task = assembly.task
    if not task.reads_items_of(state):
        return assembly
    data, theirs = assembly.config.data.path, run.config.data.path
    why = f"{run.path}: was trained on another data set than {data} holds now"
    way_out = f"{theirs} says which items it knows: leave it as it was, or train on {data}"
    earlier = open_earlier_task(run.config.for_inference(), state, why, way_out)
    return replace(assembly, task=task.grown_from(earlier, state, where))


def weights_in(file: Path, with_weights: bool = True) -> dict[str, np.ndarray]:
    """Dense weights of a snapshot or version.

    Args:
        with_weights: False gives arrays of their shapes that take no memory, for who checks whether they fit.
    """
    if with_weights:
        return dict(safetensors.numpy.load_file(file))
    with safetensors.safe_open(file, framework="numpy") as saved:
        shapes = {name: saved.get_slice(name).get_shape() for name in saved.keys()}  # noqa: SIM118 - no mapping
    return {name: np.broadcast_to(np.zeros((), np.float32), shape) for name, shape in shapes.items()}


def local_tables(assembly: Assembly, snapshot: Snapshot | None) -> ShardClient:
    """The run's embedding tables as one shard in this process, read-only by use.

    Args:
        snapshot: None: tables without rows.
    """
    shard_map, num_servers = ShardMap(1), assembly.config.sparse.num_servers
    # One shard has the rows of all servers, so where rows are on disk it needs the memory of all of them.
    tables = [
        table.model_copy(update={"disk": table.disk and table.disk.times(num_servers)})
        for table in assembly.tables
    ]
    shard = EmbeddingShard(tables, shard=0, num_trainers=1)
    if tables and snapshot is not None:
        shard.restore(load_tables(snapshot.sparse_chain, tables, shard_map, shard=0))
    return ShardClient(tables, shard_map, LocalTransport([shard]))
