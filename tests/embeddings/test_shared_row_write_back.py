"""What the only trainer asks servers for and brings them, and when. That it is exact: `test_exactness`."""

import numpy as np
import pytest

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import EvictionConfig
from rayrec.embeddings.lookup.lookups import SyncLookups, TrainerLink
from rayrec.embeddings.lookup.shared_row_write_back import SharedRowWriteBack
from rayrec.embeddings.transport.client import LocalTransport, ShardClient
from rayrec.embeddings.transport.protocol import ApplyCall, FetchCall, WriteBackCall
from tests.embeddings.sparse_runs import ITEMS, alone, ids, make_shards


class RecordingTransport(LocalTransport):
    """Remembers, of every call, its name, ids of the table `items`, and step."""

    def __init__(self, shards) -> None:
        super().__init__(shards)
        self.calls: list[tuple] = []

    def call(self, shard, call):
        match call:
            case FetchCall():
                self.calls.append(("fetch", _named(call.request), call.after_step))
            case ApplyCall():
                self.calls.append(("apply", _named_ids(call.update), _named_ids(call.dirty), call.tag.step))
            case WriteBackCall():
                self.calls.append(("write_back", _named_ids(call.dirty), call.after_step))
        return super().call(shard, call)


def _named_ids(values) -> list[int]:
    """Of pairs of ids and what goes with them."""
    return _named({name: ids_M for name, (ids_M, _) in (values or {}).items()})


def _named(by_table) -> list[int]:
    return sorted(by_table.get("items", np.empty(0)).tolist())


def link(transport, tables=ITEMS) -> TrainerLink:
    return TrainerLink(tables, ShardMap(1), transport)


def step(mode, number: int, batch, following=None) -> np.ndarray:
    """One step of a training whose gradients are all one; the rows that it saw."""
    if following is not None:
        mode.prefetch(number + 1, following)
    rows = mode.rows(number, batch)["items"].copy()
    mode.update(number, batch, {"items": np.ones_like(rows)})
    return rows


def with_rows(*values: int, tables=ITEMS):
    """A shard whose ids have rows since step 0, and what trains it."""
    shards = make_shards(tables, 1)
    transport = RecordingTransport(shards)
    mode = SharedRowWriteBack(link(transport, tables))
    step(mode, 0, alone(*values))
    mode.drain()
    transport.calls.clear()
    return shards, transport, mode


def test_what_two_batches_share_stays_and_comes_back_when_the_next_does_not_read_it():
    _, transport, mode = with_rows(1, 2, 3, 4, 5)
    mode.prefetch(1, alone(1, 2, 3))
    step(mode, 1, alone(1, 2, 3), alone(3, 4))
    step(mode, 2, alone(3, 4), alone(4, 5))
    step(mode, 3, alone(4, 5))
    assert transport.calls == [
        ("fetch", [1, 2, 3], 0),
        ("fetch", [4], 0),
        ("apply", [1, 2], [], 1),
        ("fetch", [5], 1),
        ("apply", [], [3], 2),
        ("apply", [5], [4], 3),
    ]
    assert (mode.stats.num_cache_hits, mode.stats.num_cache_misses) == (2, 5 + 5)


def test_rows_of_the_next_batch_are_there_before_anything_else_is_sent():
    _, transport, mode = with_rows(1, 2, 3)
    mode.prefetch(1, alone(1, 2))
    found = []
    mode.on_rows = lambda number, rows: found.append((number, len(transport.calls), rows["items"].copy()))
    step(mode, 1, alone(1, 2), alone(2, 3))
    (number, num_calls, rows_MD), *_ = found
    assert (number, num_calls) == (2, 2)  # two fetches, no apply
    assert rows_MD.tobytes() == step(mode, 2, alone(2, 3)).tobytes()


def test_an_id_without_a_row_is_asked_for_behind_the_update_that_may_create_it():
    _, transport, mode = with_rows(1)
    mode.prefetch(1, alone(1, 9))
    step(mode, 1, alone(1, 9), alone(1, 9))
    assert transport.calls == [("fetch", [1, 9], 0), ("apply", [9], [], 1), ("fetch", [9], 1)]


def test_where_a_step_evicts_every_row_goes_to_the_servers_and_is_asked_for_behind_it():
    tables = (ITEMS[0].model_copy(update={"eviction": EvictionConfig(max_age_steps=9, every_steps=3)}),)
    _, transport, mode = with_rows(1, 2, tables=tables)
    mode.prefetch(1, alone(1, 2))
    step(mode, 1, alone(1, 2), alone(1, 2))
    step(mode, 2, alone(1, 2), alone(1, 2))  # evicts
    assert transport.calls[-2:] == [("apply", [], [1, 2], 2), ("fetch", [1, 2], 2)]


def test_drain_brings_held_rows_to_the_servers_and_keeps_them():
    shards, transport, mode = with_rows(1, 2)
    expected = make_shards(ITEMS, 1)
    sync = SyncLookups(link(LocalTransport(expected)))
    step(sync, 0, alone(1, 2))
    step(sync, 1, alone(1, 2))
    mode.prefetch(1, alone(1, 2))
    step(mode, 1, alone(1, 2), alone(2))
    mode.drain()
    assert transport.calls[-1] == ("write_back", [2], 1)
    read = [
        ShardClient(ITEMS, ShardMap(1), LocalTransport(s)).read({"items": ids(1, 2)})
        for s in (shards, expected)
    ]
    assert read[0]["items"].tobytes() == read[1]["items"].tobytes()
    assert step(mode, 2, alone(2)).tobytes() == read[1]["items"][1:].tobytes()
    assert transport.calls[-1] == ("apply", [], [2], 2)


@pytest.mark.parametrize(
    ("grads_MD", "refusal"),
    [
        (np.full((2, 4), np.nan, np.float32), "step 1, table 'items': the gradient of id 1 is nan"),
        (np.ones((2, 4)), "gradients must be float32"),
        (np.ones((1, 4), np.float32), "one row per id"),
    ],
)
def test_gradients_that_servers_would_refuse_change_no_row(grads_MD, refusal):
    shards, transport, mode = with_rows(1, 2)
    before = shards[0].export("items")
    mode.prefetch(1, alone(1, 2))
    mode.prefetch(2, alone(2))
    mode.rows(1, alone(1, 2))
    transport.calls.clear()
    with pytest.raises(ValueError, match=refusal):
        mode.update(1, alone(1, 2), {"items": grads_MD})
    assert transport.calls == []
    assert shards[0].export("items").weights_MD.tobytes() == before.weights_MD.tobytes()


def test_a_batch_that_is_announced_again_keeps_the_rows_that_it_holds():
    shards, _, mode = with_rows(1, 2)
    mode.prefetch(1, alone(1, 2))
    rows_MD = step(mode, 1, alone(1, 2), alone(2))
    mode.prefetch(2, alone(2))
    assert step(mode, 2, alone(2)).tobytes() != rows_MD[1:].tobytes()
    mode.drain()
    held = shards[0].export("items")
    assert dict(zip(held.ids_M.tolist(), held.counts_M.tolist(), strict=True)) == {1: 2, 2: 3}


def test_an_update_needs_rows():
    _, _, mode = with_rows(1)
    with pytest.raises(RuntimeError, match="no update without rows"):
        mode.update(1, alone(1), {})


def test_rows_of_a_step_can_be_taken_once():
    _, _, mode = with_rows(1)
    mode.rows(1, alone(1))
    with pytest.raises(RuntimeError, match="the rows of a step can be taken once"):
        mode.rows(1, alone(1))
