"""Rows of a log are in files, each once, whatever the disk does meanwhile."""

import os
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from rayrec.platform.remote_files import remote_folder
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.reading.followed_plan import FollowedPlan
from rayrec.samples.reading.read_plan import Batching, ReadSettings
from rayrec.samples.reading.reader import SampleReader
from rayrec.serve.events.parquet_log import ParquetLog

SCHEMA = pa.schema([("number", pa.int64()), ("name", pa.string())])


def row(number: int) -> dict[str, object]:
    return {"number": number, "name": str(number)}


def wait_until(holds) -> None:
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.005)


def numbers(folder: Path) -> list[int]:
    files = [pq.ParquetFile(path).read() for path in folder.rglob("part-*.parquet")]
    return sorted(number for file in files for number in file["number"].to_pylist())


def test_a_file_comes_when_enough_rows_have_and_the_rest_at_the_end(tmp_path):
    log = ParquetLog(str(tmp_path), SCHEMA, roll_s=3600, roll_rows=3)
    for number in range(4):
        log.offer(row(number))
    wait_until(lambda: log.status.files == 1)
    assert numbers(tmp_path) == [0, 1, 2]
    assert log.status.queued == 1
    log.close()
    assert numbers(tmp_path) == [0, 1, 2, 3]
    assert (log.status.rows, log.status.dropped, log.status.queued) == (4, 0, 0)


def test_a_row_does_not_wait_for_others(tmp_path):
    log = ParquetLog(str(tmp_path), SCHEMA, roll_s=0.02)
    log.offer({"number": 7})
    wait_until(lambda: log.status.files == 1)
    (path,) = tmp_path.rglob("part-*.parquet")
    assert path.parent.name.startswith("date=")
    assert pq.ParquetFile(path).read().to_pylist() == [{"number": 7, "name": None}]
    log.close()


def test_what_finds_no_room_is_told_or_counted_and_room_can_be_given_back(tmp_path):
    log = ParquetLog(str(tmp_path), SCHEMA, roll_s=3600, max_queued=3)
    assert log.reserve(2)
    assert not log.reserve(2)
    log.release(1)
    assert log.reserve(2)
    log.offer(row(9))
    assert log.status.dropped == 1
    log.add([row(0), row(1), row(2)])
    log.close()
    assert numbers(tmp_path) == [0, 1, 2]
    assert not log.reserve(1)
    log.offer(row(3))
    assert log.status.dropped == 2


def test_a_folder_that_cannot_be_written_loses_nothing_and_is_told_once(tmp_path, caplog):
    folder = tmp_path / "log"
    folder.write_text("a file where the folder should be")
    log = ParquetLog(str(folder), SCHEMA, roll_s=0.01, retry_s=0.01)
    log.offer(row(0))
    wait_until(lambda: log.status.failures >= 3)
    log.offer(row(1))
    folder.unlink()
    wait_until(lambda: log.status.rows == 2)
    log.close()
    assert numbers(folder) == [0, 1]
    assert caplog.text.count("cannot be written") == 1
    assert caplog.text.count("can be written again") == 1


def test_rows_that_fit_no_column_are_left_out_and_counted(tmp_path, caplog):
    log = ParquetLog(str(tmp_path), SCHEMA, roll_s=3600)
    for unfit in ({"name": "\ud800"}, {"number": "x"}, {"number": 2**70}):
        log.offer(unfit)
    log.offer(row(1))
    log.close()
    assert numbers(tmp_path) == [1]
    assert (log.status.rows, log.status.dropped, log.status.failures) == (1, 3, 0)
    assert "3 rows do not fit" in caplog.text


def test_a_log_of_unfit_rows_alone_makes_no_file(tmp_path):
    log = ParquetLog(str(tmp_path), SCHEMA, roll_s=3600)
    log.offer({"number": "x"})
    log.close()
    assert (log.status.files, log.status.dropped) == (0, 1)


def test_texts_are_bounded_by_their_bytes_and_written_before_they_fill_the_memory(tmp_path):
    folder = tmp_path / "log"
    folder.write_text("a file where the folder should be")
    log = ParquetLog(str(folder), SCHEMA, roll_s=3600, retry_s=0.01, max_bytes=100)
    for number in range(5):
        log.offer({"number": number, "name": "x" * 40})
    assert log.status.dropped == 3
    wait_until(lambda: log.status.failures > 0)
    folder.unlink()
    wait_until(lambda: log.status.rows == 2)
    log.offer({"number": 7, "name": "x" * 40})
    log.close()
    assert numbers(folder) == [0, 1, 7]


def test_what_cannot_be_written_at_the_end_is_counted(tmp_path):
    folder = tmp_path / "log"
    folder.write_text("a file where the folder should be")
    log = ParquetLog(str(folder), SCHEMA, roll_s=3600)
    log.offer(row(0))
    log.close()
    assert (log.status.rows, log.status.dropped) == (0, 1)


def test_readers_never_see_half_of_a_file_and_no_thread_loses_a_row(tmp_path):
    log = ParquetLog(str(tmp_path), SCHEMA, roll_s=0.001, roll_rows=50)
    each, num_threads = 300, 4
    done = threading.Event()
    broken: list[Exception] = []

    def read() -> None:
        while not done.is_set():
            for path in tmp_path.rglob("*.parquet"):
                if path.name.startswith("."):
                    continue
                try:
                    pq.ParquetFile(path).read()
                except Exception as error:
                    broken.append(error)

    def write(first: int) -> None:
        for number in range(first, first + each):
            log.offer(row(number))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(each * number,)) for number in range(num_threads)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    log.close()
    done.set()
    reader.join()
    assert not broken
    assert numbers(tmp_path) == list(range(each * num_threads))
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_files_go_to_any_file_system(tmp_path):
    url = f"memory://{tmp_path.name}/log"
    log = ParquetLog(url, SCHEMA, roll_s=3600)
    log.offer(row(5))
    log.close()
    folder = remote_folder(url)
    found = folder.filesystem.get_file_info(fs.FileSelector(folder.path, recursive=True))
    (path,) = [info.path for info in found if info.type == fs.FileType.File]
    assert pq.read_table(path, filesystem=folder.filesystem, partitioning=None)["number"].to_pylist() == [5]


def test_a_run_that_follows_the_log_reads_each_row_once(tmp_path):
    log = ParquetLog(str(tmp_path), SCHEMA, roll_s=3600, roll_rows=4)
    for number in range(4):
        log.offer(row(number))
    wait_until(lambda: log.status.files == 1)
    plan = FollowedPlan(tmp_path, ReadSettings(Batching(batch_size=2), seed=0, window_rows=8))
    plan.refresh()
    assert plan.known_steps == 2

    for number in range(4, 8):
        log.offer(row(number))
    log.close()
    plan.refresh()

    reader = SampleReader(plan.spec)
    batches = [reader.read_batch(plan.batch(step)) for step in range(plan.known_steps)]
    assert sorted(RowBatch.concatenate(batches).rows["number"].to_pylist()) == list(range(8))


def test_others_read_no_file_of_a_log_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        log = ParquetLog(str(tmp_path / "log"), SCHEMA, roll_s=3600)
        log.offer(row(1))
        log.close()
    finally:
        os.umask(before)
    (file,) = (tmp_path / "log").rglob("part-*.parquet")
    for path in (file, file.parent):
        assert path.stat().st_mode & 0o007 == 0, path
