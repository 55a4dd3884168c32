"""Ranks that compute each batch together: the first leads, the others do what it does.

    thread of the leader: next command ─┬─ broadcast (gloo, host memory) ─► every other rank: `follow`
                                        ├─ its own part of the network  ◄── sums over the ranks ──► theirs
                                        ├─ a checksum of the items      ◄── the same in all ranks?
                                        └─ answer
    nothing to do for a while ─ an empty command: ranks that wait are not taken for lost

All ranks get the same commands in the same order, and hold the same versions. So none waits in a sum that
another does not take part in. What a batch does wrong (an `InputError`) all of them find; whatever else goes
wrong in one of them, a version that it alone cannot load included, parts their ways, and the ranks are given
up as a whole: they start again together.

Each rank chooses its beams by itself. Of equal inputs they are equal; a rank that keeps others, for another
library, processor or a fault, would add its part of one beam to others' parts of another, and all would go on
with scores of no item. So the items that the ranks have found are compared at the end of each batch.

No Ray in here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from rayrec.platform.devices import Device
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.serve.on_ray.packed_batch import RankBatch, unpacked_items

logger = logging.getLogger(__name__)

SILENCE_S = 5.0
"""The leader says nothing for so long at most."""
LOST_S = 120.0
"""Ranks that wait for each other for so long are given up."""
START_S = 600.0
"""All ranks have joined and loaded by then, and a version that is new has answered its first batch, for which
it may have to be compiled."""
SERVICE = "the ranks of the dense part"


class CommandKind(IntEnum):
    NOTHING = 0
    HOLD = 1
    """Take one's part of a version that was read; the body is its number, or empty."""
    ANSWER = 2
    """The body is a packed `RankBatch`."""
    END = 3


class Part(Protocol):
    """What each rank has, see `DensePart`."""

    def hold(self, version: int | None) -> None: ...

    def holds(self, version: int | None) -> bool: ...

    def answer(self, batch: RankBatch) -> bytes: ...


class Commands:
    """The way from the leader to all others."""

    def send(self, kind: CommandKind, body: bytes = b"") -> None:
        torch.distributed.broadcast(torch.tensor([kind, len(body)]), 0)
        if body:
            # Not written to, which torch would warn of.
            torch.distributed.broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), 0)

    def receive(self) -> tuple[CommandKind, bytes]:
        head = torch.zeros(2, dtype=torch.int64)
        torch.distributed.broadcast(head, 0)
        kind, length = head.tolist()
        body = torch.empty(length, dtype=torch.uint8)
        if length:
            torch.distributed.broadcast(body, 0)
        return CommandKind(kind), body.numpy().tobytes()

    def agree(self, checksum: int) -> bool:
        """Whether all ranks, which ask this at once, have the same checksum of at most 63 bits."""
        ends = torch.tensor([checksum, -checksum])
        torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
        most, less_least = ends.tolist()
        return bool(most == -less_least)


def meet(store: Any, device: Device, num_ranks: int, rank: int) -> Commands:
    """Join the other ranks; all do so at once.

    Args:
        store: of torch.distributed, the same of all.
    """
    torch.distributed.init_process_group(
        device.backend_beside_host,
        store=store,
        world_size=num_ranks,
        rank=rank,
        timeout=timedelta(seconds=LOST_S),
    )
    return Commands()


def follow(commands: Commands, part: Part) -> None:
    """Do what the leader does, until it ends.

    Raises:
        RuntimeError: it, or another rank, is lost.
    """
    while True:
        kind, body = commands.receive()
        if kind is CommandKind.END:
            return
        try:
            _do(commands, part, kind, body)
        except InputError as error:  # which the leader found, too, and says
            logger.debug("refused: %s", error)


def _do(
    commands: Commands, part: Part, kind: CommandKind, body: bytes, batch: RankBatch | None = None
) -> bytes:
    """
    Raises:
        InputError: what a batch does wrong, which all ranks find.
        RuntimeError: a version that this rank cannot hold, or ranks that have found different items.
    """
    if kind is CommandKind.HOLD:
        _hold(part, int(body) if body else None)
    elif kind is CommandKind.ANSWER:
        batch = RankBatch.unpacked(body) if batch is None else batch
        _hold(part, batch.version)
        return _agreed(commands, part, batch)
    return b""


def _agreed(commands: Commands, part: Part, batch: RankBatch) -> bytes:
    """The answer to a batch, when all ranks have found the same items, or refuse it."""
    refusal: InputError | None = None
    try:
        answer = part.answer(batch)
        checksum = _checksum(answer)
    except InputError as error:
        refusal, answer, checksum = error, b"", _OF_REFUSALS
    if not commands.agree(checksum):
        raise RuntimeError(
            "the ranks have found different items for one batch, so that their sums are of different beams; "
            "they start again (the same processor and libraries for all ranks?)"
        )
    if refusal is not None:
        raise refusal
    return answer


_OF_REFUSALS = 1
"""In the place of a checksum, which is even."""


def _checksum(answer: bytes) -> int:
    """Of the items, in their order. Scores may differ in their last bits between processors."""
    items_BK = np.ascontiguousarray(unpacked_items(answer).items_BK)
    return xxhash.xxh3_64_intdigest(items_BK.data) >> 2 << 1


def _hold(part: Part, version: int | None) -> None:
    try:
        part.hold(version)
    except InputError as error:  # others hold it, and go on to what this rank would miss
        raise RuntimeError(f"a rank cannot hold a version that was read: {error}") from error


@dataclass
class _Command:
    kind: CommandKind
    body: bytes = b""
    batch: RankBatch | None = None
    done: Future[bytes] = field(default_factory=Future)


class FirstRank:
    """The first rank. Safe to call from several threads."""

    def __init__(
        self,
        commands: Commands,
        part: Part,
        read: Callable[[int | None], None],
        most_s: float = LOST_S,
        start_s: float = START_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            read: loads a version on every rank, this one included; returns when all have.
            most_s: a command that takes longer has lost a rank.
            start_s: the same of what a new version does first.
        """
        self._start_s = start_s
        self._commands, self._part, self._read = commands, part, read
        self._most_s, self._clock = most_s, clock
        self._waiting: queue.Queue[_Command] = queue.Queue()
        self._lock = threading.Lock()
        self._unanswered: dict[int, _Command] = {}
        self._ends: tuple[float, float] | None = None
        """By when the command at hand has lost a rank, and how long that is."""
        self._answered: set[int | None] = set()
        """Versions that a batch was computed with."""
        self._lost: str | None = None
        self._reading = threading.Lock()
        self._thread = threading.Thread(target=self._lead, name="leader", daemon=True)
        self._thread.start()

    def recommend(self, packed: bytes) -> bytes:
        """As `DensePart.recommend`, of all ranks together.

        Raises:
            UnavailableError: a rank is lost.
        """
        batch = RankBatch.unpacked(packed)
        self.hold(batch.version)
        return self._result(_Command(CommandKind.ANSWER, packed, batch))

    def hold(self, version: int | None) -> None:
        """As `DensePart.hold`; batches of other versions are computed meanwhile.

        Raises:
            InputError: it cannot be loaded.
            UnavailableError: a rank is lost.
        """
        if self._part.holds(version):
            return
        with self._reading:
            if self._part.holds(version):
                return
            self._read(version)
            self._result(_Command(CommandKind.HOLD, b"" if version is None else str(version).encode()))

    def lose(self, reason: str) -> None:
        """Give the ranks up: nothing is answered any more, and those that wait are told."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            unanswered = list(self._unanswered.values())
            self._unanswered.clear()
        logger.error("%s: %s", SERVICE, reason)
        for command in unanswered:
            command.done.set_exception(self._error())

    def check(self) -> None:
        """Check that all ranks are there and go on.

        Raises:
            UnavailableError: they are not.
        """
        ends = self._ends
        if ends is not None and self._clock() > ends[0]:
            self.lose(f"a command takes longer than {ends[1]:.0f} s")
        if self._lost is not None:
            raise self._error()

    def end(self) -> None:
        """Let the other ranks go."""
        if self._lost is None:
            self._waiting.put(_Command(CommandKind.END))
            self._thread.join(SILENCE_S)

    def _error(self) -> UnavailableError:
        return UnavailableError(SERVICE, 1, self._lost or "")

    def _result(self, command: _Command) -> bytes:
        with self._lock:
            if self._lost is not None:
                raise self._error()
            self._unanswered[id(command)] = command
        self._waiting.put(command)
        return command.done.result()

    def _lead(self) -> None:
        while self._lost is None:
            try:
                command = self._waiting.get(timeout=SILENCE_S)
            except queue.Empty:
                command = _Command(CommandKind.NOTHING)
            most_s = self._most_of(command)
            self._ends = self._clock() + most_s, most_s
            self._take(command)
            self._ends = None
            if command.kind is CommandKind.END:
                return

    def _most_of(self, command: _Command) -> float:
        is_first = command.batch is not None and command.batch.version not in self._answered
        return self._start_s if is_first or command.kind is CommandKind.HOLD else self._most_s

    def _take(self, command: _Command) -> None:
        """Do a command on all ranks."""
        try:
            self._commands.send(command.kind, command.body)
            answer = _do(self._commands, self._part, command.kind, command.body, command.batch)
            if command.batch is not None:
                self._answered.add(command.batch.version)
        except InputError as error:
            if self._is_waited_for(command):
                command.done.set_exception(error)
        except Exception as error:
            self.lose(f"{type(error).__name__}: {error}")
        else:
            if self._is_waited_for(command):
                command.done.set_result(answer)

    def _is_waited_for(self, command: _Command) -> bool:
        """Whether nobody was told yet what became of it; from now on somebody was."""
        with self._lock:
            return self._unanswered.pop(id(command), None) is not None
