import os
import platform
import resource
import tempfile
import threading

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rayrec.embeddings.storage.disk import page_reads, record_log
from rayrec.embeddings.storage.disk.record_log import RecordLog
from rayrec.platform import files
from rayrec.platform.errors import InputError
from tests.helpers.examples import examples

READ_CALL = 0
NO_CALL = 9999
SMALL_SEGMENT = 2 * page_reads.ALIGNMENT


def records(first: int, num: int, words: int) -> np.ndarray:
    """Record i is i, i + 1, i + 2, ..."""
    return (first + np.arange(num)[:, None] + np.arange(words)).astype(np.int32)


@pytest.fixture(params=["queued", "threads", "without O_DIRECT"])
def way(request, monkeypatch):
    if request.param == "threads":
        monkeypatch.setattr(page_reads, "_CALLS", None)
    if request.param == "without O_DIRECT":
        monkeypatch.delattr(os, "O_DIRECT")
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("words", [1, 3, 68, 1024, 1025, 3000])
def test_records_come_back_in_the_order_asked_for(tmp_path, way, words):
    log = RecordLog(tmp_path, words)
    first, second = log.write(records(0, 700, words)), log.write(records(700, 300, words))
    addresses_M = np.concatenate((first, second))
    order_M = np.random.default_rng(0).integers(0, 1000, 2000)  # with repetitions
    assert (log.read(addresses_M[order_M]) == records(0, 1000, words)[order_M]).all()
    assert len(log) == 1000


def test_an_empty_call_changes_nothing(tmp_path):
    log = RecordLog(tmp_path, 5)
    assert len(log.write(records(0, 0, 5))) == 0
    assert log.read(np.empty(0, dtype=np.int64)).shape == (0, 5)
    assert log.compact() is None
    assert log.disk_bytes == 0


def test_records_of_another_width_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"records of 5 words, got shape \(3, 4\)"):
        RecordLog(tmp_path, 5).write(records(0, 3, 4))


def test_a_record_freed_twice_is_caught(tmp_path):
    log = RecordLog(tmp_path, 5)
    addresses_M = log.write(records(0, 3, 5))
    log.free(addresses_M[:1])
    with pytest.raises(AssertionError, match="1 records on disk were freed that are not there"):
        log.free(addresses_M)


def test_the_file_has_no_name(tmp_path):
    log = RecordLog(tmp_path, 5)
    log.write(records(0, 3, 5))
    assert list(tmp_path.iterdir()) == []


def test_closing_gives_the_file_back(tmp_path):
    log = RecordLog(tmp_path, 5)
    descriptor = log._descriptor
    log.close()
    log.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="missing: there is no such folder on this machine"):
        RecordLog(tmp_path / "missing", 5)


def test_a_folder_in_memory_is_refused_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "memory_file_system", lambda folder: "tmpfs")
    with pytest.raises(
        InputError, match=rf"{tmp_path} is in memory \(tmpfs\).*name a folder on a local disk"
    ):
        RecordLog(tmp_path, 5)
    assert list(tmp_path.iterdir()) == []
    RecordLog(tmp_path, 5, may_be_memory=True)


class LogMachine(RuleBasedStateMachine):
    """Any order of calls against a dictionary of records; segments of 2 pages with 4 records each."""

    WORDS = 250

    def __init__(self) -> None:
        super().__init__()
        self._before = record_log._SEGMENT_BYTES
        record_log._SEGMENT_BYTES = SMALL_SEGMENT
        self.log = RecordLog(tempfile.gettempdir(), self.WORDS)
        self.addresses: dict[int, int] = {}
        self.next_key = 0

    def teardown(self) -> None:
        record_log._SEGMENT_BYTES = self._before
        self.log.close()

    @rule(num=st.integers(1, 30))
    def write(self, num):
        keys = range(self.next_key, self.next_key + num)
        addresses_M = self.log.write(records(self.next_key, num, self.WORDS))
        self.addresses.update(zip(keys, addresses_M.tolist(), strict=True))
        self.next_key += num

    @precondition(lambda self: self.addresses)
    @rule(data=st.data())
    def free(self, data):
        keys = data.draw(st.lists(st.sampled_from(sorted(self.addresses)), unique=True))
        self.log.free(np.array([self.addresses.pop(key) for key in keys], dtype=np.int64))

    @rule()
    def compact(self):
        while (moved := self.log.compact()) is not None:
            self.addresses.update(zip(moved.words_KW[:, 0].tolist(), moved.addresses_K.tolist(), strict=True))

    @invariant()
    def holds_what_the_dictionary_holds(self):
        keys = np.array(sorted(self.addresses), dtype=np.int64)
        words = self.log.read(np.array([self.addresses[key] for key in keys.tolist()], dtype=np.int64))
        assert (words == (keys[:, None] + np.arange(self.WORDS))).all()
        assert len(set(self.addresses.values())) == len(self.addresses) == len(self.log)


LogMachine.TestCase.settings = examples(60, stateful_step_count=25)
TestLogBehavesLikeADictionary = LogMachine.TestCase


@pytest.mark.slow
def test_the_file_stays_within_twice_its_records_whatever_is_freed(tmp_path, monkeypatch):
    monkeypatch.setattr(record_log, "_SEGMENT_BYTES", 8 * page_reads.ALIGNMENT)
    words, num = 68, 6000
    log, random = RecordLog(tmp_path, words), np.random.default_rng(0)
    addresses_K = log.write(records(0, num, words))
    full = log.disk_bytes
    for _ in range(200):
        keys_M = random.choice(num, 500, replace=False)
        words_MW = log.read(addresses_K[keys_M])
        assert (words_MW[:, 0] == keys_M).all()
        log.free(addresses_K[keys_M])
        addresses_K[keys_M] = log.write(words_MW)
        while (moved := log.compact()) is not None:
            addresses_K[moved.words_KW[:, 0]] = moved.addresses_K
    assert (log.read(addresses_K) == records(0, num, words)).all()
    assert log.disk_bytes <= 2.3 * full


@pytest.fixture
def file_limit():
    """Sets the largest file that this process may write: a full disk, without filling one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_names_folder_and_need_and_loses_nothing(tmp_path, file_limit, monkeypatch):
    monkeypatch.setattr(record_log, "_SEGMENT_BYTES", SMALL_SEGMENT)
    log = RecordLog(tmp_path, 250)
    addresses_M = log.write(records(0, 50, 250))  # 13 pages
    file_limit(20 * page_reads.ALIGNMENT)
    before = log.disk_bytes
    with pytest.raises(OSError, match=r"no space on disk for 102,400 more bytes.*no row is lost") as caught:
        log.write(records(100, 100, 250))
    assert caught.value.filename == str(tmp_path)
    assert (len(log), log.disk_bytes) == (50, before)
    assert (log.read(addresses_M) == records(0, 50, 250)).all()
    file_limit(2**30)
    more_M = log.write(records(100, 100, 250))
    assert (log.read(more_M) == records(100, 100, 250)).all()


def test_a_full_disk_leaves_records_where_they_are(tmp_path, file_limit, monkeypatch):
    monkeypatch.setattr(record_log, "_SEGMENT_BYTES", SMALL_SEGMENT)
    log = RecordLog(tmp_path, 250)
    addresses_M = log.write(records(0, 64, 250))  # eight whole segments, none of them half full in a moment
    log.free(addresses_M[np.arange(64) % 8 > 2])
    file_limit(log.disk_bytes)
    assert log.compact() is None
    assert (log.read(addresses_M[::8]) == records(0, 64, 250)[::8]).all()
    file_limit(2**30)
    assert log.compact() is not None


def test_room_that_was_reserved_is_there_on_a_full_disk(tmp_path, file_limit):
    log = RecordLog(tmp_path, 250)
    log.reserve(20_000)
    file_limit(log.disk_bytes)
    addresses_M = log.write(records(0, 20_000, 250))
    assert (log.read(addresses_M) == records(0, 20_000, 250)).all()


def test_what_is_pinned_stays_readable_after_it_was_freed(tmp_path, monkeypatch):
    monkeypatch.setattr(record_log, "_SEGMENT_BYTES", SMALL_SEGMENT)
    log = RecordLog(tmp_path, 250)
    addresses_M = log.write(records(0, 40, 250))
    pin = log.pin()
    log.free(addresses_M)
    later_M = log.write(records(100, 40, 250))
    assert (log.read(addresses_M) == records(0, 40, 250)).all()
    log.unpin(pin)
    before = log.disk_bytes
    log.write(records(200, 30, 250))  # into what was freed
    assert log.disk_bytes == before
    assert (log.read(later_M) == records(100, 40, 250)).all()


def test_threads_read_while_one_writes_and_compacts(tmp_path, way, monkeypatch):
    monkeypatch.setattr(record_log, "_SEGMENT_BYTES", SMALL_SEGMENT)
    log = RecordLog(tmp_path, 250)
    kept_M = log.write(records(0, 64, 250))  # whole segments, so that compaction leaves them alone
    wrong, done = [], threading.Event()

    def read():
        while not done.is_set():
            if not (log.read(kept_M) == records(0, 64, 250)).all():
                wrong.append(1)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(30):
        log.free(log.write(records(1000, 20, 250))[3:])
        while log.compact() is not None:
            pass
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong


@pytest.fixture
def queued_log(tmp_path):
    log = RecordLog(tmp_path, 1023)  # a record a page, with its checksum
    if not log._reader._asynchronous:
        pytest.skip("no asynchronous I/O here")
    return log


def test_a_queue_that_is_full_is_emptied_before_more_is_put_in(queued_log, monkeypatch):
    depth = 12_000  # more than the kernel makes of a queue for one read
    reader, setup = queued_log._reader, page_reads._Ring.open
    monkeypatch.setattr(page_reads._Ring, "open", lambda depth, page_bytes: None)
    ring = reader._idle.pop()
    narrow = setup(1, page_reads.ALIGNMENT)
    reader._idle = [page_reads._Ring(narrow.calls, narrow.context, depth, page_reads.ALIGNMENT)]
    addresses_M = queued_log.write(records(0, depth, 1023))
    assert (queued_log.read(addresses_M, 2) == records(0, depth, 2)).all()
    ring.close()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls differ")
def test_a_queue_that_takes_nothing_is_done_without(queued_log):
    addresses_M = queued_log.write(records(0, 50, 1023))
    (ring,) = queued_log._reader._idle
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    queue = ring.context
    ring.context, ring.calls = reading, ring.calls._replace(submit=READ_CALL)  # from a pipe: try again
    assert (queued_log.read(addresses_M) == records(0, 50, 1023)).all()
    ring.context = queue
    os.close(reading)
    os.close(writing)


def test_a_queue_that_breaks_is_not_used_again_while_reads_may_still_arrive(queued_log):
    addresses_M = queued_log.write(records(0, 500, 1023))
    reader = queued_log._reader
    (ring,) = reader._idle
    ring.calls = ring.calls._replace(wait=NO_CALL)
    before = reader.num_bytes
    with pytest.raises(OSError, match="cannot read embedding rows back"):
        queued_log.read(addresses_M)
    assert reader._idle == []
    assert reader.num_bytes < before
    assert (queued_log.read(addresses_M) == records(0, 500, 1023)).all()
    assert ring not in reader._idle


def test_a_file_that_is_cut_off_is_an_error_not_zeros(tmp_path, way):
    log = RecordLog(tmp_path, 250)
    addresses_M = log.write(records(0, 200, 250))
    os.ftruncate(log._descriptor, page_reads.ALIGNMENT)
    with pytest.raises(OSError, match="cannot read embedding rows back") as caught:
        log.read(addresses_M)
    assert caught.value.filename == str(tmp_path)


@pytest.mark.parametrize("way", ["threads"], indirect=True)
def test_a_log_that_the_collector_finds_waits_for_no_thread(tmp_path, way, monkeypatch):
    """It may find it inside of a thread that starts, holding the lock that ending threads need."""
    log = RecordLog(tmp_path, 250)
    assert (log.read(log.write(records(0, 500, 250))) == records(0, 500, 250)).all()
    idle = list(log._reader._threads._threads)
    assert idle
    for thread in idle:
        monkeypatch.setattr(thread, "join", lambda timeout=None: pytest.fail("it waited"))
    log.close()
    for thread in idle:
        threading.Thread.join(thread, 10)
        assert not thread.is_alive()


def spoil(log: RecordLog, offset: int, content: bytes) -> None:
    """Change the file as a failing disk does."""
    descriptor = os.open(f"/proc/self/fd/{log._descriptor}", os.O_RDWR)
    os.pwrite(descriptor, content, offset)
    os.fsync(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize(("offset", "content"), [(0, bytes(1024)), (4 * 100, b"\x01")])
def test_a_block_that_the_disk_lost_or_changed_is_named(tmp_path, way, offset, content):
    """It was trained on, and went into the next snapshot under a valid checksum."""
    words = 100
    log = RecordLog(tmp_path, words)
    addresses_M = log.write(records(0, 1000, words))
    spoil(log, 2 * page_reads.ALIGNMENT + offset, content)
    is_spoiled_M = addresses_M // (1024 // (words + 1)) == 2

    assert (log.read(addresses_M[~is_spoiled_M]) == records(0, 1000, words)[~is_spoiled_M]).all()
    for num_words in (None, 1):
        with pytest.raises(
            OSError, match=r"block 2 of embedding rows on disk, at byte 8,192, is not as"
        ) as caught:
            log.read(addresses_M, num_words)
        assert caught.value.filename == str(tmp_path)


def test_what_a_lost_write_leaves_of_an_earlier_use_is_not_taken_for_new(tmp_path, monkeypatch):
    monkeypatch.setattr(record_log, "_SEGMENT_BYTES", SMALL_SEGMENT)
    log = RecordLog(tmp_path, 250)
    before_M = log.write(records(0, 8, 250))  # a segment
    other_M = log.write(records(100, 8, 250))
    with open(f"/proc/self/fd/{log._descriptor}", "rb") as file:
        earlier = file.read(page_reads.ALIGNMENT)
    log.free(before_M)
    after_M = log.write(records(200, 8, 250))
    assert set(after_M.tolist()) == set(before_M.tolist())

    spoil(log, 0, earlier)

    with pytest.raises(OSError, match="block 0 of embedding rows"):
        log.read(after_M)
    assert (log.read(other_M) == records(100, 8, 250)).all()
