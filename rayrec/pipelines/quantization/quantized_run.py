"""A run of quantized weights as a folder like any other. Only training does not go on from it."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.snapshot.saved_files import SavedFile, checksum_file
from rayrec.embeddings.snapshot.snapshot import load_tables, write_table
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.method import BY_REWARDS, rewards_of
from rayrec.pipelines.runs.run_folder import COLUMNS_FILE, RunFolder
from rayrec.pipelines.runs.snapshots import Snapshot, write_snapshot
from rayrec.pipelines.tasks.assembly import Assembly
from rayrec.platform.files import sync
from rayrec.samples.prepare.writer import whole_folder

REPORT = "quantization.json"


def write_quantized_run(
    out: Path,
    source: RunFolder,
    snapshot: Snapshot,
    config: RunConfig,
    assembly: Assembly,
    weights: Mapping[str, np.ndarray],
    report: Mapping[str, Any],
) -> None:
    """Write the folder, whole or not at all.

    Args:
        out: made here.
        snapshot: that the weights were made of; rows, and where the run stood, are its own.
        config: of the new run.
        assembly: of the run that it is made of, for its tables.
    """
    with whole_folder(out) as draft:
        folder = RunFolder(draft)
        (draft / "config.yaml").write_text(config.to_yaml())
        if (source.path / COLUMNS_FILE).exists():
            shutil.copyfile(source.path / COLUMNS_FILE, draft / COLUMNS_FILE)
        path = folder.snapshot_path(snapshot.committed_step + 1)
        write_snapshot(
            path,
            snapshot.state,
            weights=dict(weights),
            optimizer_state={},  # nothing trains on from here
            cursor=snapshot.cursor.to_table(),
            save_sparse=lambda to: _save_rows(Path(to), snapshot, assembly),
        )
        kept = {name: source.state.get(name) for name in ("metric", "progress", "result")}
        folder.update(
            **{name: value for name, value in kept.items() if value is not None},
            state="finished",
            error=None,
            id=uuid.uuid4().hex,
            best=path.name,
            last=path.name,
            quantized_from=str(source.path.resolve()),
            **({} if (by_rewards := rewards_of(source)) is None else {BY_REWARDS: by_rewards}),
        )
        (draft / REPORT).write_text(json.dumps(report, indent=2) + "\n")


def _save_rows(to: Path, snapshot: Snapshot, assembly: Assembly) -> list[SavedFile]:
    """The rows of the tables, in a snapshot that builds on no other."""
    if len(snapshot.chain) == 1:
        return [_copied(path, to) for path in snapshot.chain[0].files]
    tables, shard_map = assembly.tables, ShardMap(1)
    shard = EmbeddingShard(tables, shard=0, num_trainers=1)
    shard.restore(load_tables(snapshot.sparse_chain, tables, shard_map, shard=0))
    step = snapshot.committed_step
    return [
        file
        for table in tables
        for file in write_table(to, table, shard_map, 0, step, [shard.export(table.name)])
    ]


def _copied(path: Path, to: Path) -> SavedFile:
    copy = to / path.name
    shutil.copyfile(path, copy)
    sync(copy)
    return SavedFile(path.name, copy.stat().st_size, checksum_file(copy))
