import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from rayrec.platform import cluster
from rayrec.platform.errors import InputError


@pytest.mark.ray
def test_a_joined_cluster_stays_and_has_to_be_large_enough(ray_cluster):
    import ray

    with cluster.ray_cluster(cluster.ClusterConfig(), cpus_needed=8):
        pass
    assert ray.is_initialized()
    assert not cluster.starts_cluster(cluster.ClusterConfig())

    with (
        pytest.raises(
            InputError, match=r"need 9\.5 CPUs and the Ray cluster has 8; lower pipeline\.num_trainers"
        ),
        cluster.ray_cluster(cluster.ClusterConfig(), cpus_needed=9.5),
    ):
        pass
    assert ray.is_initialized()


@pytest.mark.ray
def test_accelerators_that_the_cluster_lacks_are_not_waited_for(ray_cluster):
    claim = {"num_cpus": 1, "resources": {"abacus": 2}}

    with pytest.raises(
        InputError, match=r"the trainers need 6 abacus and the Ray cluster has 0; take fewer$"
    ):
        cluster.check_accelerators(claim, 3, "trainers", "take fewer")
    cluster.check_accelerators({"num_cpus": 1}, 3, "trainers", "take fewer")
    cluster.check_accelerators({"resources": {"CPU": 2}}, 4, "trainers", "take fewer")


@pytest.mark.parametrize(
    ("address", "environment", "expected"),
    [(None, None, True), (None, "", True), (None, "10.0.0.1:6379", False), ("auto", None, False)],
)
def test_a_cluster_is_started_where_none_is_named(monkeypatch, address, environment, expected):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)

    assert cluster.starts_cluster(cluster.ClusterConfig(address=address)) == expected


class SlowStarts:
    """`ray.init` that runs into Ray's time limit some times."""

    def __init__(self, monkeypatch, num_timeouts: int) -> None:
        self.calls: list[str] = []
        self._left = num_timeouts
        monkeypatch.setattr("ray.init", self._init)
        monkeypatch.setattr("ray.shutdown", lambda: self.calls.append("shutdown"))

    def _init(self, address: str, num_cpus: int) -> None:
        self.calls.append(f"init {address} {num_cpus}")
        self._left -= 1
        if self._left >= 0:
            raise Exception("The current node timed out during startup. This could happen because ...")


def test_a_node_that_does_not_come_up_in_time_is_started_again(monkeypatch, caplog):
    ray = SlowStarts(monkeypatch, num_timeouts=1)

    cluster.start_on_this_machine(num_cpus=3)

    assert ray.calls == ["init local 3", "shutdown", "init local 3"]
    assert "trying again" in caplog.text


def test_a_node_that_never_comes_up_is_given_up_after_a_few_tries(monkeypatch):
    ray = SlowStarts(monkeypatch, num_timeouts=99)

    with pytest.raises(InputError, match=r"^Ray did not start on this machine in time"):
        cluster.start_on_this_machine(num_cpus=3)

    assert ray.calls == ["init local 3", "shutdown"] * cluster.START_TRIES


def test_other_errors_of_a_start_are_not_tried_again(monkeypatch):
    def fails(**options):
        raise ValueError("num_cpus must not be negative")

    monkeypatch.setattr("ray.init", fails)

    with pytest.raises(ValueError, match="num_cpus"):
        cluster.start_on_this_machine(num_cpus=-1)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "localhost:1"])
def test_an_address_at_which_nothing_listens_is_refused_at_once(monkeypatch, address):
    """Ray would go on trying for a quarter of an hour."""
    monkeypatch.setattr(cluster, "ADDRESS_PAUSE_S", 0.0)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("is not asked"))
    monkeypatch.setenv("RAY_ADDRESS", address)

    with (
        pytest.raises(
            InputError, match=f"^RAY_ADDRESS: no Ray cluster answers at '{address}'.*unset RAY_ADDRESS"
        ),
        cluster.ray_cluster(cluster.ClusterConfig(), 1.0),
    ):
        pass
    with (
        pytest.raises(InputError, match=r"^cluster\.address: no Ray cluster answers"),
        cluster.ray_cluster(cluster.ClusterConfig(address=address), 1.0),
    ):
        pass


@contextlib.contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """The address of something that answers with these bytes; None: it says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    if answer is not None:
                        connection.sendall(answer)
                        connection.close()
                    else:
                        silent.append(connection)

        silent: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        for connection in silent:
            connection.close()


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"-ERR\r\n", b""])
def test_an_address_at_which_something_else_listens_is_refused(monkeypatch, answer):
    monkeypatch.setattr(cluster, "ADDRESS_PAUSE_S", 0.0)
    monkeypatch.setattr(cluster, "ADDRESS_PATIENCE_S", 0.05)
    with (
        listening(answer) as address,
        pytest.raises(InputError, match=f"^cluster.address: no Ray cluster answers at '{address}'"),
    ):
        cluster._check_answers(address, "cluster.address")


def test_an_address_that_answers_and_names_that_ray_knows_are_left_to_ray():
    with listening(b"\0\0\6\4\0\0\0\0\0") as address:
        cluster._check_answers(address, "cluster.address")
    for name in ("auto", "local", "anyscale://mine"):
        cluster._check_answers(name, "cluster.address")


def test_a_dashboard_that_does_not_come_up_does_not_end_the_run(monkeypatch, caplog):
    calls = []

    def init(address: str, include_dashboard: bool) -> None:
        calls.append(include_dashboard)
        if include_dashboard:
            raise Exception("Failed to start the dashboard; it did not come up in time")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.shutdown", lambda: calls.append("shutdown"))

    cluster.start_on_this_machine(include_dashboard=True)

    assert calls == [True, "shutdown", False]
    assert "the run goes on without it" in caplog.text


def test_a_cluster_without_cpus_is_told_to_get_a_node(monkeypatch):
    monkeypatch.setattr("ray.cluster_resources", lambda: {"memory": 1.0})

    with pytest.raises(InputError, match=r"need 3 CPUs and the Ray cluster has none.*ray start --address"):
        cluster._check_capacity(3.0)


def test_the_handler_of_a_command_stays_where_ray_puts_its_own_below_it(monkeypatch):
    """Ray's prints a trace of C++ and aborts, and run.json goes on saying that the run is running."""
    installed = []
    monkeypatch.setattr(cluster.signal, "signal", lambda number, handler: installed.append(handler))

    cluster._keep_handler(signal.SIGTERM, signal.default_int_handler)
    cluster._keep_handler(signal.SIGTERM, signal.SIG_DFL)
    cluster._keep_handler(signal.SIGTERM, None)

    assert installed == [signal.default_int_handler]


def test_workers_of_a_cluster_that_is_started_here_get_the_time_that_others_get(monkeypatch):
    seen = []
    monkeypatch.setattr("ray.init", lambda **options: seen.append(os.environ.get(cluster.NICENESS)))
    monkeypatch.delenv(cluster.NICENESS, raising=False)
    cluster.start_on_this_machine(num_cpus=3)
    assert cluster.NICENESS not in os.environ, "clusters that are joined have their own"
    monkeypatch.setenv(cluster.NICENESS, "10")
    cluster.start_on_this_machine(num_cpus=3)
    assert seen == ["0", "10"]


@pytest.mark.ray
def test_ray_reads_how_nice_workers_are_to_be(ray_cluster):
    import ray

    @ray.remote(num_cpus=0)
    def niceness() -> int:
        return os.nice(0)

    assert ray.get(niceness.remote()) == os.nice(0)
