"""Event stores, embedded and as a service: what was appended, in whatever order, is what is read."""

import itertools
import multiprocessing
import pickle
import shutil
import subprocess
import threading
from contextlib import closing, contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError, UnavailableError
from rayrec.samples.stores import (
    EventBatch,
    RetryConfig,
    StoreManifest,
    StoreUnavailableError,
    TimeWindow,
    feed,
    open_store,
)
from rayrec.samples.stores.key_values import Commit
from rayrec.samples.stores.retry import Retry
from rayrec.samples.stores.store import append_sides
from tests.helpers.examples import examples
from tests.helpers.redis_server import RedisServer

MANIFEST = StoreManifest(
    columns={"behaviors": "int8", "price": "float64"}, behaviors=("view", "buy"), chunk_events=4
)
IMPATIENT = RetryConfig(attempts=3, first_wait_s=0.01, timeout_s=0.5)
_numbers = itertools.count()


@pytest.fixture(params=["lmdb", "redis"])
def address(request, tmp_path):
    """Where a new store may be made."""
    if request.param == "lmdb":
        return str(tmp_path / "store")
    return f"{request.getfixturevalue('redis_server').url}#test{next(_numbers)}"


@pytest.fixture
def store(address):
    store = open_store(address, create=MANIFEST)
    yield store
    store.close()


def batch(events):
    """(key, time, item, behavior, price) of each."""
    columns = list(zip(*events, strict=True)) or [()] * 5
    keys_E, times_E, items_E, behaviors_E = (np.array(column, dtype=np.int64) for column in columns[:4])
    return EventBatch(
        keys_E, times_E, items_E, {"behaviors": behaviors_E, "price": np.array(columns[4], dtype=float)}
    )


def read(store, keys, window=None):
    """[(time, item, behavior, price), ...] of each key."""
    histories = store.get_many(np.array(keys, dtype=np.int64), window=window)
    names = ("times", "items", "behaviors", "price")
    rows = list(zip(*(histories.columns[name].tolist() for name in names), strict=True))
    return [rows[start:stop] for start, stop in itertools.pairwise(histories.offsets_K1.tolist())]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from([-(2**63), -1, 0, 7, 2**63 - 1]),
        st.integers(0, 30),
        st.integers(0, 3),
        st.integers(0, 1),
        st.sampled_from([0.5, 2.0]),
    ),
    max_size=60,
)


@examples(40)
@given(st.lists(EVENTS, max_size=5))
def test_a_store_is_the_set_of_its_events_however_they_came(tmp_path_factory, batches):
    """Order by time; ties alike for any order of appends; duplicates once; counts that add up."""
    one, other = (open_store(tmp_path_factory.mktemp("store") / "s", create=MANIFEST) for _ in range(2))
    keys = [-(2**63), -1, 0, 7, 2**63 - 1, 5]
    expected: set = set()
    for events in batches:
        report = one.append(batch(events))
        assert report.added == len(set(events) - expected)
        assert report.added + report.duplicates == len(events)
        expected |= set(events)
    by_item = sorted(expected, key=lambda event: event[2:] + event[:2])
    for third in range(3):
        other.append(batch(by_item[third::3]))

    found = read(one, keys)
    assert found == read(other, keys)
    for key, events in zip(keys, found, strict=True):
        assert set(events) == {event[1:] for event in expected if event[0] == key}
        assert [time for time, *_ in events] == sorted(time for time, *_ in events)
    assert sorted(itertools.chain.from_iterable(part.tolist() for part in one.key_batches(3))) == sorted(
        {event[0] for event in expected}
    )
    one.close()
    other.close()


def test_both_kinds_of_store_hold_the_same(store):
    random = np.random.default_rng(0)
    expected: set = set()
    for _ in range(6):
        events = [tuple(random.integers(0, high) for high in (5, 40, 4, 2, 2)) for _ in range(50)]
        events = [(int(k), int(t), int(i), int(b), float(p)) for k, t, i, b, p in events]
        store.append(batch(events))
        expected |= set(events)
    for key, events in enumerate(read(store, range(6))):
        assert sorted(events) == sorted(event[1:] for event in expected if event[0] == key)
    assert [part.tolist() for part in store.key_batches(2)] == [[0, 1], [2, 3], [4]]


def test_both_sides_of_a_log_are_in_one_store(store, address):
    """What users did and who met an item: each as if it were alone, appended in one transaction."""
    events = [(u, n, i, n % 2, float(n)) for n, (u, i) in enumerate([(1, 9), (2, 9), (1, 8), (1, 9)] * 5)]
    by_item = open_store(address, create=MANIFEST.model_copy(update={"by": "item"}), by="item")
    parts = [batch(events[:7]), batch([]), batch(events[5:])]

    reports = append_sides([(store, parts), (by_item, [part.reversed() for part in parts])])

    assert [(report.added, report.duplicates) for report in reports] == [(7, 0), (0, 0), (13, 2)]
    for side, place, keys in ((store, 0, [1, 2]), (by_item, 2, [8, 9])):
        expected = [[(e[1], e[2 - place], *e[3:]) for e in events if e[place] == key] for key in keys]
        assert read(side, keys) == expected
        assert sorted(np.concatenate(list(side.key_batches(1))).tolist()) == keys
        assert append_sides([(side, [parts[2] if place == 0 else parts[2].reversed()])])[0].added == 0
    assert store.manifest.fingerprint != by_item.manifest.fingerprint
    assert store.manifest.log_fingerprint == by_item.manifest.log_fingerprint
    by_item.close()
    again = open_store(address, by="item")
    assert again.manifest.by == "item"
    assert read(again, [8]) == [[(e[1], e[0], *e[3:]) for e in events if e[2] == 8]]
    again.close()


def test_a_store_without_a_side_says_how_it_is_built(store, address):
    with pytest.raises(InputError, match=r"no event store by item; .* --by item` builds one"):
        open_store(address, by="item")
    assert b'"by"' not in store.manifest.to_bytes(), "earlier versions read it"


def test_nothing_is_appended_where_one_side_cannot_be(store, address, monkeypatch):
    by_item = open_store(address, create=MANIFEST.model_copy(update={"by": "item"}), by="item")
    part = batch([(1, 5, 9, 0, 1.0)])
    merged = type(store)._merged

    def failing(self, *arguments):
        if self is by_item:
            raise MemoryError
        return merged(self, *arguments)

    monkeypatch.setattr(type(store), "_merged", failing)
    with pytest.raises(MemoryError):
        append_sides([(store, [part]), (by_item, [part.reversed()])])

    assert read(store, [1]) == [[]]
    by_item.close()


@examples(60)
@given(
    EVENTS,
    st.integers(0, 31),
    st.integers(0, 31),
    st.integers(1, 12),
)
def test_a_window_brings_what_it_promises(tmp_path_factory, events, first, second, last):
    store = open_store(tmp_path_factory.mktemp("store") / "s", create=MANIFEST)
    store.append(batch(events))
    keys = [-1, 0, 7]
    earliest, latest = sorted((first, second))
    window = TimeWindow(np.full(3, earliest), np.full(3, latest), last)
    for some, whole in zip(read(store, keys, window), read(store, keys), strict=True):
        for time in range(earliest, latest + 1):
            before = [[event for event in part if event[0] < time][-last:] for part in (some, whole)]
            assert before[0] == before[1]
    store.close()


def test_a_long_history_is_read_and_rewritten_in_part(tmp_path):
    """Of 10,000 events, an append of one writes its head, and the newest 4 before a time cost two chunks."""
    store = open_store(tmp_path / "store", create=MANIFEST)
    store.append(batch([(1, time, time, 0, 0.0) for time in range(10_000)]))
    written = []
    transact = store._transact
    store._transact = lambda change: transact(lambda read: written.append(change(read)) or written[-1])

    store.append(batch([(1, 10_000, 5, 0, 0.0)]))
    store.append(batch([(1, 10_001, 5, 0, 0.0)]))

    assert [len(commit.changes) for commit in written] == [1, 1]
    few = store.get_many(np.array([1]), window=TimeWindow(np.array([5000]), np.array([5000]), 4))
    head = 4 + 3  # the newest are always there
    assert len(few.times_N) <= 2 * MANIFEST.chunk_events + head
    store.close()


def test_late_events_are_counted(store):
    assert store.append(batch([(1, 5, 1, 0, 0.0), (1, 9, 1, 0, 0.0)])).late == 0
    report = store.append(batch([(1, 7, 1, 0, 0.0), (1, 10, 1, 0, 0.0), (2, 1, 1, 0, 0.0)]))
    assert (report.added, report.late, report.duplicates) == (3, 1, 0)


def test_a_store_is_found_again_as_it_was_made(store, address):
    store.append(batch([(1, 5, 1, 0, 0.5)]))
    again = open_store(address)
    assert again.manifest == MANIFEST
    assert read(again, [1, 2]) == [[(5, 1, 0, 0.5)], []]
    again.close()
    assert read(store, [1]) == [[(5, 1, 0, 0.5)]]  # closing one does not close the other


def test_there_is_no_store(address):
    with pytest.raises(InputError, match="there is no event store; `rayrec data store"):
        open_store(address)


def test_unknown_addresses_and_taken_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match="nothing here reads ftp://"):
        open_store("ftp://host/store")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="something else is there"):
        open_store(tmp_path, create=MANIFEST)


def test_events_must_have_the_columns_of_the_store(store):
    with pytest.raises(InputError, match="append exactly those that the store has, times, items, behaviors"):
        store.append(EventBatch(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)))
    with pytest.raises(InputError, match="column behaviors holds int8 and cannot hold all values, which lie"):
        store.append(batch([(1, 5, 1, 300, 0.0)]))
    assert read(store, [1]) == [[]]


def test_damaged_values_are_refused(tmp_path):
    store = open_store(tmp_path / "store", create=MANIFEST)
    store.append(batch([(1, 5, 1, 0, 0.0)]))
    transact = store._transact

    def cut(change):
        transact(lambda read: Commit({name: value[:-8] for name, value in change(read).changes.items()}))

    store._transact = cut
    store.append(batch([(1, 6, 1, 0, 0.0)]))
    with pytest.raises(InputError, match="a value is damaged"):
        read(store, [1])
    store.close()


def test_concurrent_writers_lose_nothing(store, address):
    def write(first):
        mine = open_store(address, RetryConfig(attempts=200, first_wait_s=0.001, longest_wait_s=0.01))
        for time in range(first, 60, 3):
            mine.append(batch([(1, time, 1, 0, 0.0)]))
        mine.close()

    writers = [threading.Thread(target=write, args=(first,)) for first in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [time for time, *_ in read(store, [1])[0]] == list(range(60))


def test_attempts_are_bounded_and_their_pauses_grow():
    pauses, calls = [], []

    def fail():
        calls.append(1)
        raise ConnectionError("refused")

    retry = Retry(
        RetryConfig(attempts=5, first_wait_s=1, longest_wait_s=5), pauses.append, lambda low, high: high
    )
    with pytest.raises(StoreUnavailableError) as caught:
        retry("redis://host", fail, (ConnectionError,))

    assert len(calls) == 5
    assert pauses == [1, 2, 4, 5]
    assert str(caught.value) == (
        "redis://host: no answer in 5 attempts, the last one failed with: ConnectionError: refused"
    )
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, UnavailableError)
    assert (again.service, again.attempts, again.reason) == ("redis://host", 5, "ConnectionError: refused")


def test_a_service_that_is_down_is_named_and_one_that_comes_back_is_used_again(tmp_path):
    server = RedisServer(tmp_path)
    try:
        pauses = []
        store = open_store(server.url, IMPATIENT, create=MANIFEST, sleep=pauses.append)
        store.append(batch([(1, 5, 1, 0, 0.0)]))
        server.stop()
        for request in (lambda: read(store, [1]), lambda: store.append(batch([(1, 6, 1, 0, 0.0)]))):
            with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1.*3 attempts.*ConnectionError"):
                request()
        assert len(pauses) == 4
        server.start()
        assert store.append(batch([(1, 5, 1, 0, 0.0)])).added == 1  # it keeps nothing
        assert read(store, [1]) == [[(5, 1, 0, 0.0)]]
        store.close()
    finally:
        server.stop()


def test_a_request_waits_for_a_service_that_restarts(tmp_path):
    server = RedisServer(tmp_path)
    try:
        store = open_store(server.url, IMPATIENT, create=MANIFEST, sleep=lambda seconds: server.start())
        server.stop()
        assert store.append(batch([(1, 5, 1, 0, 0.0)])).added == 1
        store.close()
    finally:
        server.stop()


def test_passwords_open_a_service_and_are_not_told(tmp_path):
    server = RedisServer(tmp_path, "--requirepass", "secret")
    try:
        url = server.url.replace("redis://", "redis://:secret@")
        store = open_store(url, IMPATIENT, create=MANIFEST)
        assert "secret" not in store.name
        assert store.name.startswith("redis://:***@127.0.0.1")
        store.close()
        for wrong in (server.url, url.replace("secret", "guess")):
            with pytest.raises(InputError, match="give the user and password") as caught:
                open_store(wrong, IMPATIENT)
            assert "guess" not in str(caught.value)
    finally:
        server.stop()


def test_a_service_may_be_reached_by_tls(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    server = RedisServer(tmp_path, tls=(key, certificate))
    try:
        url = server.url.replace("redis://", "rediss://")
        store = open_store(f"{url}?ssl_ca_certs={certificate}", IMPATIENT, create=MANIFEST)
        store.append(batch([(1, 5, 1, 0, 0.0)]))
        assert read(store, [1]) == [[(5, 1, 0, 0.0)]]
        store.close()
        with pytest.raises(StoreUnavailableError, match="certificate verify failed"):
            open_store(url, IMPATIENT)
    finally:
        server.stop()


def test_urls_that_are_none_are_refused():
    with pytest.raises(InputError, match="expected redis://"):
        open_store("redis://host:notaport/0", IMPATIENT)
    with pytest.raises(InputError, match="the prefix after # is 'a\\*'"):
        open_store("redis://host/0#a*", IMPATIENT)


@pytest.mark.slow
def test_processes_read_a_store_that_another_one_writes(store, address):
    store.append(batch([(1, 5, 1, 0, 0.0)]))
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_read_twice, args=(address, theirs), daemon=True)
    process.start()
    assert mine.recv() == 1
    store.append(batch([(1, 6, 2, 0, 0.0)]))
    mine.send("appended")
    assert mine.recv() == 2
    process.join()
    assert process.exitcode == 0


def _read_twice(address, connection):
    store = open_store(address)
    connection.send(len(read(store, [1])[0]))
    connection.recv()
    connection.send(len(read(store, [1])[0]))
    store.close()


@pytest.fixture
def by_item(store, address):
    by_item = open_store(address, create=MANIFEST.model_copy(update={"by": "item"}), by="item")
    yield by_item
    by_item.close()


def post(store, by_item, *events):
    both = batch(events)
    return append_sides([(store, [both]), (by_item, [both.reversed()])])


def fed(store, position):
    """(user, item, time, kind) of each event after a position, and where they end."""
    events, after = store.feed_after(position)
    return list(zip(*(column.tolist() for column in events), strict=True)), after


def test_what_comes_to_a_store_with_both_sides_is_in_its_feed(store, by_item):
    start = store.feed_position()
    assert fed(store, start) == ([], start)

    post(store, by_item, (1, 10, 5, 1, 0.0), (2, 11, 6, 0, 0.0))
    middle = store.feed_position()
    post(store, by_item, (1, 12, 7, 0, 0.0))
    post(store, by_item, (1, 12, 7, 0, 0.0))  # there already
    store.append(batch([(3, 13, 8, 1, 0.0)]))  # as `rayrec data store` does it, a side at a time
    by_item.append(batch([(8, 13, 3, 1, 0.0)]))

    later = [(1, 7, 12, 0), (3, 8, 13, 1)]
    assert fed(store, start)[0] == [(1, 5, 10, 1), (2, 6, 11, 0), *later]
    assert fed(by_item, middle)[0] == later
    end = fed(store, middle)[1]
    assert end == store.feed_position()
    assert fed(store, end) == ([], end)
    one, after_one = store.feed_after(middle, most=1)
    assert one.users_E.tolist() == [1]
    assert fed(store, after_one) == (later[1:], end)


def test_a_store_of_one_side_has_no_feed(store):
    store.append(batch([(1, 10, 5, 1, 0.0)]))

    assert store.feed_position() is None


def test_events_of_an_append_that_fails_are_not_in_the_feed(store, by_item, monkeypatch):
    def failing(*arguments):
        raise MemoryError

    monkeypatch.setattr(feed, "packed", failing)
    monkeypatch.setattr("rayrec.samples.stores.store.packed", failing)
    with pytest.raises(MemoryError):
        post(store, by_item, (1, 10, 5, 1, 0.0))

    assert (read(store, [1]), store.feed_position()) == ([[]], feed.START)


@pytest.mark.slow
def test_a_feed_is_bounded_and_says_so_to_a_reader_that_fell_behind(store, by_item, address, monkeypatch):
    most = 3 if "redis" not in address else 200  # Redis removes whole nodes of a hundred entries
    for module in ("lmdb_store", "redis_store"):
        monkeypatch.setattr(f"rayrec.samples.stores.{module}.MOST_ENTRIES", most)
    start = store.feed_position()
    post(store, by_item, (1, 1, 5, 1, 0.0))
    first = store.feed_position()
    assert len(fed(store, start)[0]) == 1

    positions = [first]
    for time in range(2, 2 * most + 2):
        post(store, by_item, (1, time, 5, 1, 0.0))
        positions.append(store.feed_position())

    for position in (start, first, "another:1", "1-1"):
        with pytest.raises(feed.FeedGoneError):
            store.feed_after(position)
    assert fed(store, positions[-2]) == ([(1, 5, 2 * most + 1, 1)], positions[-1])


def test_a_position_of_before_a_store_was_restored_is_gone(tmp_path):
    @contextmanager
    def opened():
        address = str(tmp_path / "store")
        with (
            closing(open_store(address, create=MANIFEST)) as store,
            closing(
                open_store(address, create=MANIFEST.model_copy(update={"by": "item"}), by="item")
            ) as by_item,
        ):
            yield store, by_item

    def posted(user):
        with opened() as sides:
            post(*sides, (user, 10, 5, 1, 0.0))
            return sides[0].feed_position()

    kept = posted(1)
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    lost = posted(2)
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "copy").rename(tmp_path / "store")
    posted(3)
    posted(4)
    with opened() as (store, _):
        assert [event[0] for event in fed(store, kept)[0]] == [3, 4]
        for position in (lost, "9:", ":", "x"):
            with pytest.raises(feed.FeedGoneError):
                store.feed_after(position)


def test_a_feed_of_many_events_has_entries_of_a_bounded_size(store, by_item):
    many = [(user, user, 5, 1, 0.0) for user in range(2 * feed.ENTRY_EVENTS + 1)]
    post(store, by_item, *many)

    some, position = store.feed_after(feed.START, most=2)
    assert some.users_E.tolist() == list(range(2 * feed.ENTRY_EVENTS))
    assert fed(store, position)[0] == [(many[-1][0], 5, many[-1][1], 1)]
