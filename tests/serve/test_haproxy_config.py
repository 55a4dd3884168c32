"""What HAProxy is told, from the template of the Ray Serve that is installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ray.serve._private.haproxy import (
    BackendConfig,
    HAProxyApi,
    HAProxyConfig,
    ServerConfig,
    get_haproxy_binary,
)
from ray.serve.config import HTTPOptions

from rayrec.serve.haproxy_config import NO_REPLICA, Listen, Plan, Replicas, rewritten, write_program
from rayrec.serve.tls import TlsConfig, link_for_haproxy
from tests.serve.certificates import make_certificate

PLAIN: Listen = {"host": "10.1.2.3", "port": 8443, "certificate": None}
REPLICAS: Replicas = {"most": 40, "queue_ms": 50}
ERROR_FILE = "/somewhere/no-replica.http"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """As Serve writes it, for one application with one replica."""
    file = tmp_path / "serve" / "haproxy.cfg"
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=8123),
        socket_path=str(tmp_path / "admin.sock"),
        server_state_base=str(tmp_path),
        server_state_file=str(tmp_path / "state"),
        is_head=True,
    )
    replica = ServerConfig("replica", "127.0.0.1", 30_000)
    backend = BackendConfig(name="http-rayrec", path_prefix="/", app_name="rayrec", servers=[replica])
    api = HAProxyApi(config, {"http-rayrec": backend}, str(file))
    api._generate_config_file_internal()
    return file


def addresses(config: str) -> list[str]:
    return sorted(line.split()[1] for line in config.splitlines() if line.split()[:1] == ["bind"])


def haproxy() -> str:
    try:
        return get_haproxy_binary()
    except FileNotFoundError:
        pytest.skip("HAProxy is not installed")


def test_nothing_but_the_service_listens_outside_of_loopback(config_file):
    written = config_file.read_text()
    assert [address for address in addresses(written) if not address.startswith("127.0.0.1:")] == [
        "*:8404",
        ":9101",
    ], "the template has changed: is the module still needed?"

    changed = rewritten(written, PLAIN, REPLICAS, ERROR_FILE)

    assert addresses(changed) == ["127.0.0.1:8404", "127.0.0.1:9101", "ipv4@10.1.2.3:8443"]
    assert addresses(rewritten(written, {**PLAIN, "host": "::1"}, REPLICAS, ERROR_FILE))[-1] == "ipv6@::1:8443"


def test_the_address_of_a_client_is_what_haproxy_sees_and_no_request_is_logged(config_file):
    lines = [line.strip() for line in rewritten(config_file.read_text(), PLAIN, REPLICAS, ERROR_FILE).splitlines()]

    place = lines.index("bind ipv4@10.1.2.3:8443")
    assert lines[place - 1] == "frontend http_frontend"
    assert "http-request set-header X-Forwarded-For %[src]" in lines[place:]
    assert "http-request set-header X-Forwarded-Proto http" in lines[place:]
    assert not any(line.startswith("log 127.0.0.1:514") for line in lines)


def test_a_replica_has_no_more_requests_than_it_can_hold_and_nobody_waits_long_for_it(config_file):
    lines = [
        line.strip()
        for line in rewritten(config_file.read_text(), PLAIN, REPLICAS, ERROR_FILE).splitlines()
    ]
    (server,) = [line for line in lines if line.startswith("server replica ")]
    assert server.endswith(" maxconn 40")
    assert lines[lines.index("defaults") + 1] == "timeout queue 50ms"
    assert len([line for line in lines if line.startswith("timeout queue")]) == 1


def test_where_no_replica_answers_it_is_said_when_to_come_back(config_file, tmp_path):
    plan: Plan = {"haproxy": "/bin/true", "listen": PLAIN, "replicas": REPLICAS}
    folder = write_program(tmp_path, sys.executable, plan).parent
    subprocess.run([folder / "haproxy", "-f", config_file], check=True)

    files = [line.split() for line in config_file.read_text().splitlines() if "errorfile" in line]
    assert [words[1] for words in files] == ["502", "503", "504"]
    (file,) = {words[2].strip("'") for words in files}
    head, _, body = Path(file).read_bytes().decode().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 503 ")
    assert "Retry-After: 1" in head
    assert f"Content-Length: {len(body)}" in head
    assert json.loads(body) == NO_REPLICA


def test_an_address_that_is_not_known_is_refused(config_file):
    written = config_file.read_text()
    with pytest.raises(ValueError, match="'listen debug' listens in a way that is not known: 'bind :7000'"):
        rewritten(f"{written}\nlisten debug\n  bind :7000\n", PLAIN, REPLICAS, ERROR_FILE)
    with pytest.raises(ValueError, match="'listen stats' listens in a way that is not known"):
        rewritten(written.replace("bind *:8404", "bind unix@/tmp/stats"), PLAIN, REPLICAS, ERROR_FILE)
    with pytest.raises(ValueError, match="expected one address of each section"):
        rewritten(written.replace("bind :9101", ""), PLAIN, REPLICAS, ERROR_FILE)


@pytest.mark.parametrize("tls", [False, True])
def test_haproxy_takes_the_rewritten_configuration(config_file, tmp_path, tls):
    certificate = None
    if tls:
        chain, key = make_certificate(tmp_path)
        certificate = str(link_for_haproxy(TlsConfig(certificate=str(chain), key=str(key)), tmp_path))
    listen: Listen = {"host": "127.0.0.1", "port": 8443, "certificate": certificate}
    program = write_program(tmp_path, sys.executable, {"haproxy": haproxy(), "listen": listen, "replicas": REPLICAS})

    checked = subprocess.run([program, "-c", "-f", config_file], capture_output=True, text=True)

    assert checked.returncode == 0, checked.stderr
    assert "ipv4@127.0.0.1:8443" in addresses(config_file.read_text())


def test_haproxy_does_not_start_with_a_configuration_that_is_not_known(config_file, tmp_path):
    config_file.write_text(config_file.read_text().replace("bind *:8404", "bind unix@/tmp/stats"))
    before = config_file.read_text()
    program = write_program(tmp_path, sys.executable, {"haproxy": "/bin/true", "listen": PLAIN, "replicas": REPLICAS})

    refused = subprocess.run([program, "-f", config_file], capture_output=True, text=True)

    assert refused.returncode == 1
    assert "this version of Ray Serve configures HAProxy in a new way" in refused.stderr
    assert config_file.read_text() == before


PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=sys.stdout)
child.wait()
"""


def test_haproxy_ends_with_the_process_that_started_it(tmp_path):
    stands_in = tmp_path / "stands_in"
    stands_in.write_text("#!/bin/sh\necho started\nexec sleep 300\n")
    stands_in.chmod(0o700)
    plan: Plan = {"haproxy": str(stands_in), "listen": PLAIN, "replicas": REPLICAS}
    program = write_program(tmp_path, sys.executable, plan)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(program)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        os.kill(parent.pid, signal.SIGKILL)
        # The end of the pipe: nobody holds it open any more, so the one that was started is gone, too.
        assert parent.stdout.read() == ""
