"""A process that asks a service for one thing over and over, with so little work of its own that it is not
what is measured: bare sockets, one request written before, and nothing read of an answer but its length."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
import urllib.parse
from collections.abc import Callable


def rates() -> Callable[[tuple[str, int, float]], float]:
    """In the process: answers per second over windows of (URL, connections, seconds).

    The function raises a RuntimeError for a status other than 200, since such answers cost nothing.
    """
    return lambda window: _rate(*window)


def _rate(url: str, num_connections: int, seconds: float) -> float:
    parts = urllib.parse.urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    request = f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
    with selectors.DefaultSelector() as selector:
        connections = [
            _Connection(parts.hostname, parts.port, request, selector) for _ in range(num_connections)
        ]
        try:
            _answers(selector, seconds / 4)  # thrown away: not all connections are busy yet
            began = time.perf_counter()
            return _answers(selector, seconds) / (time.perf_counter() - began)
        finally:
            for connection in connections:
                connection.close()


def _answers(selector: selectors.BaseSelector, seconds: float) -> int:
    end = time.perf_counter() + seconds
    num_answers = 0
    while time.perf_counter() < end:
        for key, _ in selector.select(timeout=seconds):
            num_answers += key.data.read()
    return num_answers


class _Connection:
    """With one request at a time; opened again when the service closes it between two answers."""

    def __init__(self, host: str, port: int, request: bytes, selector: selectors.BaseSelector) -> None:
        self._address, self._request, self._selector = (host, port), request, selector
        self._answer = bytearray()
        self._open()

    def _open(self) -> None:
        self._socket = socket.create_connection(self._address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(self._socket, selectors.EVENT_READ, self)
        self._socket.sendall(self._request)

    def close(self) -> None:
        self._selector.unregister(self._socket)
        self._socket.close()

    def read(self) -> bool:
        """Takes what has come, and asks again at the end of an answer; whether that was one."""
        try:
            received = self._socket.recv(65_536)
        except ConnectionResetError:
            received = b""
        if not received:
            if self._answer:
                raise RuntimeError("the service closed a connection in the middle of an answer")
            self.close()
            self._open()
            return False
        self._answer += received
        head, end, body = self._answer.partition(b"\r\n\r\n")
        if not end:
            return False
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"the service answers {bytes(self._answer[:200])!r}")
        if len(body) < content_length(head):
            return False
        self._answer.clear()
        with contextlib.suppress(OSError):  # closed, as the next read will find
            self._socket.sendall(self._request)
        return True


def content_length(head: bytearray) -> int:
    """Bytes of the body that follows."""
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    if not found:
        raise RuntimeError("an answer does not say how long it is")
    return int(rest.partition(b"\r\n")[0])
