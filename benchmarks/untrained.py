"""Runs of models that nobody has trained, for what hangs on shapes and not on what was learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayrec.models.program.program import ProgramPlacement
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import RunState, write_snapshot
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.platform.devices import HOST
from rayrec.samples.reading.cursor import Cursor

LANGUAGE_MODEL: dict[str, Any] = {
    "name": "causal_lm",
    "backbone": {
        "network": {
            "kind": "qwen3",
            "dim": 256,
            "num_layers": 4,
            "num_heads": 4,
            "num_key_heads": 2,
            "feedforward_dim": 768,
        },
        "max_length": 50,
    },
}
"""Shaped as Qwen3, with 50 events of a history."""


def untrained_run(path: Path, data: Path, model: dict[str, Any]) -> Path:
    """A run with one snapshot of random weights, made large, so that what follows hangs on the history."""
    config = RunConfig.parse({"data": {"path": str(data)}, "model": model, "cluster": {"dashboard": False}})
    folder = RunFolder.create(path, config)
    assembly = assemble(config, checksums=False)
    assert not assembly.tables, "rows would have to be written"
    folder.keep_columns(assembly.rows.columns)
    program = assembly.task.program(assembly.dense_optimizer()).build(
        ProgramPlacement(HOST.torch, config.seed)
    )
    weights = {name: array * 4 if array.ndim > 1 else array for name, array in program.weights().items()}
    state = RunState(
        committed_step=0,
        incarnation=0,
        dataset_fingerprint=assembly.task.fingerprint,
        semantic_ids_version=assembly.task.semantic_ids_version,
        read_position=assembly.rows.plan.position(0),
    )
    write_snapshot(
        folder.snapshot_path(1),
        state,
        weights=weights,
        optimizer_state=program.optimizer_state(),
        cursor=Cursor(assembly.task.fingerprint).to_table(),
        save_sparse=lambda _: [],
    )
    folder.update(last=folder.snapshot_path(1).name, state="finished")
    return path
