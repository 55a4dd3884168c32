import errno
import fcntl
import os
import shutil

import pytest

from rayrec.embeddings.snapshot import saved_files
from rayrec.embeddings.snapshot.saved_files import WrittenFile, checksum_file


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("lengths", [(), (1,), (4096, 4096), (5000, 0, 20_000, 3), (8192,)])
def test_what_was_written_is_in_the_file_whatever_the_pieces(tmp_path, monkeypatch, lengths, direct):
    monkeypatch.setattr(saved_files, "_BLOCK_BYTES", 8192)
    if not direct:
        open_file = os.open

        def without(path, flags, mode=0o777):
            if flags & getattr(os, "O_DIRECT", 0):
                raise OSError("a file system without")
            return open_file(path, flags, mode)

        monkeypatch.setattr(saved_files.os, "open", without)
    file = WrittenFile(tmp_path / "a")
    pieces = [os.urandom(length) for length in lengths]
    for piece in pieces:
        file.write(piece)
    assert not (tmp_path / "a").exists()
    saved = file.finish(since=None)
    assert (tmp_path / "a").read_bytes() == b"".join(pieces)
    assert saved.bytes == sum(lengths) == file.tell()
    assert saved.checksum == checksum_file(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_that_is_given_up_leaves_nothing(tmp_path):
    file = WrittenFile(tmp_path / "a")
    file.write(b"some")
    file.remove_unfinished()
    file.remove_unfinished()
    assert not list(tmp_path.iterdir())


def test_a_file_system_that_refuses_only_to_write_is_written_to_in_its_own_way(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_files, "_BLOCK_BYTES", 8192)
    write, is_direct = os.write, getattr(os, "O_DIRECT", 0)
    lengths = iter([0, 100, 5000])

    def grudging(descriptor, content):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & is_direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, content[: next(lengths, len(content))])  # and in pieces of its own

    monkeypatch.setattr(saved_files.os, "write", grudging)
    content = os.urandom(30_000)
    file = WrittenFile(tmp_path / "a")
    file.write(content)
    saved = file.finish(since=None)
    assert (tmp_path / "a").read_bytes() == content
    assert saved.checksum == checksum_file(tmp_path / "a")


def test_a_disk_that_is_full_names_the_file(tmp_path, monkeypatch):
    def full(descriptor, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saved_files.os, "write", full)
    file = WrittenFile(tmp_path / "a")
    file.write(b"some")
    with pytest.raises(OSError, match=r"No space left on device.*a\..*part"):
        file.finish(since=None)
    file.remove_unfinished()
    assert not list(tmp_path.iterdir())


def test_a_writer_that_was_given_up_does_not_end_the_file_of_the_next(tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    old = WrittenFile(folder / "a")
    old.write(b"old")
    shutil.rmtree(folder)
    folder.mkdir()
    new = WrittenFile(folder / "a")
    new.write(b"half of ")

    with pytest.raises(OSError, match="belongs to another attempt"):
        old.finish(since=None)
    old.remove_unfinished()
    assert not (folder / "a").exists()
    new.write(b"the new one")
    assert new.finish(since=None).checksum == checksum_file(folder / "a")
    assert (folder / "a").read_bytes() == b"half of the new one"
    assert [path.name for path in folder.iterdir()] == ["a"]
