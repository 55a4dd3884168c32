"""A command as an image runs it: nothing of the package can be written, there is no home, network or room.

Linux lets root alone take these away from a process of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534
INSIDE = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec setpriv --reuid={0} --regid={0} --clear-groups "


def can_take_away() -> bool:
    if os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        return False
    tried = ["unshare", "-m", "-n", "sh", "-c", INSIDE.format(NOBODY) + '"$0" -c 0', sys.executable]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not can_take_away(), reason="needs root and namespaces")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that nobody may use; pytest's own are root's alone."""
    path = Path(tempfile.mkdtemp(prefix="rayrec-container-"))
    for name in ("log", "tmp"):
        (path / name).mkdir()
    rows = [
        f"u{user},i{(user * 5 + k * k) % 9},{1700000000 + k * 10}" for user in range(30) for k in range(6)
    ]
    (path / "log" / "interactions.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]))
    (path / "run.yaml").write_text(
        "data: {path: data}\n"
        "model: {name: sasrec, backbone: {dim: 8, num_layers: 1, num_heads: 2, feedforward_dim: 16}}\n"
        "training: {batch_size: 8, epochs: 100000}\n"
        "evaluation: {every_epochs: 100000, every_steps: 20}\n"
    )
    for each in (path, *path.rglob("*")):
        os.chown(each, NOBODY, NOBODY)
    yield path
    shutil.rmtree(path)


BOUND_S = 300.0
"""Longest that a command may take, on a machine that has much else to do."""


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = INSIDE.format(NOBODY) + '"$@"'
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HOME": "/nonexistent",
        "TMPDIR": str(folder / "tmp"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # Into a file: nobody reads while the command runs, and one that has filled a pipe waits for ever.
    with open(folder / "said", "w") as said:
        return subprocess.Popen(
            ["unshare", "-m", "-n", "sh", "-c", command, "sh", sys.executable, "-m", "rayrec", *arguments],
            cwd=folder,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
        )


def ended(command: subprocess.Popen[bytes], folder: Path) -> str:
    """What it said, once it has ended; it is killed where it does not."""
    try:
        command.wait(timeout=BOUND_S)
    finally:
        command.kill()
        command.wait()
    return (folder / "said").read_text()


@pytest.mark.slow
def test_a_run_trains_and_ends_well_where_nothing_can_be_written_but_its_folder(folder):
    prepared = start(folder, "prepare", "log", "data", "--no-ray")
    said = ended(prepared, folder)
    assert prepared.returncode == 0, said

    training = start(folder, "train", "run.yaml", "--local")
    run = folder / "runs" / "run"
    until = time.monotonic() + BOUND_S
    while not list(run.glob("snapshots/step-*")) and training.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    training.send_signal(signal.SIGTERM)  # as a scheduler ends a job
    said = ended(training, folder)

    assert training.returncode == 130, said
    assert said.splitlines()[-1] == "rayrec: interrupted"
    assert "stopped; resumed, it goes on from " in said
    assert "Traceback" not in said
    assert '"state": "stopped"' in (run / "run.json").read_text()
