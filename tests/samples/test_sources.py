import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.base.intervals import Interval
from rayrec.samples.reading.followed_plan import FollowedPlan
from rayrec.samples.reading.read_plan import Batching, ReadPlan, ReadSettings
from rayrec.samples.reading.reader import SampleReader
from rayrec.samples.reading.sources import ParquetSource
from tests.helpers.data import write_log


def plan_of(url, **more):
    return ReadPlan.over(url, ReadSettings(Batching(batch_size=6), window_rows=8), **more)


def read_all(plan):
    reader = SampleReader(plan.spec)
    return RowBatch.concatenate([reader.read_batch(plan.batch(step)) for step in range(plan.steps_per_epoch)])


def damage(path, start=4, stop=80):
    """The first pages of a file; its footer stays."""
    content = bytearray(path.read_bytes())
    content[start:stop] = bytes(stop - start)
    path.write_bytes(content)


def test_files_are_found_in_all_sub_folders_but_not_what_is_hidden(tmp_path):
    write_log(tmp_path, {"hour=01/b.parquet": 4, "hour=01/a.parquet": 4, "hour=00/z/c.parquet": 4})
    write_log(tmp_path, {"_temporary/x.parquet": 4, "hour=01/.y.parquet": 4, "hour=01/_y.parquet": 4})
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "notes.txt").write_text("x")
    source = ParquetSource.open(tmp_path)
    assert [file.name for file in source.files] == [
        "hour=00/z/c.parquet",
        "hour=01/a.parquet",
        "hour=01/b.parquet",
    ]
    assert source.files[0].group_rows == (4,)


@pytest.mark.parametrize("is_followed", [False, True])
def test_keys_of_folders_are_columns_for_those_who_ask_for_them(tmp_path, is_followed):
    """A filter on such a column said that there is none."""
    names = ("day=1/shop=a%2Fb/x.parquet", "day=2/shop=__HIVE_DEFAULT_PARTITION__/x.parquet")
    write_log(tmp_path, dict.fromkeys(names, 9))
    settings = ReadSettings(Batching(batch_size=6), window_rows=8)

    def plan(**more):
        if not is_followed:
            return ReadPlan.over(tmp_path, settings, **more)
        followed = FollowedPlan(tmp_path, settings, **more)
        followed.refresh()
        return followed

    def rows_of(plan, steps):
        reader = SampleReader(plan.spec)
        return RowBatch.concatenate([reader.read_batch(plan.batch(step)) for step in range(steps)]).rows

    assert plan().spec.schema.names == ["user_id", "item_ids", "price", "country"]
    found = rows_of(plan(columns=["shop", "user_id", "day"]), 3).to_pydict()
    pairs = sorted(zip(found["day"], found["shop"], strict=True), key=str)
    assert pairs == [("1", "a/b")] * 9 + [("2", None)] * 9
    assert rows_of(plan(columns=["day"], filters=[["shop", "==", "a/b"]]), 2)["day"].to_pylist() == ["1"] * 9
    assert rows_of(plan(filters=[["day", "in", ["2"]]]), 1).num_rows == 6
    for operator, value in ((">=", 2), (">=", "2"), ("==", 2), ("in", [1, 2])):
        with pytest.raises(InputError, match="is of a key of folders, which is a text: '10' would come"):
            plan(filters=[["day", operator, value]])
    write_log(tmp_path, {"y.parquet": 3})
    if not is_followed:  # a file outside of such folders: nobody can ask for them, and all else is as it was
        assert rows_of(plan(), 4).num_rows == 21
        why = r"found user_id, item_ids, price, country; y\.parquet is in no folder 'day=\.\.\.', others are"
        with pytest.raises(InputError, match=f"no column 'day'; {why}"):
            plan(columns=["day"])
        with pytest.raises(InputError, match=f"asks for column 'day', which is not there; {why}"):
            plan(filters=[["day", "in", ["1"]]])


def test_a_key_of_an_object_store_may_have_an_empty_part(tmp_path):
    write_log(tmp_path, {"a.parquet": 9})
    content = (tmp_path / "a.parquet").read_bytes()
    with fsspec.open("memory://odd-log//a.parquet", "wb") as file:
        file.write(content)
    assert read_all(plan_of("memory://odd-log")).num_rows == 9


def test_a_url_of_fsspec_is_read_like_a_folder(tmp_path):
    rows = write_log(tmp_path, {"a.parquet": 9, "sub/b.parquet": 5})
    for name in ("a.parquet", "sub/b.parquet"):
        with fsspec.open(f"memory://a-log/{name}", "wb") as file:
            file.write((tmp_path / name).read_bytes())
    there, here = plan_of("memory://a-log"), plan_of(tmp_path)
    assert there.order_fingerprint == here.order_fingerprint
    assert there.source.fingerprint == here.source.fingerprint
    assert read_all(there).rows.equals(read_all(here).rows)
    assert read_all(here).num_rows == len(rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda table: table.append_column("extra", pa.array(np.arange(4))),
            r"b.parquet: column 'extra' \(int64\) is not in a.parquet",
        ),
        (
            lambda table: table.drop_columns(["price"]),
            r"b.parquet: no column 'price', which a.parquet has \(float\); found user_id, item_ids, country",
        ),
        (
            lambda table: table.set_column(0, "user_id", table["user_id"].cast(pa.int32())),
            r"b.parquet: column 'user_id' is int32, in a.parquet it is int64",
        ),
    ],
)
def test_a_file_with_another_schema_is_named_with_column_and_types(tmp_path, change, message):
    write_log(tmp_path, {"a.parquet": 4, "b.parquet": 4, "c.parquet": 4})
    pq.write_table(change(pq.read_table(tmp_path / "b.parquet")), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=message):
        plan_of(tmp_path)


def test_two_columns_of_one_name_are_refused_where_they_are_read(tmp_path):
    """The run ended with a KeyError that said there was no such column; and a second file of the kind was
    refused where nobody read the column."""
    table = pa.Table.from_arrays([pa.array([[1], [2]])] * 3, names=["a", "a", "b"])
    settings = ReadSettings(Batching(batch_size=4))
    twice = "column 'a' is there twice in a, a, b; rename one"
    for number, name in enumerate(("x.parquet", "y.parquet"), start=1):
        pq.write_table(table, tmp_path / name)
        for open_plan in (ReadPlan.over, FollowedPlan):
            with pytest.raises(InputError, match=twice):
                open_plan(tmp_path, settings)
            with pytest.raises(InputError, match=twice):
                open_plan(tmp_path, settings, columns=["b"], filters=[["a", "==", 1]])
            by_tokens = ReadSettings(Batching(batch_tokens=9, length_of="a"))
            with pytest.raises(InputError, match=twice):
                open_plan(tmp_path, by_tokens, columns=["b"])
        plan = ReadPlan.over(tmp_path, settings, columns=["b"])
        followed = FollowedPlan(tmp_path, settings, columns=["b"])
        followed.refresh()
        for each in (plan, followed):
            rows = SampleReader(each.spec).read_batch(each.batch(0)).rows
            assert sorted(rows["b"].to_pylist()) == [[1]] * number + [[2]] * number


def test_two_columns_of_one_name_are_no_one_column(tmp_path):
    table = pa.Table.from_arrays([pa.array([1, 2])] * 3, names=["a", "a", "b"])
    settings = ReadSettings(Batching(batch_size=2))
    pq.write_table(table, tmp_path / "x.parquet")
    pq.write_table(table.select([0, 2]), tmp_path / "w.parquet")
    with pytest.raises(InputError, match=r"x\.parquet: column 'a' is there twice in a, a, b; rename"):
        ReadPlan.over(tmp_path, settings)
    with pytest.raises(InputError, match=r"x\.parquet: column 'a' is there twice in a, a"):
        FollowedPlan(tmp_path, settings).refresh()
    pq.write_table(table, tmp_path / "v.parquet")
    with pytest.raises(InputError, match=r"v\.parquet: column 'a' is there twice in a, a, b; rename"):
        ReadPlan.over(tmp_path, settings, columns=["b"])


def test_what_depends_on_the_writer_is_no_other_schema(tmp_path):
    """Order of columns, names and nullability of list elements, dictionaries."""
    rows = write_log(tmp_path, {"a.parquet": 4, "b.parquet": 4})
    table = pq.read_table(tmp_path / "b.parquet").select(["country", "item_ids", "price", "user_id"])
    strict = pa.list_(pa.field("element", pa.int64(), nullable=False))
    table = table.set_column(1, "item_ids", table["item_ids"].cast(strict))
    table = table.set_column(0, "country", table["country"].dictionary_encode())
    pq.write_table(table, tmp_path / "b.parquet", use_compliant_nested_type=False)
    found = read_all(plan_of(tmp_path)).rows
    assert found.schema.field("item_ids").type == pa.list_(pa.int64())
    assert sorted(map(str, found["country"].to_pylist())) == sorted(
        str(None if pd.isna(country) else country) for country in rows.country
    )
    assert sorted(map(str, found["item_ids"].to_pylist())) == sorted(
        str(items.tolist()) for items in rows.item_ids
    )


def test_a_folder_without_parquet_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no Parquet files; files have to end in \.parquet"):
        plan_of(tmp_path)
    with pytest.raises(InputError, match=r"nowhere: the folder cannot be listed"):
        plan_of(tmp_path / "nowhere")


@pytest.mark.parametrize("kept", [0, 3, 200, -1])
def test_a_truncated_file_is_named_or_skipped_and_counted(tmp_path, kept):
    write_log(tmp_path, {"a.parquet": 4, "b.parquet": 6})
    path = tmp_path / "a.parquet"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"a\.parquet: not a readable Parquet file, it may be truncated"):
        plan_of(tmp_path)
    plan = plan_of(tmp_path, on_corrupt="skip")
    assert plan.source.unreadable == ("a.parquet",)
    assert plan.groups.num_rows == 6
    (tmp_path / "b.parquet").unlink()
    with pytest.raises(InputError, match="none of its 1 Parquet files is readable"):
        plan_of(tmp_path, on_corrupt="skip")


def test_a_damaged_row_group_is_named(tmp_path):
    write_log(tmp_path, {"a.parquet": 12, "b.parquet": 8})
    damage(tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: row group 0 \(rows 0 to 3\) cannot be decoded"):
        read_all(plan_of(tmp_path))


def test_rows_of_a_damaged_row_group_are_left_out_and_listed_if_that_is_allowed(tmp_path):
    rows = write_log(tmp_path, {"a.parquet": 12, "b.parquet": 8})
    damage(tmp_path / "a.parquet")
    plan = plan_of(tmp_path, on_corrupt="skip")
    batch = read_all(plan)
    assert batch.cursor == [Interval("a.parquet", 4, 12), Interval("b.parquet", 0, 8)]
    assert batch.unreadable == [Interval("a.parquet", 0, 4)]
    left = rows[4:]
    assert sorted(batch.rows["user_id"].to_pylist()) == sorted(left.user_id)
    whole = read_all(plan_of_undamaged(tmp_path / "whole"))
    at = {key: row for row, key in enumerate(whole.row_keys_B.tolist())}
    order = [at[key] for key in batch.row_keys_B.tolist()]
    assert order == sorted(order)  # the others come in the order in which they would have come
    assert batch.rows.equals(whole.rows.take(pa.array(order)))


def plan_of_undamaged(folder):
    write_log(folder, {"a.parquet": 12, "b.parquet": 8})
    return plan_of(folder)


def test_rows_that_pass_a_filter_and_cannot_be_decoded_are_known_by_their_places(tmp_path):
    rows = write_log(tmp_path, {"a.parquet": 12})
    damage(tmp_path / "a.parquet")  # user_id of the first group; what the filter reads is whole
    batch = read_all(plan_of(tmp_path, on_corrupt="skip", filters=[["price", ">", 4.0]]))
    passing = rows[rows.price > 4.0].row
    read = [row for one in batch.cursor for row in range(one.start, one.stop)]
    lost = [row for one in batch.unreadable for row in range(one.start, one.stop)]
    assert read == [row for row in passing if row >= 4]
    assert lost == [row for row in passing if row < 4] != []


def test_row_groups_that_cannot_be_counted_are_left_out_if_that_is_allowed(tmp_path):
    write_log(tmp_path, {"a.parquet": 12})
    path = tmp_path / "a.parquet"
    start = pq.read_metadata(path).row_group(0).column(1).data_page_offset
    damage(path, start, start + 20)  # item_ids of the first group
    settings = ReadSettings(Batching(batch_tokens=9, length_of="item_ids"))
    with pytest.raises(InputError, match=r"a\.parquet: row group 0 \(rows 0 to 3\) cannot be decoded"):
        ReadPlan.over(tmp_path, settings)
    plan = ReadPlan.over(tmp_path, settings, on_corrupt="skip")
    assert plan.groups.unreadable == (Interval("a.parquet", 0, 4),)
    assert read_all(plan).cursor == [Interval("a.parquet", 4, 12)]


@pytest.mark.parametrize("on_corrupt", ["stop", "skip"])
def test_a_file_that_has_changed_or_vanished_since_is_named_and_never_skipped(tmp_path, on_corrupt):
    write_log(tmp_path, {"a.parquet": 12})
    plan = plan_of(tmp_path, on_corrupt=on_corrupt)
    path = tmp_path / "a.parquet"
    write_log(tmp_path, {"a.parquet": 12}, seed=1)
    with pytest.raises(InputError, match=r"a\.parquet: the file has changed since the run was planned"):
        read_all(plan)
    path.unlink()
    with pytest.raises(InputError, match=r"a\.parquet: the file is missing"):
        read_all(plan)


def test_what_went_wrong_once_may_be_put_right(tmp_path):
    write_log(tmp_path, {"a.parquet": 12})
    plan, path = plan_of(tmp_path), tmp_path / "a.parquet"
    reader = SampleReader(plan.spec)
    path.rename(tmp_path / "away")
    with pytest.raises(InputError, match="the file is missing"):
        reader.read_batch(plan.batch(0))
    (tmp_path / "away").rename(path)
    assert reader.read_batch(plan.batch(0)).num_rows == 6
