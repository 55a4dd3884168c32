"""A shard that goes back to a snapshot by the rows that have changed since, against one that loads all."""

from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.actors.parameter_server import ParameterServer, ServerSpec
from rayrec.actors.spawning import ActorRole
from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import AdamConfig, DiskConfig, EvictionConfig, IdAdmissionConfig, TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.snapshot import snapshot
from rayrec.embeddings.snapshot.snapshot import load_tables, write_table
from rayrec.embeddings.storage.disk import record_log, tiered_rows
from rayrec.embeddings.storage.disk.page_reads import ALIGNMENT
from rayrec.embeddings.storage.disk.tiered_rows import TieredRows
from rayrec.embeddings.table import ids_since
from tests.embeddings.admission_runs import IDS, OPTIMIZERS
from tests.embeddings.test_table_snapshot import assert_same
from tests.helpers.examples import examples

EVICTIONS = (
    None,
    EvictionConfig(max_age_steps=3, every_steps=2, remember_steps=4),
    EvictionConfig(max_rows_per_bucket=3, keep="frequent", every_steps=3, remember_steps=4),
    EvictionConfig(ttl_hours=3, every_steps=2, remember_steps=4),
    EvictionConfig(min_score=1.5, half_life_steps=3, every_steps=2, remember_steps=4),
)
ADMISSIONS = (
    IdAdmissionConfig(),
    IdAdmissionConfig(min_sightings=2, forget_after_steps=4, every_steps=3),
)


@pytest.fixture(autouse=True, scope="module")
def small_parts():
    """Four rows of a table with a disk are in memory; what changes is remembered of few ids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiered_rows, "_MIN_ROWS", 1)
        patch.setattr(tiered_rows, "_COPY_BYTES", 100)
        patch.setattr(record_log, "_SEGMENT_BYTES", 2 * ALIGNMENT)
        patch.setattr(TieredRows, "_capacity_beside", lambda self, num_bytes: 4)
        patch.setattr(snapshot, "_ROWS_PER_GROUP", 8)
        yield


def train(shards: list[EmbeddingShard], table: TableConfig, steps: range, seed: int) -> None:
    """Steps that depend on seed and step alone, by each of the shards."""
    for step in steps:
        rng = np.random.default_rng((seed, step))
        ids_M = rng.choice(IDS, size=rng.integers(0, 12), replace=False)
        grads_MD = rng.standard_normal((len(ids_M), table.dim)).astype(np.float32)
        for shard in shards:
            tag = UpdateTag(shard.incarnation, step, 0, newest_event=3600 * step)
            shard.apply(tag, {table.name: (ids_M, grads_MD)})


def save(shard: EmbeddingShard, table: TableConfig, folder: Path, step: int, since: int | None) -> list[Path]:
    folder.mkdir()
    shard.begin_snapshot(step)
    with closing(shard.export_snapshot(table.name, step, since)) as parts:
        files = write_table(folder, table, ShardMap(1), 0, step, parts)
    shard.release(step)
    return [folder / file.name for file in files]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kind)
@examples(8)
@given(
    eviction=st.sampled_from(EVICTIONS),
    admission=st.sampled_from(ADMISSIONS),
    on_disk=st.booleans(),
    remembers=st.booleans(),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    undone=st.integers(0, 9),
    snapshot_lost=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_rows_that_go_back_are_those_of_a_fresh_load_and_go_on_as_they(
    tmp_path_factory, optimizer, eviction, admission, on_disk, remembers, lengths, undone, snapshot_lost, seed
):
    folder = tmp_path_factory.mktemp("snapshots")
    disk = DiskConfig(memory=64 * 2**20) if on_disk else None
    table = TableConfig(
        name="items", dim=3, optimizer=optimizer, eviction=eviction, admission=admission, disk=disk
    )
    shard = EmbeddingShard([table], 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ids_since, "_LEAST_IDS", 1000 if remembers else 2)
        chain, last = [], None
        for length in lengths:
            first = 0 if last is None else last + 1
            train([shard], table, range(first, first + length), seed)
            chain.append(save(shard, table, folder / str(len(chain)), first + length - 1, last))
            last = first + length - 1
        assert last is not None
        train([shard], table, range(last + 1, last + 1 + undone // 2), seed + 1)
        if snapshot_lost:  # begun, and never written
            shard.begin_snapshot(last + undone // 2)
        train([shard], table, range(last + 1 + undone // 2, last + 1 + undone), seed + 1)
        load = partial(load_tables, chain, [table], ShardMap(1), 0)

        fresh = EmbeddingShard([table], 0, 1)
        fresh.restore(load())
        fresh.begin(last, 1)
        if not shard.roll_back(last, 1, lambda changed: load(only=changed)):
            assert not remembers, "everything is known"
            shard.restore(load())
            shard.begin(last, 1)

        assert_same(shard.export("items"), fresh.export("items"))
        # Also what does not show in rows: when they are given up, and which have changed since.
        both = [shard, fresh]
        train(both, table, range(last + 1, last + 6), seed + 2)
        assert_same(shard.export("items"), fresh.export("items"))
        again = [
            save(each, table, folder / f"again-{number}", last + 5, last) for number, each in enumerate(both)
        ]
        assert [path.name for path in again[0]] == [path.name for path in again[1]]
        for mine, others in zip(*again, strict=True):
            assert pq.read_table(mine).equals(pq.read_table(others))


def test_a_step_of_which_a_part_has_come_is_undone_and_its_rest_refused():
    table = TableConfig(name="items", dim=3, optimizer=AdamConfig())
    shard = EmbeddingShard([table], 0, num_trainers=2)
    ids_M, grads_MD = IDS[:5], np.ones((5, 3), dtype=np.float32)
    for rank in range(2):
        shard.apply(UpdateTag(0, 0, rank), {"items": (ids_M, grads_MD)})
    shard.begin_snapshot(0)
    with closing(shard.export_snapshot("items", 0)) as parts:
        kept = list(parts)
    shard.release(0)
    expected = shard.export("items")
    shard.apply(UpdateTag(0, 1, 0), {"items": (ids_M, grads_MD)})

    assert shard.roll_back(0, 1, lambda changed: {"items": [part for part in kept if not len(part.ids_M)]})

    assert_same(shard.export("items"), expected)
    with pytest.raises(ValueError, match="incarnation 1 and refuses the update of step 1 from trainer 1"):
        shard.apply(UpdateTag(0, 1, 1), {"items": (ids_M, grads_MD)})
    assert shard.committed_step == 0


def test_a_shard_without_the_snapshots_past_says_so_and_keeps_its_rows():
    table = TableConfig(name="items", dim=3)
    shard = EmbeddingShard([table], 0, 1)
    train([shard], table, range(4), seed=0)
    before = shard.export("items")

    assert not shard.roll_back(2, 1, lambda changed: pytest.fail("nothing is read"))

    assert_same(shard.export("items"), before)
    train([shard], table, range(4, 5), seed=0)


def test_a_server_that_goes_back_opens_its_own_files_and_reads_rows_of_those_groups_that_have_changed(
    tmp_path, monkeypatch
):
    """Eight servers' files; one has changed a single row since."""
    table = TableConfig(name="items", dim=3, optimizer=AdamConfig())
    spec = ServerSpec((table,), num_shards=8, shard=3, num_trainers=1, wait_timeout_s=10.0)
    shard_map, ids = ShardMap(8), np.arange(4000)
    files = []
    for number, at in enumerate(shard_map.split(ids)):
        server = ParameterServer(ActorRole("run", "parameter_server", number), spec)
        if number == 3:
            own, mine = server, ids[at]
        server._shard.apply(UpdateTag(0, 0, 0), {"items": (ids[at], np.ones((len(at), 3), dtype=np.float32))})
        parts = [server._shard.export("items")]
        written = write_table(tmp_path, table, shard_map, number, 0, parts)
        files += [str(tmp_path / file.name) for file in written]
    own.load([files], 0, 1)
    expected = own._shard.export("items")
    own._shard.apply(UpdateTag(1, 1, 0), {"items": (mine[:1], np.ones((1, 3), dtype=np.float32))})
    opened, groups, real = [], [], pq.ParquetFile

    class Counted(real):
        def __init__(self, path, **options):
            opened.append(Path(path).name)
            super().__init__(path, **options)

        def iter_batches(self, *args, row_groups, **options):
            groups.extend(row_groups)
            return super().iter_batches(*args, row_groups=row_groups, **options)

    monkeypatch.setattr(snapshot.pq, "ParquetFile", Counted)
    own.load([files], 0, 2)

    assert opened == ["items-00003.parquet"]
    assert len(groups) == 1
    assert_same(own._shard.export("items"), expected)
