"""Actors' processes are bound to one socket of a machine that has several."""

import os
import subprocess
import sys as python
import threading

import pytest

from rayrec.actors import numa
from rayrec.actors.numa import Bound, Socket, bind, read_sockets, take_seat
from rayrec.actors.spawning import ActorRole
from rayrec.actors.stage_actor import StageActor
from rayrec.pipelines.config.placement import PlacementConfig
from rayrec.platform import devices
from rayrec.platform.devices import pci_address, socket_of_card
from rayrec.platform.errors import InputError
from rayrec.platform.metrics import StageClock

ALL = frozenset(range(8))
FIRST, SECOND = Socket(0, frozenset({0, 1, 4, 5})), Socket(1, frozenset({2, 3, 6, 7}))


@pytest.fixture
def two_sockets(tmp_path):
    """/sys of a machine with two sockets, memory without CPUs, and a GPU on the second one."""
    nodes = tmp_path / "sys" / "devices" / "system" / "node"
    for name, cpus in (("node0", "0-1,4-5\n"), ("node1", "2-3,6-7\n"), ("node2", "\n")):
        (nodes / name).mkdir(parents=True)
        (nodes / name / "cpulist").write_text(cpus)
    (nodes / "online").write_text("0-2\n")
    gpu = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:3b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    return tmp_path / "sys"


class Kernel:
    """Takes down what it is told, in order."""

    def __init__(self, refuses=False):
        self.refuses, self.told = refuses, []

    def set_cpus(self, cpus):
        self.told.append(("cpus", frozenset(cpus)))

    def set_memory(self, node):
        if self.refuses:
            raise OSError(1, "Operation not permitted")
        self.told.append(("memory", node))


def bound(sys, seats, kernel, gpu=None, allowed=ALL):
    return bind(sys, seats, lambda: gpu, allowed, kernel.set_cpus, kernel.set_memory)


def test_sockets_are_those_with_cpus_that_may_be_used(two_sockets):
    assert read_sockets(ALL, two_sockets) == [FIRST, SECOND]
    assert read_sockets({0, 1, 2}, two_sockets) == [Socket(0, frozenset({0, 1})), Socket(1, frozenset({2}))]
    assert read_sockets({0, 1}, two_sockets) == [Socket(0, frozenset({0, 1}))]
    assert read_sockets(ALL, two_sockets / "nowhere") == []


def test_processes_are_spread_over_sockets_and_cpus_come_before_memory(two_sockets, tmp_path):
    kernel = Kernel()
    found = [bound(two_sockets, tmp_path / "seats", kernel) for _ in range(4)]
    assert [each.socket.id for each in found] == [0, 1, 0, 1]
    assert kernel.told[:4] == [
        ("cpus", FIRST.cpus),
        ("memory", 0),
        ("cpus", SECOND.cpus),
        ("memory", 1),
    ]
    for each in found:
        os.close(each.seat)


def test_the_seat_of_a_process_that_has_ended_is_free_again(two_sockets, tmp_path):
    seats = tmp_path / "seats"
    program = (
        "import sys, pathlib; from rayrec.actors.numa import Socket, take_seat\n"
        "socket, _ = take_seat([Socket(0, frozenset()), Socket(1, frozenset())], pathlib.Path(sys.argv[1]))\n"
        "print(socket.id, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [python.executable, "-c", program, seats], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "0\n"
    second, seat = take_seat([FIRST, SECOND], seats)
    assert second == SECOND
    process.kill()
    process.wait()
    third, other = take_seat([FIRST, SECOND], seats)
    assert third == FIRST
    os.close(seat)
    os.close(other)


def test_a_trainer_is_where_its_gpu_is(two_sockets, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "_bus_of_gpu", lambda visible: {"2": "0000:3b:00.0"}[visible])
    assert socket_of_card({"CUDA_VISIBLE_DEVICES": "2,3"}, two_sockets) == 1
    kernel = Kernel()
    assert bound(two_sockets, tmp_path / "seats", kernel, gpu=1) == Bound(SECOND, True, None)
    assert bound(two_sockets, tmp_path / "seats", kernel, gpu=1).socket == SECOND  # others are there already


@pytest.mark.parametrize("visible", ["", "-1", "7"])
def test_a_gpu_that_nobody_knows_is_on_no_socket(two_sockets, monkeypatch, visible):
    def bus(name):
        raise RuntimeError("NVML Shared Library Not Found")

    monkeypatch.setattr(devices, "_bus_of_gpu", bus)
    assert socket_of_card({"CUDA_VISIBLE_DEVICES": visible}, two_sockets) is None


def test_a_gpu_on_a_socket_without_our_cpus_is_as_good_as_none(two_sockets, tmp_path):
    found = bound(two_sockets, tmp_path / "seats", Kernel(), gpu=5)
    assert found.socket == FIRST
    os.close(found.seat)


def test_addresses_of_nvml_are_those_of_sys():
    assert pci_address("00000000:3B:00.0") == "0000:3b:00.0"
    assert pci_address("0000:3B:00.0") == "0000:3b:00.0"
    assert pci_address("00010000:3B:00.0") == "00010000:3b:00.0"


def test_where_the_kernel_keeps_its_memory_policy_cpus_are_bound_all_the_same(two_sockets, tmp_path, caplog):
    kernel = Kernel(refuses=True)
    found = bound(two_sockets, tmp_path / "seats", kernel)
    assert not found.has_memory
    assert kernel.told == [("cpus", FIRST.cpus)]
    assert "memory is not preferred on socket 0" in caplog.text
    os.close(found.seat)


def test_on_one_socket_nothing_is_done(two_sockets, tmp_path):
    kernel = Kernel()
    assert bound(two_sockets, tmp_path / "seats", kernel, allowed={0, 1}) is None
    assert bound(tmp_path / "nowhere", tmp_path / "seats", kernel) is None
    assert kernel.told == []
    assert not (tmp_path / "seats").exists()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="CPUs are bound on Linux")
def test_threads_that_run_already_are_bound_too():
    """In a process of its own, which is bound to one of its CPUs."""
    program = (
        "import os, threading; from rayrec.actors.numa import use_cpus\n"
        "over = threading.Event(); other = threading.Thread(target=over.wait); other.start()\n"
        "cpu = min(os.sched_getaffinity(0)); use_cpus({cpu})\n"
        "assert os.sched_getaffinity(other.native_id) == {cpu} == os.sched_getaffinity(0)\n"
        "over.set()"
    )
    subprocess.run([python.executable, "-c", program], check=True)


@pytest.mark.skipif(not python.platform.startswith("linux"), reason="set_mempolicy is a call of Linux")
def test_the_kernel_takes_the_call_or_refuses_it_with_a_reason():
    """The policy is of the thread that sets it. Node 4095 is none, which a kernel that takes calls says."""
    said = []

    def work():
        for node in (0, 4095):
            try:
                numa.prefer_memory(node)
                said.append("taken")
            except OSError as error:
                said.append(error.strerror)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said[0] in ("taken", "Operation not permitted", "Function not implemented")
    assert said[1] != "taken"


def test_a_stage_binds_itself_before_anything_else_and_only_if_it_is_told(monkeypatch):
    calls = []
    monkeypatch.setattr("rayrec.actors.stage_actor.bind", lambda: calls.append("bound"))

    class Actor(StageActor[StageClock]):
        def __init__(self, role):
            super().__init__(role, StageClock())
            calls.append("allocates")

    Actor(ActorRole("run", "trainer", 0))
    assert calls == ["allocates"]
    Actor(ActorRole("run", "trainer", 0, is_bound=True))
    assert calls == ["allocates", "bound", "allocates"]


def test_placement_says_whether_actors_are_bound():
    assert PlacementConfig().numa == "off"
    assert PlacementConfig.parse({"numa": "bind"}).bound_stages == {"parameter_server", "trainer"}
    assert PlacementConfig().bound_stages == frozenset()
    with pytest.raises(InputError, match="numa"):
        PlacementConfig.parse({"numa": "yes"})
