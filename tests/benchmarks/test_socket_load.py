"""The load generator of bare sockets counts whole answers, and only good ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.socket_load import rates


@contextmanager
def service(status: int = 200, closes: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Its URL, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", "5")
            self.end_headers()  # which leaves before the body does
            self.wfile.write(b"ready")
            self.close_connection = closes

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/path", asked
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("closes", [False, True])
def test_answers_are_counted_whether_connections_stay_open_or_not(closes):
    with service(closes=closes) as (url, asked):
        rate = rates()((url, 2, 0.2))
    assert set(asked) == {"/path"}
    # At most what was asked for, in a time of at least what was said; some went to warming up.
    assert 0 < rate <= len(asked) / 0.2


def test_an_answer_of_another_status_is_an_error():
    with service(status=503) as (url, _), pytest.raises(RuntimeError, match="503"):
        rates()((url, 1, 0.2))
