"""Trainers that call servers in groups: bit for bit a dictionary whose gradients are added up by groups."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.base.row_codec import Wire
from rayrec.embeddings.lookup.bounded_stale import BoundedStale
from rayrec.embeddings.shard.contributions import Part, UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard, StepTimeoutError
from rayrec.embeddings.transport.client import LocalTransport
from rayrec.embeddings.transport.group_caller import GroupCaller
from rayrec.embeddings.transport.narrow import over
from rayrec.embeddings.transport.protocol import (
    AdmitCall,
    ApplyCall,
    ApplyHeadCall,
    FetchCall,
    LookupCall,
    ShardTransport,
)
from tests.embeddings.dictionary_runs import MODES, Run, check_tables, runs, trained_dictionaries
from tests.embeddings.sparse_runs import (
    ITEMS,
    WAIT_S,
    AdversarialTransport,
    Seen,
    ids,
    make_shards,
    run,
    without_exchange,
)
from tests.helpers.examples import examples


class Counted(ShardTransport):
    """Counts the calls that reach servers, and the ids and gradients in them."""

    def __init__(self, transport: ShardTransport) -> None:
        self._transport = transport
        self.calls: list[tuple[str, int]] = []

    def call(self, shard, call):
        match call:
            case LookupCall():
                num_rows = sum(map(len, call.request.values()))
            case ApplyHeadCall():
                num_rows = sum(len(ids_M) for ids_M, _ in call.head.values())
            case ApplyCall():
                num_rows = sum(len(ids_M) for ids_M, _ in call.update.values())
        self.calls.append((type(call).__name__, num_rows))
        return self._transport.call(shard, call)


class ThreadedTransport(ShardTransport):
    """One trainer's way to its caller, which it calls without waiting, as another process would."""

    def __init__(self, caller: GroupCaller) -> None:
        self._caller = caller
        self.in_order, self.any_order = ThreadPoolExecutor(1), ThreadPoolExecutor(8)

    def call(self, shard, call):
        assert shard == 0
        return (self.in_order if call.in_order else self.any_order).submit(self._caller.answer, call)


def train_in_groups(
    run_: Run, mode: str, num_shards: int, group_size: int, ahead: str, seed: int, wire: Wire = "float32"
) -> tuple[list[EmbeddingShard], list[Seen]]:
    """The shards after the run, and the rows that every trainer and step saw."""
    num_trainers = len(run_.batches_by_source)
    starts = range(0, num_trainers, group_size)
    shards = make_shards(run_.tables, num_shards, len(starts), max_staleness=2)
    transport = AdversarialTransport(shards, seed, repeated=0.3, lost=0.2)
    with ExitStack() as stack:
        ways: list[ThreadedTransport] = []
        for group, first in enumerate(starts):
            members = range(first, min(first + group_size, num_trainers))
            to_servers = over(transport, wire, run_.tables)
            caller = GroupCaller(group, members, run_.tables, ShardMap(num_shards), to_servers, WAIT_S)
            ways += [ThreadedTransport(caller) for _ in members]
        for way in ways:
            stack.enter_context(way.in_order)
            stack.enter_context(way.any_order)

        def make_mode(link, exchange):
            link = replace(link, shard_map=ShardMap(1), transport=ways[link.rank], is_in_group=True)
            return GROUPED[mode](link, exchange)

        found = run(make_mode, run_.tables, transport, num_shards, run_.batches_by_source, ahead=ahead)
    transport.finish()
    return shards, [seen for seen, _ in found]


GROUPED = MODES | {"bounded_stale(2)": without_exchange(partial(BoundedStale, max_staleness=2))}
aheads = st.sampled_from(["never", "before rows", "behind rows"])


@pytest.mark.parametrize("mode", ["sync", "exact_prefetch", "exact_prefetch in a thread", "bounded_stale(0)"])
@examples(40)
@given(
    run_=runs(most_trainers=5),
    num_shards=st.integers(1, 3),
    group_size=st.integers(1, 3),
    ahead=aheads,
    seed=st.integers(0, 1000),
)
def test_groups_give_the_rows_of_a_dictionary(mode, run_, num_shards, group_size, ahead, seed):
    expected, expected_rows = trained_dictionaries(run_, group_size)
    shards, seen = train_in_groups(run_, mode, num_shards, group_size, ahead, seed)
    for found, wanted in zip(seen, expected_rows, strict=True):
        assert [as_bytes(rows) for rows in found] == [as_bytes(rows) for rows in wanted]
    check_tables(shards, run_, expected)


def as_bytes(rows: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: rows_MD.tobytes() for name, rows_MD in rows.items()}


@examples(15)
@given(run_=runs(most_trainers=4), num_shards=st.integers(1, 2), ahead=aheads, seed=st.integers(0, 1000))
def test_stale_rows_do_not_keep_groups_from_committing_every_step(run_, num_shards, ahead, seed):
    shards, _ = train_in_groups(run_, "bounded_stale(2)", num_shards, 2, ahead, seed)
    assert {shard.committed_step for shard in shards} == {run_.num_steps - 1}


# ------------------------------------------------------------------------------------------ one at a time


def caller_of(
    num_members: int, wait_timeout_s: float = WAIT_S
) -> tuple[GroupCaller, Counted, EmbeddingShard]:
    (shard,) = make_shards(ITEMS, 1)
    transport = Counted(LocalTransport([shard]))
    caller = GroupCaller(0, range(num_members), ITEMS, ShardMap(1), transport, wait_timeout_s)
    return caller, transport, shard


def gradients(*values: int) -> dict:
    return {"items": (ids(*values), np.ones((len(values), 4), np.float32))}


def at_once(caller: GroupCaller, calls: list) -> list:
    """Answers, or what was raised."""

    def answered(call):
        try:
            return caller.answer(call)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(answered, calls))


def test_servers_are_called_once_with_every_id_once():
    caller, transport, shard = caller_of(3)
    for rank, values in enumerate(((1, 2), (2, 3), (1, 2))):
        caller.answer(ApplyCall(UpdateTag(0, 0, rank), gradients(*values)))
    tags = [UpdateTag(0, 1, rank) for rank in range(3)]
    requests = [{"items": ids(2, 3)}, {}, {"items": ids(9, 3)}]
    calls = [LookupCall(request, 0, tag) for request, tag in zip(requests, tags, strict=True)]
    found = at_once(caller, calls)
    assert transport.calls == [("ApplyCall", 3), ("LookupCall", 3)]
    assert found[1] == {}
    for request, rows in ((requests[0], found[0]), (requests[2], found[2])):
        assert rows["items"].tobytes() == shard.lookup(request)["items"].tobytes()


def test_a_head_brings_the_next_rows_of_every_trainer():
    caller, transport, shard = caller_of(2)
    tags = [UpdateTag(0, 0, rank, Part.HEAD) for rank in range(2)]
    rest = {"items": ids(7)}
    calls = [
        ApplyHeadCall(tags[0], gradients(1), rest, {"items": ids(1, 5)}),
        ApplyHeadCall(tags[1], gradients(1, 2), {}, {"items": ids(2)}),
    ]
    first, second = at_once(caller, calls)
    assert transport.calls == [("ApplyHeadCall", 2)]
    assert first["items"].tobytes() == shard.lookup({"items": ids(1, 5)})["items"].tobytes()
    assert second["items"].tobytes() == shard.lookup({"items": ids(2)})["items"].tobytes()
    caller.answer(ApplyCall(tags[0]._replace(part=Part.REST), gradients(7)))
    assert shard.committed_step == -1
    caller.answer(ApplyCall(tags[1]._replace(part=Part.REST), {}))
    assert shard.committed_step == 0
    assert set(shard.export("items").ids_M.tolist()) == {1, 2, 7}


def test_what_a_server_raises_every_trainer_of_the_group_hears():
    caller, transport, _ = caller_of(2)
    transport.call = lambda shard, call: (_ for _ in ()).throw(OSError("the disk is full"))
    calls = [LookupCall({"items": ids(1)}, None, UpdateTag(0, 0, rank)) for rank in range(2)]
    assert [str(error) for error in at_once(caller, calls)] == ["the disk is full"] * 2


def test_a_trainer_that_does_not_call_is_named():
    caller, _, _ = caller_of(3, wait_timeout_s=0.05)
    (error,) = at_once(caller, [LookupCall({"items": ids(1)}, None, UpdateTag(0, 4, 1))])
    assert isinstance(error, StepTimeoutError)
    assert "a call of step 4; nothing came from trainers [0, 2]" in str(error)


def test_a_gradient_that_is_not_finite_is_refused_in_the_name_of_its_trainer():
    caller, transport, _ = caller_of(2)
    bad = {"items": (ids(1), np.full((1, 4), np.nan, np.float32))}
    caller.answer(ApplyCall(UpdateTag(0, 0, 0), gradients(1)))
    with pytest.raises(ValueError, match="trainer 1: step 0, table 'items': the gradient of id 1 is nan"):
        caller.answer(ApplyCall(UpdateTag(0, 0, 1), bad))
    assert transport.calls == []
    with pytest.raises(ValueError, match="trainer 1: step 0"):  # those that wait for the step hear it, too
        caller.answer(LookupCall({"items": ids(1)}, 0, UpdateTag(0, 1, 0)))


def test_what_a_contribution_failed_with_the_others_hear_with_their_next_call():
    caller, transport, _ = caller_of(2)
    transport.call = lambda shard, call: (_ for _ in ()).throw(OSError("the disk is full"))
    caller.answer(ApplyCall(UpdateTag(0, 0, 0), gradients(1)))
    with pytest.raises(OSError, match="the disk is full"):
        caller.answer(ApplyCall(UpdateTag(0, 0, 1), gradients(1)))
    with pytest.raises(OSError, match="the disk is full"):
        caller.answer(LookupCall({"items": ids(1)}, 0, UpdateTag(0, 1, 0)))


def test_a_contribution_that_comes_again_counts_once():
    caller, transport, shard = caller_of(2)
    for step in range(2):
        for rank in (0, 0, 1, 1):
            caller.answer(ApplyCall(UpdateTag(0, step, rank), gradients(1)))
        caller.answer(ApplyCall(UpdateTag(0, 0, 0), gradients(1)))
    assert transport.calls == [("ApplyCall", 1)] * 2
    assert shard.committed_step == 1
    assert caller._meetings == {}


def test_a_contribution_may_overtake_the_one_of_the_step_before():
    """Of stale rows several are in flight, and Ray's threads carry them out in any order."""
    (shard,) = make_shards(ITEMS, 1, 1, max_staleness=2)
    caller = GroupCaller(0, range(2), ITEMS, ShardMap(1), LocalTransport([shard]), WAIT_S)
    for step, rank in [(1, 0), (0, 0), (1, 0), (0, 1), (0, 0), (2, 1), (1, 1), (2, 0), (1, 0)]:
        caller.answer(ApplyCall(UpdateTag(0, step, rank), gradients(1)))
    assert shard.committed_step == 2
    assert caller._meetings == {}
    for step in range(3, 10):
        for rank in (1, 0):
            caller.answer(ApplyCall(UpdateTag(0, step, rank), gradients(1)))
    assert shard.committed_step == 9
    assert max(map(len, caller._brought.values())) <= 2  # what is over is not remembered


@pytest.mark.parametrize("is_head", [False, True])
def test_waiting_for_room_on_a_server_is_not_work(is_head):
    held_back_s = 0.5

    class Full(LocalTransport):
        is_at_once = False

        def call(self, shard, call):
            if isinstance(call, AdmitCall):
                return type("Reply", (), {"result": lambda _: time.sleep(held_back_s)})()
            return super().call(shard, call)

    caller = GroupCaller(0, range(1), ITEMS, ShardMap(1), Full(make_shards(ITEMS, 1)), unasked_bytes=0)
    for step in range(2):  # in the first one, kernels are compiled
        busy_s = caller.busy_s
        tag = UpdateTag(0, step, 0, Part.HEAD if is_head else Part.WHOLE)
        caller.answer(ApplyHeadCall(tag, gradients(1), {}, {}) if is_head else ApplyCall(tag, gradients(1)))
        if is_head:
            caller.answer(ApplyCall(tag._replace(part=Part.REST), {}))
    assert 0 <= caller.busy_s - busy_s < held_back_s / 2


def test_rows_that_have_one_owner_are_not_called_for_in_a_group():
    caller, _, _ = caller_of(2)
    with pytest.raises(TypeError, match="FetchCall cannot be made for a group"):
        caller.answer(FetchCall({"items": ids(1)}))
