"""Rows read ahead are the rows read in turn, bit for bit, however replies are delayed and reordered."""

import contextlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.embeddings.client import LocalTransport, ShardClient
from rayrec.embeddings.config import AdamConfig, RowwiseAdagradConfig, TableConfig
from rayrec.embeddings.lookups import ExactPrefetch, LookupMode, SyncLookups
from rayrec.embeddings.routing import ShardMap
from rayrec.embeddings.shard import EmbeddingShard

WAIT_S = 20.0


@dataclass(frozen=True)
class Ids:
    ids_M: np.ndarray
    touched: np.ndarray


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def alone(*values: int) -> dict[str, Ids]:
    """What a single trainer's batch reads of the table `items`."""
    return {"items": Ids(ids(*values), ids(*values))}


def make_shards(tables, num_shards: int, num_sources: int = 1) -> list[EmbeddingShard]:
    return [EmbeddingShard(tables, s, num_sources, wait_timeout_s=WAIT_S) for s in range(num_shards)]


ITEMS = (TableConfig(name="items", dim=4, seed=3, optimizer=RowwiseAdagradConfig(lr=0.1)),)


class LateReply:
    def __init__(self, transport: "AdversarialTransport") -> None:
        self.future: Future = Future()
        self._transport = transport

    def result(self):
        self._transport.run_until(self.future)
        return self.future.result()


class AdversarialTransport:
    """Keeps every call until somebody waits for an answer, then carries out calls in random order.

    A lookup whose step is not committed yet is not carried out, so nothing blocks inside a shard.
    """

    def __init__(self, shards: list[EmbeddingShard], seed: int) -> None:
        self._shards = shards
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._calls: list[tuple[Callable[[], bool], Callable[[], object], Future]] = []

    def lookup(self, shard, request, after_step):
        server = self._shards[shard]
        return self._post(
            lambda: after_step is None or server.committed_step >= after_step,
            lambda: server.lookup(request, after_step),
        )

    def apply(self, shard, tag, update):
        return self._post(lambda: True, lambda: self._shards[shard].apply(tag, update))

    def _post(self, is_ready, call) -> LateReply:
        reply = LateReply(self)
        with self._changed:
            self._calls.append((is_ready, call, reply.future))
            self._changed.notify_all()
        return reply

    def run_until(self, wanted: Future) -> None:
        with self._changed:
            while not wanted.done():
                ready = [call for call in self._calls if call[0]()]
                if not ready:
                    if not self._changed.wait(WAIT_S):
                        raise TimeoutError("every call waits for a step that nobody sends")
                    continue
                chosen = self._random.choice(ready)
                self._calls.remove(chosen)
                try:
                    chosen[2].set_result(chosen[1]())
                except Exception as error:
                    chosen[2].set_exception(error)
                self._changed.notify_all()


def train(mode: LookupMode, batches, source: int, dense_stage: threading.Barrier) -> list[dict]:
    """Rows that every step saw; the gradient depends on them, so a stale bit spreads."""
    seen = []
    for step, batch in enumerate(batches):
        if step + 1 < len(batches):
            if step == 0:
                mode.prefetch(0, batch)
            mode.prefetch(step + 1, batches[step + 1])
        rows = mode.rows(step, batch)
        seen.append({name: rows_MD.copy() for name, rows_MD in rows.items()})
        dense_stage.wait(WAIT_S)  # trainers meet in every dense step, to add up its gradients
        weight = np.float32(1 + source + 0.1 * step)
        mode.update(step, batch, {name: rows_MD * weight + 0.01 for name, rows_MD in rows.items()})
    mode.drain()
    return seen


def run(mode_type, tables, transport, num_shards: int, batches_by_source) -> list[list[dict]]:
    num_sources = len(batches_by_source)
    dense_stage = threading.Barrier(num_sources)

    def train_source(source: int) -> list[dict]:
        mode = mode_type(tables, ShardMap(num_shards), transport, source)
        try:
            return train(mode, batches_by_source[source], source, dense_stage)
        except BaseException:
            dense_stage.abort()
            raise

    with ThreadPoolExecutor(num_sources) as pool:
        return list(pool.map(train_source, range(num_sources)))


def all_rows(shards: list[EmbeddingShard], tables) -> dict[str, dict[int, tuple]]:
    """Everything the shards hold, by table and id."""
    held: dict[str, dict[int, tuple]] = {table.name: {} for table in tables}
    for shard in shards:
        for name, by_id in held.items():
            rows = shard.export(name)
            for m, i in enumerate(rows.ids_M.tolist()):
                values = rows.weights_MD[m].tobytes() + rows.state_MS[m].tobytes()
                by_id[i] = (values, rows.steps_M[m], rows.counts_M[m])
    return held


OPTIMIZERS = st.sampled_from([RowwiseAdagradConfig(lr=0.1), AdamConfig(lr=0.05)])
FEW_IDS = st.lists(st.one_of(st.integers(0, 9), st.sampled_from([-1, -(2**63)])), max_size=6, unique=True)


@st.composite
def runs(draw):
    tables = tuple(
        TableConfig(name=f"table{n}", dim=draw(st.integers(1, 3)), seed=n, optimizer=draw(OPTIMIZERS))
        for n in range(draw(st.integers(1, 2)))
    )
    num_sources = draw(st.integers(1, 2))
    batches_by_source: list[list[dict[str, Ids]]] = [[] for _ in range(num_sources)]
    for _ in range(draw(st.integers(1, 6))):
        read = {table.name: [draw(FEW_IDS) for _ in range(num_sources)] for table in tables}
        for source in range(num_sources):
            batches_by_source[source].append(
                {
                    name: Ids(ids(*by_source[source]), ids(*sorted(set().union(*by_source))))
                    for name, by_source in read.items()
                }
            )
    return tables, batches_by_source


@settings(max_examples=120, deadline=None)
@given(run_=runs(), num_shards=st.integers(1, 3), seed=st.integers(0, 10_000))
def test_exact_prefetch_is_bit_equal_to_sync(run_, num_shards, seed):
    tables, batches_by_source = run_
    num_sources = len(batches_by_source)

    sync_shards = make_shards(tables, 1, num_sources)
    expected = run(SyncLookups, tables, LocalTransport(sync_shards), 1, batches_by_source)

    shards = make_shards(tables, num_shards, num_sources)
    transport = AdversarialTransport(shards, seed)
    found = run(ExactPrefetch, tables, transport, num_shards, batches_by_source)

    for expected_steps, found_steps in zip(expected, found, strict=True):
        for expected_rows, found_rows in zip(expected_steps, found_steps, strict=True):
            assert expected_rows.keys() == found_rows.keys()
            for name in expected_rows:
                assert expected_rows[name].tobytes() == found_rows[name].tobytes()
    assert all_rows(shards, tables) == all_rows(sync_shards, tables)
    num_steps = len(batches_by_source[0])
    assert [shard.committed_step for shard in shards] == [num_steps - 1] * num_shards


class RecordingTransport(LocalTransport):
    def __init__(self, shards) -> None:
        super().__init__(shards)
        self.calls: list[tuple] = []

    def lookup(self, shard, request, after_step):
        self.calls.append(("lookup", shard, {n: sorted(i.tolist()) for n, i in request.items()}, after_step))
        return super().lookup(shard, request, after_step)

    def apply(self, shard, tag, update):
        self.calls.append(("apply", shard, {n: sorted(u[0].tolist()) for n, u in update.items()}, tag.step))
        return super().apply(shard, tag, update)


def ones(batch: dict[str, Ids]) -> dict[str, np.ndarray]:
    return {name: np.ones((len(lookup.ids_M), 4), np.float32) for name, lookup in batch.items()}


def test_only_the_overlap_waits_for_the_update_and_is_asked_for_right_behind_it():
    transport = RecordingTransport(make_shards(ITEMS, 1))
    mode = ExactPrefetch(ITEMS, ShardMap(1), transport)
    first, second = alone(1, 2, 3), alone(3, 4, 5)
    mode.prefetch(0, first)
    mode.prefetch(1, second)
    mode.rows(0, first)
    mode.update(0, first, ones(first))
    assert transport.calls == [
        ("lookup", 0, {"items": [1, 2, 3]}, -1),
        ("lookup", 0, {"items": [4, 5]}, -1),
        ("apply", 0, {"items": [1, 2, 3]}, 0),
        ("lookup", 0, {"items": [3]}, 0),
    ]
    mode.rows(1, second)
    assert len(transport.calls) == 4
    assert (mode.stats.num_early, mode.stats.num_late) == (2, 4)


def test_what_another_trainer_touches_is_not_read_ahead():
    transport = RecordingTransport(make_shards(ITEMS, 1, num_sources=2))
    mode = ExactPrefetch(ITEMS, ShardMap(1), transport)
    mode.prefetch(0, {"items": Ids(ids(1), touched=ids(1, 4))})
    mode.prefetch(1, {"items": Ids(ids(4, 5), touched=ids(4, 5))})
    assert transport.calls[-1] == ("lookup", 0, {"items": [5]}, -1)


def test_a_batch_that_was_not_announced_is_read_after_the_update_before_it():
    transport = RecordingTransport(make_shards(ITEMS, 1))
    mode = ExactPrefetch(ITEMS, ShardMap(1), transport)
    for step in range(2):
        mode.rows(step, alone(7))
        mode.update(step, alone(7), ones(alone(7)))
    assert [call[::3] for call in transport.calls if call[0] == "lookup"] == [("lookup", -1), ("lookup", 0)]


class RefusingTransport(AdversarialTransport):
    """Cannot send lookups of the given number, counted from the first."""

    def __init__(self, shards, refused: set[int]) -> None:
        super().__init__(shards, seed=0)
        self._refused = refused
        self._num_lookups = 0

    def lookup(self, shard, request, after_step):
        self._num_lookups += 1
        if self._num_lookups - 1 in self._refused:
            raise ConnectionError("no way to the server")
        return super().lookup(shard, request, after_step)


def trained_rows(mode: LookupMode) -> np.ndarray:
    """Rows of the second of two batches, each announced and asked for again where that failed."""

    def insist(call, *arguments):
        try:
            return call(*arguments)
        except ConnectionError:
            return call(*arguments)

    first, second = alone(1, 2, 3), alone(3, 4, 5)
    for step, batch in enumerate((first, second)):
        with contextlib.suppress(ConnectionError):
            mode.prefetch(step, batch)
    insist(mode.rows, 0, first)
    with contextlib.suppress(ConnectionError):
        mode.update(0, first, ones(first))
    return insist(mode.rows, 1, second)["items"]


@pytest.mark.parametrize("refused", [{0}, {1}, {2}, {1, 2}], ids=str)
def test_a_request_that_could_not_be_sent_never_becomes_rows(refused):
    expected_MD = trained_rows(SyncLookups(ITEMS, ShardMap(1), LocalTransport(make_shards(ITEMS, 1))))

    transport = RefusingTransport(make_shards(ITEMS, 1), refused)
    found_MD = trained_rows(ExactPrefetch(ITEMS, ShardMap(1), transport))

    assert found_MD.tobytes() == expected_MD.tobytes()


def test_rows_of_a_step_are_not_given_out_twice():
    mode = ExactPrefetch(ITEMS, ShardMap(1), LocalTransport(make_shards(ITEMS, 1)))
    mode.rows(0, alone(1, 2))
    with pytest.raises(RuntimeError, match=r"step 0, table 'items': rows of 0 of 2 ids"):
        mode.rows(0, alone(1, 2))


@pytest.mark.parametrize("mode_type", [SyncLookups, ExactPrefetch])
def test_a_shard_without_ids_of_the_batch_gets_its_update_and_no_lookup(mode_type):
    shard_map = ShardMap(2)
    batch = alone(*(i for i in range(20) if shard_map.shard_of(ids(i))[0] == 1))
    shards = make_shards(ITEMS, 2)
    transport = RecordingTransport(shards)
    mode = mode_type(ITEMS, shard_map, transport)
    mode.prefetch(0, batch)
    mode.rows(0, batch)
    mode.update(0, batch, ones(batch))
    mode.drain()
    assert [call[:2] for call in transport.calls] == [("lookup", 1), ("apply", 0), ("apply", 1)]
    assert [shard.committed_step for shard in shards] == [0, 0]


@pytest.mark.parametrize("mode_type", [SyncLookups, ExactPrefetch])
def test_a_step_without_ids_works(mode_type):
    shards = make_shards(ITEMS, 2)
    mode = mode_type(ITEMS, ShardMap(2), LocalTransport(shards))
    for step, batch in enumerate([alone(), {}, alone(1)]):
        rows = mode.rows(step, batch)
        assert {name: rows_MD.shape for name, rows_MD in rows.items()} == {
            name: (len(lookup.ids_M), 4) for name, lookup in batch.items()
        }
        mode.update(step, batch, ones(batch))
    mode.drain()
    assert [shard.committed_step for shard in shards] == [2, 2]


def test_a_refused_update_surfaces_in_every_way_out():
    def sent_nan() -> ExactPrefetch:
        mode = ExactPrefetch(ITEMS, ShardMap(1), LocalTransport(make_shards(ITEMS, 1)))
        mode.prefetch(0, alone(1))
        mode.prefetch(1, alone(1, 2))
        mode.rows(0, alone(1))
        mode.update(0, alone(1), {"items": np.full((1, 4), np.nan, np.float32)})
        return mode

    for leave in (
        lambda mode: mode.drain(),
        lambda mode: mode.rows(1, alone(1, 2)),
        lambda mode: mode.update(1, alone(1, 2), ones(alone(1, 2))),
    ):
        with pytest.raises(ValueError, match=r"trainer 0: table 'items'.*id 1 is nan"):
            leave(sent_nan())


@pytest.mark.parametrize("mode_type", [SyncLookups, ExactPrefetch])
@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"items": np.ones((3, 4), np.float32)}, r"step 0, table 'items'.*\(2, 4\).*\(3, 4\)"),
        ({"users": np.ones((2, 4), np.float32)}, "'users', which the batch does not read"),
    ],
)
def test_gradients_that_do_not_fit_the_batch_are_refused_before_they_are_sent(mode_type, grads, message):
    shards = make_shards(ITEMS, 1)
    mode = mode_type(ITEMS, ShardMap(1), LocalTransport(shards))
    mode.rows(0, alone(1, 2))
    with pytest.raises(ValueError, match=message):
        mode.update(0, alone(1, 2), grads)
    assert shards[0].committed_step == -1


def test_waiting_is_measured_with_the_given_clock():
    ticks = iter(range(100))
    mode = SyncLookups(ITEMS, ShardMap(1), LocalTransport(make_shards(ITEMS, 1)), clock=lambda: next(ticks))
    mode.rows(0, alone(1))
    mode.update(0, alone(1), ones(alone(1)))
    assert (mode.stats.rows_wait_s, mode.stats.update_wait_s) == (1, 1)


def test_rows_do_not_depend_on_the_number_of_shards():
    many = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=500)
    found = []
    for num_shards in (1, 3, 16):
        transport = LocalTransport(make_shards(ITEMS, num_shards))
        mode = ExactPrefetch(ITEMS, ShardMap(num_shards), transport)
        batch = alone(*many.tolist())
        for step in range(3):
            rows = mode.rows(step, batch)
            mode.update(step, batch, {"items": rows["items"] * 2})
        mode.drain()
        found.append(ShardClient(ITEMS, ShardMap(num_shards), transport).read({"items": many[::-1]}))
    assert found[0]["items"].tobytes() == found[1]["items"].tobytes() == found[2]["items"].tobytes()


def test_a_table_that_does_not_exist_is_named():
    client = ShardClient(ITEMS, ShardMap(1), LocalTransport(make_shards(ITEMS, 1)))
    with pytest.raises(ValueError, match="no embedding table 'films'; tables: items"):
        client.read({"films": ids(1)})
