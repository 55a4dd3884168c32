import json
import os
from pathlib import Path

import pytest

from rayrec.platform import files
from rayrec.platform.files import write_atomically, write_json


def test_content_is_replaced_and_nothing_else_left(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})

    assert json.loads(path.read_text()) == {"a": 2}
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_write_that_fails_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_atomically(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")

    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system that is known to be in memory")
def test_a_file_system_in_memory_is_told_from_one_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MEMORY_FILE_SYSTEMS", {0x01021994: "tmpfs"})
    assert files.memory_file_system(Path("/dev/shm")) == "tmpfs"
    assert files.memory_file_system(Path("/proc")) is None
    assert files.memory_file_system(tmp_path / "missing") is None
