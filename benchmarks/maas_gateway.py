"""What our gateway adds to an answer of another service: the same request, there and through the gateway.

    client ─► a service that answers at once (a process)
    client ─► gateway, engine `remote` (a process) ─► the same service

The service has nothing to compute, so that all of the difference is the gateway's. Requests alternate, one at
a time.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.serve import free_port
from rayrec.serve.web.address import wait_until_ready

NUM_REQUESTS, NOT_COUNTED = 400, 50
STARTS_S, ENDS_S = 60.0, 30.0
MODELS = {"object": "list", "data": [{"id": "bench", "object": "model"}]}
ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "bench",
    "choices": [{"index": 0, "text": " time", "finish_reason": "length", "logprobs": None}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


def gateway_s() -> float:
    """Median seconds that the gateway adds."""
    body = json.dumps({"model": "bench", "prompt": "tea", "max_tokens": 1, "temperature": 0})
    port = free_port()
    with _process("benchmarks.maas_gateway", str(port)), _gateway(port) as here:
        # A plain client: others take a millisecond themselves.
        clients = [http.client.HTTPConnection("127.0.0.1", each) for each in (port, here)]
        added = []
        for _ in range(NUM_REQUESTS):
            alone, through = (_seconds(client, body) for client in clients)
            added.append(through - alone)
        for client in clients:
            client.close()
    return statistics.median(added[NOT_COUNTED:])


def _seconds(client: http.client.HTTPConnection, body: str) -> float:
    began = time.perf_counter()
    client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = client.getresponse()
    said = answer.read()
    took_s = time.perf_counter() - began
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {said[:200]!r}")
    return took_s


@contextmanager
def _gateway(service: int) -> Iterator[int]:
    """`rayrec maas up` before a service; the value is its port."""
    port = free_port()
    model = {"name": "bench", "engine": "remote", "url": f"http://127.0.0.1:{service}/v1"}
    with tempfile.TemporaryDirectory() as draft:
        settings = Path(draft) / "models.yaml"
        settings.write_text(json.dumps({"models": [model]}))  # which is YAML, too
        _wait_for(service)
        with _process("rayrec", "maas", "up", str(settings), "--port", str(port)):
            _wait_for(port)
            wait_until_ready(f"http://127.0.0.1:{port}")
            yield port


@contextmanager
def _process(*command: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(ENDS_S)


def _wait_for(port: int) -> None:
    ends = time.monotonic() + STARTS_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > ends:
            raise RuntimeError(f"nothing listens on port {port} after {STARTS_S:.0f} s")
        time.sleep(0.1)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As little of HTTP as the gateway and the client need."""
    while not reader.at_eof():
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
        except asyncio.IncompleteReadError:
            break
        sizes = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        if sizes:
            await reader.readexactly(int(sizes[0].partition(b":")[2]))
        said = json.dumps(MODELS if head.startswith(b"get") else ANSWER).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(said), said)
        )
        await writer.drain()
    writer.close()


async def _serve(port: int) -> None:
    async with await asyncio.start_server(_answer, "127.0.0.1", port) as server:
        await server.serve_forever()


def main(arguments: Sequence[str]) -> None:
    asyncio.run(_serve(int(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
