"""Sparse training without a model: batches of ids, shards, and a transport that does its worst."""

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import RowwiseAdagradConfig, TableConfig
from rayrec.embeddings.lookup.cache.cached_records import Rows, on_host
from rayrec.embeddings.lookup.lookups import LookupMode, TrainerLink
from rayrec.embeddings.shard.shard import EmbeddingShard
from rayrec.embeddings.shard.step_buffer import DEFAULT_STEP_BUFFER
from rayrec.embeddings.transport.narrow import NarrowCall
from rayrec.embeddings.transport.protocol import (
    AdmitCall,
    ApplyCall,
    ApplyHeadCall,
    EvictedCall,
    FetchCall,
    LookupCall,
    ShardTransport,
    WriteBackCall,
)

WAIT_S = 20.0


@dataclass(frozen=True)
class Ids:
    ids_M: np.ndarray
    updated_ids: np.ndarray


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def alone(*values: int) -> dict[str, Ids]:
    """What a single trainer's batch reads of the table `items`."""
    return {"items": Ids(ids(*values), ids(*values))}


def make_shards(
    tables: Sequence[TableConfig],
    num_shards: int,
    num_trainers: int = 1,
    max_staleness: int = 0,
    step_buffer: int = DEFAULT_STEP_BUFFER,
) -> list[EmbeddingShard]:
    return [
        EmbeddingShard(
            tables,
            s,
            num_trainers,
            wait_timeout_s=WAIT_S,
            max_staleness=max_staleness,
            step_buffer=step_buffer,
        )
        for s in range(num_shards)
    ]


ITEMS = (TableConfig(name="items", dim=4, seed=3, optimizer=RowwiseAdagradConfig(lr=0.1)),)


class LateReply:
    def __init__(self, transport: "AdversarialTransport") -> None:
        self.future: Future = Future()
        self._transport = transport

    def result(self):
        self._transport.run_until(self.future)
        return self.future.result()


@dataclass(frozen=True)
class NarrowReply:
    """In place of the reply to the call that a narrow one stands for."""

    reply: LateReply
    call: NarrowCall

    def result(self):
        return self.call.narrowed(self.reply.result())


@dataclass(frozen=True, eq=False)
class Call:
    is_ready: Callable[[], bool]
    carry_out: Callable[[], object]
    reply: Future
    reads: EmbeddingShard | None = None
    """Whose rows it reads, if it does."""


class AdversarialTransport(ShardTransport):
    """Keeps every call until somebody waits for an answer, then carries out calls in random order.

    A call whose step is not committed yet is not carried out, so nothing blocks inside a shard. Reads may be
    carried out while an update is, wherever the shard lets them in.

    Args:
        repeated: share of the updates and written-back rows that come again, at any later time, also when
            the run is long past their step.
        lost: share of the deliveries of which the call or its answer is lost; the call is sent again.
    """

    def __init__(
        self, shards: list[EmbeddingShard], seed: int, repeated: float = 0.0, lost: float = 0.0
    ) -> None:
        self._shards = shards
        self._random = random.Random(seed)
        self._repeated = repeated
        self._lost = lost
        self._changed = threading.Condition()
        self._calls: list[Call] = []
        self._again: list[Callable[[], object]] = []
        for shard in shards:
            if not shard._has_disk:  # which lets none in
                shard._let_reads_in = partial(self._let_reads_in, shard)

    def call(self, shard, call):
        if isinstance(call, NarrowCall):
            return NarrowReply(self.call(shard, call.widened()), call)
        served = self._shards[shard]
        match call:
            case LookupCall() | FetchCall():
                is_ready, reads, is_repeated = self._is_at(shard, call.after_step), served, False
            case EvictedCall():
                is_ready, reads, is_repeated = self._is_at(shard, call.after_step), None, False
            case WriteBackCall():
                is_ready, reads = self._is_at(shard, call.after_step), None
                is_repeated = self._is_repeated()
            case AdmitCall():
                is_ready, reads, is_repeated = self._has_room(served, call), None, self._is_repeated()
            case ApplyCall():
                is_ready, reads, is_repeated = (lambda: True), None, self._is_repeated()
            case ApplyHeadCall():
                # In two calls, so that nothing waits inside of the shard.
                head = partial(served.take_head, call.tag, call.head, call.rest)
                self._post(lambda: True, head, self._is_repeated())
                is_repeated, reads = False, served

                def is_ready():
                    return served.has_heads(call.tag.step) or served._failure is not None

        return self._post(is_ready, lambda: call.carry_out(served), is_repeated, reads)

    def finish(self) -> None:
        """Carry out what is left over."""
        for call in self._again:
            call()
        self._again.clear()

    def _is_at(self, shard, after_step) -> Callable[[], bool]:
        return lambda: after_step is None or self._shards[shard].committed_step >= after_step

    def _has_room(self, served: EmbeddingShard, call: AdmitCall) -> Callable[[], bool]:
        return lambda: served._failure is not None or served.ask_for_room(call.tag, call.num_bytes)

    def _is_repeated(self) -> bool:
        with self._changed:
            return self._random.random() < self._repeated

    def _post(self, is_ready, call, is_repeated=False, reads=None) -> LateReply:
        reply = LateReply(self)

        def repeated():
            self._again.append(call)
            return call()

        with self._changed:
            self._calls.append(Call(is_ready, repeated if is_repeated else call, reply.future, reads))
            self._changed.notify_all()
        return reply

    def run_until(self, wanted: Future) -> None:
        with self._changed:
            while not wanted.done():
                if self._again and self._random.random() < 0.1:
                    self._again.pop(self._random.randrange(len(self._again)))()
                ready = [call for call in self._calls if call.is_ready()]
                if not ready:
                    if not self._changed.wait(WAIT_S):
                        raise TimeoutError("every call waits for a step that nobody sends")
                    continue
                self._deliver(self._random.choice(ready))
                self._changed.notify_all()

    def _deliver(self, call: Call) -> None:
        if self._random.random() < self._lost:
            if self._random.random() < 0.5:  # the answer is
                with suppress(Exception):
                    call.carry_out()
            return
        self._calls.remove(call)
        try:
            call.reply.set_result(call.carry_out())
        except Exception as error:
            call.reply.set_exception(error)

    def _let_reads_in(self, shard: EmbeddingShard) -> None:
        """Called by a shard, which is the one that `_deliver` calls, between two rows of a step."""
        for call in [call for call in self._calls if call.reads is shard and call.is_ready()]:
            if self._random.random() < 0.3:
                self._deliver(call)


class ThreadExchange:
    """One trainer's end of an all-to-all among threads."""

    def __init__(self, board: "Board", rank: int) -> None:
        self._board = board
        self._rank = rank
        self.num_trainers = board.num_trainers

    def all_to_all(self, parts):
        return self._board.swap(self._rank, list(parts))


class Board:
    """Where threads that are trainers meet."""

    def __init__(self, num_trainers: int) -> None:
        self.num_trainers = num_trainers
        self._parts: list[list[np.ndarray]] = [[] for _ in range(num_trainers)]
        self._barrier = threading.Barrier(num_trainers)

    def swap(self, rank: int, parts: list[np.ndarray]) -> list[np.ndarray]:
        self._parts[rank] = parts
        self._barrier.wait(WAIT_S)
        received = [from_trainer[rank] for from_trainer in self._parts]
        self._barrier.wait(WAIT_S)
        return received

    def abort(self) -> None:
        self._barrier.abort()


Seen = list[dict[str, np.ndarray]]
"""Rows, or gradients, of one source by step and table."""


def gradient_of(rows_MD: Rows, rank: int, step: int) -> Rows:
    """Depends on the rows, so that a stale bit spreads; where rows are tensors, it is one too."""
    gradient_MD = on_host(rows_MD) * np.float32(1 + rank + 0.1 * step) + np.float32(0.01)
    return gradient_MD if isinstance(rows_MD, np.ndarray) else torch.from_numpy(gradient_MD)


def train(
    mode: LookupMode,
    batches: list[dict[str, Ids]],
    rank: int,
    board: Board,
    drain_every: int,
    ahead: Literal["never", "before rows", "behind rows"],
    announces_over_drains: bool = False,
) -> tuple[Seen, Seen]:
    """(rows that every step saw, gradients that it sent)."""

    def look_ahead(step: int) -> None:
        if step < len(batches) and (announces_over_drains or step % drain_every):
            mode.prefetch(step, batches[step])
            if ahead == "behind rows":
                mode.receive(step)

    seen, sent = [], []
    for step, batch in enumerate(batches):
        if ahead != "never" and (step == 0 or not announces_over_drains) and step % drain_every == 0:
            mode.prefetch(step, batch)
        if ahead == "before rows":
            look_ahead(step + 1)
        rows = mode.rows(step, batch)
        if ahead == "behind rows":
            look_ahead(step + 1)
        seen.append({name: on_host(rows_MD).copy() for name, rows_MD in rows.items()})
        board.swap(rank, [np.empty(0)] * board.num_trainers)  # as trainers meet in every dense step
        grads = {name: gradient_of(rows_MD, rank, step) for name, rows_MD in rows.items()}
        sent.append({name: on_host(grads_MD) for name, grads_MD in grads.items()})
        mode.update(step, batch, grads)
        if (step + 1) % drain_every == 0:
            mode.drain()
            board.swap(rank, [np.empty(0)] * board.num_trainers)
    mode.drain()
    return seen, sent


def run(
    make_mode: Callable[..., LookupMode],
    tables: Sequence[TableConfig],
    transport,
    num_shards: int,
    batches_by_source: list[list[dict[str, Ids]]],
    drain_every: int = 1000,
    ahead: Literal["never", "before rows", "behind rows"] = "before rows",
    announces_over_drains: bool = False,
    unasked_bytes: int | None = None,
) -> list[tuple[Seen, Seen]]:
    """Train all trainers at once, each in a thread; a mode that takes an `exchange` gets one.

    Args:
        drain_every: steps between two moments at which the servers have everything.
        ahead: whether and when the batch after is announced.
        announces_over_drains: also if the servers have everything in between.
        unasked_bytes: of a part of a step, for which trainers do not ask for room.
    """
    num_trainers = len(batches_by_source)
    board, rows_board = Board(num_trainers), Board(num_trainers)  # as there are two process groups

    def train_source(rank: int) -> tuple[Seen, Seen]:
        try:
            link = TrainerLink(tables, ShardMap(num_shards), transport, rank, unasked_bytes=unasked_bytes)
            mode = make_mode(link, ThreadExchange(rows_board, rank))
            return train(
                mode, batches_by_source[rank], rank, board, drain_every, ahead, announces_over_drains
            )
        except BaseException:
            board.abort()
            rows_board.abort()
            raise

    with ThreadPoolExecutor(num_trainers) as pool:
        return list(pool.map(train_source, range(num_trainers)))


def without_exchange(mode_type) -> Callable[..., LookupMode]:
    """A mode that needs no exchange, as `run` wants it."""
    return lambda link, exchange: mode_type(link)


def all_rows(shards: list[EmbeddingShard], tables: Sequence[TableConfig]) -> dict[str, dict[int, tuple]]:
    """Everything the shards hold, by table and id, as `DictionaryTable.everything`."""
    held: dict[str, dict[int, tuple]] = {table.name: {} for table in tables}
    for shard in shards:
        for name, by_id in held.items():
            rows = shard.export(name)
            for m, i in enumerate(rows.ids_M.tolist()):
                by_id[i] = (
                    rows.weights_MD[m].tobytes(),
                    rows.state_MS[m].tobytes(),
                    int(rows.steps_M[m]),
                    int(rows.counts_M[m]),
                )
    return held
