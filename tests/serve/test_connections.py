"""Connections of clients that are slow, or many."""

from __future__ import annotations

import json
import logging
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from rayrec.serve.config.connections import ConnectionsConfig
from rayrec.serve.web import connections
from rayrec.serve.web.connections import OTHER_FILES, Connections, allowed_by_files

LARGE = 32 * 2**20
"""Bytes of an answer, more than sockets hold."""


@contextmanager
def running(config: ConnectionsConfig) -> Iterator[int]:
    """A server with these bounds, whose answers are large at `/large`; the value is its port."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        text = "x" * LARGE if scope["path"] == "/large" else "here"
        await PlainTextResponse(text)(scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        protocol = Connections(config).protocol
        settings = uvicorn.Config(app, http=protocol, log_level="critical", lifespan="off")  # type: ignore[arg-type]
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def connected(stack: ExitStack, port: int) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    parts = []
    try:
        while part := connection.recv(2**16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_headers_that_do_not_come_end_a_connection_and_others_are_answered():
    with running(ConnectionsConfig(headers_timeout_s=0.2)) as port, ExitStack() as stack:
        silent, slow, second = (connected(stack, port) for _ in range(3))
        slow.sendall(b"POST /v1/recommend HTTP/1.1\r\nHost: x\r\n")
        # The first request of a connection is in time, and the next one is not.
        second.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert second.recv(12) == b"HTTP/1.1 200"
        second.sendall(b"GET / HTTP/1.1\r\n")
        assert httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).text == "here"
        assert [rest_of(each) for each in (silent, slow)] == [b"", b""]
        assert rest_of(second).endswith(b"here")


def test_one_address_has_no_more_than_its_part_and_is_told_when_to_come_back():
    with running(ConnectionsConfig(most=9, most_per_address=2)) as port, ExitStack() as stack:
        held = [connected(stack, port) for _ in range(2)]
        for each in held:
            each.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert each.recv(12) == b"HTTP/1.1 200"
        head, _, body = rest_of(connected(stack, port)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in head
        assert "too many connections" in json.loads(body)["error"]
        held[0].close()
        answers = (httpx.get(f"http://127.0.0.1:{port}/", trust_env=False) for _ in range(1000))
        assert any(answer.status_code == 200 for answer in answers), "a slot is not free again"


def test_a_connection_that_asks_for_another_protocol_is_free_again_when_it_ends():
    wanted = b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    wanted += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with running(ConnectionsConfig(most=9, most_per_address=2)) as port:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(wanted)
                assert connection.recv(12) == b"HTTP/1.1 200"
        answers = (httpx.get(f"http://127.0.0.1:{port}/", trust_env=False) for _ in range(100))
        assert any(answer.status_code == 200 for answer in answers), "a slot is not free again"


def test_the_bound_of_all_holds_for_all_addresses_together():
    counted = Connections(ConnectionsConfig(most=3))
    assert counted.config.of_one_address == 1
    assert [counted.enter(address) for address in ("a", "a", "b", "c", "d")] == [
        True,
        False,
        True,
        True,
        False,
    ]
    counted.leave("b")
    assert counted.enter("d")


def test_a_client_that_takes_nothing_of_its_answer_is_disconnected():
    with running(ConnectionsConfig(answer_timeout_s=0.2)) as port, ExitStack() as stack:
        idle = connected(stack, port)
        idle.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while idle.fileno() >= 0:
            # Nothing is read until the server has given up: a write to it fails then.
            try:
                idle.sendall(b"x")
            except OSError:
                break
            threading.Event().wait(0.05)
        assert len(rest_of(idle)) < LARGE


def test_open_files_are_raised_as_far_as_they_may_and_what_lacks_is_said(monkeypatch, caplog):
    limits = [(1024, 2048)]
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(connections.resource, "setrlimit", lambda kind, new: limits.append(new))
    caplog.set_level(logging.WARNING)

    assert allowed_by_files(ConnectionsConfig(most=1000)).most == 1000
    assert limits[-1] == (1000 + OTHER_FILES, 2048)
    assert caplog.text == ""
    assert allowed_by_files(ConnectionsConfig(most=8192)).most == 2048 - OTHER_FILES
    assert limits[-1] == (2048, 2048)
    assert f"up to {2048 - OTHER_FILES} connections instead of 8192" in caplog.text
    limits.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert allowed_by_files(ConnectionsConfig(most=8192)).most == 8192
