"""Temporary folders that go with their process, however it ends."""

import os
import signal
import subprocess
import sys

from rayrec.platform.held_folders import HeldFolder

HOLDER = """
import sys, time
from pathlib import Path
from rayrec.platform.held_folders import HeldFolder
folder = HeldFolder("kept-", Path(sys.argv[1]))
(folder.path / "file").write_text("large")
print(folder.path, flush=True)
time.sleep(600)
"""


def test_a_folder_goes_with_its_owner(tmp_path):
    folder, other = HeldFolder("kept-", tmp_path), HeldFolder("kept-", tmp_path)
    (folder.path / "file").write_text("large")
    folder.close()
    assert list(tmp_path.iterdir()) == [other.path]
    del other
    assert not list(tmp_path.iterdir())


def test_folders_of_killed_processes_go_when_the_next_one_starts_and_others_stay(tmp_path):
    (tmp_path / "kept-of-somebody").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        path = holder.stdout.readline().strip()
        first = HeldFolder("kept-", tmp_path)
        assert os.path.exists(path)
        holder.send_signal(signal.SIGKILL)
        holder.wait(60)

    assert os.path.exists(path)
    second = HeldFolder("kept-", tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {
        "kept-of-somebody",
        first.path.name,
        second.path.name,
    }
