import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from pyarrow import fs

from rayrec.platform import files
from rayrec.platform.files import (
    append_line,
    is_plain_name,
    no_room,
    unusable_path,
    write_atomically,
    write_json,
    written_whole,
)
from rayrec.platform.remote_files import RemoteFolder, remote_folder


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


@pytest.mark.parametrize("on_disk", [False, True])
def test_two_writers_of_one_file_do_not_meet(tmp_path, on_disk):
    path = tmp_path / "a"
    with written_whole(path, on_disk) as first:
        first.write_bytes(b"first")
        with written_whole(path, on_disk) as second:  # as of another thread, or of a host with the same ids
            second.write_bytes(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_a_block_that_fails_leaves_what_was_there(tmp_path):
    (tmp_path / "a").write_bytes(b"old")

    def half() -> None:
        with written_whole(tmp_path / "a") as unfinished:
            unfinished.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "a"):
        pass  # writes nothing
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


class _Disk(LocalFileSystem):
    """A file system of fsspec that shows what is there of a file, as SFTP does."""

    protocol = "some-disk"


@pytest.mark.parametrize("kind", ["local", "elsewhere"])
def test_a_remote_file_is_whole_or_not_there(tmp_path, kind):
    folder = remote_folder(str(tmp_path))
    if kind == "elsewhere":
        folder = RemoteFolder(str(tmp_path), fs.PyFileSystem(fs.FSSpecHandler(_Disk())), str(tmp_path))

    def write(content: bytes, fails: bool = False) -> None:
        with folder.written_whole("in/a") as target, folder.filesystem.open_output_stream(target) as file:
            file.write(content)
            assert folder.read("in/a") != content
            if fails:
                raise RuntimeError("a wire is cut")

    with pytest.raises(RuntimeError):
        write(b"half", fails=True)
    assert os.listdir(tmp_path / "in") == []
    write(b"old")
    write(b"new")
    with pytest.raises(RuntimeError):
        write(b"half", fails=True)
    assert folder.read("in/a") == b"new"
    assert os.listdir(tmp_path / "in") == ["a"]


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system that is known to be in memory")
def test_a_file_system_in_memory_is_told_from_one_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MEMORY_FILE_SYSTEMS", {0x01021994: "tmpfs"})
    assert files.memory_file_system(Path("/dev/shm")) == "tmpfs"
    assert files.memory_file_system(Path("/proc")) is None
    assert files.memory_file_system(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/data/a"), "/data/a: its disk is full"),
        (OSError(errno.EROFS, "Read-only file system"), "/runs/mine: its disk is read-only"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "/runs/mine: its disk is full"),
        (OSError(errno.EACCES, "Permission denied"), None),
        (ValueError("os error"), None),
    ],
)
def test_a_disk_that_takes_no_more_is_said_in_a_sentence(error, said):
    folder = None if said is None or "/data" in said else Path("/runs/mine")

    found = no_room(error, folder)

    assert (found is None) if said is None else str(found).startswith(said)


def test_a_place_that_cannot_be_used_is_said_in_a_sentence(tmp_path):
    file = tmp_path / "file"
    file.write_text("")

    def told(act: Callable[[], object]) -> str:
        with pytest.raises(OSError, match="Errno") as raised:
            act()
        return str(unusable_path(raised.value))

    assert told((file / "below" / "it").mkdir).startswith(f"{file}/below/it: lies below a file")
    assert told(file.mkdir).startswith(f"{file}: is there already (File exists)")
    assert told(tmp_path.read_bytes).startswith(f"{tmp_path}: is a folder")
    assert told((tmp_path / ("a" * 300)).touch).endswith("(File name too long); name another place")
    (folder := tmp_path / "folder").mkdir()
    # Of two names, the one that is in the way, and not what was to get it.
    assert told(lambda: file.replace(folder)).startswith(f"{folder}: is a folder")
    assert told(lambda: os.link(file, folder)).startswith(f"{folder}: is there already")
    assert told(lambda: folder.rename(file)) == "None"  # neither lies below a file
    assert told((tmp_path / "none").read_bytes) == "None"  # perhaps a fault of ours: shown as it is
    assert unusable_path(OSError(errno.EACCES, "Permission denied")) is None  # of what, it does not say


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "/a", "a/b", "a\\b", "a\0b", None, 7])
def test_what_is_no_plain_name_is_known(name):
    assert is_plain_name("step-000000005")
    assert not is_plain_name(name)


def test_an_appended_line_never_continues_a_torn_one(tmp_path):
    path = tmp_path / "log"
    append_line(path, b"one")
    with open(path, "ab") as file:
        file.write(b"tor")

    append_line(path, b"two")

    assert path.read_bytes() == b"one\ntor\ntwo\n"
