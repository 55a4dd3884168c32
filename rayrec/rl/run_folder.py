"""Folder of a run of reinforcement learning; it reads like the folder of a supervised run.

RUN/config.yaml           settings of the supervised run: the network and its inputs
RUN/rl.yaml               settings of this run
RUN/metrics.jsonl         a line per step, and one per validation
RUN/rl-evaluation.json    metrics before and after
RUN/snapshots/step-N/     the policy after N batches, with the embedding rows of the supervised run

The rest is as in `rayrec.pipelines.runs.run_folder`; `rayrec evaluate`, `recommend` and `serve` read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.snapshot.saved_files import SavedFile
from rayrec.embeddings.snapshot.snapshot import load_tables, write_table
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RL_CONFIG, RunFolder
from rayrec.pipelines.runs.snapshots import RunState, Snapshot, read_snapshot, write_snapshot
from rayrec.platform.config import differing_keys, is_among
from rayrec.platform.errors import InputError
from rayrec.platform.files import write_atomically, write_json
from rayrec.rl.config import RlConfig
from rayrec.rl.policy import Policy
from rayrec.samples.reading.cursor import Cursor
from rayrec.samples.reading.read_plan import ReadPosition

RL_EVALUATION = "rl-evaluation.json"
FREE_TO_CHANGE = ("placement.", "steps", "evaluation.every_steps", "alarms.", "learner.micro_batches")
"""Settings that may differ when a run is resumed; sections end in a dot."""


class RlRunFolder:
    """One run."""

    def __init__(self, folder: RunFolder, base: Snapshot, policy: Policy) -> None:
        """
        Args:
            base: the snapshot that the run started from.
        """
        self.folder, self._base, self._policy = folder, base, policy

    @classmethod
    def create(cls, path: Path, config: RlConfig, supervised: RunConfig, policy: Policy) -> RlRunFolder:
        """Create the folder of a new run.

        Args:
            supervised: settings of the run that it starts from.

        Raises:
            InputError: the folder already holds a run, or something else.
        """
        folder = RunFolder.create(path, supervised)
        write_atomically(path / RL_CONFIG, config.to_yaml().encode())
        if (columns := RunFolder.open(Path(config.init_from)).columns) is not None:
            folder.keep_columns(columns)
        base = _base_of(config)
        folder.update(init_from=config.init_from, init_snapshot=base.path.name, kind="rl")
        return cls(folder, base, policy)

    @classmethod
    def resume(cls, path: Path, config: RlConfig, supervised: RunConfig, policy: Policy) -> RlRunFolder:
        """Open the folder of a run that is to be resumed.

        Raises:
            InputError: there is no such run, settings that results depend on have changed, the supervised
                run has another snapshot by now, or the snapshot of the run is damaged.
        """
        folder = RunFolder.open(path)
        if not (path / RL_CONFIG).is_file():
            raise InputError(f"{path}: not a run of reinforcement learning; it has no {RL_CONFIG}")
        started_with = RlConfig.load(path / RL_CONFIG)
        differing = differing_keys(started_with, config)
        changed = [key for key in differing if not is_among(key, FREE_TO_CHANGE)]
        if changed:
            raise InputError(
                f"{path}: holds another run: it differs from this config in {', '.join(changed)}; use what "
                f"it was started with ({path / RL_CONFIG}), or choose another folder with --run"
            )
        base, started_from = _base_of(config), folder.state["init_snapshot"]
        if base.path.name != started_from:
            raise InputError(
                f"{path}: started from {started_from} of {config.init_from}, whose {config.snapshot} "
                f"snapshot is {base.path.name} by now, so the reference would be another one; start a new run"
            )
        found = cls(folder, base, policy)
        last = found.last()
        # The steps after it are taken again, so their metrics will be written again.
        folder.forget_after(0 if last is None else last.committed_step + 1)
        write_atomically(path / RL_CONFIG, config.to_yaml().encode())
        folder.update(state="running", error=None)
        return found

    @property
    def path(self) -> Path:
        return self.folder.path

    def last(self) -> Snapshot | None:
        """Read the snapshot that a resumed run continues from.

        Raises:
            InputError: it is damaged.
        """
        if self.folder.state["last"] is None:
            return None
        return read_snapshot(self.folder.chosen_snapshot("last"))

    def save(
        self,
        step: int,
        weights: dict[str, np.ndarray],
        optimizer_state: dict[str, np.ndarray],
        position: ReadPosition,
        progress: dict[str, Any],
        is_best: bool,
    ) -> None:
        """Save the policy after a step; keeps the best and the last snapshot.

        Args:
            step: batches that were learned from.
            position: in the files, after the prompts that were learned from.
        """
        base = self._base.state
        state = RunState(
            committed_step=step - 1,
            incarnation=base.incarnation,
            dataset_fingerprint=base.dataset_fingerprint,
            semantic_ids_version=base.semantic_ids_version,
            read_position=position,
            progress=progress,
            labels=base.labels,
            content_items=base.content_items,
        )
        path = self.folder.snapshot_path(step)
        write_snapshot(
            path,
            state,
            weights=weights,
            optimizer_state=optimizer_state,
            cursor=Cursor(base.dataset_fingerprint).to_table(),
            save_sparse=lambda folder: self._save_rows(Path(folder), step - 1),
        )
        best = path.name if is_best else self.folder.state["best"]
        self.folder.update(last=path.name, best=best, progress=progress)
        self.folder.keep_only({path.name, *([] if best is None else [best])})

    def _save_rows(self, folder: Path, step: int) -> list[SavedFile]:
        """Write the rows of the supervised run, which are frozen, as one full export."""
        tables, shard_map = self._policy.trained.assembly.tables, ShardMap(1)
        if not tables:
            return []
        rows = load_tables(self._base.sparse_chain, tables, shard_map, shard=0)
        return [
            file
            for table in tables
            for file in write_table(folder, table, shard_map, 0, step, rows[table.name])
        ]

    def write_evaluation(self, report: dict[str, Any]) -> None:
        write_json(self.path / RL_EVALUATION, report)


def _base_of(config: RlConfig) -> Snapshot:
    return read_snapshot(RunFolder.open(Path(config.init_from)).chosen_snapshot(config.snapshot))
