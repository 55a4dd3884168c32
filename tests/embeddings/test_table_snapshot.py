import json
import threading
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.base.row_codec import decode, encode_rows
from rayrec.embeddings.config import (
    AdamConfig,
    EvictionConfig,
    IdAdmissionConfig,
    RowwiseAdagradConfig,
    SgdConfig,
    TableConfig,
)
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.snapshot import snapshot
from rayrec.embeddings.snapshot.saved_files import checksum_file
from rayrec.embeddings.snapshot.snapshot import load_tables, write_table
from rayrec.embeddings.storage.consistent_snapshot import SnapshotEndedError
from rayrec.embeddings.table.table_rows import TableRows
from rayrec.platform.errors import InputError

TABLES = (
    TableConfig(name="items", dim=3, seed=1, optimizer=RowwiseAdagradConfig()),
    TableConfig(name="users", dim=2, seed=2, optimizer=AdamConfig()),
)
STEP = 2
IDS = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=400)


def grown_shards(num_shards: int) -> list[EmbeddingShard]:
    shard_map = ShardMap(num_shards)
    rng = np.random.default_rng(1)
    shards = [EmbeddingShard(TABLES, shard, 1) for shard in range(num_shards)]
    for step in range(3):
        grads = {t.name: rng.standard_normal((len(IDS), t.dim)).astype(np.float32) for t in TABLES}
        for shard, at in enumerate(shard_map.split(IDS)):
            update = {name: (IDS[at], grads_MD[at]) for name, grads_MD in grads.items()}
            shards[shard].apply(UpdateTag(0, step, 0), update)
    return shards


def save(shards: list[EmbeddingShard], folder) -> list:
    files = []
    for shard, server in enumerate(shards):
        for table in TABLES:
            parts = [server.export(table.name)]
            saved = write_table(folder, table, ShardMap(len(shards)), shard, STEP, parts)
            files += [folder / file.name for file in saved]
    return files


@pytest.mark.parametrize(("num_saved", "num_loaded"), [(1, 1), (1, 3), (3, 2), (2, 5)])
def test_any_number_of_shards_loads_what_any_number_saved(tmp_path, num_saved, num_loaded, monkeypatch):
    monkeypatch.setattr(snapshot, "_ROWS_PER_GROUP", 32)
    files = save(grown_shards(num_saved), tmp_path)
    expected = grown_shards(num_loaded)
    for shard in range(num_loaded):
        restored = EmbeddingShard(TABLES, shard, 1)
        restored.restore(load_tables(files[::-1], TABLES, ShardMap(num_loaded), shard))
        for table in TABLES:
            assert_same(restored.export(table.name), expected[shard].export(table.name))


def test_a_shard_reads_rows_of_no_file_that_has_none_of_its_own(tmp_path, monkeypatch):
    files = save(grown_shards(4), tmp_path)
    opened, real = [], pq.ParquetFile

    class Counted(real):
        def __init__(self, path, **options):
            opened.append(path)
            super().__init__(path, **options)

    monkeypatch.setattr(snapshot.pq, "ParquetFile", Counted)
    restored = EmbeddingShard(TABLES, 1, 1)
    restored.restore(load_tables(files, TABLES, ShardMap(4), 1))
    assert len(opened) == len(set(opened)) == len(files) // 4
    assert len(restored.export("items").ids_M) > 0


def assert_same(first: TableRows, second: TableRows) -> None:
    for name, values in vars(first).items():
        if isinstance(values, np.ndarray):
            assert values.tobytes() == getattr(second, name).tobytes(), name
        elif name in ("forgotten", "clock"):
            assert values == getattr(second, name), name
        elif name != "since":
            assert_same(values, getattr(second, name))


def test_sightings_and_tombstones_go_to_the_shards_of_their_ids(tmp_path):
    rule = {
        "admission": IdAdmissionConfig(min_sightings=2),
        "eviction": EvictionConfig(max_age_steps=1, every_steps=1),
        "weight_dtype": "bfloat16",
    }
    table = TABLES[0].model_copy(update=rule)

    def trained(num_shards: int) -> list[EmbeddingShard]:
        shards = [EmbeddingShard([table], shard, 1) for shard in range(num_shards)]
        for step, named in enumerate((IDS[:300], IDS[:200], IDS[:100], IDS[100:150], IDS[100:150])):
            for shard, at in enumerate(ShardMap(num_shards).split(named)):
                update = {"items": (named[at], np.ones((len(at), 3), np.float32))}
                shards[shard].apply(UpdateTag(0, step, 0), update)
        return shards

    (saved,) = trained(1)
    files = write_table(tmp_path, table, ShardMap(1), 0, STEP, [saved.export("items")])
    names = [file.name for file in files]
    assert names == ["items-00000.parquet", "items-00000.sighted.parquet", "items-00000.evicted.parquet"]
    for shard, expected in enumerate(trained(3)):
        restored = EmbeddingShard([table], shard, 1)
        restored.restore(load_tables([tmp_path / name for name in names], [table], ShardMap(3), shard))
        assert_same(restored.export("items"), expected.export("items"))
        assert len(expected.export("items").sighted) > 10
        assert len(expected.export("items").evicted) > 10


def test_a_shard_may_be_empty(tmp_path):
    files = save([EmbeddingShard(TABLES, 0, 1)], tmp_path)
    parts = load_tables(files, TABLES, ShardMap(2), 1)
    assert [rows.weights_MD.shape for rows in parts["items"]] == [(0, 3)]
    assert [rows.state_MS.shape for rows in parts["users"]] == [(0, 4)]


def test_files_are_plain_parquet_ordered_by_bucket_and_id(tmp_path):
    path = save(grown_shards(1), tmp_path)[0]
    table = pq.read_table(path)
    assert {field.name: str(field.type) for field in table.schema} == {
        "id": "int64",
        "bucket": "int32",
        "step": "int32",
        "count": "int32",
        "weights": "fixed_size_binary[12]",
        "state": "fixed_size_binary[4]",
    }
    keys = [(b, i % 2**64) for b, i in zip(table["bucket"].to_pylist(), table["id"].to_pylist(), strict=True)]
    assert keys == sorted(keys)
    assert len(keys) == len(IDS)
    assert json.loads(table.schema.metadata[b"rayrec.table"]) == {
        "format_version": 4,
        "step": 2,
        "since": None,
        "buckets": [0, 65536],
        "content": "rows",
        "table": "items",
        "dim": 3,
        "weight_dtype": "float32",
        "optimizer": "rowwise_adagrad",
        "seed": 1,
        "init_scale": 0.05,
    }
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["items-00000.parquet", "users-00000.parquet"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 4}, "'items' was saved with dim 3, the config says 4"),
        ({"weight_dtype": "bfloat16"}, "weight_dtype 'float32', the config says 'bfloat16'"),
        ({"seed": 9}, "'items' was saved with seed 1, the config says 9"),
        ({"init_scale": 0.5}, "init_scale 0.05, the config says 0.5"),
        ({"optimizer": AdamConfig()}, "optimizer 'rowwise_adagrad', the config says 'adam'"),
        ({"name": "films"}, "holds rows of table 'items'; the config has tables 'films', 'users'"),
    ],
)
def test_a_snapshot_of_another_table_is_refused_with_both_values(tmp_path, change, message):
    files = save(grown_shards(1), tmp_path)
    other = (TABLES[0].model_copy(update=change), TABLES[1])
    with pytest.raises(InputError, match=message):
        load_tables(files, other, ShardMap(1), 0)


def test_another_learning_rate_may_go_on_from_a_snapshot(tmp_path):
    files = save(grown_shards(1), tmp_path)
    slower = (TABLES[0].model_copy(update={"optimizer": RowwiseAdagradConfig(lr=1e-4)}), TABLES[1])
    parts = load_tables(files, slower, ShardMap(1), 0)["items"]
    assert sum(len(rows.ids_M) for rows in parts) == len(IDS)


def test_files_that_are_no_snapshot_are_refused(tmp_path):
    files = save(grown_shards(1), tmp_path)
    with pytest.raises(InputError, match="no file of table 'users'"):
        load_tables(files[:1], TABLES, ShardMap(1), 0)
    text = tmp_path / "notes.parquet"
    text.write_text("not Parquet")
    with pytest.raises(InputError, match=r"notes\.parquet: cannot be read"):
        load_tables([text], TABLES, ShardMap(1), 0)
    pq.write_table(pa.table({"id": [1]}), text)
    with pytest.raises(InputError, match="not a snapshot of embedding rows"):
        load_tables([text], TABLES, ShardMap(1), 0)
    with pytest.raises(InputError, match=r"gone\.parquet: cannot be read"):
        load_tables([tmp_path / "gone.parquet"], TABLES, ShardMap(1), 0)


def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch):
    def disk_full(writer, table, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr(snapshot.pq.ParquetWriter, "write_table", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save(grown_shards(1), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("and_parts_end", [False, True])
def test_a_disk_that_is_full_is_the_reason_whatever_else_there_is(tmp_path, monkeypatch, and_parts_end):
    (shard,) = grown_shards(1)
    whole, written, threads = shard.export("items"), [], threading.active_count()
    is_third, is_full = threading.Event(), threading.Event()

    def some(contents, rows):
        if len(written) == 2:
            is_third.set()
            is_full.wait(20)
            raise OSError("No space left on device")
        written.append(rows)

    def parts():
        for _ in range(5):
            yield whole
        is_third.wait(20)
        is_full.set()
        if and_parts_end:
            raise SnapshotEndedError("given up")
        for _ in range(50):
            yield whole

    monkeypatch.setattr(snapshot, "_write_part", some)
    with pytest.raises(OSError, match="No space left"):
        write_table(tmp_path, TABLES[0], ShardMap(1), 0, STEP, parts())
    assert len(written) == 2
    assert threading.active_count() == threads
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_damage_anywhere_in_a_file_shows_in_its_checksum(tmp_path, damage):
    (shard,) = grown_shards(1)
    (file,) = write_table(tmp_path, TABLES[0], ShardMap(1), 0, STEP, [shard.export("items")])
    path = tmp_path / file.name
    content = path.read_bytes()
    assert (file.bytes, file.checksum) == (len(content), checksum_file(path))
    for at in (0, len(content) // 2, len(content) - 1):
        if damage == "flipped":
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        else:
            path.write_bytes(content[:at])
        assert checksum_file(path) != file.checksum


def test_files_of_older_versions_are_refused(tmp_path):
    path = save(grown_shards(1), tmp_path)[0]
    table = pq.read_table(path)
    described = json.loads(table.schema.metadata[b"rayrec.table"]) | {"format_version": 2}
    pq.write_table(table.replace_schema_metadata({b"rayrec.table": json.dumps(described)}), path)
    with pytest.raises(
        InputError, match=r"items-00000\.parquet: format version 2; this version reads 3 to 5"
    ):
        load_tables([path], TABLES, ShardMap(1), 0)


def test_increments_of_the_version_before_have_all_ids_that_wait(tmp_path):
    """They were written whole; what is not in the last of them waits no longer."""
    table = TABLES[0].model_copy(update={"admission": IdAdmissionConfig(min_sightings=3)})
    shard, chain, waiting = EmbeddingShard([table], 0, 1), [], {}
    for step, named in enumerate((IDS[:20], IDS[:10], IDS[5:30])):
        shard.apply(UpdateTag(0, step, 0), {"items": (named, np.ones((len(named), 3), np.float32))})
        rows = shard.export("items")
        waiting = dict(zip(rows.sighted.ids_K.tolist(), rows.sighted.counts_K.tolist(), strict=True))
        folder = tmp_path / str(step)
        folder.mkdir()
        rows = replace(rows, since=step - 1 if step else None)
        names = [file.name for file in write_table(folder, table, ShardMap(1), 0, step, [rows])]
        for name in names:
            content = pq.read_table(folder / name)
            described = json.loads(content.schema.metadata[b"rayrec.table"]) | {"format_version": 3}
            described.pop("forgotten", None)
            content = content.replace_schema_metadata({b"rayrec.table": json.dumps(described)})
            pq.write_table(content, folder / name)
        chain.append([folder / name for name in names])
    restored = EmbeddingShard([table], 0, 1)
    restored.restore(load_tables(chain, [table], ShardMap(1), 0))
    found = restored.export("items").sighted
    assert dict(zip(found.ids_K.tolist(), found.counts_K.tolist(), strict=True)) == waiting
    assert 0 < len(waiting) < 30


def test_a_file_that_turns_out_damaged_while_rows_are_read_is_named(tmp_path):
    files = save(grown_shards(1), tmp_path)
    parts = load_tables(files, TABLES, ShardMap(1), 0)["items"]
    with open(files[0], "r+b") as file:
        file.truncate(100)
    with pytest.raises(InputError, match=r"items-00000\.parquet: cannot be read"):
        list(parts)


def test_an_increment_without_what_it_builds_upon_is_refused(tmp_path):
    shard, table, chain = EmbeddingShard(TABLES[:1], 0, 1), TABLES[0], []
    for step, since in ((0, None), (1, 0), (2, 1)):
        shard.apply(UpdateTag(0, step, 0), {"items": (IDS, np.ones((len(IDS), 3), np.float32))})
        shard.begin_snapshot(step)
        folder = tmp_path / str(step)
        folder.mkdir()
        parts = shard.export_snapshot("items", step, since)
        chain.append([folder / f.name for f in write_table(folder, table, ShardMap(1), 0, step, parts)])
        shard.release(step)
    load_tables(chain, [table], ShardMap(1), 0)
    for wrong, message in (
        (chain[1:], "only what has changed since step 0, and follows nothing"),
        ([chain[0], chain[2]], "only what has changed since step 1, and follows a snapshot of step 0"),
        ([chain[0] + chain[1]], "of step 1, but .* is of step 0; they are not of one snapshot"),
    ):
        with pytest.raises(InputError, match=message):
            load_tables(wrong, [table], ShardMap(1), 0)


def test_an_id_that_an_increment_removed_and_that_comes_back_is_given_up_once(tmp_path):
    """After the load it is to be looked at once again, not also for the row that it had before."""
    eviction = EvictionConfig(max_age_steps=1, every_steps=1)
    table = TABLES[0].model_copy(update={"eviction": eviction})
    shard, ids_M, nothing = EmbeddingShard([table], 0, 1), np.arange(3), np.arange(0)

    def step(shard: EmbeddingShard, number: int, ids_M: np.ndarray) -> None:
        update = {"items": (ids_M, np.ones((len(ids_M), 3), dtype=np.float32))}
        shard.apply(UpdateTag(shard.incarnation, number, 0), update)

    def saved(number: int, since: int | None) -> list:
        folder = tmp_path / str(number)
        folder.mkdir()
        shard.begin_snapshot(number)
        parts = shard.export_snapshot("items", number, since)
        files = write_table(folder, table, ShardMap(1), 0, number, parts)
        shard.release(number)
        return [folder / file.name for file in files]

    step(shard, 0, ids_M)
    chain = [saved(0, None)]
    step(shard, 1, nothing)
    step(shard, 2, nothing)
    chain.append(saved(2, 0))
    restored = EmbeddingShard([table], 0, 1)
    restored.restore(load_tables(chain, [table], ShardMap(1), 0))
    restored.begin(2, 1)
    assert restored.stats().num_rows == {"items": 0}

    for number, ids in ((3, ids_M), (4, nothing), (5, nothing)):
        step(restored, number, ids)

    assert restored.evicted(4)["items"].tolist() == ids_M.tolist()
    assert restored.export("items").evicted.ids_V.tolist() == ids_M.tolist()


def test_a_snapshot_that_lacks_the_file_of_a_shard_is_refused(tmp_path):
    files = save(grown_shards(3), tmp_path)
    left = [path for path in files if path.name != "items-00001.parquet"]
    with pytest.raises(InputError, match=r"lacks a file of table 'items': none has rows .* bucket 21845"):
        load_tables(left, TABLES, ShardMap(1), 0)


def test_a_table_without_optimizer_state_is_saved_too(tmp_path):
    config = TableConfig(name="items", dim=3, optimizer=SgdConfig())
    shard = EmbeddingShard([config], 0, 1)
    shard.apply(UpdateTag(0, 0, 0), {"items": (IDS, np.ones((len(IDS), 3), np.float32))})
    (file,) = write_table(tmp_path, config, ShardMap(1), 0, 0, [shard.export("items")])
    loaded = EmbeddingShard([config], 0, 1)
    loaded.restore(load_tables([tmp_path / file.name], [config], ShardMap(1), 0))
    assert_same(loaded.export("items"), shard.export("items"))


def test_another_run_begins_with_the_weights_alone(tmp_path):
    """Whatever its optimizers, seeds and kinds of weights are."""
    shards = grown_shards(2)
    files = save(shards, tmp_path)
    other = [
        TableConfig(name="items", dim=3, seed=8, optimizer=AdamConfig()),
        TableConfig(name="users", dim=2, seed=9, optimizer=RowwiseAdagradConfig(initial_accumulator=0.25)),
    ]
    begun = EmbeddingShard(other, 0, 1)

    begun.restore(load_tables(files, other, ShardMap(1), 0, weights_only=True))
    begun.begin(-1, 1)

    for name, state in (("items", 0.0), ("users", 0.25)):
        rows = begun.export(name)
        saved = {
            ident: weights_D.tolist()
            for shard in shards
            for ident, weights_D in zip(
                shard.export(name).ids_M.tolist(), shard.export(name).weights_MD, strict=True
            )
        }
        assert {i: w.tolist() for i, w in zip(rows.ids_M.tolist(), rows.weights_MD, strict=True)} == saved
        assert (rows.state_MS == state).all()
        assert (rows.counts_M == 0).all()
    assert begun.committed_step == -1
    begun.apply(UpdateTag(1, 0, 0), {t.name: (IDS[:1], np.ones((1, t.dim), np.float32)) for t in other})
    assert begun.export("items").counts_M.sum() == 1

    wider = [TableConfig(name="items", dim=4, seed=8), other[1]]
    with pytest.raises(InputError, match=r"table 'items' was saved with dim 3, the config says 4"):
        load_tables(files, wider, ShardMap(1), 0, weights_only=True)


def test_a_run_that_begins_with_an_increment_remembers_its_own_evictions(tmp_path):
    """What the other run has forgotten is of its steps, which are later than the first ones of this."""
    table = TableConfig(
        name="items",
        dim=2,
        eviction=EvictionConfig(max_age_steps=3, every_steps=2, remember_steps=4),
        admission=IdAdmissionConfig(min_sightings=2, forget_after_steps=50, every_steps=2),
    )

    def step(shard, number, *ids):
        update = {"items": (np.array(ids), np.ones((len(ids), 2), np.float32))}
        shard.apply(UpdateTag(shard.incarnation, number, 0), update)

    def saved(shard, number, since=None):
        shard.begin_snapshot(number)
        folder = tmp_path / f"{shard.incarnation}-{number}"
        folder.mkdir()
        parts = shard.export_snapshot("items", number, since)
        files = write_table(folder, table, ShardMap(1), 0, number, parts)
        shard.release(number)
        return [folder / file.name for file in files]

    earlier, begun, resumed = (EmbeddingShard([table], 0, 1) for _ in range(3))
    for number in range(90):
        step(earlier, number, 5)
    chain = [saved(earlier, 89)]
    for number in range(90, 100):
        step(earlier, number, 5)
    chain.append(saved(earlier, 99, since=89))
    begun.restore(load_tables(chain, [table], ShardMap(1), 0, weights_only=True))
    begun.begin(-1, 1)

    step(begun, 0, 5, 7, 8)
    step(begun, 1, 5, 7)
    chain = [saved(begun, 1)]
    for number in range(2, 6):
        step(begun, number, 5)
    assert begun.evicted(4) == {"items": [7]}

    chain.append(saved(begun, 5, since=1))
    resumed.restore(load_tables(chain, [table], ShardMap(1), 0))
    exported = resumed.export("items")
    assert exported.sighted.ids_K.tolist() == begun.export("items").sighted.ids_K.tolist() == [8]
    assert exported.evicted.ids_V.tolist() == begun.export("items").evicted.ids_V.tolist() == [7]


def written_narrow(folder, wire, rows=None):
    """(Path of a file of narrow rows, the rows as they were)."""
    rows = grown_shards(1)[0].export("items") if rows is None else rows
    (file,) = write_table(folder, TABLES[0], ShardMap(1), 0, STEP, [rows], wire)
    return folder / file.name, rows


@pytest.mark.parametrize("wire", ["bfloat16", "int8_row"])
def test_narrow_rows_are_read_as_what_the_codec_says(tmp_path, wire, monkeypatch):
    monkeypatch.setattr(snapshot, "_ROWS_PER_GROUP", 32)
    path, rows = written_narrow(tmp_path, wire)

    (found,) = [part for part in load_tables([path], TABLES[:1], ShardMap(1), 0)["items"] if len(part.ids_M)]

    np.testing.assert_array_equal(found.ids_M, rows.ids_M)
    np.testing.assert_array_equal(found.weights_MD, decode(encode_rows(wire, rows.weights_MD)))
    np.testing.assert_array_equal(found.state_MS, rows.state_MS)


def test_a_file_of_8_bit_rows_says_so_and_earlier_readers_refuse_it(tmp_path):
    path, _ = written_narrow(tmp_path, "int8_row")

    schema = pq.read_schema(path)
    assert str(schema.field("weights").type) == "fixed_size_binary[3]"
    assert str(schema.field("scale").type) == "float"
    described = json.loads(schema.metadata[b"rayrec.table"])
    assert (described["format_version"], described["wire"]) == (5, "int8_row")


def test_8_bit_rows_take_less_than_a_third_of_the_bytes(tmp_path):
    config = TableConfig(name="items", dim=64, seed=1, optimizer=SgdConfig())
    shard = EmbeddingShard([config], 0, 1)
    ids = np.arange(20_000)
    shard.apply(UpdateTag(0, 0, 0), {"items": (ids, np.ones((len(ids), 64), np.float32))})
    rows, sizes = shard.export("items"), {}
    for wire in ("float32", "bfloat16", "int8_row"):
        (tmp_path / wire).mkdir()
        (file,) = write_table(tmp_path / wire, config, ShardMap(1), 0, 0, [rows], wire)
        sizes[wire] = (tmp_path / wire / file.name).stat().st_size

    assert sizes["int8_row"] <= 0.30 * sizes["float32"]
    assert sizes["bfloat16"] <= 0.55 * sizes["float32"]


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_scales_that_are_no_scales_are_refused(tmp_path, scale):
    path, _ = written_narrow(tmp_path, "int8_row")
    table = pq.read_table(path)
    scales = table["scale"].to_numpy().copy()
    scales[7] = scale
    changed = table.set_column(table.schema.get_field_index("scale"), "scale", pa.array(scales))
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), path)

    with pytest.raises(InputError, match="scales of 8-bit rows of table 'items' are not finite and positive"):
        list(load_tables([path], TABLES[:1], ShardMap(1), 0)["items"])
