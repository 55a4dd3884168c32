import os

import pytest

from rayrec.platform import processors
from rayrec.platform.processors import num_processors


@pytest.fixture
def container(tmp_path, monkeypatch):
    """A machine of 64 processors, on which this process may use 48."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)), raising=False)
    monkeypatch.setattr(processors, "_CGROUP_2", str(tmp_path / "max"))
    monkeypatch.setattr(processors, "_CGROUP_1", (str(tmp_path / "quota"), str(tmp_path / "period")))
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 48),
        ({"max": "max 100000\n"}, 48),
        ({"max": "400000 100000\n"}, 4),
        ({"max": "150000 100000\n"}, 2),  # what is there in part is used
        ({"max": "10000 100000\n"}, 1),
        ({"max": "9900000 100000\n"}, 48),
        ({"quota": "-1\n", "period": "100000\n"}, 48),
        ({"quota": "200000\n", "period": "100000\n"}, 2),
    ],
)
def test_a_process_has_what_its_affinity_and_its_container_leave(container, files, expected):
    for name, text in files.items():
        (container / name).write_text(text)

    assert num_processors() == expected


def test_a_system_without_affinity_has_all(container, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")

    assert num_processors() == 64
