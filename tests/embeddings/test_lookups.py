"""What each mode asks the servers for, and when. That all of them are exact: `test_exactness`."""

import contextlib
import time

import numpy as np
import pytest

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import EvictionConfig, TableConfig
from rayrec.embeddings.lookup.exact_prefetch import ExactPrefetch
from rayrec.embeddings.lookup.lookups import LookupMode, SyncLookups, TrainerLink
from rayrec.embeddings.lookup.shared_row_write_back import SharedRowWriteBack
from rayrec.embeddings.lookup.threaded_lookups import ThreadedLookups
from rayrec.embeddings.transport.client import LocalTransport, ShardClient
from rayrec.embeddings.transport.protocol import ApplyCall, ApplyHeadCall, FetchCall, LookupCall
from tests.embeddings.sparse_runs import ITEMS, AdversarialTransport, Ids, alone, ids, make_shards


def link(transport, **further) -> TrainerLink:
    """The only trainer's, to one shard."""
    return TrainerLink(ITEMS, ShardMap(1), transport, **further)


class RecordingTransport(LocalTransport):
    def __init__(self, shards) -> None:
        super().__init__(shards)
        self.calls: list[tuple] = []

    def call(self, shard, call):
        match call:
            case LookupCall() | FetchCall():
                name = "lookup" if isinstance(call, LookupCall) else "fetch"
                self.calls.append((name, shard, _sorted(call.request), call.after_step))
            case ApplyCall():
                named = [_sorted_ids(part) for part in (call.update, call.dirty) if part]
                self.calls.append(("apply", shard, *(named or [{}]), call.tag.step))
            case ApplyHeadCall():
                named = [_sorted_ids(call.head), _sorted(call.rest), _sorted(call.wanted)]
                self.calls.append(("apply_head", shard, *named, call.tag.step))
        return super().call(shard, call)


def _sorted(request) -> dict[str, list[int]]:
    return {name: sorted(ids_M.tolist()) for name, ids_M in request.items()}


def _sorted_ids(values) -> dict[str, list[int]]:
    """Of pairs of ids and what goes with them."""
    return _sorted({name: ids_M for name, (ids_M, _) in values.items()})


def ones(batch: dict[str, Ids]) -> dict[str, np.ndarray]:
    return {name: np.ones((len(lookup.ids_M), 4), np.float32) for name, lookup in batch.items()}


def test_only_the_overlap_waits_for_the_update_of_which_it_is_the_first_part():
    transport = RecordingTransport(make_shards(ITEMS, 1))
    mode = ExactPrefetch(link(transport))
    first, second = alone(1, 2, 3), alone(3, 4, 5)
    mode.prefetch(0, first)
    mode.prefetch(1, second)
    mode.rows(0, first)
    mode.update(0, first, ones(first))
    assert transport.calls == [
        ("lookup", 0, {"items": [1, 2, 3]}, -1),
        ("lookup", 0, {"items": [4, 5]}, -1),
        ("apply_head", 0, {"items": [3]}, {"items": [1, 2]}, {"items": [3]}, 0),
        ("apply", 0, {"items": [1, 2]}, 0),
    ]
    mode.rows(1, second)
    assert len(transport.calls) == 4
    assert (mode.stats.num_early, mode.stats.num_late) == (2, 4)


def test_nothing_of_a_table_is_read_ahead_across_a_step_that_may_evict_its_rows():
    eviction = EvictionConfig(max_age_steps=5, every_steps=2)
    tables = (*ITEMS, TableConfig(name="films", dim=4, eviction=eviction))
    transport = RecordingTransport(make_shards(tables, 1))
    mode = ExactPrefetch(TrainerLink(tables, ShardMap(1), transport))

    def batch(*values: int) -> dict[str, Ids]:
        return {name: Ids(ids(*values), ids(*values)) for name in ("items", "films")}

    mode.prefetch(0, batch(1))
    mode.prefetch(1, batch(2))
    mode.rows(0, batch(1))
    mode.update(0, batch(1), {})
    mode.prefetch(2, batch(3))  # step 1 evicts
    assert transport.calls[1] == ("lookup", 0, {"items": [2], "films": [2]}, -1)
    assert transport.calls[-1] == ("lookup", 0, {"items": [3]}, 0)
    mode.rows(1, batch(2))
    mode.update(1, batch(2), {})
    assert transport.calls[-1] == ("lookup", 0, {"films": [3]}, 1)


def test_what_another_trainer_touches_is_not_read_ahead():
    transport = RecordingTransport(make_shards(ITEMS, 1, num_trainers=2))
    mode = ExactPrefetch(link(transport))
    mode.prefetch(0, {"items": Ids(ids(1), updated_ids=ids(1, 4))})
    mode.prefetch(1, {"items": Ids(ids(4, 5), updated_ids=ids(4, 5))})
    assert transport.calls[-1] == ("lookup", 0, {"items": [5]}, -1)


def test_a_batch_that_was_not_announced_is_read_after_the_update_before_it():
    transport = RecordingTransport(make_shards(ITEMS, 1))
    mode = ExactPrefetch(link(transport))
    for step in range(2):
        mode.rows(step, alone(7))
        mode.update(step, alone(7), ones(alone(7)))
    assert [call[::3] for call in transport.calls if call[0] == "lookup"] == [("lookup", -1), ("lookup", 0)]


class RefusingTransport(AdversarialTransport):
    """Cannot send reads of the given number, counted from the first."""

    def __init__(self, shards, refused: set[int]) -> None:
        super().__init__(shards, seed=0)
        self._refused = refused
        self._num_reads = 0

    def call(self, shard, call):
        if isinstance(call, LookupCall | FetchCall):
            self._num_reads += 1
            if self._num_reads - 1 in self._refused:
                raise ConnectionError("no way to the server")
        return super().call(shard, call)


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


@pytest.mark.parametrize("mode_type", [ExactPrefetch, SharedRowWriteBack])
@pytest.mark.parametrize("refused", [{0}, {1}, {2}, {1, 2}], ids=str)
def test_a_request_that_could_not_be_sent_never_becomes_rows(refused, mode_type):
    expected_MD = trained_rows(SyncLookups(link(LocalTransport(make_shards(ITEMS, 1)))))

    transport = RefusingTransport(make_shards(ITEMS, 1), refused)
    found_MD = trained_rows(mode_type(link(transport)))

    assert found_MD.tobytes() == expected_MD.tobytes()


def test_rows_of_a_step_are_not_given_out_twice():
    mode = ExactPrefetch(link(LocalTransport(make_shards(ITEMS, 1))))
    mode.rows(0, alone(1, 2))
    with pytest.raises(RuntimeError, match=r"step 0, table 'items': rows of 0 of 2 ids"):
        mode.rows(0, alone(1, 2))


@pytest.mark.parametrize("mode_type", [SyncLookups, ExactPrefetch])
def test_a_shard_without_ids_of_the_batch_gets_its_update_and_no_lookup(mode_type):
    shard_map = ShardMap(2)
    batch = alone(*(i for i in range(20) if shard_map.shard_of(ids(i))[0] == 1))
    shards = make_shards(ITEMS, 2)
    transport = RecordingTransport(shards)
    mode = mode_type(TrainerLink(ITEMS, shard_map, transport))
    mode.prefetch(0, batch)
    mode.rows(0, batch)
    mode.update(0, batch, ones(batch))
    mode.drain()
    assert [call[:2] for call in transport.calls] == [("lookup", 1), ("apply", 0), ("apply", 1)]
    assert [shard.committed_step for shard in shards] == [0, 0]


@pytest.mark.parametrize("mode_type", [SyncLookups, ExactPrefetch])
def test_a_step_without_ids_works(mode_type):
    shards = make_shards(ITEMS, 2)
    mode = mode_type(TrainerLink(ITEMS, ShardMap(2), LocalTransport(shards)))
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
        mode = ExactPrefetch(link(LocalTransport(make_shards(ITEMS, 1))))
        mode.prefetch(0, alone(1))
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
    mode = mode_type(link(LocalTransport(shards)))
    mode.rows(0, alone(1, 2))
    with pytest.raises(ValueError, match=message):
        mode.update(0, alone(1, 2), grads)
    assert shards[0].committed_step == -1


def test_waiting_is_measured_with_the_given_clock():
    ticks = iter(range(100))
    mode = SyncLookups(link(LocalTransport(make_shards(ITEMS, 1)), clock=lambda: next(ticks)))
    mode.rows(0, alone(1))
    mode.update(0, alone(1), ones(alone(1)))
    assert (mode.stats.rows_wait_s, mode.stats.update_wait_s) == (1, 1)


def test_rows_do_not_depend_on_the_number_of_shards():
    many = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=500)
    found = []
    for num_shards in (1, 3, 16):
        transport = LocalTransport(make_shards(ITEMS, num_shards))
        mode = ExactPrefetch(TrainerLink(ITEMS, ShardMap(num_shards), transport))
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


class StubbornTransport(LocalTransport):
    """Refuses updates."""

    def call(self, shard, call):
        if isinstance(call, ApplyCall | ApplyHeadCall):
            raise ConnectionError("no way to the server")
        return super().call(shard, call)


def test_an_error_beside_dense_compute_is_raised_by_every_call_that_follows():
    mode = ThreadedLookups(ExactPrefetch(link(StubbornTransport(make_shards(ITEMS, 1)))))
    batch = alone(1, 2)
    mode.prefetch(0, batch)
    mode.rows(0, batch)
    mode.prefetch(1, batch)
    mode.update(0, batch, ones(batch))
    for call in (
        lambda: mode.rows(1, batch),
        lambda: mode.rows(2, batch),
        lambda: mode.update(1, batch, ones(batch)),
        mode.drain,
    ):
        with pytest.raises(ConnectionError, match="no way to the server"):
            call()
    mode.close()


@pytest.mark.parametrize("mode_type", [ExactPrefetch, SharedRowWriteBack])
def test_a_batch_may_be_announced_before_one_that_never_is(mode_type):
    transport = AdversarialTransport(make_shards(ITEMS, 1), seed=0)
    mode = ThreadedLookups(mode_type(link(transport)))
    mode.prefetch(1, alone(7))  # which needs the update of step 0
    mode.rows(0, alone(7))
    mode.update(0, alone(7), ones(alone(7)))
    expected = SyncLookups(link(LocalTransport(make_shards(ITEMS, 1))))
    expected.rows(0, alone(7))
    expected.update(0, alone(7), ones(alone(7)))
    assert (mode.rows(1, alone(7))["items"] == expected.rows(1, alone(7))["items"]).all()
    mode.close()


class Unhurried(SharedRowWriteBack):
    """Whose updates take longer than those who wait for nothing."""

    def update(self, step, lookups, grads) -> None:
        time.sleep(0.02)
        super().update(step, lookups, grads)


def test_batches_that_read_no_table_come_in_their_turn():
    """As where a model has none: nothing is waited for, and nothing may be overtaken."""
    mode = ThreadedLookups(Unhurried(TrainerLink((), ShardMap(1), LocalTransport(make_shards((), 1)))))
    mode.prefetch(0, {})
    for step in range(4):
        mode.prefetch(step + 1, {})
        assert mode.rows(step, {}) == {}
        mode.update(step, {}, {})
    mode.drain()
    mode.close()


def test_a_thread_that_may_not_give_way_works_all_the_same(monkeypatch):
    def forbidden(*arguments):
        raise PermissionError("no priorities here")

    monkeypatch.setattr("os.setpriority", forbidden, raising=False)
    mode = ThreadedLookups(SyncLookups(link(LocalTransport(make_shards(ITEMS, 1)))))
    assert mode.rows(0, alone(7))["items"].shape == (1, 4)
    mode.close()


def test_the_next_batch_is_read_while_the_trainer_computes_and_not_before():
    transport = RecordingTransport(make_shards(ITEMS, 1))
    mode = ThreadedLookups(ExactPrefetch(link(transport)))
    mode.prefetch(0, alone(1, 2))
    mode.prefetch(1, alone(2, 3))
    mode.rows(0, alone(1, 2))
    mode.prefetch(2, alone(4))
    mode.update(0, alone(1, 2), ones(alone(1, 2)))
    mode.close()  # which waits for what was handed over
    # Batch 2 is put off until the rows of batch 1 are under way: dense compute waits for those.
    assert [call[::2] for call in transport.calls] == [
        ("lookup", {"items": [1, 2]}),
        ("lookup", {"items": [3]}),
        ("apply_head", {"items": [2]}, {"items": [2]}),
        ("apply", {"items": [1]}),
    ]
