"""`join_history`: what a key's history was at a time, and nothing that came at that time or later."""

import itertools
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rayrec.platform.errors import InputError
from rayrec.samples.operations.config import OperationConfig
from rayrec.samples.operations.join_history import JoinHistoryConfig
from rayrec.samples.operations.operation import RowContext
from rayrec.samples.operations.program import FeatureProgram
from rayrec.samples.operations.sequences import ConcatConfig
from rayrec.samples.prepare.ids import hash_strings
from rayrec.samples.stores import (
    EventBatch,
    Histories,
    RetryConfig,
    StoreManifest,
    StoreUnavailableError,
    open_store,
)
from rayrec.samples.stores.lookup import histories_before
from tests.helpers.examples import examples
from tests.helpers.redis_server import RedisServer

SECOND = 1_000_000
KEYS = (1, 2, 3)
COLUMNS = ("items", "behaviors")
SAMPLE_TYPES = (("user_id", pa.int64()), ("timestamp", pa.int64()))
MANIFEST = StoreManifest(
    name="clicks", columns={"behaviors": "int8"}, behaviors=("view", "buy"), time_unit="s", chunk_events=3
)
EVENTS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(0, 12), st.integers(0, 99), st.integers(0, 1)), max_size=40
)
SAMPLES = st.lists(st.tuples(st.sampled_from((*KEYS, 9)), st.integers(-1, 14)), min_size=1, max_size=12)


def append(store, events):
    keys_E, times_E, items_E, behaviors_E = (
        np.array(column, dtype=np.int64) for column in list(zip(*events, strict=True)) or [()] * 4
    )
    return store.append(EventBatch(keys_E, times_E, items_E, {"behaviors": behaviors_E}))


def lookup(store, samples, last, behaviors=None):
    keys_B, times_B = (np.array(column, dtype=np.int64) for column in zip(*samples, strict=True))
    return rows_of(histories_before(store, keys_B, times_B, last, COLUMNS, behaviors))


def rows_of(histories: Histories):
    """[(time, item, behavior), ...] of each row."""
    rows = list(zip(*(histories.columns[name].tolist() for name in ("times", *COLUMNS)), strict=True))
    offsets = histories.offsets_K1.tolist()
    return [rows[start:stop] for start, stop in itertools.pairwise(offsets)]


@examples(150)
@given(st.lists(EVENTS, max_size=3), SAMPLES, st.integers(1, 9), st.sampled_from([None, (1,), (0, 1)]))
def test_a_history_is_the_newest_events_strictly_before_the_time(
    tmp_path_factory, batches, samples, last, of
):
    """Against a brute force over the whole log, with ties, several appends, late and out of order."""
    store = open_store(tmp_path_factory.mktemp("store") / "s", create=MANIFEST)
    for events in batches:
        append(store, events)
    log = {event for events in batches for event in events}

    found = lookup(store, samples, last, of)

    for (key, time), history in zip(samples, found, strict=True):
        known = [e[1:] for e in log if e[0] == key and e[1] < time and (of is None or e[3] in of)]
        assert set(history) <= set(known)
        assert sorted(event[0] for event in history) == [event[0] for event in history]
        assert [event[0] for event in history] == sorted(event[0] for event in known)[-last:]
        # Among events of one time, which are cut is the store's to say; none is there twice.
        assert len(set(history)) == len(history) == min(last, len(known))
    store.close()


@examples(100)
@given(EVENTS, SAMPLES, EVENTS, st.integers(1, 9))
def test_what_comes_at_a_samples_time_or_later_never_shows(tmp_path_factory, past, samples, future, last):
    store = open_store(tmp_path_factory.mktemp("store") / "s", create=MANIFEST)
    append(store, past)
    before = lookup(store, samples, last)
    newest = max(time for _, time in samples)
    append(
        store, [(key, time + newest, item, kind) for key, time, item, kind in future if time + newest >= 0]
    )
    append(store, [(key, newest, 7, 1) for key in KEYS])

    assert lookup(store, samples, last) == before
    store.close()


def test_the_event_itself_is_not_in_its_own_history(tmp_path):
    """Every event as a sample, in a log where most events share their second."""
    random = np.random.default_rng(0)
    events = sorted(
        {(1, int(time), int(item), 0) for time, item in random.integers(0, (20, 50), size=(200, 2))}
    )
    store = open_store(tmp_path / "store", create=MANIFEST)
    append(store, events)
    for event, history in zip(events, lookup(store, [event[:2] for event in events], last=1000), strict=True):
        assert len(history) == sum(other[1] < event[1] for other in events)
        assert all(time < event[1] for time, *_ in history)
    store.close()


def test_each_key_is_fetched_once_per_batch(tmp_path):
    store = open_store(tmp_path / "store", create=MANIFEST)
    append(store, [(1, 5, 50, 0)])
    asked = []

    class Spy:
        def get_many(self, keys_K, columns, window):
            asked.append(keys_K.tolist())
            return store.get_many(keys_K, columns, window)

    found = rows_of(histories_before(Spy(), np.array([2, 1, 2, 1]), np.array([9, 9, 4, 5]), 10, COLUMNS))
    assert asked == [[2, 1]]
    assert found == [[], [(5, 50, 0)], [], []]
    store.close()


@pytest.fixture
def store(tmp_path):
    """Key 1: items 50, 60, 70 at seconds 5, 6, 7; the second one was bought."""
    store = open_store(tmp_path / "store", create=MANIFEST)
    append(store, [(1, 5, 50, 0), (1, 6, 60, 1), (1, 7, 70, 0), (2, 5, 55, 0)])
    yield store
    store.close()


def config(store, /, **values):
    return JoinHistoryConfig.parse({"op": "join_history", "store": store.name, **values})


def program(store, types=SAMPLE_TYPES, /, **values):
    return FeatureProgram.compile([config(store, **values)], pa.schema(types))


def join(program, *columns):
    rows = pa.record_batch(
        [pa.array(column, field.type) for column, field in zip(columns, program.input_schema, strict=True)],
        schema=program.input_schema,
    )
    return program(rows, RowContext(np.arange(rows.num_rows), 0, 0))


def refused(store, types=SAMPLE_TYPES, /, **values):
    with pytest.raises(InputError) as caught:
        program(store, types, **values)
    return str(caught.value)


def test_columns_of_the_store_become_lists_of_the_rows(store):
    outputs = {"item_ids": "items", "item_times": "times", "kinds": "behaviors"}
    rows = join(program(store, outputs=outputs, last=2), [1, 2, 3, 1, None], [8, 6, 8, 7, 8])
    assert rows["item_ids"].to_pylist() == [[60, 70], [55], [], [50, 60], []]
    assert rows["item_times"].to_pylist() == [[6, 7], [5], [], [5, 6], []]
    assert rows["kinds"].to_pylist() == [[1, 0], [0], [], [0, 1], []]
    assert rows.schema.field("kinds").type == pa.list_(pa.int64())


def test_behaviors_choose_before_the_newest_are_cut(store):
    assert join(program(store, behaviors=["view"], last=2), [1], [9])["item_ids"].to_pylist() == [[50, 70]]
    assert "no event has the behavior 'sell'; the store knows view, buy" in refused(store, behaviors=["sell"])


def test_the_rows_own_item_may_stand_behind_its_history(store):
    types = pa.schema([*SAMPLE_TYPES, ("item_id", pa.int64())])
    concat = ConcatConfig(inputs=("item_ids", "item_id"), output="item_ids")
    joined = FeatureProgram.compile([config(store), concat], types)
    assert join(joined, [1, None], [7, 3], [70, 5])["item_ids"].to_pylist() == [[50, 60, 70], [5]]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_keep_the_type_of_the_row(store, unit):
    types = (("user_id", pa.int64()), ("timestamp", pa.timestamp(unit)))
    per_second = {"s": 1, "ms": 1000, "us": SECOND, "ns": 1000 * SECOND}[unit]
    rows = join(
        program(store, types, outputs={"item_times": "times"}), [1, 1], [7 * per_second, 7 * per_second + 1]
    )
    expected = [[5 * per_second, 6 * per_second]] * 2
    if unit == "s":
        expected[1] = [*expected[1], 7]
    times = rows["item_times"]
    assert times.type == pa.list_(pa.timestamp(unit))
    assert times.cast(pa.list_(pa.int64())).to_pylist() == expected


def test_a_finer_time_does_not_see_the_rest_of_its_second(store):
    """The store knows seconds: 7.9 s is in second 7, and so is what may have come at 7.95 s."""
    rows = join(program(store, time_unit="ms"), [1, 1], [7900, 8000])
    assert rows["item_ids"].to_pylist() == [[50, 60], [50, 60, 70]]


def test_a_coarser_time_does_not_see_its_own_second(tmp_path):
    """The store knows microseconds: a sample of second 7 may have been at its very beginning."""
    fine = open_store(tmp_path / "fine", create=MANIFEST.model_copy(update={"time_unit": "us"}))
    append(fine, [(1, 7 * SECOND - 1, 1, 0), (1, 7 * SECOND, 2, 0), (1, 7 * SECOND + 1, 3, 0)])
    rows = join(program(fine, outputs={"item_ids": "items", "item_times": "times"}), [1, 1], [7, 8])
    assert rows["item_ids"].to_pylist() == [[1], [1, 2, 3]]
    assert rows["item_times"].to_pylist() == [[6], [6, 7, 7]]
    fine.close()


def test_times_in_another_unit_than_is_said_would_see_everything_and_are_refused(store):
    with pytest.raises(InputError) as caught:
        join(program(store), [1, 1], [1_600_000_000, 1_600_000_000_000])
    assert "column 'timestamp': 1600000000000 in row 2 is said to be in s" in str(caught.value)
    assert "would be 2020-09-13 in ms (1 of 2 values); set time_unit" in str(caught.value)
    with pytest.raises(InputError, match=r"said to be in ms.*would be 2020-09-13 in s"):
        join(program(store, time_unit="ms"), [1], [1_600_000_000])
    join(program(store), [1], [1_600_000_000])


def test_a_row_without_a_time_has_no_history(store):
    assert join(program(store), [1, 1, None], [None, 7, None])["item_ids"].to_pylist() == [[], [50, 60], []]


def test_texts_are_keys_as_they_were_when_the_store_was_built(tmp_path):
    types = (("user_id", pa.string()), ("timestamp", pa.int64()))
    kinds = {"user": "string", "item": "integer"}
    named = open_store(tmp_path / "named", create=MANIFEST.model_copy(update={"id_kinds": kinds}))
    append(named, [(int(hash_strings(["ann"])[0]), 5, 50, 0)])
    assert join(program(named, types), ["ann", "bob", None], [6, 6, 6])["item_ids"].to_pylist() == [
        [50],
        [],
        [],
    ]
    ids = [int(hash_strings(["ann"])[0])]  # as a prepared data set has them
    assert join(program(named), ids, [6])["item_ids"].to_pylist() == [[50]]
    named.close()

    numbered = open_store(tmp_path / "numbered", create=MANIFEST)
    append(numbered, [(12, 5, 50, 0)])
    assert join(program(numbered, types), ["12"], [6])["item_ids"].to_pylist() == [[50]]
    with pytest.raises(InputError, match="user id 'ann' is no integer, but all user ids were integers"):
        join(program(numbered, types), ["ann"], [6])
    numbered.close()


@pytest.mark.parametrize(("kind", "key"), [("string", int(hash_strings(["ann"])[0])), ("integer", 12)])
def test_blanks_around_a_key_are_cut_off_as_when_the_store_was_built(tmp_path, kind, key):
    """Such rows had no history, or were said to have no integer."""
    types = (("user_id", pa.string()), ("timestamp", pa.int64()))
    kinds = {"user": kind, "item": "integer"}
    store = open_store(tmp_path / "s", create=MANIFEST.model_copy(update={"id_kinds": kinds}))
    append(store, [(key, 5, 50, 0)])
    text = "ann" if kind == "string" else "12"
    found = join(program(store, types), [f" {text}", f"{text}\t"], [6, 6])
    assert found["item_ids"].to_pylist() == [[50], [50]]
    store.close()


def test_mistakes_are_found_before_a_row_is_read(store, tmp_path):
    assert "there is no event store" in refused(store, store=str(tmp_path / "nowhere"))
    assert "has no column 'price', only times, items, behaviors" in refused(store, outputs={"p": "price"})
    assert "there is no column 'user'; did you mean 'user_id'" in refused(store, key="user")
    assert "this event store has the fingerprint" in refused(store, fingerprint="0" * 32)
    program(store, fingerprint=MANIFEST.fingerprint)
    lists = (("user_id", pa.int64()), ("timestamp", pa.list_(pa.int64())))
    assert "column 'timestamp' holds lists" in refused(store, lists)


def test_stores_of_other_logs_have_other_fingerprints():
    same = MANIFEST.model_copy(update={"behaviors": ("view", "buy", "like"), "chunk_events": 7})
    assert same.fingerprint == MANIFEST.fingerprint
    for change in (
        {"name": "sales"},
        {"time_unit": "us"},
        {"columns": {"behaviors": "int16"}},
        {"id_kinds": {"user": "string", "item": "integer"}},
    ):
        assert MANIFEST.model_copy(update=change).fingerprint != MANIFEST.fingerprint


def test_the_operation_travels_and_opens_the_store_where_it_arrives(store):
    schema = pa.schema([("user_id", pa.int64()), ("timestamp", pa.int64())])
    operation = pickle.loads(pickle.dumps(config(store).bind(schema)))
    columns = {"user_id": pa.array([1]), "timestamp": pa.array([6])}
    context = RowContext(np.zeros(1, dtype=np.int64), 0, 0)
    assert operation(columns, context)["item_ids"].to_pylist() == [[50]]


def test_a_run_declares_it_as_any_other_operation(store):
    declared = {"op": "join_history", "store": store.name, "last": 3}
    assert TypeAdapter(OperationConfig).validate_python(declared) == config(store, last=3)


def test_one_row_in_serving_is_the_row_of_a_batch(store):
    joined = program(store)
    row = {"user_id": 1, "timestamp": 7}
    assert joined.one(row)["item_ids"] == join(joined, [1], [7])["item_ids"].to_pylist()[0] == [50, 60]


def test_a_service_gives_the_same_histories_and_stops_the_batch_when_it_is_down(tmp_path, store):
    server = RedisServer(tmp_path)
    try:
        service = open_store(server.url, create=MANIFEST)
        append(service, [(1, 5, 50, 0), (1, 6, 60, 1), (1, 7, 70, 0), (2, 5, 55, 0)])
        retry = {"attempts": 2, "first_wait_s": 0.01}
        joined = program(service, store=server.url, retry=retry)
        rows = join(joined, [1, 2, 3], [7, 6, 1])
        assert rows == join(program(store), [1, 2, 3], [7, 6, 1])
        service.close()
        server.stop()
        with pytest.raises(StoreUnavailableError, match="no answer in 2 attempts"):
            join(joined, [1, 2, 3], [7, 6, 1])
        with pytest.raises(StoreUnavailableError):
            program(store, store=server.url, retry=retry)
    finally:
        server.stop()
    assert RetryConfig.parse(retry).attempts == 2


def test_a_password_need_not_stand_in_the_settings(tmp_path, monkeypatch):
    server = RedisServer(tmp_path, "--requirepass", "p@ss/word")
    try:
        url = server.url.replace("redis://", "redis://:${RAYREC_TEST_PASSWORD}@")
        with pytest.raises(InputError, match=r"_PASSWORD\}@.*no variable RAYREC_TEST_PASSWORD"):
            open_store(url, create=MANIFEST)
        monkeypatch.setenv("RAYREC_TEST_PASSWORD", "p@ss/word")
        service = open_store(url, create=MANIFEST)
        append(service, [(1, 5, 50, 0)])
        assert join(program(service, store=url), [1], [6])["item_ids"].to_pylist() == [[50]]
        assert "p@ss" not in service.name
        service.close()
        monkeypatch.setenv("RAYREC_TEST_PASSWORD", "wrong")
        with pytest.raises(InputError, match="refused"):
            open_store(url)
    finally:
        server.stop()
