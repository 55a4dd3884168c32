"""A daemon for processes that share a GPU, with a program in its place that does as it does."""

import os
import threading
from pathlib import Path

import pytest

from rayrec.platform import mps
from rayrec.platform.errors import InputError

PROGRAM = """#!/bin/sh
# With -d, a daemon: one for each folder. Without, it is asked, and there has to be one.
running="$CUDA_MPS_PIPE_DIRECTORY/running"
if [ "$1" = -d ]; then
    mkdir "$running" 2>/dev/null || { echo "An instance of this daemon is already running"; exit 1; }
    echo "$CUDA_MPS_LOG_DIRECTORY" >> "$CUDA_MPS_PIPE_DIRECTORY/started"
else
    cat > /dev/null
    [ -d "$running" ] || { echo "Cannot find MPS control daemon process"; exit 1; }
fi
"""


@pytest.fixture
def control(tmp_path, monkeypatch) -> Path:
    """The program, and an environment as processes of a service have it."""
    program = tmp_path / "bin" / mps.CONTROL
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in mps.environment(0.25, tmp_path / "mps").items():
        monkeypatch.setenv(name, value)
    return program


def test_processes_are_told_where_the_daemon_is_and_how_much_is_theirs(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", "/var/log/mps")
    assert mps.environment(0.25, tmp_path) == {
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipes"),
        "CUDA_MPS_LOG_DIRECTORY": "/var/log/mps",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }


def test_one_daemon_is_started_whoever_asks(control, tmp_path):
    threads = [threading.Thread(target=mps.start_daemon) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mps.start_daemon()
    assert (tmp_path / "mps" / "pipes" / "started").read_text() == f"{tmp_path}/mps/logs\n"


def test_one_that_does_not_start_is_said_in_its_own_words(control, monkeypatch):
    control.write_text("#!/bin/sh\necho 'the driver is too old'\nexit 1\n")
    monkeypatch.setattr(mps, "_START_S", 0.1)
    with pytest.raises(InputError, match="starts no daemon: the driver is too old"):
        mps.start_daemon()


def test_without_the_program_it_is_said_where_it_comes_from(control, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="comes with NVIDIA's driver"):
        mps.start_daemon()
