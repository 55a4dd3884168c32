"""Calls between processes of one machine whose arrays lie in memory that both have mapped.

      client                                                      server
      reply = call(request)
        takes a free block, copies the arrays in
        └─ message: request, where the arrays are ────────────►  its arrays are views of the block
                                                                 the answer has its arrays made in
      reply.result()                                             the same block (`empty`)
        ◄──────────── message: where the arrays of the reply are ─┘
        views of the block; the block is free again when the last of them is gone

A channel is one connection. On one `in_order`, a thread of the server's carries out the calls one by one
as they were sent. On any other, every call that waits has a thread to wait on, so none holds up another,
and they are answered as they are done. What is asked is not known here: anything that pickles can be a
request or a result, and contiguous arrays in it do not go through the socket.

Blocks are the client's. One that a reply does not fit into is replaced by the server; one that the server
still reads when it has answered (a contribution kept until another trainer's arrives) is left to
it until a later answer says that it is done. `rayrec.embeddings.transport.shared_blocks` says what blocks and
messages are.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import secrets
import socket
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from rayrec.embeddings.transport.shared_blocks import (
    BlockSpace,
    Bytes,
    SharedBlock,
    Span,
    is_own,
    new_block,
    packed,
    receive,
    send,
    unpacked,
)

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

AnswerTo = Callable[[Any, Callable[..., Any]], Any]
"""Called with a client's request, whose arrays are read-only, and `empty` (as `np.empty`); arrays of the
result that `empty` made are not copied any more."""


class ServerLostError(RuntimeError):
    """The server's process ended, or never answered at its address."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server of this machine can be reached."""

    server: str
    """Its name in messages."""
    address: str
    """In the abstract namespace of Unix-domain sockets, which the kernel clears when the process ends."""


class _HelloMessage(NamedTuple):
    in_order: bool
    """Whether calls are carried out one by one as they were sent."""


class _CallMessage(NamedTuple):
    number: int
    block: int
    num_bytes: int
    """Size of the block."""
    request: bytes
    spans: list[Span]
    used: int
    """Bytes of the block that the request takes."""
    dropped: list[int]
    """Blocks that will not be used again."""


class _AnswerMessage(NamedTuple):
    number: int
    result: bytes
    spans: list[Span]
    failed: str | None
    """Where the error in `result` was raised; None if it is no error."""
    kept: bool
    """The server goes on reading the call's block,"""
    released: list[int]
    """and is done with these, which it kept before."""
    num_bytes: int
    """Size of the block that comes with the message in place of the call's."""


class CallServer:
    """Answers the calls of any number of clients, on threads of its own, until it is closed."""

    def __init__(self, name: str, answer: AnswerTo) -> None:
        self._name = name
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        address = f"rayrec-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener.bind("\0" + address)
        self._listener.listen()
        self._connections: weakref.WeakSet[_Connection] = weakref.WeakSet()
        self.endpoint = Endpoint(name, address)
        self._accepting = threading.Thread(target=self._accept, name=f"{name} accepts", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Hear of no further calls; clients that wait for an answer learn that there will be none."""
        _hang_up(self._listener)
        self._accepting.join()
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                _hang_up(self._listener)  # if it was not: clients must not wait for somebody to accept
                return
            if is_own(accepted):
                self._connections.add(_Connection(accepted, self._name, self._answer))
            else:
                accepted.close()


class _Connection:
    """The server's end of one connection.

    One thread reads at a time. It leaves with the call that it read, and another reads on.
    """

    def __init__(self, connection: socket.socket, name: str, answer_to: AnswerTo) -> None:
        self._socket = connection
        self._name = name
        self._answer_to = answer_to
        self._in_order = True
        self._blocks: dict[int, SharedBlock] = {}
        self._released: deque[int] = deque()  # filled by whichever thread drops the last argument of a call
        self._reading, self._sending, self._counting = (threading.Lock() for _ in range(3))
        self._num_free = 0
        """Threads that read or will read next."""
        self._start_thread(self._greet)

    def close(self) -> None:
        _hang_up(self._socket)

    def _start_thread(self, target: Callable[[], None]) -> None:
        with self._counting:
            self._num_free += 1
        threading.Thread(target=target, name=f"{self._name} answers", daemon=True).start()

    def _greet(self) -> None:
        with contextlib.suppress(OSError):
            hello = receive(self._socket)
            if hello is not None:
                self._in_order = hello[0].in_order
                self._serve()

    def _serve(self) -> None:
        try:
            while (read := self._next_call()) is not None:
                call, block = read
                self._answer(call, block)
                del block, read
                with self._counting:
                    self._num_free += 1
        except OSError:
            pass  # the client is gone: nobody wants the answer
        except Exception:
            logger.exception("%s cannot answer a client, and hangs up", self._name)
        finally:
            self.close()  # whatever happened here, the client must not wait for it

    def _next_call(self) -> tuple[_CallMessage, SharedBlock] | None:
        with self._reading:
            received = receive(self._socket)
            if received is None:
                return None
            call: _CallMessage = received[0]
            descriptor = received[1]
            if descriptor is not None:
                try:
                    self._blocks[call.block] = SharedBlock(call.block, descriptor, call.num_bytes)
                finally:
                    os.close(descriptor)
            for number in call.dropped:
                self._blocks.pop(number, None)
            with self._counting:
                self._num_free -= 1
                is_last = self._num_free == 0
            if is_last and not self._in_order:
                self._start_thread(self._serve)
            return call, self._blocks[call.block]

    def _answer(self, call: _CallMessage, block: SharedBlock) -> None:
        inputs = block.bytes(writeable=False)
        watched = weakref.ref(inputs)  # every array of the request keeps it alive
        space = BlockSpace(block, call.used)
        failed: str | None = None
        try:
            request = unpacked(call.request, inputs, call.spans)
            del inputs
            result, arrays = packed(self._answer_to(request, space.empty))
        except Exception as error:
            result, arrays = _packed_error(error)
            failed = traceback.format_exc()
        request = None  # if any of its arrays is still alive, the server has kept it
        placed = [space.place(array) for array in arrays]
        spans = [span for span in placed if span is not None]
        descriptor, num_bytes = None, 0
        if len(spans) < len(arrays):
            try:
                # With room for the request of such a call too: the next one will fit.
                grown, descriptor = new_block(block.number, space.used)
            except MemoryError as error:
                spans, failed = [], traceback.format_exc()
                result, _ = _packed_error(error)
            else:
                num_bytes = grown.num_bytes
                self._blocks[block.number] = grown
                larger = BlockSpace(grown, 0)
                spans = [span for span in map(larger.place, arrays) if span is not None]
        del arrays
        try:
            with self._sending:  # also while looking: no earlier answer may say that the block is released
                still_read = watched() if descriptor is None else None
                if kept := still_read is not None:
                    weakref.finalize(still_read, self._released.append, block.number).atexit = False
                    still_read = None
                released = [self._released.popleft() for _ in range(len(self._released))]
                answer = _AnswerMessage(call.number, result, spans, failed, kept, released, num_bytes)
                send(self._socket, answer, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _packed_error(error: Exception) -> tuple[bytes, list[Bytes]]:
    """The error, or what can be said of it if it does not pickle."""
    try:
        both = packed(error)
        pickle.loads(both[0], buffers=both[1])
        return both
    except Exception:
        return packed(RuntimeError(f"{type(error).__name__}: {error}"))


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # wakes who waits on it
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class SharedReply(Generic[ResultT]):
    """An answer that may still be on its way; its arrays are read-only and lie in shared memory."""

    def __init__(self, channel: Channel, request: str) -> None:
        self._channel = channel
        self._request = request
        """What it answers, for messages."""
        self._outcome: tuple[Any, Exception | None] | None = None

    def result(self) -> ResultT:
        """Wait for the answer; raises what the server raised.

        Raises:
            ServerLostError: the server's process ended before it answered.
        """
        self._channel.wait_for(self)
        assert self._outcome is not None
        result, error = self._outcome
        if error is not None:
            raise error
        return result


class _Reserved(NamedTuple):
    """A block for one call."""

    block: SharedBlock
    descriptor: int | None
    """Of a block that the server has not heard of."""
    dropped: list[int]
    """Numbers of blocks that were given up for it."""
    space: BlockSpace

    def place(self, arrays: Sequence[Bytes]) -> list[Span] | None:
        """Where the arrays are in the block, copied there if they are not; None if they do not fit."""
        placed = [self.space.place(array) for array in arrays]
        spans = [span for span in placed if span is not None]
        return spans if len(spans) == len(arrays) else None


class Channel:
    """The client's end of one connection; any number of threads call and wait."""

    def __init__(self, endpoint: Endpoint, in_order: bool) -> None:
        self._endpoint = endpoint
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sending = threading.Lock()
        self._arrived = threading.Condition()
        self._is_read = False
        """Whether a thread waits on the socket; the others wait for what it reads."""
        self._lost: str | None = None
        self._numbers = itertools.count()
        # Filled by whichever thread drops the last array of a reply, hence no lock: a deque needs none.
        self._free: deque[SharedBlock] = deque()
        self._block_bytes = 0
        self._reserved: dict[int, _Reserved] = {}
        """By thread, for its next call."""
        self._dropped: list[int] = []
        """Blocks that the server is to be told it can forget."""
        self._lent: dict[int, Bytes] = {}
        """Arrays of blocks that the server keeps, which keep the blocks from being used again."""
        self._in_flight: dict[int, tuple[SharedBlock, weakref.ref[SharedReply[Any]]]] = {}
        try:
            self._socket.connect("\0" + endpoint.address)
            if not is_own(self._socket):
                raise PermissionError("another user's process answers there")
            send(self._socket, _HelloMessage(in_order))
        except OSError as error:
            self._socket.close()
            raise ServerLostError(
                f"{endpoint.server} cannot be reached through shared memory on this machine: {error}"
            ) from error

    def call(self, request: Any) -> SharedReply[Any]:
        """Send a request; its arrays may change once this returns."""
        name = type(request).__name__
        reply: SharedReply[Any] = SharedReply(self, name)
        pickled, arrays = packed(request)
        with self._sending:
            if self._lost is not None:
                raise ServerLostError(self._lost)
            number = next(self._numbers)
            reserved = self._reserved.pop(threading.get_ident(), None)
            placed = reserved.place(arrays) if reserved is not None else None
            if reserved is None or placed is None:
                unused = reserved
                reserved = self._reserve(sum(len(array) + 64 for array in arrays))
                placed = reserved.place(arrays)
                if unused is not None:  # not before: some of the arrays are there
                    self._give_back(unused)
            assert placed is not None
            (block, descriptor, dropped, space), spans = reserved, placed
            self._in_flight[number] = block, weakref.ref(reply)
            call = _CallMessage(number, block.number, block.num_bytes, pickled, spans, space.used, dropped)
            try:
                send(self._socket, call, descriptor)
            except OSError as error:
                raise ServerLostError(self._lose(name)) from error
            finally:
                if descriptor is not None:
                    os.close(descriptor)
        return reply

    def memory(self, num_bytes: int) -> Callable[..., Any]:
        """As `np.empty`: in the block of this thread's next call, so that nothing is copied there.

        Args:
            num_bytes: of all the call's arrays; if they are more, they are copied after all.

        The arrays are the call's from then on: others may come to lie there.
        """
        with self._sending:
            unused = self._reserved.pop(threading.get_ident(), None)
            if unused is not None:
                self._give_back(unused)
            reserved = self._reserved[threading.get_ident()] = self._reserve(num_bytes)
            return reserved.space.empty

    def wait_for(self, reply: SharedReply[Any]) -> None:
        """Return when the reply has its outcome; others that arrive meanwhile get theirs."""
        with self._arrived:
            while reply._outcome is None:
                if self._lost is not None:
                    raise ServerLostError(self._lost)
                if self._is_read:
                    self._arrived.wait()
                    continue
                self._is_read = True
                self._arrived.release()
                received: tuple[_AnswerMessage, int | None] | None = None
                try:
                    with contextlib.suppress(OSError):
                        received = receive(self._socket)
                finally:
                    self._arrived.acquire()
                    self._is_read = False
                    self._arrived.notify_all()
                if received is None:
                    self._lose(reply._request)
                else:
                    self._take_answer(*received)

    def close(self) -> None:
        self._lost = f"the connection to {self._endpoint.server} was closed"
        _hang_up(self._socket)
        with self._sending:
            while self._reserved:
                self._give_back(self._reserved.popitem()[1])

    def _lose(self, request: str) -> str:
        if self._lost is None:
            self._lost = (
                f"{self._endpoint.server} is gone: its process ended before it answered {request!r}, "
                "and its rows with it"
            )
        return self._lost

    def _reserve(self, num_bytes: int) -> _Reserved:
        # As large as any has been: whatever the next batch needs, few blocks are replaced.
        self._block_bytes = max(self._block_bytes, num_bytes)
        dropped, self._dropped = self._dropped, []
        while self._free:
            block = self._free.pop()
            if block.num_bytes >= self._block_bytes:
                return _Reserved(block, None, dropped, BlockSpace(block, 0))
            dropped.append(block.number)
        try:
            block, descriptor = new_block(next(self._numbers), self._block_bytes)
        except MemoryError:
            self._dropped = dropped  # the server is still to be told
            raise
        return _Reserved(block, descriptor, dropped, BlockSpace(block, 0))

    def _give_back(self, reserved: _Reserved) -> None:
        """No call has used it."""
        self._dropped += reserved.dropped
        if reserved.descriptor is None:
            self._free.append(reserved.block)
        else:
            os.close(reserved.descriptor)  # the server has never heard of it

    def _take_answer(self, answer: _AnswerMessage, descriptor: int | None) -> None:
        block, waiting = self._in_flight.pop(answer.number)
        result: Any = None
        error: Exception | None = None
        try:
            if descriptor is not None:
                block = SharedBlock(block.number, descriptor, answer.num_bytes)
                self._block_bytes = max(self._block_bytes, block.num_bytes)
            array = block.bytes(writeable=False)
            weakref.finalize(array, self._free.append, block).atexit = False
            if answer.kept:
                self._lent[block.number] = array
            for number in answer.released:
                self._lent.pop(number, None)
            result = unpacked(answer.result, array, answer.spans)
            if answer.failed is not None:
                result, error = None, result
                error.add_note(f"raised in {self._endpoint.server}:\n{answer.failed}")
        except Exception as cannot_read:  # the reply's to raise: this thread may wait for another one
            error = cannot_read
        finally:
            if descriptor is not None:
                os.close(descriptor)
        reply = waiting()
        if reply is not None:
            reply._outcome = result, error
