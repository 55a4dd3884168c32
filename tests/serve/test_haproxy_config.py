"""What HAProxy is told, from the template of the Ray Serve that is installed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from ray.serve._private.haproxy import (
    BackendConfig,
    HAProxyApi,
    HAProxyConfig,
    ServerConfig,
    get_haproxy_binary,
)
from ray.serve.config import HTTPOptions

from rayrec.serve.config.tls import TlsConfig, link_for_haproxy
from rayrec.serve.on_ray import haproxy_stand_in
from rayrec.serve.on_ray.haproxy_config import (
    NO_REPLICA,
    NO_REPLICA_OPENAI,
    NO_ROUTES,
    REST_MS,
    Listen,
    Plan,
    rewritten,
    write_program,
)
from rayrec.serve.wire.deadlines import NO_TIME_HEADER
from tests.serve.certificates import make_certificate

PLAIN: Listen = {"host": "10.1.2.3", "port": 8443, "certificate": None}
MOST = 2


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return written_config(tmp_path, 30_000)


def written_config(
    tmp_path: Path, *replica_ports: int, fallback_port: int | None = None, **settings: str
) -> Path:
    """As Serve writes it, for one application; for none where there is no replica."""
    file = tmp_path / "serve" / "haproxy.cfg"
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=8123),
        socket_path=str(tmp_path / "admin.sock"),
        server_state_base=str(tmp_path),
        server_state_file=str(tmp_path / "state"),
        is_head=True,
        **settings,
    )
    replicas = [
        ServerConfig(f"replica-{number}", "127.0.0.1", port) for number, port in enumerate(replica_ports)
    ]
    fallback = None if fallback_port is None else ServerConfig("proxy", "127.0.0.1", fallback_port)
    backend = BackendConfig(
        name="http-rayrec", path_prefix="/", app_name="rayrec", servers=replicas, fallback_server=fallback
    )
    api = HAProxyApi(config, {"http-rayrec": backend} if replica_ports else {}, str(file))
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

    changed = rewritten(written, PLAIN, MOST)

    assert addresses(changed) == ["127.0.0.1:8404", "127.0.0.1:9101", "ipv4@10.1.2.3:8443"]
    assert addresses(rewritten(written, {**PLAIN, "host": "::1"}, MOST))[-1] == "ipv6@::1:8443"


def test_the_address_of_a_client_is_what_haproxy_sees_and_no_request_is_logged(config_file):
    lines = [line.strip() for line in rewritten(config_file.read_text(), PLAIN, MOST).splitlines()]

    place = lines.index("bind ipv4@10.1.2.3:8443")
    assert lines[place - 1] == "frontend http_frontend"
    assert "http-request set-header X-Forwarded-For %[src]" in lines[place:]
    assert "http-request set-header X-Forwarded-Proto http" in lines[place:]
    assert not any(line.startswith("log 127.0.0.1:514") for line in lines)


class Replica(BaseHTTPRequestHandler):
    """Holds what is to be computed until it is let."""

    protocol_version = "HTTP/1.1"
    let = threading.Event()
    held = threading.Semaphore(0)

    def do_GET(self) -> None:
        """Asked for its health."""
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/v1/events":
            self.held.release()
            assert self.let.wait(timeout=20)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_haproxy_refuses_what_the_replicas_have_no_room_for_and_nothing_else(tmp_path):
    """With the real one; what is not computed passes all the same."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Replica) as server, ThreadPoolExecutor(3) as pool:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with running_haproxy(tmp_path, MOST, server.server_port) as port:

            def post(path: str) -> httpx.Response:
                return httpx.post(
                    f"http://127.0.0.1:{port}{path}", content=b"{}", trust_env=False, timeout=20
                )

            held = [pool.submit(post, "/v1/recommend") for _ in range(MOST)]
            for _ in held:
                assert Replica.held.acquire(timeout=20)
            of_one = ("/v1/recommend", "/v2/models/recommend/infer")
            plain = [post(path) for path in (*of_one, *(f"/models/books{path}" for path in of_one))]
            openai = [post(path) for path in ("/v1/completions", "/models/books/v1/completions")]
            assert [answer.status_code for answer in (*plain, *openai)] == [503] * 6
            assert [answer.headers["Retry-After"] for answer in (*plain, *openai)] == ["1"] * 6
            assert [answer.json() for answer in plain] == [NO_REPLICA] * 4
            assert [answer.json() for answer in openai] == [NO_REPLICA_OPENAI] * 2
            assert post("/v1/events").status_code == 200
            Replica.let.set()
            assert [each.result().status_code for each in held] == [200] * MOST
            assert post("/v1/recommend").status_code == 200
        Replica.let.set()
        server.shutdown()


class LateReplica(Replica):
    """Has no time for whoever has less than a second."""

    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        has_ms = int(self.headers.get("X-Request-Timeout-Ms", 5000))
        self.asked.append(f"{self.path} {has_ms}")
        is_late = self.path != "/v1/events" and has_ms < 1000
        self.send_response(503 if is_late else 200)
        if is_late:
            self.send_header(NO_TIME_HEADER, "1")
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def late_replica() -> Iterator[int]:
    LateReplica.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), LateReplica) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_who_has_no_more_time_than_one_that_was_late_is_refused_for_a_while(tmp_path):
    """With the real one, and a while that is longer than the test."""
    with (
        late_replica() as replica,
        running_haproxy(tmp_path, 100, replica, rest_ms=600_000) as port,
        httpx.Client(trust_env=False) as client,
    ):

        def post(has_ms: int | None, path: str = "/v1/recommend") -> httpx.Response:
            headers = {} if has_ms is None else {"X-Request-Timeout-Ms": str(has_ms)}
            return client.post(f"http://127.0.0.1:{port}{path}", content=b"{}", headers=headers)

        passed = [post(1000), post(None)]
        late = post(500)
        refused = [post(500), post(200), post(1), post(500, "/v1/completions")]
        passed += [post(1000), post(None), post(200, "/v1/events")]
    assert [answer.status_code for answer in passed] == [200] * 5
    assert [answer.status_code for answer in (late, *refused)] == [503] * 5
    assert NO_TIME_HEADER not in late.headers
    assert [answer.headers["Retry-After"] for answer in refused] == ["1"] * 4
    assert LateReplica.asked == [
        *("/v1/recommend 1000", "/v1/recommend 5000", "/v1/recommend 500"),
        *("/v1/recommend 1000", "/v1/recommend 5000", "/v1/events 200"),
    ]


def test_after_a_while_a_replica_is_asked_again(tmp_path):
    with (
        late_replica() as replica,
        running_haproxy(tmp_path, 100, replica, rest_ms=1) as port,
        httpx.Client(trust_env=False) as client,
    ):
        for _ in range(2):
            url = f"http://127.0.0.1:{port}/v1/recommend"
            client.post(url, content=b"{}", headers={"X-Request-Timeout-Ms": "500"})
            time.sleep(0.05)
    assert LateReplica.asked == ["/v1/recommend 500"] * 2


@contextmanager
def running_haproxy(
    tmp_path: Path,
    most: int,
    *replica_ports: int,
    rest_ms: int = REST_MS,
    has_token: bool = False,
    of_one_address: int = 1000,
    fallback_port: int | None = None,
    **settings: str,
) -> Iterator[int]:
    """The real one, before these replicas; the value is its port."""
    port = free_port()
    listen: Listen = {"host": "127.0.0.1", "port": port, "certificate": None}
    plan: Plan = {"haproxy": haproxy(), "listen": listen, "most": most}
    plan |= {"rest_ms": rest_ms, "has_token": has_token, "of_one_address": of_one_address}
    file = written_config(tmp_path, *replica_ports, fallback_port=fallback_port, **settings)
    running = started(tmp_path, plan, file)
    try:
        wait_until(lambda: accepts(port))
        yield port
    finally:
        running.terminate()
        running.wait()


def started(tmp_path: Path, plan: Plan, file: Path) -> subprocess.Popen[bytes]:
    """The program, as Serve starts it."""
    program = write_program(tmp_path, sys.executable, plan)
    text = file.read_text().replace("bind *:8404", f"bind *:{free_port()}")
    file.write_text(text.replace("bind :9101", f"bind :{free_port()}"))
    return subprocess.Popen([program, "-db", "-f", file])


@pytest.mark.parametrize("path", ["/v1/recommend", "/v1/users"])
def test_while_no_replica_is_there_requests_are_refused_and_do_not_wait_in_serves_proxy(tmp_path, path):
    """They waited for 20 s, until another replica had loaded the model."""
    with (
        named_replicas(1) as (proxy_port,),
        running_haproxy(tmp_path, MOST, free_port(), fallback_port=proxy_port) as port,
    ):
        answer = httpx.post(f"http://127.0.0.1:{port}{path}", content=b"{}", trust_env=False)

    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert answer.json() == NO_REPLICA


@pytest.mark.slow
def test_another_haproxy_answers_for_one_that_died_until_a_newer_one_knows_the_application(tmp_path):
    port = free_port()
    listen: Listen = {"host": "127.0.0.1", "port": port, "certificate": None}
    plan: Plan = {"haproxy": haproxy(), "listen": listen, "most": MOST, "launcher": os.getpid()}

    def answer() -> str | None:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/v1/users", trust_env=False).text
        except httpx.TransportError:
            return None

    def is_standing_in() -> bool:
        return haproxy_stand_in.answers(tmp_path)

    with named_replicas(2) as ports:
        first = started(tmp_path, plan, written_config(tmp_path, ports[0]))
        wait_until(lambda: answer() == str(ports[0]))
        assert not is_standing_in()
        first.kill()
        first.wait()
        wait_until(is_standing_in)
        wait_until(lambda: answer() == str(ports[0]))
        # As Serve begins: nothing is known, and the stand-in is left to answer.
        unknowing = started(tmp_path, plan, written_config(tmp_path))
        wait_until(lambda: "rayrec_no_replica" in (tmp_path / "serve" / "haproxy.cfg").read_text())
        assert [answer() for _ in range(20)] == [str(ports[0])] * 20
        newer = started(tmp_path, plan, written_config(tmp_path, ports[1]))
        wait_until(lambda: not is_standing_in())
        assert [answer() for _ in range(20)] == [str(ports[1])] * 20

        (tmp_path / haproxy_stand_in.STOPPING).touch()
        for each in (unknowing, newer):
            each.kill()
            each.wait()
        wait_until(lambda: not accepts(port))
        assert not is_standing_in()


def test_one_address_has_no_more_connections_than_it_may(tmp_path):
    with (
        named_replicas(1) as ports,
        running_haproxy(tmp_path, MOST, *ports, of_one_address=3) as port,
        ExitStack() as stack,
    ):
        wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).status_code == 200)
        statuses = []
        for _ in range(6):
            try:
                held = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                held.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                statuses.append(held.recv(12))
            except ConnectionError:
                statuses.append(b"")
        # The one that asked before may still count.
        assert 2 <= statuses.count(b"HTTP/1.1 200") <= 3, statuses
        assert set(statuses) == {b"HTTP/1.1 200", b""}


def test_where_no_application_is_known_it_is_said_when_to_come_back(tmp_path):
    """Serve's own answer is status 404, which clients take for good."""
    with (
        running_haproxy(tmp_path, MOST) as port,
        httpx.Client(trust_env=False, base_url=f"http://127.0.0.1:{port}") as client,
    ):
        answers = [client.post(path, content=b"{}") for path in ("/v1/recommend", "/v1/completions")]
    assert [(answer.status_code, answer.headers["Retry-After"]) for answer in answers] == [(503, "1")] * 2
    assert [answer.json() for answer in answers] == [NO_REPLICA, NO_REPLICA_OPENAI]


class NamedReplica(BaseHTTPRequestHandler):
    """Says which one it is."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        text = str(self.server.server_address[1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def named_replicas(count: int) -> Iterator[list[int]]:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), NamedReplica)) for _ in range(count)
        ]
        for server in servers:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        yield [server.server_port for server in servers]


@pytest.mark.slow
def test_a_user_stays_with_a_replica_and_moves_only_if_it_goes(tmp_path):
    sticky = {"balance_algorithm": "hdr(X-User-Id)"}
    users = [f"u{number}" for number in range(60)]

    def answered_by(port: int) -> list[str]:
        with httpx.Client(trust_env=False, timeout=20) as client:
            url = f"http://127.0.0.1:{port}/"
            return [client.get(url, headers={"X-User-Id": user}).text for user in users]

    with named_replicas(3) as ports:
        with running_haproxy(tmp_path / "three", MOST, *ports, **sticky) as port:
            first, again = answered_by(port), answered_by(port)
            without_user = [httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).text for _ in range(9)]
        with running_haproxy(tmp_path / "two", MOST, *ports[:2], **sticky) as port:
            fewer = answered_by(port)
    assert first == again
    assert set(first) == set(without_user) == {str(port) for port in ports}
    stayed = [user for user, replica in enumerate(first) if replica != str(ports[2])]
    assert [fewer[user] for user in stayed] == [first[user] for user in stayed]


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_where_no_replica_answers_it_is_said_when_to_come_back_in_the_form_of_the_protocol(tmp_path):
    """With the real one, whose only replica takes no connection, and then one that ends them."""
    paths = (
        *("/v1/recommend", "/models/books/v1/recommend"),
        *("/v1/completions", "/models/books/v1/completions", "/v1/models"),
    )
    with running_haproxy(tmp_path, MOST, free_port()) as port, httpx.Client(trust_env=False) as client:
        absent = [client.post(f"http://127.0.0.1:{port}{path}", content=b"{}") for path in paths]
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), DyingReplica) as server,
        running_haproxy(tmp_path / "dying", MOST, server.server_port) as port,
        httpx.Client(trust_env=False) as client,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dying = [client.post(f"http://127.0.0.1:{port}{path}", content=b"{}") for path in paths]
        server.shutdown()

    for answers in (absent, dying):
        assert [(answer.status_code, answer.headers["Retry-After"]) for answer in answers] == [(503, "1")] * 5
        assert [answer.json() for answer in answers] == [NO_REPLICA] * 2 + [NO_REPLICA_OPENAI] * 3


class DyingReplica(Replica):
    """Ends the connection instead of an answer."""

    def do_POST(self) -> None:
        self.close_connection = True


@pytest.mark.parametrize("has_token", [False, True])
def test_where_a_token_is_needed_routes_are_not_told_and_health_is(tmp_path, has_token):
    """By HAProxy itself, which here was not told of any: it answers with 503."""
    with (
        named_replicas(1) as ports,
        running_haproxy(tmp_path, MOST, *ports, has_token=has_token) as port,
        httpx.Client(trust_env=False, base_url=f"http://127.0.0.1:{port}") as client,
    ):
        wait_until(lambda: client.get("/v1/users").status_code == 200)
        answers = [client.get(path) for path in ("/-/routes", "/-/ROUTES", "/-/routes?x=1")]
        encoded = [client.get(path) for path in ("/%2D/routes", "/%2d/%72outes/")]
        assert client.get("/-/healthz").status_code == 503

    assert [answer.status_code for answer in answers] == [403 if has_token else 503] * 3
    if has_token:  # else it is the replicas' to answer
        assert [answer.status_code for answer in encoded] == [403, 403]
    assert not has_token or answers[0].json() == NO_ROUTES


def test_an_address_that_is_not_known_is_refused(config_file):
    written = config_file.read_text()
    with pytest.raises(ValueError, match="'listen debug' listens in a way that is not known: 'bind :7000'"):
        rewritten(f"{written}\nlisten debug\n  bind :7000\n", PLAIN, MOST)
    with pytest.raises(ValueError, match="'listen stats' listens in a way that is not known"):
        rewritten(written.replace("bind *:8404", "bind unix@/tmp/stats"), PLAIN, MOST)
    with pytest.raises(ValueError, match="expected one address of each section"):
        rewritten(written.replace("bind :9101", ""), PLAIN, MOST)


@pytest.mark.parametrize("tls", [False, True])
def test_haproxy_takes_the_rewritten_configuration(config_file, tmp_path, tls):
    certificate = None
    if tls:
        chain, key = make_certificate(tmp_path)
        certificate = str(link_for_haproxy(TlsConfig(certificate=str(chain), key=str(key)), tmp_path))
    listen: Listen = {"host": "127.0.0.1", "port": 8443, "certificate": certificate}
    program = write_program(tmp_path, sys.executable, {"haproxy": haproxy(), "listen": listen, "most": MOST})

    checked = subprocess.run([program, "-c", "-f", config_file], capture_output=True, text=True)

    assert checked.returncode == 0, checked.stderr
    assert "ipv4@127.0.0.1:8443" in addresses(config_file.read_text())


def test_haproxy_does_not_start_with_a_configuration_that_is_not_known(config_file, tmp_path):
    config_file.write_text(config_file.read_text().replace("bind *:8404", "bind unix@/tmp/stats"))
    before = config_file.read_text()
    program = write_program(tmp_path, sys.executable, {"haproxy": "/bin/true", "listen": PLAIN, "most": MOST})

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
    plan: Plan = {"haproxy": str(stands_in), "listen": PLAIN, "most": MOST}
    program = write_program(tmp_path, sys.executable, plan)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(program)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        os.kill(parent.pid, signal.SIGKILL)
        # The end of the pipe: nobody holds it open any more, so the one that was started is gone, too.
        assert parent.stdout.read() == ""


def test_headers_have_to_come_in_time(config_file):
    """After Serve's own settings, of which the last one counts."""
    lines = [line.strip() for line in rewritten(config_file.read_text(), PLAIN, MOST).splitlines()]

    assert lines.index("timeout http-request 10s") > lines.index("frontend http_frontend")
