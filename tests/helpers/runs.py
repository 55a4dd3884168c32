"""A tiny finished run: one epoch trained in this process, by the pieces the actors are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.lookup.lookups import SyncLookups, TrainerLink
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.snapshot.saved_files import SavedFile
from rayrec.embeddings.snapshot.snapshot import write_table
from rayrec.embeddings.transport.client import LocalTransport
from rayrec.models.program.program import ProgramPlacement
from rayrec.models.tokenizers.fit import fit_registry
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import MANIFEST, RunState, checksum_of, write_snapshot
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.tasks.features import SEMANTIC_IDS_FOLDER
from rayrec.platform.devices import get_device
from rayrec.platform.files import write_json
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.reading.cursor import Cursor
from rayrec.samples.reading.reader import SampleReader
from tests.helpers.data import random_events, write_source

NUM_USERS, NUM_ITEMS = 40, 30
"""Users "u0", ..., "u39"; items "i0", ..., "i29" with the titles "Title of i0", ..."""

BACKBONE = {"dim": 8, "num_layers": 1, "num_heads": 2, "feedforward_dim": 16, "max_length": 8, "dropout": 0.1}
SPARSE_SASREC: dict[str, Any] = {
    "name": "sasrec",
    "item_matrix": "sparse",
    "num_negatives": 8,
    "user_embedding": True,
    "backbone": {"dim": 8, "num_layers": 1, "num_heads": 2, "feedforward_dim": 16, "max_length": 8},
}
"""Small, with rows of items and users on the servers."""
MODELS: dict[str, dict[str, Any]] = {
    "sasrec": {"name": "sasrec", "backbone": BACKBONE},
    "bsarec": {"name": "bsarec", "backbone": BACKBONE},
    "hstu": {"name": "hstu", "backbone": {k: v for k, v in BACKBONE.items() if k != "feedforward_dim"}},
    "gnn": {"name": "gnn", "backbone": BACKBONE, "neighbors": {"count": 4}},
    "generative": {"name": "light_decoder", "backbone": BACKBONE, "decoder_dim": 16, "beam_width": 40},
    "prefix": {"name": "prefix_decoder", "backbone": BACKBONE, "beam_width": 40},
    "lazy": {"name": "lazy_decoder", "backbone": BACKBONE, "beam_width": 40},
    "encoder": {"name": "encoder_decoder", "backbone": BACKBONE, "decoder_layers": 1, "beam_width": 40},
}


def make_run(
    folder: Path,
    model: Literal["sasrec", "bsarec", "hstu", "gnn", "generative", "prefix", "lazy", "encoder"] = "sasrec",
    integer_users: bool = False,
    data_of: Callable[[Dataset], dict[str, Any]] = lambda dataset: {},
    collision_policy: str = "extra_digit",
    labeled: bool = False,
    snapshots_after: Sequence[int] = (),
    **model_settings: object,
) -> Path:
    """`folder`/run: a run with one snapshot, trained on `folder`/data.

    Args:
        integer_users: users are 0, 1, ... instead of "u0", "u1", ...
        data_of: more settings of the data, such as `features`, for the data set that was made.
        collision_policy: of the semantic IDs.
        labeled: whether events have a behavior and a scenario.
        snapshots_after: steps after which there are snapshots, too: a full one, then increments.
        model_settings: more settings of the model, such as `item_matrix="sparse"`.
    """
    dataset = dataset_of(folder, integer_users, labeled)
    if model not in ("sasrec", "bsarec", "hstu", "gnn"):
        make_semantic_ids(dataset, collision_policy)
    config = RunConfig.parse(
        {
            "data": {"path": str(dataset.root), **data_of(dataset)},
            "model": MODELS[model] | model_settings,
            "pipeline": {"trainer_threads": 1},
            "training": {"batch_size": 16, "epochs": 1},
        }
    )
    return trained(config, folder / "run", snapshots_after)


def trained(config: RunConfig, path: Path, snapshots_after: Sequence[int] = ()) -> Path:
    """The folder of a run of one epoch, without Ray."""
    run = RunFolder.create(path, config)
    assembly = assemble(config)
    run.keep_columns(assembly.rows.columns)
    _train_one_epoch(run, assembly, snapshots_after)
    run.update(state="finished")
    return run.path


def change_manifest(run: Path, **changes: Any) -> None:
    """Of the last snapshot; as somebody would write it who means it: its own checksum fits."""
    path = RunFolder.open(run).chosen_snapshot("last") / MANIFEST
    manifest = json.loads(path.read_text()) | changes
    del manifest["checksum"]
    write_json(path, manifest | {"checksum": checksum_of(manifest)})


def dataset_of(folder: Path, integer_users: bool = False, labeled: bool = False) -> Dataset:
    events = random_events(NUM_USERS, NUM_ITEMS)
    labels = {}
    if labeled:
        labels["behavior"] = [("VIEW", "LIKE", "VIEW", "SHARE")[place % 4] for place in range(len(events))]
        labels["scenario"] = [("home", "search")[place % 3 == 0] for place in range(len(events))]
    if integer_users:
        events = [(int(str(user)[1:]), item, time) for user, item, time in events]
    keys = [f"i{item}" for item in range(NUM_ITEMS)]
    source = write_source(
        folder / "source",
        events,
        items={"item_id": keys, "title": [f"Title of {key}" for key in keys]},
        **labels,
    )
    prepare(source, folder / "data", PrepareConfig(rows_per_group=4, rows_per_file=16, num_partitions=3))
    return Dataset.open(folder / "data")


def make_semantic_ids(
    dataset: Dataset, collision_policy: str = "extra_digit", codebook_size: int = 4
) -> None:
    """Codes of random vectors: enough levels and codes for a trie that branches."""
    vectors_ID = np.random.default_rng(0).normal(size=(len(dataset.items), 6)).astype(np.float32)
    registry, _ = fit_registry(
        vectors_ID,
        dataset.items.ids_I,
        dataset.fingerprint,
        num_levels=2,
        codebook_size=codebook_size,
        collision_policy=collision_policy,
    )
    registry.save(dataset.root / SEMANTIC_IDS_FOLDER)


def _train_one_epoch(run: RunFolder, assembly: Assembly, snapshots_after: Sequence[int]) -> None:
    config, plan = assembly.config, assembly.plan
    shard = EmbeddingShard(assembly.tables, shard=0, num_trainers=1)
    lookups = SyncLookups(TrainerLink(assembly.tables, ShardMap(1), LocalTransport([shard])))
    spec = assembly.task.program(assembly.dense_optimizer())
    program = spec.build(ProgramPlacement(get_device(config.device).torch, config.seed))
    reader, cursor = SampleReader(plan.spec), Cursor(assembly.rows.fingerprint)
    base: Path | None = None
    last_step = plan.steps_per_epoch - 1
    shard.begin(committed_step=-1, incarnation=0)
    for step in range(plan.steps_per_epoch):
        rows = reader.read_batch(plan.batch(step))
        cursor.commit(0, rows.cursor)
        (features,) = assembly.features.training(step, rows)
        gradients = program.backward(features, lookups.rows(step, features.lookups))
        is_kept = step in (*snapshots_after, last_step)
        if is_kept:
            shard.begin_snapshot(step)
        lookups.update(step, features.lookups, gradients.row_grads)
        program.update()
        if is_kept:
            base = _write_snapshot(run, assembly, program, shard, cursor, step, base)


def _write_snapshot(
    run: RunFolder,
    assembly: Assembly,
    program: Any,
    shard: EmbeddingShard,
    cursor: Cursor,
    step: int,
    base: Path | None,
) -> Path:
    since = None if base is None else int(base.name.removeprefix("step-")) - 1

    def save_sparse(folder: str) -> list[SavedFile]:
        written = [
            write_table(
                Path(folder), table, ShardMap(1), 0, step, shard.export_snapshot(table.name, step, since)
            )
            for table in assembly.tables
        ]
        return [file for files in written for file in files]

    path = run.snapshot_path(step + 1)
    write_snapshot(
        path,
        RunState(
            committed_step=step,
            incarnation=0,
            dataset_fingerprint=assembly.task.fingerprint,
            semantic_ids_version=assembly.task.semantic_ids_version,
            read_position=assembly.plan.position(step + 1),
            labels=assembly.task.labels,
            content_items=assembly.task.content_items,
        ),
        weights=program.weights(),
        optimizer_state=program.optimizer_state(),
        cursor=cursor.to_table(),
        save_sparse=save_sparse,
        base=None if base is None else base.name,
    )
    shard.release(step)
    run.update(last=path.name, best=path.name)
    return path
