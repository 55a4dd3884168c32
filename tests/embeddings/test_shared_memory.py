"""Calls through shared memory give what local calls give, and say so when the other side is gone."""

import gc
import multiprocessing
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rayrec.embeddings.config import AdamConfig, TableConfig
from rayrec.embeddings.lookup.exact_prefetch import ExactPrefetch
from rayrec.embeddings.lookup.lookups import SyncLookups
from rayrec.embeddings.lookup.shared_row_write_back import SharedRowWriteBack
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.transport.client import LocalTransport
from rayrec.embeddings.transport.protocol import (
    ApplyCall,
    EvictedCall,
    FetchCall,
    LookupCall,
    WriteBackCall,
)
from rayrec.embeddings.transport.shared_blocks import why_unavailable
from rayrec.embeddings.transport.shared_calls import CallServer, Channel, Endpoint, ServerLostError
from rayrec.embeddings.transport.shared_memory import SharedMemoryTransport
from tests.embeddings.sparse_runs import Ids, all_rows, ids, make_shards, run, without_exchange

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

WAIT_S = 20.0
ITEMS = (TableConfig(name="items", dim=4, seed=3), TableConfig(name="users", dim=2, seed=4))


def answers_of(shard: EmbeddingShard):
    """What a `CallServer` answers with, as a parameter server does."""
    return lambda call, empty: call.carry_out(shard, empty)


class Served:
    """A server in this process, and whom to close when a test is over."""

    def __init__(self) -> None:
        self._open: list = []

    def server(self, answer) -> CallServer:
        self._open.append(CallServer("server 0", answer))
        return self._open[-1]

    def transport(self, *servers: CallServer) -> SharedMemoryTransport:
        self._open.append(SharedMemoryTransport({n: server.endpoint for n, server in enumerate(servers)}))
        return self._open[-1]

    def shards(self, shards: list[EmbeddingShard]) -> SharedMemoryTransport:
        return self.transport(*(self.server(answers_of(shard)) for shard in shards))

    def close(self) -> None:
        for each in reversed(self._open):
            each.close()


@pytest.fixture
def served():
    everything = Served()
    yield everything
    everything.close()


@pytest.fixture(autouse=True, scope="module")
def what_is_there_already_is_not_looked_at_for_garbage():
    """Blocks are counted when garbage is gone, which takes long where much was imported before."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def ones(*values: int) -> tuple[np.ndarray, np.ndarray]:
    """An update of the given items."""
    return ids(*values), np.ones((len(values), 4), np.float32)


def shared_blocks() -> int:
    """How many blocks of shared memory this process has mapped and can still reach: fewer than before, where
    those of an earlier test have gone meanwhile."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:rayrec")


def eventually(condition) -> None:
    """Wait for what another thread or process does in its own time."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_rows_and_updates_go_there_and_back(served):
    (shard,) = make_shards(ITEMS, 1)
    transport = served.shards([shard])

    assert transport.call(0, ApplyCall(UpdateTag(0, 0, 0), {"items": ones(5, -1)})).result() == 0
    request = {"items": ids(7, -1, 5), "users": ids()}
    found = transport.call(0, LookupCall(request, after_step=0)).result()

    expected = shard.lookup(request)
    assert found.keys() == expected.keys()
    for name, rows_MD in expected.items():
        assert found[name].dtype == np.float32
        assert found[name].shape == rows_MD.shape
        assert found[name].tobytes() == rows_MD.tobytes()
    assert shard.stats().num_rows == {"items": 2, "users": 0}


def test_a_caches_calls_go_there_and_back(served):
    (shard,), (expected,) = make_shards(ITEMS, 1), make_shards(ITEMS, 1)
    transport, local = served.shards([shard]), LocalTransport([expected])

    def calls(through):
        yield through.call(0, ApplyCall(UpdateTag(0, 0, 0), {"items": ones(1, 2)})).result()
        records_MW, present_M = through.call(0, FetchCall({"items": ids(2, 3)}, 0)).result()["items"]
        yield records_MW.tolist(), present_M.tolist()
        changed_MW = records_MW[:1] + 1
        yield through.call(0, WriteBackCall(0, 0, {"items": (ids(2), changed_MW)})).result()
        yield through.call(0, ApplyCall(UpdateTag(0, 1, 0), {}, {"items": (ids(2), changed_MW + 1)})).result()
        yield through.call(0, EvictedCall(-1, 1)).result()

    assert list(calls(transport)) == list(calls(local))
    assert all_rows([shard], ITEMS) == all_rows([expected], ITEMS)


def test_a_lookup_that_waits_holds_up_neither_updates_nor_other_lookups(served):
    (shard,) = make_shards(ITEMS, 1)
    transport = served.shards([shard])

    waiting = [transport.call(0, LookupCall({"items": ids(1)}, after_step)) for after_step in (1, 0, 1, 0)]
    before_MD = transport.call(0, LookupCall({"items": ids(1)}, after_step=None)).result()["items"]
    for step in range(2):
        transport.call(0, ApplyCall(UpdateTag(0, step, 0), {"items": ones(1)})).result()

    after_MD = [reply.result()["items"] for reply in waiting]
    assert (after_MD[0] < before_MD).all()
    assert after_MD[0].tobytes() == after_MD[2].tobytes()


def test_answers_can_be_claimed_in_any_order_more_than_once_or_never(served):
    transport = served.shards(make_shards(ITEMS, 1))
    replies = {i: transport.call(0, LookupCall({"items": ids(i)}, None)) for i in range(50)}
    for i in range(0, 50, 7):
        del replies[i]

    expected = make_shards(ITEMS, 1)[0]
    for i in sorted(replies, reverse=True):
        for _ in range(2):
            assert (
                replies[i].result()["items"].tobytes()
                == expected.lookup({"items": ids(i)})["items"].tobytes()
            )


def test_rows_stay_as_they_are_while_somebody_has_them(served):
    """A block is used again only when the last array in it is gone, and then it is."""
    transport = served.shards(make_shards(ITEMS, 1))
    expected = make_shards(ITEMS, 1)[0]
    held = {
        i: transport.call(0, LookupCall({"items": ids(i, i + 1)}, None)).result()["items"][1:]
        for i in range(20)
    }

    for i, rows_MD in held.items():
        assert rows_MD.tobytes() == expected.lookup({"items": ids(i + 1)})["items"].tobytes()
    assert not rows_MD.flags.writeable
    in_use = shared_blocks()
    assert in_use >= 20

    held.clear()
    del rows_MD
    for i in range(100):
        transport.call(0, LookupCall({"items": ids(i)}, None)).result()
    assert shared_blocks() == in_use


def test_blocks_grow_with_what_is_asked_for(served):
    """The reply is larger than the request, and the next request larger than any block so far."""
    wide = (TableConfig(name="wide", dim=512, seed=1), TableConfig(name="thin", dim=1, seed=2))
    (shard,) = make_shards(wide, 1)
    transport = served.shards([shard])

    for num_ids in (1, 40, 0, 2_000, 20_000, 3):
        request = {name: np.arange(num_ids) for name in ("thin", "wide")}
        found = transport.call(0, LookupCall(request, None)).result()
        expected = shard.lookup(request)
        for name, rows_MD in expected.items():
            assert found[name].tobytes() == rows_MD.tobytes()
    del found
    many_M = np.arange(100_000)
    transport.call(
        0, ApplyCall(UpdateTag(0, 0, 0), {"thin": (many_M, np.ones((100_000, 1), np.float32))})
    ).result()
    assert shard.stats().num_rows == {"wide": 0, "thin": 100_000}


def test_anything_that_pickles_can_be_asked_and_answered(served):
    def answer_to(request, empty):
        first, second = request
        made = empty((2, 3), dtype=np.int32)
        made[:] = first["array"]
        return {"made": made, "sent back": second, "elsewhere": first["array"] * 2, "words": ("a", None)}

    server = served.server(answer_to)
    channel = served.transport(server)._any_order[0]
    array_23 = np.arange(6, dtype=np.int32).reshape(2, 3)

    answer = channel.call(({"array": array_23}, array_23[:, ::2])).result()

    assert answer["words"] == ("a", None)
    assert answer["made"].tolist() == array_23.tolist()
    assert answer["sent back"].tolist() == array_23[:, ::2].tolist()
    assert answer["elsewhere"].tolist() == (2 * array_23).tolist()


def test_errors_arrive_as_they_were_raised_and_the_server_goes_on(served):
    (shard,) = make_shards(ITEMS, 1)
    transport = served.shards([shard])

    with pytest.raises(ValueError, match="there is no embedding table 'nobody'") as raised:
        transport.call(0, LookupCall({"nobody": ids(1)}, None)).result()
    assert "raised in server 0" in raised.value.__notes__[0]
    refused = transport.call(
        0, ApplyCall(UpdateTag(0, 0, 0), {"items": (ids(1), np.full((1, 4), np.nan, np.float32))})
    )
    waiting = transport.call(0, LookupCall({"items": ids(1)}, after_step=0))
    for reply in (refused, waiting):
        with pytest.raises(ValueError, match=r"shard 0 refuses step 0 because of trainer 0.*id 1 is nan"):
            reply.result()
    assert transport.call(0, LookupCall({"items": ids(1)}, None)).result()["items"].shape == (1, 4)


class NoWayBackError(Exception):
    def __init__(self, needed: str, also: str) -> None:
        super().__init__(f"{needed} and {also}")


def test_an_error_that_does_not_pickle_arrives_as_its_words(served):
    def answer_to(request, empty):
        raise NoWayBackError("this", "that")

    channel = served.transport(served.server(answer_to))._any_order[0]

    with pytest.raises(RuntimeError, match="NoWayBackError: this and that"):
        channel.call(None).result()


def test_a_reply_for_which_there_is_no_memory_is_an_error_of_that_call(served, monkeypatch):
    channel = served.transport(served.server(lambda num, empty: np.ones(num)))._any_order[0]
    assert channel.call(10).result().sum() == 10

    def no_block(number, num_bytes):
        raise MemoryError(f"no shared memory for a block of {num_bytes} bytes")

    with monkeypatch.context() as patched:
        patched.setattr("rayrec.embeddings.transport.shared_calls.new_block", no_block)
        with pytest.raises(MemoryError, match="no shared memory for a block of 8000"):
            channel.call(1_000_000).result()
    assert channel.call(1_000_000).result().sum() == 1_000_000


def test_a_server_that_cannot_answer_hangs_up(served, monkeypatch):
    """A thread that ended without a word would leave the client waiting."""
    channel = served.transport(served.server(lambda request, empty: 1 // request))._any_order[0]
    monkeypatch.setattr("rayrec.embeddings.transport.shared_calls._packed_error", None)

    with pytest.raises(ServerLostError, match="server 0 is gone"):
        channel.call(0).result()


def test_a_contribution_that_waits_for_another_ones_is_not_overwritten(served):
    """The shard keeps the first trainer's arrays, which lie in a block, until the second one's arrive."""
    shards = make_shards(ITEMS, 1, num_trainers=2), make_shards(ITEMS, 1, num_trainers=2)
    first, second = (served.shards(shards[0]) for _ in range(2))
    first_update, second_update = {"items": ones(1, 2)}, {"items": ones(2, 3)}
    for step in range(3):
        first.call(0, ApplyCall(UpdateTag(0, step, 0), first_update)).result()
        first.call(0, LookupCall({"items": np.arange(1000)}, None)).result()
        # A repetition:
        first.call(0, ApplyCall(UpdateTag(0, step, 0), {"items": ones(*range(100, 1000))})).result()
        second.call(0, ApplyCall(UpdateTag(0, step, 1), second_update)).result()
        for source, update in enumerate((first_update, second_update)):
            shards[1][0].apply(UpdateTag(0, step, source), update)

    assert all_rows(shards[0], ITEMS) == all_rows(shards[1], ITEMS)


def test_what_a_server_keeps_is_lent_to_it_until_it_is_done(served):
    held = []

    def keep_or_release(array_M, empty):
        if array_M is None:
            held.clear()
        else:
            held.append(array_M)

    channel = served.transport(served.server(keep_or_release))._in_order[0]
    in_use = set()
    for turn in range(4):
        sent = [np.full(1000, n) for n in range(4)]
        for array_M in sent:
            channel.call(array_M).result()
        assert [array_M.tolist() for array_M in held] == [array_M.tolist() for array_M in sent]
        if turn:
            in_use.add(shared_blocks())
        channel.call(None).result()
        channel.call(None).result()  # whose answer comes when all of them are released

    assert len(in_use) == 1


def test_two_clients_and_several_threads_of_one_do_not_get_each_others_answers(served):
    (shard,) = make_shards(ITEMS, 1)
    server = served.server(answers_of(shard))
    transports = [served.transport(server) for _ in range(2)]

    def ask(thread: int) -> None:
        random = np.random.default_rng(thread)
        for _ in range(60):
            wanted_M = random.choice(10_000, size=random.integers(1, 300), replace=False)
            found = transports[thread % 2].call(0, LookupCall({"items": wanted_M}, None)).result()["items"]
            assert found.tobytes() == shard.lookup({"items": wanted_M})["items"].tobytes()

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(ask, thread) for thread in range(4)]:
            future.result()


def test_arrays_that_outgrow_their_memory_arrive_all_the_same(served):
    """`memory` is made for less than what comes: some arrays lie there already, others do not fit."""
    server = served.server(lambda arrays, empty: b"".join(array.tobytes() for array in arrays))
    channel = Channel(server.endpoint, in_order=True)
    for _ in range(3):
        empty = channel.memory(100_000)
        first, unused = empty((30_000,), np.uint8), empty((70_000,), np.uint8)
        first[:], unused[:] = 1, 2
        second = np.full(100_000, 3, np.uint8)
        assert channel.call((first, second)).result() == bytes([1]) * 30_000 + bytes([3]) * 100_000
    channel.memory(1000)  # and is not used
    channel.close()


@pytest.mark.parametrize(
    ("num_trainers", "mode_type"), [(3, ExactPrefetch), (1, ExactPrefetch), (1, SharedRowWriteBack)]
)
@pytest.mark.parametrize("share_a_connection", [False, True])
def test_training_through_shared_memory_is_bit_equal_to_sync(
    served, share_a_connection, num_trainers, mode_type
):
    """Trainers on threads of their own, two servers."""
    num_shards = 2
    tables = tuple(
        TableConfig(name=name, dim=dim, seed=dim, optimizer=AdamConfig(lr=0.05))
        for name, dim in (("items", 8), ("users", 3))
    )
    random = np.random.default_rng(5)
    batches: list[list[dict[str, Ids]]] = [[] for _ in range(num_trainers)]
    for _ in range(12):
        read = {
            table.name: [random.choice(60, size=random.integers(0, 40), replace=False) for _ in batches]
            for table in tables
        }
        for source, of_source in enumerate(batches):
            of_source.append(
                {name: Ids(parts[source], np.unique(np.concatenate(parts))) for name, parts in read.items()}
            )
    expected_shards = make_shards(tables, 1, num_trainers)
    expected = run(without_exchange(SyncLookups), tables, LocalTransport(expected_shards), 1, batches)

    shards = make_shards(tables, num_shards, num_trainers)
    servers = [served.server(answers_of(shard)) for shard in shards]
    transports = [served.transport(*servers) for _ in range(1 if share_a_connection else num_trainers)]

    class OneEach:
        """As in a run: every trainer, known by its thread, has its own connections."""

        def __init__(self) -> None:
            self._left = list(transports)
            self._mine = threading.local()

        def __getattr__(self, name):
            if not hasattr(self._mine, "transport"):
                self._mine.transport = self._left.pop()
            return getattr(self._mine.transport, name)

    transport = transports[0] if share_a_connection else OneEach()
    found = run(without_exchange(mode_type), tables, transport, num_shards, batches)

    for (expected_steps, _), (found_steps, _) in zip(expected, found, strict=True):
        for expected_rows, found_rows in zip(expected_steps, found_steps, strict=True):
            for name in expected_rows:
                assert expected_rows[name].tobytes() == found_rows[name].tobytes()
    assert all_rows(shards, tables) == all_rows(expected_shards, tables)


def test_a_server_that_is_not_there_is_said_at_once():
    with pytest.raises(ServerLostError, match="server 7 cannot be reached through shared memory"):
        SharedMemoryTransport({0: Endpoint("server 7", "rayrec-nobody")})


def test_a_closed_server_fails_who_waits_and_who_asks(served):
    (shard,) = make_shards(ITEMS, 1)
    server = served.server(answers_of(shard))
    transport = served.transport(server)
    waiting = transport.call(0, LookupCall({"items": ids(1)}, after_step=0))
    with ThreadPoolExecutor(1) as pool:
        claimed = pool.submit(waiting.result)
        server.close()
        with pytest.raises(ServerLostError, match="server 0 is gone: its process ended before it answered"):
            claimed.result(WAIT_S)
    for ask in (
        lambda: transport.call(0, LookupCall({"items": ids(1)}, None)).result(),
        lambda: transport.call(0, ApplyCall(UpdateTag(0, 0, 0), {})).result(),
    ):
        with pytest.raises(ServerLostError, match="server 0 is gone"):
            ask()


def serve_until_killed(pipe) -> None:
    (shard,) = make_shards(ITEMS, 1)
    server = CallServer("server 0", answers_of(shard))
    pipe.send(server.endpoint)
    pipe.recv()


def hold_rows_until_killed(pipe) -> None:
    transport = SharedMemoryTransport({0: pipe.recv()})
    held = [transport.call(0, LookupCall({"items": np.arange(10)}, None)).result() for _ in range(5)]
    transport.call(0, LookupCall({"items": ids(1)}, after_step=0))
    pipe.send(len(held))
    pipe.recv()


@pytest.fixture
def start_process():
    """Start a function in a process of its own; returns it and a pipe to it."""
    context = multiprocessing.get_context("spawn")
    started = []

    def start(function):
        ours, theirs = context.Pipe()
        process = context.Process(target=function, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        started.append(process)
        return process, ours

    yield start
    for process in started:
        process.kill()
        process.join()


@pytest.mark.slow
def test_a_server_that_is_killed_is_missed_at_once_and_leaves_nothing(start_process):
    before = shared_blocks()
    process, pipe = start_process(serve_until_killed)
    endpoint = pipe.recv()
    transport = SharedMemoryTransport({0: endpoint})
    rows_MD = transport.call(0, LookupCall({"items": ids(1, 2)}, None)).result()["items"]
    waiting = transport.call(0, LookupCall({"items": ids(1)}, after_step=0))

    process.kill()

    with pytest.raises(ServerLostError, match="server 0 is gone"):
        waiting.result()
    process.join()
    with pytest.raises(ServerLostError, match="server 0 is gone"):
        transport.call(0, ApplyCall(UpdateTag(0, 0, 0), {"items": ones(1)}))
    assert rows_MD.shape == (2, 4)  # what has arrived stays
    assert endpoint.address not in Path("/proc/net/unix").read_text()
    transport.close()
    del transport, waiting, rows_MD
    assert shared_blocks() <= before


@pytest.mark.slow
def test_the_server_frees_the_blocks_of_a_client_that_is_killed(served, start_process):
    (shard,) = make_shards(ITEMS, 1)
    server = served.server(answers_of(shard))
    before = shared_blocks()
    process, pipe = start_process(hold_rows_until_killed)
    pipe.send(server.endpoint)
    assert pipe.recv() == 5
    assert shared_blocks() > before

    process.kill()
    shard.apply(UpdateTag(0, 0, 0), {})  # what the client waited for; nobody wants it any more

    eventually(lambda: shared_blocks() <= before)


def test_another_users_process_is_not_listened_to(served, monkeypatch):
    (shard,) = make_shards(ITEMS, 1)
    server = served.server(answers_of(shard))
    monkeypatch.setattr("rayrec.embeddings.transport.shared_calls.is_own", lambda connection: False)

    with pytest.raises(ServerLostError, match="another user's process answers there"):
        SharedMemoryTransport({0: server.endpoint})
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(WAIT_S)
    stranger.connect("\0" + server.endpoint.address)
    assert stranger.recv(1) == b""
    stranger.close()
