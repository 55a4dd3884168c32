"""Versions of tables that share layers are what a full snapshot of their step would be."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import AdamConfig, DiskConfig, EvictionConfig, SgdConfig, TableConfig
from rayrec.embeddings.snapshot import layered_tables
from rayrec.embeddings.snapshot.layered_tables import (
    LayeredTable,
    LayeredTables,
    reading_config,
    reading_rows,
)
from rayrec.embeddings.snapshot.snapshot import write_table
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.embeddings.table.table_rows import TableRows
from rayrec.platform.errors import InputError
from tests.helpers.examples import examples

IDS = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=60)


def table_config(**changed) -> TableConfig:
    return TableConfig(name="items", dim=3, seed=5, optimizer=AdamConfig(), **changed)


class Training:
    """A table that trains, with rows that come and go, and says what has changed between its snapshots."""

    def __init__(self, config: TableConfig) -> None:
        self.table = EmbeddingTable(config)
        self._random = np.random.default_rng(1)
        self.step = -1
        self._last_cut: int | None = None

    def go_on(self, ids_M: np.ndarray) -> None:
        self.step += 1
        grads_MD = self._random.standard_normal((len(ids_M), 3)).astype(np.float32)
        self.table.apply(ids_M, grads_MD, self.step)

    def snapshot(self, everything: bool = False) -> list[TableRows]:
        since = None if everything else self._last_cut
        snapshot = self.table.begin_snapshot(self.step, wait=lambda is_room: None)
        parts = list(self.table.snapshot_parts(snapshot, nullcontext, since))
        self.table.end_snapshot()
        self._last_cut = self.step
        return parts


def same_rows(layered: LayeredTable, table: EmbeddingTable) -> bool:
    expected = table.export()
    ids_M, weights_MD = layered.export()
    return (
        ids_M.tobytes() == expected.ids_M.tobytes()
        and weights_MD.tobytes() == expected.weights_MD.tobytes()
        and layered.lookup(IDS).tobytes() == table.lookup(IDS).tobytes()
    )


@examples(25)
@given(
    steps=st.lists(
        st.lists(st.integers(0, 59), min_size=1, max_size=20, unique=True), min_size=2, max_size=25
    ),
    most_changes=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    is_cut=st.data(),
)
def test_base_and_changes_are_the_full_export_with_rows_given_up_and_come_back(
    steps, most_changes, dtype, is_cut
):
    config = table_config(eviction=EvictionConfig(max_age_steps=2, every_steps=2), weight_dtype=dtype)
    training = Training(config)
    training.go_on(IDS[steps[0]])
    layered = LayeredTable.of(reading_config(config), reading_rows(training.snapshot(everything=True)))
    versions = [(layered, training.table.lookup(IDS))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layered_tables, "_MOST_CHANGES", most_changes)
        for positions in steps[1:]:
            training.go_on(IDS[positions])
            if is_cut.draw(st.booleans()):
                layered = layered.changed_by(reading_rows(training.snapshot()))
                assert same_rows(layered, training.table)
                assert layered.num_layers <= 1 + most_changes
                versions.append((layered, training.table.lookup(IDS)))
    for version, rows_MD in versions:  # what came later has changed nothing of them
        assert version.lookup(IDS).tobytes() == rows_MD.tobytes()


def test_rows_take_no_memory_for_what_only_training_needs():
    config = table_config()
    training = Training(config)
    training.go_on(IDS)
    held = LayeredTable.of(reading_config(config), reading_rows(training.snapshot(everything=True)))
    assert held._base.export().state_MS.shape == (len(IDS), 0)
    assert held._base.num_bytes < training.table.num_bytes


def test_versions_on_one_base_read_its_rows_on_disk_at_once(tmp_path, monkeypatch):
    """One answers while the next one is made; who reads rows on disk moves them."""
    monkeypatch.setattr(layered_tables, "_READ_AT_ONCE", 1_000)
    config = TableConfig(name="items", dim=64, optimizer=SgdConfig())
    table, ids_M = EmbeddingTable(config), np.arange(40_000)
    table.apply(ids_M, np.random.default_rng(0).standard_normal((40_000, 64)).astype(np.float32), 0)
    expected_MD = table.lookup(ids_M)
    disk = DiskConfig(memory=26 * 2**20, folder=str(tmp_path), may_be_memory=True)
    held = LayeredTable.of(config.model_copy(update={"disk": disk}), [table.export()])
    following = held.changed_by([])

    def read(version: LayeredTable, seed: int) -> int:
        chosen = [np.random.default_rng([seed, n]).permutation(ids_M)[:2_000] for n in range(40)]
        return sum(not np.array_equal(version.lookup(some), expected_MD[some]) for some in chosen)

    with ThreadPoolExecutor(2) as threads:
        wrong = list(threads.map(read, (held, following), (1, 2)))

    assert wrong == [0, 0]


def written(folder: Path, config: TableConfig, parts: list[TableRows], step: int) -> list[Path]:
    folder.mkdir()
    saved = write_table(folder, reading_config(config), ShardMap(1), 0, step, reading_rows(parts))
    return [folder / file.name for file in saved]


def test_increments_on_other_rows_and_full_ones_are_refused_as_changes(tmp_path):
    config = table_config()
    tables = [reading_config(config)]
    training = Training(config)
    training.go_on(IDS[:20])
    held = LayeredTables.load(
        tables, written(tmp_path / "0", config, training.snapshot(everything=True), 0), 0
    )
    training.go_on(IDS[:10])
    first = written(tmp_path / "1", config, training.snapshot(), 1)
    training.go_on(IDS[5:15])
    second = written(tmp_path / "2", config, training.snapshot(), 2)
    with pytest.raises(InputError, match="since step 1"):
        held.changed_by(tables, second, 2)
    changed = held.changed_by(tables, first, 1).changed_by(tables, second, 2)
    assert same_rows(changed["items"], training.table)
    assert changed["items"].num_layers == 3
    full = written(tmp_path / "full", config, training.snapshot(everything=True), 2)
    with pytest.raises(InputError, match="has all rows"):
        held.changed_by(tables, full, 2)
    instead = LayeredTables.load(tables, full, 2)
    assert same_rows(instead["items"], training.table)
    assert instead.read({"items": IDS})["items"].tobytes() == training.table.lookup(IDS).tobytes()
