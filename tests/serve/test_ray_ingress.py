"""Which way requests come to replicas, and whether the installed Ray has what that hangs on."""

from __future__ import annotations

import inspect
import json
import os
import stat
from pathlib import Path

import pytest
from ray.serve._private import constants
from ray.serve.config import HTTPOptions
from ray.serve.handle import DeploymentHandle

from rayrec.platform.errors import InputError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.config.tls import TlsConfig
from rayrec.serve.on_ray import ray_ingress
from rayrec.serve.on_ray.ray_ingress import (
    FAST,
    HAPROXY_PROGRAM,
    HAPROXY_SWITCH,
    STICKY,
    VARIABLES,
    Ingress,
    Kind,
    ingress_of_joined_cluster,
    ingress_of_own_cluster,
)
from rayrec.serve.web.guards import BODY_TIMEOUT_S
from tests.serve.certificates import make_certificate


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def haproxy_of(version: str, folder: Path) -> str:
    """A program that says it is HAProxy."""
    program = folder / "some-haproxy"
    program.write_text(f"#!/bin/sh\necho 'HAProxy version {version} 2026/01/01'\necho 'Features: +OPENSSL'\n")
    program.chmod(0o700)
    return str(program)


def chosen(**settings: object) -> Ingress:
    with ingress_of_own_cluster(ServeConfig.parse(settings)) as ingress:
        return ingress


def test_this_version_of_ray_reads_all_that_is_set():
    read = inspect.getsource(constants)
    assert [name for name in VARIABLES if f'"{name}"' not in read] == []


def test_this_version_of_ray_can_call_by_messages():
    parameters = inspect.signature(DeploymentHandle.options).parameters
    assert "_by_reference" in parameters


def test_this_version_of_ray_has_tls_for_its_proxy():
    assert {"ssl_keyfile", "ssl_certfile", "host", "port"} <= HTTPOptions.model_fields.keys()


def test_a_cluster_that_starts_here_gets_haproxy_and_an_environment_that_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv(HAPROXY_PROGRAM, haproxy_of("2.8.25-5cf5d0683", tmp_path))
    before = dict(os.environ)

    with ingress_of_own_cluster(ServeConfig(host="0.0.0.0", port=8123)) as ingress:
        folder = Path(os.environ[HAPROXY_PROGRAM]).parent
        assert ingress.kind is Kind.HAPROXY
        assert FAST.items() <= dict(os.environ).items()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert Path(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent == folder
        # Replicas are on loopback, whatever HAProxy's own address is.
        assert ingress.http_options == {"host": "127.0.0.1", "port": 8123}
        assert ingress.said() == ("HAProxy in front of the replicas' own servers (HAProxy version 2.8.25)")
    assert dict(os.environ) == before
    assert not folder.exists()


@pytest.mark.parametrize("digest", [None, "0" * 64])
def test_haproxy_is_told_whether_there_is_a_token_and_not_which(tmp_path, monkeypatch, digest):
    monkeypatch.setenv(HAPROXY_PROGRAM, haproxy_of("2.8.25", tmp_path))
    with ingress_of_own_cluster(ServeConfig(token_sha256=digest)):
        plan = json.loads(Path(os.environ[HAPROXY_PROGRAM]).with_name("plan.json").read_text())
    assert plan["has_token"] == (digest is not None)
    assert "0" * 64 not in json.dumps(plan)


def test_haproxy_waits_longer_for_a_body_than_replicas_do_and_not_for_an_hour(tmp_path, monkeypatch):
    monkeypatch.setenv(HAPROXY_PROGRAM, haproxy_of("2.8.25", tmp_path))
    waits_s = int(chosen().variables["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"])
    assert BODY_TIMEOUT_S < waits_s <= 60


def test_keys_are_not_copied(tmp_path, monkeypatch):
    monkeypatch.setenv(HAPROXY_PROGRAM, haproxy_of("2.8.25", tmp_path))
    certificate, key = make_certificate(tmp_path)
    tls = TlsConfig(certificate=str(certificate), key=str(key))
    with ingress_of_own_cluster(ServeConfig(tls=tls)):
        folder = Path(os.environ[HAPROXY_PROGRAM]).parent
        links = [file for file in folder.iterdir() if file.name.startswith("certificate.pem")]
        assert sorted(str(file.readlink()) for file in links) == sorted([str(certificate), str(key)])


def test_where_contexts_are_kept_users_go_to_the_replica_that_has_theirs(tmp_path, monkeypatch):
    monkeypatch.setenv(HAPROXY_PROGRAM, haproxy_of("2.8.25", tmp_path))
    assert STICKY.items() <= chosen(prefix_cache_mib=8).variables.items()
    assert not STICKY.keys() & chosen().variables.keys()
    monkeypatch.setenv(HAPROXY_SWITCH, "0")
    assert STICKY.items() <= chosen(prefix_cache_mib=8).variables.items()


def test_what_the_environment_says_already_stays_and_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv(HAPROXY_PROGRAM, haproxy_of("2.8.25", tmp_path))
    monkeypatch.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "0")
    ingress = chosen()
    assert ingress.variables["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "0"
    assert ingress.said().endswith("; not in force: RAY_SERVE_THROUGHPUT_OPTIMIZED=1")


def test_without_haproxy_it_is_the_proxy_of_serve(monkeypatch):
    monkeypatch.setattr(ray_ingress, "_haproxy_program", lambda: None)
    ingress = chosen(port=8123)
    assert ingress.said() == "Ray Serve's proxy (no HAProxy is installed)"
    assert ingress.variables[HAPROXY_SWITCH] == "0"
    assert ingress.variables["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == "0"
    assert ingress.http_options == {"host": "127.0.0.1", "port": 8123}


def test_an_haproxy_that_is_too_old_or_does_not_run_is_not_used(tmp_path, monkeypatch):
    program = haproxy_of("2.4.22", tmp_path)
    monkeypatch.setenv(HAPROXY_PROGRAM, program)
    assert chosen().said() == f"Ray Serve's proxy ({program} is HAProxy version 2.4.22, needed is 2.6)"
    monkeypatch.setenv(HAPROXY_PROGRAM, str(tmp_path / "nowhere"))
    assert chosen().said() == f"Ray Serve's proxy ({tmp_path / 'nowhere'} cannot be run)"


def test_haproxy_can_be_turned_off(monkeypatch):
    monkeypatch.setenv(HAPROXY_SWITCH, "0")
    assert chosen().said() == f"Ray Serve's proxy ({HAPROXY_SWITCH} is 0)"


def test_the_proxy_of_serve_gets_the_certificate(tmp_path, monkeypatch):
    monkeypatch.setenv(HAPROXY_SWITCH, "0")
    certificate, key = make_certificate(tmp_path)
    options = chosen(tls={"certificate": str(certificate), "key": str(key)}).http_options
    assert HTTPOptions(**options).ssl_certfile == str(certificate)
    assert options["ssl_keyfile"] == str(key)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_of_a_joined_cluster_it_is_said_what_it_was_started_without():
    ingress = ingress_of_joined_cluster(ServeConfig())
    assert ingress.kind is Kind.PROXY
    assert ingress.not_in_force == tuple(f"{name}={value}" for name, value in FAST.items())
    assert "not started by this command" in ingress.said()
    assert not ingress.variables


def test_a_joined_cluster_may_have_been_started_with_haproxy(monkeypatch):
    nodes = [{**FAST}, {HAPROXY_SWITCH: "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}]
    monkeypatch.setattr(ray_ingress, "_environments", lambda: nodes)
    ingress = ingress_of_joined_cluster(ServeConfig())
    assert ingress.kind is Kind.HAPROXY
    assert "its metrics on all interfaces" in ingress.said()
    assert ingress.not_in_force == tuple(f"{name}={value}" for name, value in list(FAST.items())[2:])


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({}, False),
        ({HAPROXY_SWITCH: "1"}, True),
        ({"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}, True),
        ({"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}, False),
    ],
)
def test_tls_is_refused_where_a_joined_cluster_has_none(monkeypatch, environment, refused):
    monkeypatch.setattr(ray_ingress, "_environments", lambda: [environment])
    config = ServeConfig(tls=TlsConfig(certificate="/c.pem", key="/k.pem"))
    if refused:
        with pytest.raises(InputError, match="which have no TLS"):
            ingress_of_joined_cluster(config)
    else:
        assert ingress_of_joined_cluster(config).http_options["ssl_certfile"] == "/c.pem"
