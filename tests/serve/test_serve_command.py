"""The command as it is used: it starts a cluster, listens where it should, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import numpy as np
import pytest
import yaml
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from rayrec.platform.checkout import CHECKOUT
from rayrec.serve.on_ray import serving
from rayrec.serve.on_ray.ray_ingress import HAPROXY_SWITCH, VARIABLES
from tests.cli.commands import refused
from tests.helpers.http import free_port
from tests.helpers.runs import make_run
from tests.serve.certificates import make_certificate
from tests.serve.processes import environment_of, is_loopback, listening, marked_processes, speaks_http

TOKEN = "a-token-of-the-tests-0123456789"
SERVING = ("haproxy", "ray::Serve", "ray::ProxyActor", "ray::HAProxyManager")
"""Commands of the processes that requests come to."""
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="HAProxy of Ray is for Linux")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("command"))


def environment(mark: str, **changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "RAY_ADDRESS")}
    path = os.pathsep.join([str(CHECKOUT), *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": path, "RAYREC_TEST_MARK": mark, **changes}


def services_in(folder: Path) -> list[str]:
    """Options for several deployments with users' events."""
    parts = ("gateway", "features", "sparse", "dense")
    (folder / "services.yaml").write_text(yaml.safe_dump({part: {"cpus": 0.1} for part in parts}))
    (folder / "events.yaml").write_text(yaml.safe_dump({"log": {"folder": str(folder / "events")}}))
    return ["--services", str(folder / "services.yaml"), "--events", str(folder / "events.yaml")]


def listeners(
    mark: str, command: int, expected: tuple[str, int]
) -> tuple[dict[int, str], set[tuple[int, str, int]]]:
    """Marked processes, and where those that requests come to listen: process, IP address, port.

    HAProxy hands its sockets to a new process whenever Serve reloads it, so one look may miss `expected`.
    """
    deadline = time.monotonic() + 30
    while True:
        processes = marked_processes(mark)
        found = {
            (number, address, port)
            for number, text in processes.items()
            if number == command or "haproxy.cfg" in text or text.startswith(SERVING)
            for address, port in listening(number)
        }
        if expected in {(address, port) for _, address, port in found} or time.monotonic() > deadline:
            return processes, found
        time.sleep(0.1)


def ask(url: str, certificate: Path, token: str | None = None) -> tuple[int, dict[str, object]]:
    """Status and JSON of recommendations, by HTTPS that is checked."""
    trusting = ssl.create_default_context(cafile=str(certificate))
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting)
    )
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    try:
        request = urllib.request.Request(url, json.dumps({"user_id": "u3", "k": 3}).encode(), headers)
        with opener.open(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def call(port: int, certificate: Path, token: str | None = None) -> str:
    """Status of recommendations by gRPC over TLS that is checked; three of them, if there are any."""
    given = InferInput("user_id", [1], "BYTES")
    given.set_data_from_numpy(np.array(["u3"], dtype=object))
    headers = {"authorization": f"Bearer {token}"} if token else {}
    with InferenceServerClient(f"127.0.0.1:{port}", ssl=True, root_certificates=str(certificate)) as client:
        try:
            answer = client.infer(
                "recommend", [given], parameters={"k": 3}, headers=headers, client_timeout=30
            )
        except InferenceServerException as error:
            return error.status().removeprefix("StatusCode.")
    assert answer.as_numpy("num_items").tolist() == [3]
    return "OK"


@LINUX
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("way", ["haproxy", "proxy", "single process", "services"])
def test_it_serves_with_tls_and_token_on_loopback_alone_and_stops_clean(run, tmp_path, way):
    certificate, key = make_certificate(tmp_path)
    mark, port, log = uuid.uuid4().hex, free_port(), tmp_path / "log"
    changes = {HAPROXY_SWITCH: "0"} if way == "proxy" else {}
    command = [sys.executable, "-m", "rayrec", "serve", str(run), "--port", str(port)]
    command += ["--tls-cert", str(certificate), "--tls-key", str(key)]
    command += ["--single-process"] if way == "single process" else []
    calls = free_port() if way in ("haproxy", "single process") else None
    command += [] if calls is None else ["--grpc-port", str(calls)]
    command += services_in(tmp_path) if way == "services" else []
    with subprocess.Popen(
        command,
        env=environment(mark, RAYREC_SERVE_TOKEN=TOKEN, **changes),
        stderr=subprocess.PIPE,
        stdout=log.open("w"),
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if line.startswith("answering at"):
                    break
            url = f"https://127.0.0.1:{port}/v1/recommend"
            assert url in said[-1], "".join(said)
            assert [status for status, _ in (ask(url, certificate, t) for t in (TOKEN, None, "x"))] == [
                200,
                401,
                401,
            ]
            if calls is not None:
                statuses = [call(calls, certificate, token) for token in (TOKEN, None, "x")]
                assert statuses == ["OK", "UNAUTHENTICATED", "UNAUTHENTICATED"]
            asked_by = {
                "haproxy": "HAProxy in front",
                "services": "HAProxy in front",
                "proxy": f"Ray Serve's proxy ({HAPROXY_SWITCH} is 0)",
            }
            assert asked_by.get(way, "this machine alone, TLS, with a token") in "".join(said)

            processes, found = listeners(mark, process.pid, expected=("127.0.0.1", port))
            assert any("haproxy.cfg" in each for each in processes.values()) == (
                way in ("haproxy", "services")
            )
            assert ("127.0.0.1", port) in {(address, port) for _, address, port in found}
            # What else listens is how Ray's processes talk to each other: gRPC, with the cluster's token.
            outside = {port for _, address, port in found if not is_loopback(address)}
            assert not {port for port in outside if speaks_http(port)}
            for number, text in processes.items():
                assert TOKEN not in text
                if number != process.pid:
                    assert TOKEN.encode() not in environment_of(number)
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait(timeout=60) == 0, rest
    assert "stopping" in rest
    assert marked_processes(mark) == {}


def test_a_port_in_use_is_refused_before_anything_starts(run, monkeypatch):
    monkeypatch.setattr(serving, "starts_cluster", lambda config: True)  # whatever this process has joined
    monkeypatch.setattr(serving, "ray_cluster", None)  # cannot be called
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        assert f"port {port} on 127.0.0.1 is in use" in refused("serve", run, "--port", port, code=1)


def test_half_a_pair_of_files_is_refused(run, tmp_path):
    line = refused("serve", run, "--tls-cert", tmp_path / "c.pem")

    assert "--tls-cert and --tls-key belong together" in line
