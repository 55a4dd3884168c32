"""Parts of steps that wait at their trainers: the same bits within a bound of bytes, and no deadlock."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import SgdConfig, TableConfig
from rayrec.embeddings.lookup.exact_prefetch import ExactPrefetch
from rayrec.embeddings.lookup.lookups import TrainerLink
from rayrec.embeddings.shard.contributions import Part, UpdateTag, bytes_of, summed
from rayrec.embeddings.shard.shard import EmbeddingShard, StepTimeoutError
from rayrec.embeddings.shard.step_buffer import PartKey, StepBuffer, part_bytes_without_asking
from rayrec.embeddings.transport.client import LocalTransport, ShardClient
from rayrec.embeddings.transport.protocol import AdmitCall
from tests.embeddings.sparse_runs import Board, Ids, ids, train
from tests.helpers.examples import examples

TABLE = TableConfig(name="items", dim=4, seed=3, init_scale=0, optimizer=SgdConfig(lr=1.0))


def shard(num_trainers: int, step_buffer: int, wait_timeout_s: float = 20) -> EmbeddingShard:
    return EmbeddingShard((TABLE,), 0, num_trainers, 0, wait_timeout_s, step_buffer=step_buffer)


def updates_of(num_trainers: int, seed: int = 0) -> list[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Gradients whose sum depends on the order in which they are added."""
    random_ = np.random.default_rng(seed)
    return [
        {
            "items": (
                random_.permutation(60)[:40].astype(np.int64),
                (random_.standard_normal((40, 4)) * 10.0 ** random_.integers(-4, 5, (40, 1))).astype(
                    np.float32
                ),
            )
        }
        for _ in range(num_trainers)
    ]


def rows_after(updates) -> bytes:
    """Of a server that gets the sum as one trainer's update."""
    alone_ = shard(1, 0)
    alone_.apply(UpdateTag(0, 0, 0), summed(updates))
    return rows(alone_)


def rows(served: EmbeddingShard) -> bytes:
    return served.lookup({"items": np.arange(60)})["items"].tobytes()


def key(rank: int, step: int = 0, part: Part = Part.WHOLE) -> PartKey:
    return PartKey(step, rank, part)


def test_room_goes_to_the_earliest_step_and_the_lowest_rank_and_a_turn_needs_none():
    buffer, turn = StepBuffer(200), [0]

    def is_turn(asked: PartKey) -> bool:
        return asked.step == 0 and asked.rank == turn[0]

    assert buffer.ask(key(5), 60, is_turn)  # of the half of those that ask
    assert buffer.ask(key(5), 60, is_turn)  # again
    assert not buffer.ask(key(4), 60, is_turn)
    assert not buffer.ask(key(0, step=1), 60, is_turn)
    assert not buffer.ask(key(3), 60, is_turn)
    assert buffer.ask(key(0), 1000, is_turn)
    assert buffer.num_held_back == 3
    assert buffer.grant(is_turn) == []
    buffer.release([key(0), key(5), key(9)])
    assert buffer.grant(is_turn) == [key(3)]
    turn[0] = 4
    assert buffer.grant(is_turn) == [key(4)]
    buffer.release([key(3), key(4)])
    assert buffer.grant(is_turn) == [key(0, step=1)]


def test_what_comes_without_asking_fills_half_of_the_buffer_at_most():
    assert part_bytes_without_asking(2**30, 1) is None
    for num_trainers, max_staleness in [(2, 0), (3, 2), (1000, 1)]:
        most = part_bytes_without_asking(2**30, num_trainers, max_staleness)
        assert most * num_trainers * 2 * (2 + max_staleness) <= 2**29


@given(data=st.data(), num_trainers=st.integers(2, 6), parts_in_buffer=st.integers(0, 4))
@examples(40)
def test_any_order_gives_the_bits_of_a_sum_in_rank_order_within_the_buffer(
    data, num_trainers, parts_in_buffer
):
    updates = updates_of(num_trainers)
    size = bytes_of(updates[0])
    step_buffer = 2 * parts_in_buffer * size
    served = shard(num_trainers, step_buffer)
    left = data.draw(st.permutations(range(num_trainers)))
    while left:
        admitted = [rank for rank in left if served.ask_for_room(UpdateTag(0, 0, rank), size)]
        assert admitted, "somebody can go on at any time"
        rank = data.draw(st.sampled_from(admitted))
        served.apply(UpdateTag(0, 0, rank), updates[rank])
        left = [other for other in left if other != rank]
    assert rows(served) == rows_after(updates)
    # Half of the buffer, and the part whose turn it is.
    assert served.stats().step_buffer_bytes <= step_buffer // 2 + size


@pytest.mark.parametrize("seed", range(3))
def test_32_trainers_at_once_hold_what_the_buffer_allows_and_end_with_the_same_bits(seed):
    num_trainers, num_shards = 32, 2
    updates = updates_of(num_trainers, seed)
    step_buffer = 6 * bytes_of(updates[0])
    shards = [
        EmbeddingShard((TABLE,), number, num_trainers, 0, 20, step_buffer=step_buffer)
        for number in range(num_shards)
    ]
    order = (
        list(range(num_trainers - 1, -1, -1))
        if seed == 0
        else random.Random(seed).sample(range(num_trainers), num_trainers)
    )

    def send(rank: int) -> None:
        unasked = part_bytes_without_asking(step_buffer, num_trainers)
        client = ShardClient((TABLE,), ShardMap(num_shards), LocalTransport(shards), unasked)
        ids_M, grads_MD = updates[rank]["items"]
        for reply in client.send(UpdateTag(0, 0, rank), {"items": ids_M}, {"items": grads_MD}):
            reply.result()

    with ThreadPoolExecutor(num_trainers) as pool:
        list(pool.map(send, order))
    found = ShardClient((TABLE,), ShardMap(num_shards), LocalTransport(shards)).read({"items": np.arange(60)})
    assert found["items"].tobytes() == rows_after(updates)
    stats = [one.stats() for one in shards]
    assert all(one.step_buffer_bytes <= step_buffer for one in stats)
    if seed == 0:  # the last rank came first
        assert sum(one.num_held_back for one in stats) > 0


class Threaded(LocalTransport):
    """Every call in a thread, as actors carry them out."""

    is_at_once = False

    def __init__(self, shards: list[EmbeddingShard], pool: ThreadPoolExecutor) -> None:
        super().__init__(shards)
        self._pool = pool

    def call(self, shard, call):
        return self._pool.submit(call.carry_out, self._shards[shard])


def rows_of_a_run(
    step_buffer: int, is_at_once: bool = False, num_trainers: int = 3, num_steps: int = 5
) -> bytes:
    """After steps in mode `exact_prefetch`, which sends heads first, on two servers.

    Args:
        is_at_once: whether servers are called in the trainers' threads.
    """
    every = np.arange(40)
    batches = [
        [{"items": Ids(every[rank : rank + 30 + step], every)} for step in range(num_steps)]
        for rank in range(num_trainers)
    ]
    shards = [
        EmbeddingShard((TABLE,), number, num_trainers, 0, 20, step_buffer=step_buffer) for number in range(2)
    ]
    board = Board(num_trainers)
    unasked = part_bytes_without_asking(step_buffer, num_trainers)

    def trained(rank: int, calls: ThreadPoolExecutor) -> None:
        transport = LocalTransport(shards) if is_at_once else Threaded(shards, calls)
        link = TrainerLink((TABLE,), ShardMap(2), transport, rank, unasked_bytes=unasked)
        try:
            train(ExactPrefetch(link), batches[rank], rank, board, 1000, "before rows")
        except BaseException:
            board.abort()
            raise

    with ThreadPoolExecutor(32) as calls, ThreadPoolExecutor(num_trainers) as trainers:
        for done in [trainers.submit(trained, rank, calls) for rank in range(num_trainers)]:
            done.result()
    client = ShardClient((TABLE,), ShardMap(2), LocalTransport(shards))
    return client.read({"items": every})["items"].tobytes()


@pytest.mark.parametrize("is_at_once", [False, True])
def test_heads_and_rests_go_on_with_a_buffer_of_nothing(is_at_once):
    assert rows_of_a_run(1, is_at_once) == rows_of_a_run(2**30)


def test_who_waits_for_room_hears_of_a_refused_step_of_a_rollback_and_of_its_time():
    large = 2**20

    def waiting(served: EmbeddingShard, pool: ThreadPoolExecutor):
        asked = threading.Event()
        order = served._checks.order

        def noticed(*arguments):
            order(*arguments)
            asked.set()

        served._checks.order = noticed
        future = pool.submit(served.admit, UpdateTag(0, 0, 1), large)
        assert asked.wait(10)
        return future

    with ThreadPoolExecutor(3) as pool:
        served = shard(3, 1)
        admitted = waiting(served, pool)
        with pytest.raises(ValueError, match="the gradient of id 1 is nan"):
            served.apply(UpdateTag(0, 0, 0), {"items": (ids(1), np.full((1, 4), np.nan, np.float32))})
        with pytest.raises(ValueError, match="the gradient of id 1 is nan"):
            admitted.result(10)

        served = shard(3, 1)
        admitted = waiting(served, pool)
        served.begin(-1, 1)
        with pytest.raises(
            RuntimeError, match="incarnation 1 began while a call of incarnation 0 waited for room"
        ):
            admitted.result(10)
        # What was asked for before is forgotten: the new incarnation's turns are its own.
        assert not served.ask_for_room(UpdateTag(1, 0, 2), large)
        for rank in range(3):
            served.admit(UpdateTag(1, 0, rank), large)
            served.apply(UpdateTag(1, 0, rank), {})
        assert served.committed_step == 0

        with pytest.raises(
            StepTimeoutError, match=r"waited 0.05 s for room for .* from trainer 2.*\[0, 1, 2\]"
        ):
            shard(3, 1, wait_timeout_s=0.05).admit(UpdateTag(0, 0, 2), large)


def test_a_part_that_came_needs_no_room_and_a_part_that_must_not_come_gets_none():
    served = shard(2, 1)
    served.apply(UpdateTag(0, 0, 1), updates_of(1)[0])
    AdmitCall(UpdateTag(0, 0, 1), 2**20).carry_out(served)  # delivered again
    with pytest.raises(ValueError, match="expects trainers 0 to 1"):
        served.admit(UpdateTag(0, 0, 2), 1)
    with pytest.raises(ValueError, match="leaves a gap after step -1"):
        served.admit(UpdateTag(0, 2, 0), 1)
    with pytest.raises(ValueError, match="is in incarnation 0 and refuses"):
        served.admit(UpdateTag(1, 0, 0), 1)
