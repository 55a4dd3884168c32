"""What HAProxy is told of calls over gRPC, from the template of the Ray Serve that is installed."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from ray.serve._private.common import RequestProtocol
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve._private.haproxy import get_haproxy_binary as haproxy_binary
from ray.serve.config import HTTPOptions

from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray.haproxy_config import Listen, rewritten
from rayrec.serve.on_ray.rpc import grpc_options
from rayrec.serve.rpc.handlers import handlers
from tests.helpers.http import free_port

MOST = 1
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
SERVER_LIVE = "/inference.GRPCInferenceService/ServerLive"


def written_config(tmp_path: Path, *replica_ports: int, grpc_port: int | None = 8124) -> str:
    """As Serve writes it, for one application; for none where there is no replica."""
    options = {} if grpc_port is None else {"grpc_options": grpc_options(ServeConfig(grpc_port=grpc_port))}
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=8123),
        socket_path=str(tmp_path / "admin.sock"),
        server_state_base=str(tmp_path),
        server_state_file=str(tmp_path / "state"),
        is_head=True,
        stats_port=free_port(),
        metrics_port=free_port(),
        **options,
    )
    replicas = [ServerConfig(f"replica-{port}", "127.0.0.1", port) for port in replica_ports]
    backends = {
        f"{protocol.value.lower()}-rayrec": BackendConfig(
            name=f"{protocol.value.lower()}-rayrec",
            path_prefix="/",
            app_name="rayrec",
            servers=replicas,
            protocol=protocol,
        )
        for protocol in (RequestProtocol.HTTP, RequestProtocol.GRPC)
    }
    file = tmp_path / "serve" / "haproxy.cfg"
    HAProxyApi(config, backends if replica_ports else {}, str(file))._generate_config_file_internal()
    return file.read_text()


def listen_at(host: str, grpc_port: int | None) -> Listen:
    return {"host": host, "port": free_port(), "grpc_port": grpc_port, "certificate": None}


def test_calls_come_to_the_address_of_the_service_alone(tmp_path):
    changed = rewritten(written_config(tmp_path, 30_000), listen_at("10.1.2.3", 8555), MOST)
    binds = [line.split()[1:] for line in changed.splitlines() if line.split()[:1] == ["bind"]]
    assert ["ipv4@10.1.2.3:8555", "proto", "h2"] in binds
    assert not [words for words in binds if words[0].startswith(("*", ":", "0.0.0.0"))]
    certified: Listen = {**listen_at("10.1.2.3", 8555), "certificate": "/some/file.pem"}
    assert "ssl crt '/some/file.pem' ssl-min-ver TLSv1.2 alpn h2" in rewritten(
        written_config(tmp_path, 30_000), certified, MOST
    )


def test_a_section_of_calls_is_expected_where_they_are_and_refused_elsewhere(tmp_path):
    with pytest.raises(ValueError, match="grpc_frontend"):
        rewritten(written_config(tmp_path, 30_000), listen_at("10.1.2.3", None), MOST)
    with pytest.raises(ValueError, match="expected one address of each section"):
        rewritten(written_config(tmp_path, 30_000, grpc_port=None), listen_at("10.1.2.3", 8555), MOST)


class Replica:
    """Answers every call with its metadata, when it is let."""

    def __init__(self) -> None:
        self.let, self.begun = threading.Event(), threading.Event()

    def handle(self, content: bytes, context: grpc.ServicerContext) -> bytes:
        self.begun.set()
        assert self.let.wait(20)
        return "\n".join(f"{key}={value}" for key, value in context.invocation_metadata()).encode()


@contextmanager
def running(tmp_path: Path, has_replica: bool = True, has_token: bool = False) -> Iterator[tuple]:
    """(A channel through HAProxy, the replica behind it)."""
    try:
        program = haproxy_binary()
    except FileNotFoundError:
        pytest.skip("HAProxy is not installed")
    replica = Replica()
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((handlers(lambda name: replica.handle),))
    port, own = server.add_insecure_port("127.0.0.1:0"), free_port()
    server.start()
    text = rewritten(
        written_config(tmp_path, *([port] if has_replica else [])),
        listen_at("127.0.0.1", own),
        MOST,
        has_token=has_token,
    )
    # Serve's check asks its own server, which this one is not.
    lines = [line for line in text.splitlines() if "tcp-check" not in line]
    file = tmp_path / "haproxy.cfg"
    file.write_text("\n".join(lines) + "\n")
    process = subprocess.Popen([program, "-f", str(file), "-db"])
    try:
        with grpc.insecure_channel(f"127.0.0.1:{own}") as channel:
            grpc.channel_ready_future(channel).result(timeout=20)
            yield channel, replica
    finally:
        replica.let.set()
        process.kill()
        process.wait()
        server.stop(0)


def metadata_of(answer: bytes) -> dict[str, str]:
    return dict(line.split("=", 1) for line in answer.decode().splitlines())


@pytest.mark.parametrize(("timeout_s", "least", "most"), [(30, 25_000, 31_000), (1.5, 1000, 1600)])
def test_a_deadline_and_the_address_of_the_client_come_along(tmp_path, timeout_s, least, most):
    with running(tmp_path) as (channel, replica):
        replica.let.set()
        call = channel.unary_unary(MODEL_INFER)
        found = metadata_of(call(b"", timeout=timeout_s, metadata=[("x-forwarded-for", "10.9.9.9")]))
        assert least <= int(found["x-request-timeout-ms"]) <= most
        assert found["x-forwarded-for"] == "127.0.0.1"
        assert int(found["x-request-start"]) > 0
        own = metadata_of(call(b"", timeout=timeout_s, metadata=[("x-request-timeout-ms", "7")]))
        assert own["x-request-timeout-ms"] == "7"
        assert "x-request-timeout-ms" not in metadata_of(call(b""))


def test_what_replicas_have_no_room_for_is_refused_by_haproxy(tmp_path):
    with running(tmp_path) as (channel, replica):
        first = channel.unary_unary(MODEL_INFER).future(b"")
        assert replica.begun.wait(20)
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(MODEL_INFER)(b"", timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no replica has room" in caught.value.details()
        replica.let.set()
        assert first.result(20) is not None


def test_without_a_replica_calls_are_unavailable(tmp_path):
    with running(tmp_path, has_replica=False) as (channel, _), pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(SERVER_LIVE)(b"", timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "no replica has room" in caught.value.details()


def test_with_a_token_applications_are_told_to_nobody(tmp_path):
    with running(tmp_path, has_token=True) as (channel, _), pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/ray.serve.RayServeAPIService/ListApplications")(b"", timeout=20)
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
