"""Calls over a Unix domain socket between two event loops."""

import asyncio
import fcntl
import os
import socket
import stat
import struct
import threading
from contextlib import contextmanager, suppress

import pytest

from rayrec.serve.local_calls.connection import Connection, LostError, NotSentError
from rayrec.serve.local_calls.frames import FrameReader, Kind, UnreadableError, pickled
from rayrec.serve.local_calls.listener import LeavingError, Listener, RefusedError

LIMIT_S = 20


class Replica:
    """Answers calls, on a loop of its own."""

    def __init__(self):
        self.begun, self.cancelled = [], threading.Event()
        self.release = asyncio.Event()

    async def answer(self, method, arguments, context):
        self.begun.append((method, context))
        if method == "wait":
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if method == "fail":
            raise arguments[0]
        if method == "full":
            raise RefusedError
        if method == "leave":
            raise LeavingError
        return arguments


@contextmanager
def listening(path, replica):
    """A listener on a loop of another thread; the value ends it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    listener = Listener(path, replica.answer)

    def on_loop(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(LIMIT_S)

    async def close():
        listener.close()
        await asyncio.sleep(0)

    async def release():
        replica.release.set()

    try:
        on_loop(listener.start())
        replica.let_go = lambda: on_loop(release())
        yield lambda: on_loop(close())
        on_loop(close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def called(path, work):
    """What the work with a connection returns."""

    async def run():
        async with asyncio.timeout(LIMIT_S):
            connection = await Connection.open(path)
            try:
                return await work(connection)
            finally:
                connection.close()

    return asyncio.run(run())


def test_values_come_back_as_they_went_whatever_their_size(tmp_path):
    values = (b"", b"x" * 5_000_000, "ä", {"a": [1, None]})

    async def work(connection):
        return await connection.call("same", values, ("id", "/route"))

    replica = Replica()
    with listening(tmp_path / "own" / "a.sock", replica):
        frame = called(tmp_path / "own" / "a.sock", work)

    assert (frame.kind, frame.value) == (Kind.ANSWERED, values)
    assert replica.begun == [("same", ("id", "/route"))]


def test_a_later_call_does_not_wait_for_an_earlier_one(tmp_path):
    replica = Replica()

    async def work(connection):
        first = asyncio.ensure_future(connection.call("wait", ("first",), None))
        second = await connection.call("same", ("second",), None)
        assert connection.num_under_way == 1
        await asyncio.to_thread(replica.let_go)
        return second.value, (await first).value

    with listening(tmp_path / "own" / "a.sock", replica):
        assert called(tmp_path / "own" / "a.sock", work) == (("second",), ("first",))


def test_what_a_replica_raises_comes_back_and_what_cannot_be_pickled_is_said(tmp_path):
    class TwoArgumentsError(Exception):
        def __init__(self, first, second):
            super().__init__(f"{first} and {second}")

    async def work(connection):
        plain = await connection.call("fail", (ValueError("as it is"),), None)
        return plain.kind, plain.value

    with listening(tmp_path / "own" / "a.sock", Replica()):
        kind, error = called(tmp_path / "own" / "a.sock", work)
    assert kind is Kind.FAILED
    assert isinstance(error, ValueError)
    assert str(error) == "as it is"

    class Fails(Replica):
        async def answer(self, method, arguments, context):
            raise TwoArgumentsError("one", "two")

    async def odd(connection):
        return (await connection.call("any", (), None)).value

    with listening(tmp_path / "own" / "b.sock", Fails()):
        error = called(tmp_path / "own" / "b.sock", odd)
    assert str(error) == "TwoArgumentsError: one and two"


def test_a_full_replica_and_one_that_leaves_say_so(tmp_path):
    async def work(connection):
        return [(await connection.call(method, (), None)).kind for method in ("full", "leave", "same")]

    with listening(tmp_path / "own" / "a.sock", Replica()):
        assert called(tmp_path / "own" / "a.sock", work) == [Kind.REFUSED, Kind.LEAVING, Kind.ANSWERED]


def test_a_call_that_is_given_up_is_computed_no_further(tmp_path):
    replica = Replica()

    async def work(connection):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.call("wait", (), None)
        assert await asyncio.to_thread(replica.cancelled.wait, LIMIT_S)
        assert connection.num_under_way == 0
        return (await connection.call("same", (1,), None)).value  # the connection goes on

    with listening(tmp_path / "own" / "a.sock", replica):
        assert called(tmp_path / "own" / "a.sock", work) == (1,)


def test_a_method_that_is_cancelled_by_its_own_side_fails_and_its_caller_waits_no_longer(tmp_path):
    class Cancels(Replica):
        async def answer(self, method, arguments, context):
            raise asyncio.CancelledError

    with listening(tmp_path / "own" / "a.sock", Cancels()):
        frame = called(tmp_path / "own" / "a.sock", lambda each: each.call("any", (), None))

    assert frame.kind is Kind.FAILED
    assert str(frame.value) == "any: cancelled by the replica"


def test_a_caller_that_goes_away_ends_what_it_asked_for(tmp_path):
    replica = Replica()

    async def work(connection):
        call = asyncio.ensure_future(connection.call("wait", (), None))
        while not replica.begun:
            await asyncio.sleep(0.001)
        connection.close()
        with pytest.raises(LostError):
            await call

    with listening(tmp_path / "own" / "a.sock", replica):
        called(tmp_path / "own" / "a.sock", work)
        assert replica.cancelled.wait(LIMIT_S)


def test_a_replica_that_ends_is_noticed_at_once_and_later_calls_are_not_sent(tmp_path):
    replica = Replica()
    path = tmp_path / "own" / "a.sock"
    with listening(path, replica) as close:

        async def work(connection):
            call = asyncio.ensure_future(connection.call("wait", (), None))
            while not replica.begun:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(close)
            with pytest.raises(LostError) as lost:
                await call
            assert not isinstance(lost.value, NotSentError)
            with pytest.raises(NotSentError):
                await connection.call("same", (), None)

        called(path, work)
    assert not path.exists()


def test_only_this_user_may_connect(tmp_path):
    path = tmp_path / "own" / "a.sock"
    with listening(path, Replica()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    os.chmod(path.parent, 0o755)
    with pytest.raises(PermissionError, match="not a folder of this user alone"), listening(path, Replica()):
        pass


def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path):
    with pytest.raises(OSError, match="at most 107 bytes"), listening(tmp_path / ("x" * 100), Replica()):
        pass


def test_sockets_that_killed_processes_left_are_removed_and_others_stay(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(folder / "left.sock"))
    with listening(folder / "a.sock", Replica()), listening(folder / "b.sock", Replica()):
        assert sorted(path.name for path in folder.iterdir()) == ["a.sock", "b.sock"]


def test_a_socket_that_is_bound_and_does_not_listen_yet_is_not_removed(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    sibling, lock = folder / "sibling.sock", os.open(folder, os.O_RDONLY)

    async def work():
        listener = Listener(folder / "a.sock", Replica().answer)
        with socket.socket(socket.AF_UNIX) as starts:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as another process that starts
            starts.bind(str(sibling))
            started = asyncio.ensure_future(listener.start())
            await asyncio.sleep(0.05)
            starts.listen()
            fcntl.flock(lock, fcntl.LOCK_UN)
            await asyncio.wait_for(started, LIMIT_S)
            assert sibling.exists()
        listener.close()

    try:
        asyncio.run(work())
    finally:
        os.close(lock)


def test_messages_are_read_whole_from_pieces_of_any_size():
    sent = []

    class Sink:
        def is_closing(self):
            return False

        def write(self, data):
            sent.append(bytes(data))

    connection = Connection()
    connection.connection_made(Sink())
    connection.send(Kind.CALL, 7, pickled(("a", (1,), None)))
    connection.send(Kind.CANCEL, 2**40)
    reader, stream = FrameReader(), b"".join(sent)

    frames = [frame for at in range(len(stream)) for frame in reader.read(stream[at : at + 1])]

    assert frames == [(Kind.CALL, 7, ("a", (1,), None)), (Kind.CANCEL, 2**40, None)]


class Unreadable:
    """Is pickled, and cannot be unpickled."""

    def __reduce__(self):
        return int, ("no number",)


def test_a_value_that_cannot_be_unpickled_fails_its_call_and_no_other_one(tmp_path, caplog):
    replica = Replica()

    class Answers(Replica):
        async def answer(self, method, arguments, context):
            return Unreadable() if method == "odd" else await replica.answer(method, arguments, context)

    async def work(connection):
        other = asyncio.ensure_future(connection.call("wait", ("innocent",), None))
        there = await connection.call("same", (Unreadable(),), None)
        back = await connection.call("odd", (), None)
        await asyncio.to_thread(listener.let_go)
        return there, back, await other

    listener = Answers()
    replica.release = listener.release
    with listening(tmp_path / "own" / "a.sock", listener):
        there, back, other = called(tmp_path / "own" / "a.sock", work)

    assert (other.kind, other.value) == (Kind.ANSWERED, ("innocent",))
    for frame in (there, back):
        assert frame.kind is Kind.FAILED
        assert isinstance(frame.value, UnreadableError)
        assert "no number" in str(frame.value)
    assert "cannot be unpickled" in caplog.text


def test_messages_before_one_of_an_unknown_kind_are_read():
    reader = FrameReader()
    good = struct.pack("<BQQ", Kind.CANCEL, 3, 0)

    assert reader.read(good + bytes([99]) + bytes(16) + good) == [(Kind.CANCEL, 3, None)]
    assert reader.is_lost
    assert reader.read(good) == []


def test_who_speaks_something_else_is_disconnected(tmp_path):
    path = tmp_path / "own" / "a.sock"

    async def work():
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(17))
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()

    with listening(path, Replica()):
        asyncio.run(asyncio.wait_for(work(), LIMIT_S))
        later = called(path, lambda connection: connection.call("same", (), None))
    assert later.kind is Kind.ANSWERED
