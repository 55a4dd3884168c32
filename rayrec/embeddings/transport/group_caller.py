"""One caller for a group of trainers: servers get one call where each trainer would have made one.

    trainer 0 ─┐                                        ┌─► server 0
    trainer 1 ─┼─► GroupCaller: ids once, gradients ────┼─► server 1
    trainer 2 ─┘   summed in the order of the ranks     └─► ...

To its trainers it looks like the only server, to the servers like one trainer. It waits for all of the group
where servers wait for all trainers, and for rows of one step, which all trainers ask for.

Gradients of an id are added up within each group in the order of the ranks, then over the groups in theirs.
So rows depend on the size of the groups, in their last bits, as they do on the number of trainers; and on
nothing else.

Axes: M ids of one trainer, R distinct ids of the group, D numbers of a row.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.config import TableConfig
from rayrec.embeddings.shard.contributions import Part, SparseUpdate, UpdateTag, summed
from rayrec.embeddings.shard.shard import LookupReply, LookupRequest, StepTimeoutError
from rayrec.embeddings.transport.client import ShardClient, gather_rows
from rayrec.embeddings.transport.protocol import (
    ApplyCall,
    ApplyHeadCall,
    Empty,
    LookupCall,
    ReplyT,
    ShardCall,
    ShardTransport,
)
from rayrec.platform.arrays import Int64Array
from rayrec.platform.compiled import kernel_input
from rayrec.platform.deduplication import deduplicate


@dataclass
class _Meeting:
    """The parts of one call that the trainers of a group have sent, and its result."""

    brought: dict[int, Any] = field(default_factory=dict)
    """By rank."""
    is_over: bool = False
    result: Any = None
    error: BaseException | None = None


class _Head(NamedTuple):
    update: SparseUpdate
    rest: LookupRequest
    wanted: LookupRequest


class _GroupIds(NamedTuple):
    """Distinct ids of a group, by table, and where each trainer's are among them."""

    ids: dict[str, Int64Array]
    positions: list[dict[str, Int64Array]]
    """[M] for each trainer, by table."""

    @classmethod
    def of(cls, requests: Sequence[LookupRequest]) -> _GroupIds:
        ids: dict[str, Int64Array] = {}
        positions: list[dict[str, Int64Array]] = [{} for _ in requests]
        for name in dict.fromkeys(name for request in requests for name in request):
            asking = [number for number, request in enumerate(requests) if name in request]
            parts = [requests[number][name] for number in asking]
            ids[name], numbers = deduplicate(np.concatenate(parts))
            ends = np.cumsum([len(ids_M) for ids_M in parts])[:-1]
            for number, positions_M in zip(asking, np.split(numbers, ends), strict=True):
                positions[number][name] = positions_M
        return cls(ids, positions)


class GroupCaller:
    """Answers the calls of one group's trainers. Thread-safe; each waiting call needs a thread.

    Args:
        group: its number, which is the rank that servers know it by.
        members: ranks of its trainers, in order.
        transport: to the servers.
        wait_timeout_s: for the other trainers of the group.
        unasked_bytes: as of `ShardClient`.
    """

    def __init__(
        self,
        group: int,
        members: range,
        tables: Sequence[TableConfig],
        shard_map: ShardMap,
        transport: ShardTransport,
        wait_timeout_s: float = 120.0,
        unasked_bytes: int | None = None,
    ) -> None:
        self._group = group
        self._members = members
        self._client = ShardClient(tables, shard_map, transport, unasked_bytes)
        self._wait_timeout_s = wait_timeout_s
        self._changed = threading.Condition()
        self._meetings: dict[tuple[Any, ...], _Meeting] = {}
        self._committed_step = -1
        self._over = (-1, -1)
        """Incarnation, and the last step of it that servers have committed."""
        self._brought: dict[int, set[tuple[int, int, Part]]] = {}
        """By rank: incarnation, step and part of its contributions to later steps. Not only the last:
        those in flight may be carried out in any order, where a transport gives each call a thread."""
        self._failure: BaseException | None = None
        self.busy_s = 0.0
        """Time spent putting requests together and taking answers apart, of all threads."""

    @property
    def num_steps(self) -> int:
        """Steps that servers have committed, as far as it has heard."""
        return self._committed_step + 1

    def answer(self, call: ShardCall[ReplyT], empty: Empty = np.empty) -> ReplyT:
        """Carry out a trainer's call.

        Raises:
            StepTimeoutError: another trainer of the group has not called in time.
            ValueError: a trainer's gradients do not fit their table or are not finite; nothing was sent.
            Exception: what a server raised; every trainer whose call it was gets it.
        """
        if self._failure is not None:
            raise self._failure
        match call:
            case LookupCall():
                reply: object = self._lookup(call, empty)
            case ApplyHeadCall():
                reply = self._apply_head(call, empty)
            case ApplyCall():
                reply = self._apply(call)
            case _:
                raise TypeError(f"{type(call).__name__} cannot be made for a group: its rows have one owner")
        return cast(ReplyT, reply)

    def abort(self, error: BaseException) -> None:
        """Let go those that wait for others of the group, and those that call: one of them has failed."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _lookup(self, call: LookupCall, empty: Empty) -> LookupReply:
        if call.tag is None:  # outside of training: nobody else asks for the same
            return self._client.read(call.request, call.after_step)

        def read(requests: list[LookupRequest]) -> tuple[_GroupIds, LookupReply]:
            with self._busy():
                of_group = _GroupIds.of(requests)
            return of_group, self._client.read(of_group.ids, call.after_step)

        of_group, rows = self._meet(("lookup", call.after_step), call.tag, call.request, read)
        return self._of_member(call.tag.rank, of_group, rows, empty)

    def _apply_head(self, call: ApplyHeadCall, empty: Empty) -> LookupReply:
        self._check(call.tag, call.head)

        def send(heads: list[_Head]) -> tuple[_GroupIds, LookupReply]:
            with self._busy():
                of_group = _GroupIds.of([head.wanted for head in heads])
                rest = _GroupIds.of([head.rest for head in heads]).ids
                sums = summed([head.update for head in heads])
                rows = self._client.empty_rows(of_group.ids)
                pending = self._client.send_head_of(self._tag(call.tag), sums, rest, of_group.ids)
            pending.write_to(rows)
            return of_group, rows

        of_group, rows = self._meet(("head",), call.tag, _Head(call.head, call.rest, call.wanted), send)
        return self._of_member(call.tag.rank, of_group, rows, empty)

    def _apply(self, call: ApplyCall) -> int:
        """Keep a contribution; the last one sends the group's, and waits for the servers' answers.

        So that the servers have a step only says the answer to the last one; all answers together do.
        """
        if call.dirty:
            raise TypeError("records that a trainer has changed cannot be sent for a group")
        self._check(call.tag, call.update)
        if self._is_repeated(call.tag):
            return self._committed_step
        meeting, is_last = self._bring(("apply", call.tag.part), call.tag, call.update)
        if is_last:
            try:
                committed = self._settle(meeting, lambda updates: self._send(call.tag, updates))
            except Exception as error:
                self.abort(error)  # the others have an answer already: their next call says it
                raise
            with self._changed:
                self._committed_step = max(self._committed_step, committed)
                self._over = max(self._over, (call.tag.incarnation, committed))
        return self._committed_step

    def _is_repeated(self, tag: UpdateTag) -> bool:
        """Whether a contribution came before: its step may be long over."""
        key = tag.incarnation, tag.step, tag.part
        with self._changed:
            self._over = max(self._over, (tag.incarnation, -1))
            brought = {each for each in self._brought.get(tag.rank, ()) if each[:2] > self._over}
            self._brought[tag.rank] = brought | {key}
            return key[:2] <= self._over or key in brought

    def _send(self, tag: UpdateTag, updates: Sequence[SparseUpdate]) -> int:
        with self._busy():
            sums = summed(updates)
            ids = {name: ids_R for name, (ids_R, _) in sums.items()}
            grads = {name: grads_RD for name, (_, grads_RD) in sums.items()}
            replies = self._client.send(self._tag(tag), ids, grads)
        return min(reply.result() for reply in replies)

    def _check(self, tag: UpdateTag, update: SparseUpdate) -> None:
        """Servers see sums only, which do not say whose gradient it was."""
        ids = {name: ids_M for name, (ids_M, _) in update.items()}
        grads = {name: grads_MD for name, (_, grads_MD) in update.items()}
        try:
            self._client.check_shapes(tag.step, ids, grads)
            if tag.part is Part.WHOLE:  # of parts, trainers have seen to it
                self._client.check_finite(tag.step, ids, grads)
        except ValueError as error:
            refused = ValueError(f"trainer {tag.rank}: {error}")
            self.abort(refused)  # the step will never be complete
            raise refused from error

    def _tag(self, tag: UpdateTag) -> UpdateTag:
        return tag._replace(rank=self._group)

    def _of_member(self, rank: int, of_group: _GroupIds, rows: LookupReply, empty: Empty) -> LookupReply:
        reply = {}
        with self._busy():
            for name, positions_M in of_group.positions[self._members.index(rank)].items():
                reply[name] = empty((len(positions_M), rows[name].shape[1]), dtype=np.float32)
                gather_rows(rows[name], kernel_input(positions_M, np.int64), reply[name])
        return reply

    @contextmanager
    def _busy(self) -> Iterator[None]:
        started, held_back_s = time.perf_counter(), self._client.held_back_s
        yield
        held_back_s = self._client.held_back_s - held_back_s  # while servers had no room, nothing was done
        with self._changed:
            self.busy_s += time.perf_counter() - started - held_back_s

    def _meet(
        self, what: tuple[Any, ...], tag: UpdateTag, brought: Any, settle: Callable[[list[Any]], Any]
    ) -> Any:
        """Wait until all of the group have brought theirs; the last one settles it for all."""
        meeting, is_last = self._bring(what, tag, brought)
        if is_last:
            return self._settle(meeting, settle)
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: meeting.is_over or self._failure is not None, self._wait_timeout_s
            )
            missing = [rank for rank in self._members if rank not in meeting.brought]
            if not in_time and missing:
                raise StepTimeoutError(
                    f"group {self._group} of trainers: waited {self._wait_timeout_s:g} s for a call of step "
                    f"{tag.step}; nothing came from trainers {missing}"
                )
            # All have called: the servers answer, or say in their time whom they wait for.
            self._changed.wait_for(lambda: meeting.is_over or self._failure is not None)
        if not meeting.is_over and self._failure is not None:
            raise self._failure
        if meeting.error is not None:
            raise meeting.error
        return meeting.result

    def _bring(self, what: tuple[Any, ...], tag: UpdateTag, brought: Any) -> tuple[_Meeting, bool]:
        """(The meeting that one trainer has brought something to, whether it was the last one)."""
        key = (*what, tag.incarnation, tag.step)
        with self._changed:
            meeting = self._meetings.setdefault(key, _Meeting())
            meeting.brought[tag.rank] = brought
            is_last = len(meeting.brought) == len(self._members)
            if is_last:
                del self._meetings[key]
        return meeting, is_last

    def _settle(self, meeting: _Meeting, settle: Callable[[list[Any]], Any]) -> Any:
        try:
            # Not under the lock: servers may hold the call until other groups have called.
            meeting.result = settle([meeting.brought[rank] for rank in self._members])
        except Exception as error:
            meeting.error = error
            raise
        finally:
            with self._changed:
                meeting.is_over = True
                self._changed.notify_all()
        return meeting.result
