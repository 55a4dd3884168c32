import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.pipelines.runs.accepted_files import AcceptedFiles
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.base.intervals import Interval
from rayrec.samples.reading.cursor import Cursor
from rayrec.samples.reading.followed_plan import FollowedPlan
from rayrec.samples.reading.read_plan import Batching, ReadSettings, readings
from rayrec.samples.reading.reader import SampleReader
from tests.helpers.data import write_log

SETTINGS = ReadSettings(Batching(batch_size=5), seed=3, window_rows=8)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def follow(folder, settings=SETTINGS, **more):
    plan = FollowedPlan(folder, settings, **more)
    plan.refresh()
    return plan


def restored(plan, folder, next_step, settings=SETTINGS, **more):
    return FollowedPlan.restore(json.loads(json.dumps(plan.to_json())), folder, settings, next_step, **more)


def read(plan, steps):
    reader = SampleReader(plan.spec)
    return RowBatch.concatenate([reader.read_batch(plan.batch(step)) for step in steps])


def cut_off(folder, name, count=6):
    """A file that its writer has not completed; returns how to complete it."""
    write_log(folder, {name: count}, seed=7)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-20])
    return lambda: (folder / name).write_bytes(content)


def test_what_comes_later_is_read_later_and_once(tmp_path):
    write_log(tmp_path, {"hour=01/a.parquet": 12})
    plan = follow(tmp_path)
    assert (plan.known_steps, plan.batch(3)) == (3, None)
    assert plan.refresh() == 0
    write_log(tmp_path, {"hour=02/a.parquet": 6, "hour=01/0-late.parquet": 3}, seed=1)
    assert plan.refresh() == 2
    assert [plan.batch(step).epoch for step in range(5)] == [0, 0, 0, 1, 1]
    cursor = Cursor(plan.fingerprint)
    reader = SampleReader(plan.spec)
    for step in range(plan.known_steps):
        batch = plan.batch(step)
        cursor.commit(batch.epoch, reader.read_batch(batch).cursor)
    assert cursor.intervals(0) == [Interval("hour=01/a.parquet", 0, 12)]
    assert cursor.intervals(1) == [
        Interval("hour=01/0-late.parquet", 0, 3),
        Interval("hour=02/a.parquet", 0, 6),
    ]
    keys = read(plan, range(5)).row_keys_B.tolist()
    assert len(set(keys)) == 21


def test_a_reader_goes_on_with_files_that_came_after_it_was_made(tmp_path):
    write_log(tmp_path, {"a.parquet": 6})
    plan = follow(tmp_path)
    reader = SampleReader(plan.spec)
    reader.read_batch(plan.batch(0))
    write_log(tmp_path, {"b.parquet": 4})
    plan.refresh()
    assert reader.read_batch(plan.batch(2)).cursor == [Interval("b.parquet", 0, 4)]


def test_neighboring_segments_of_one_window_belong_to_different_readers(tmp_path):
    plan = None
    for name in "abcd":
        write_log(tmp_path, {f"{name}.parquet": 3})
        plan = plan or follow(tmp_path)
        plan.refresh()
    found = [readings(plan, plan.batch(step), 2)[0] for step in range(4)]
    assert [one.reader for one in found] == [0, 1, 0, 1]
    assert [one.ahead and one.ahead.epoch for one in found[-2:]] == [None, None]


def test_a_restored_plan_reads_the_same_rows_in_the_same_steps(tmp_path):
    write_log(tmp_path, {"b.parquet": 12})
    plan = follow(tmp_path)
    write_log(tmp_path, {"a.parquet": 9}, seed=1)  # later, though its name is the first
    plan.refresh()
    write_log(tmp_path, {"0.parquet": 4}, seed=2)
    again = restored(plan, tmp_path, next_step=1)
    assert [again.position(step) for step in range(6)] == [plan.position(step) for step in range(6)]
    assert again.fingerprint == plan.fingerprint
    again.refresh()
    plan.refresh()
    assert again.known_steps == plan.known_steps == 6
    theirs, ours = read(again, range(1, 6)), read(plan, range(1, 6))
    assert theirs.row_keys_B.tolist() == ours.row_keys_B.tolist()
    assert theirs.rows.equals(ours.rows)


def test_what_was_accepted_is_hashed_and_written_down_once(tmp_path, monkeypatch):
    """A snapshot and an arrival cost more with every file that a run had ever accepted."""
    plan = None
    for name in "abcd":
        write_log(tmp_path / "log", {f"{name}.parquet": 3})
        plan = plan or follow(tmp_path / "log")
        plan.refresh()
    positions = [plan.position(step) for step in range(5)]
    assert [plan.position(step) for step in (3, 0, 4, 1, 2)] == [positions[step] for step in (3, 0, 4, 1, 2)]
    assert restored(plan, tmp_path / "log", next_step=0).position(4) == positions[4]

    accepted = AcceptedFiles(tmp_path)
    accepted.keep(plan)
    asked, segments_to_json = [], plan.segments_to_json

    def counted(first):
        asked.append(first)
        return segments_to_json(first)

    monkeypatch.setattr(plan, "segments_to_json", counted)
    accepted.keep(plan)
    write_log(tmp_path / "log", {"e.parquet": 3})
    plan.refresh()
    accepted.keep(plan)

    assert asked == [4]
    assert len(AcceptedFiles(tmp_path).state_since(None)["segments"]) == 5


def test_a_file_copied_back_is_the_same_file(tmp_path):
    """Its time of writing has changed, what it holds has not."""
    write_log(tmp_path, {"a.parquet": 12})
    plan = follow(tmp_path)
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "a.parquet").write_bytes(content)
    assert read(restored(plan, tmp_path, next_step=0), range(3)).num_rows == 12


def test_files_that_have_been_read_may_go_but_not_those_that_are_still_needed(tmp_path):
    write_log(tmp_path, {"a.parquet": 12})
    plan = follow(tmp_path)
    write_log(tmp_path, {"b.parquet": 12})
    plan.refresh()
    (tmp_path / "a.parquet").unlink()
    assert read(restored(plan, tmp_path, next_step=3), range(3, 6)).num_rows == 12
    with pytest.raises(InputError, match=r"a\.parquet: the file is missing, and not all of it has been read"):
        restored(plan, tmp_path, next_step=2)
    write_log(tmp_path, {"b.parquet": 12}, seed=9)
    with pytest.raises(InputError, match=r"b\.parquet: the file has changed since the run accepted it"):
        restored(plan, tmp_path, next_step=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": ReadSettings(Batching(batch_size=6), 3, 8)}, "the run was begun with batching"),
        (
            {"settings": ReadSettings(Batching(batch_size=5), 4, 8)},
            "the run was begun with seed 3, now it is 4",
        ),
        ({"filters": [["price", ">", 1.0]]}, "the run was begun with filters"),
    ],
)
def test_a_plan_is_not_restored_with_another_order(tmp_path, changes, message):
    write_log(tmp_path, {"a.parquet": 12})
    with pytest.raises(InputError, match=message):
        restored(follow(tmp_path), tmp_path, 0, **changes)


def test_a_state_of_another_format_is_refused(tmp_path):
    write_log(tmp_path, {"a.parquet": 12})
    with pytest.raises(InputError, match="has format 7, this version reads 1"):
        FollowedPlan.restore({"format": 7}, tmp_path, SETTINGS, 0)


def test_a_file_without_its_footer_is_waited_for(tmp_path):
    write_log(tmp_path, {"b.parquet": 5})
    complete, clock = cut_off(tmp_path, "a.parquet"), Clock()
    plan = follow(tmp_path, patience_s=10.0, clock=clock)
    assert [file.name for file in plan.files] == ["b.parquet"]
    clock.now = 9.0
    assert plan.refresh() == 0
    complete()
    clock.now = 11.0
    assert plan.refresh() == 2
    assert [file.name for file in plan.files] == ["b.parquet", "a.parquet"]


def test_patience_begins_anew_whenever_the_file_grows_and_then_ends(tmp_path):
    write_log(tmp_path, {"b.parquet": 5})
    path, clock = tmp_path / "a.parquet", Clock()
    path.write_bytes(b"PAR1")
    plan = follow(tmp_path, patience_s=10.0, clock=clock)
    for clock.now in (9.0, 18.0):
        path.write_bytes(path.read_bytes() + b"more")
        plan.refresh()
    clock.now = 28.0
    with pytest.raises(InputError, match=r"a\.parquet: not a readable Parquet file since 10 s"):
        plan.refresh()


def test_a_file_that_is_given_up_is_named_and_looked_at_again_when_it_changes(tmp_path, caplog):
    write_log(tmp_path, {"b.parquet": 5})
    complete = cut_off(tmp_path, "a.parquet")
    with caplog.at_level(logging.WARNING):
        plan = follow(tmp_path, patience_s=0.0, on_corrupt="skip")
        plan.refresh()
    assert len(caplog.messages) == 1
    assert "a.parquet" in caplog.messages[0]
    assert list(plan.unreadable) == ["a.parquet"]
    again = restored(plan, tmp_path, next_step=0, on_corrupt="skip")
    assert list(again.unreadable) == ["a.parquet"]
    complete()
    assert again.refresh() == 2
    assert not again.unreadable


def test_columns_that_are_read_may_not_change_and_others_may(tmp_path):
    write_log(tmp_path, {"a.parquet": 5})
    plan = follow(tmp_path, columns=["user_id"], filters=[["price", ">", 0.0]])
    write_log(tmp_path, {"b.parquet": 5})
    path = tmp_path / "b.parquet"
    table = pq.read_table(path).drop_columns(["country"]).append_column("new", pa.array(range(5)))
    pq.write_table(table, path)
    assert plan.refresh() == 1
    pq.write_table(table.drop_columns(["price"]), tmp_path / "c.parquet")
    with pytest.raises(InputError, match=r"c\.parquet: no column 'price', which a.parquet has"):
        plan.refresh()


def test_files_of_which_no_row_passes_make_no_step(tmp_path):
    write_log(tmp_path, {"a.parquet": 5})
    plan = follow(tmp_path, filters=[["country", "==", "nowhere"]])
    assert (plan.known_steps, plan.batch(0)) == (0, None)
    assert len(plan.files) == 1
    assert restored(plan, tmp_path, 0, filters=[["country", "==", "nowhere"]]).known_steps == 0


def test_batches_by_length_are_cut_in_every_segment(tmp_path):
    settings = ReadSettings(Batching(batch_tokens=12, length_of="item_ids"), seed=1, window_rows=8)
    rows = write_log(tmp_path, {"a.parquet": 12})
    plan = follow(tmp_path, settings)
    first = plan.known_steps
    rows_later = write_log(tmp_path, {"b.parquet": 12}, seed=4)
    plan.refresh()
    again = restored(plan, tmp_path, first - 1, settings)
    assert read(again, range(first - 1, again.known_steps)).rows.equals(
        read(plan, range(first - 1, plan.known_steps)).rows
    )
    assert read(plan, range(first)).num_rows == len(rows)
    assert read(plan, range(first, plan.known_steps)).num_rows == len(rows_later)


def test_a_folder_without_a_complete_file_cannot_be_followed_yet(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="there is no complete Parquet file yet"):
        FollowedPlan(tmp_path, SETTINGS)
