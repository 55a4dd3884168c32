import os
import subprocess
import sys

import pytest

from rayrec.platform import control_groups
from rayrec.platform.processors import let_idle_threads_sleep, num_processors


@pytest.fixture
def container(tmp_path, monkeypatch):
    """A machine of 64 processors, on which this process may use 48."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)), raising=False)
    monkeypatch.setattr(control_groups, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 48),
        ({"cpu.max": "max 100000\n"}, 48),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "150000 100000\n"}, 2),  # what is there in part is used
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "9900000 100000\n"}, 48),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 48),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        # A group of the process's own, without a container, and one around it.
        ({"own": "0::/a/b\n", "a/b/cpu.max": "300000 100000\n"}, 3),
        ({"own": "0::/a/b\n", "a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        ({"own": "0::/a/b\n", "a/b/cpu.max": "300000 100000\n", "a/cpu.max": "900000 100000\n"}, 3),
        ({"own": "0::/of/the/host\n", "cpu.max": "500000 100000\n"}, 5),
        ({"own": "0::/a\n", "b/cpu.max": "100000 100000\n"}, 48),
        (
            {
                "own": "4:memory:/b\n3:cpu,cpuacct:/a\n",
                "cpu/a/cpu.cfs_quota_us": "200000\n",
                "cpu/a/cpu.cfs_period_us": "100000\n",
                "cpu/b/cpu.cfs_quota_us": "100000\n",
                "cpu/b/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
    ],
)
def test_a_process_has_what_its_affinity_and_its_container_leave(container, files, expected):
    for name, text in files.items():
        (container / name).parent.mkdir(parents=True, exist_ok=True)
        (container / name).write_text(text)

    assert num_processors() == expected


def test_a_system_without_affinity_has_all(container, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")

    assert num_processors() == 64


@pytest.mark.parametrize(
    ("set_before", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "10000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_idle_threads_sleep_soon_unless_the_environment_says_otherwise(monkeypatch, set_before, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)

    let_idle_threads_sleep()

    assert {name: os.environ.get(name) for name in expected} == expected
    assert ("GOMP_SPINCOUNT" in os.environ) == ("GOMP_SPINCOUNT" in expected)


def test_the_setting_is_there_before_torch_can_be_imported():
    code = "import os, sys, rayrec; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))}

    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)

    assert said.stdout.split() == ["10000", "False"]
