"""A folder of a saved pair holds the old one or the new one, wherever its writer was killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayrec.platform.saved_pair import SavedPair, checksum

PAIR = SavedPair("pair.json", "pair.safetensors", "pair", readable_formats=(1,), written_format=1)


class Killed(BaseException):
    """Ends a writer where a signal would."""


def write(folder: Path, number: int) -> None:
    settings, arrays = {"number": number}, {"values": np.full(3, number)}
    PAIR.write(folder, checksum(settings, arrays), settings, arrays)


def read(folder: Path, pair: SavedPair = PAIR) -> int:
    manifest, arrays = pair.read(folder)
    number = manifest["number"]
    pair.check_version(folder, manifest["version"], checksum({"number": number}, arrays))
    return int(number)


class Replaces:
    """Stands for `os.replace`: what is read around every call, and a kill before or after one of them."""

    def __init__(self, folder: Path, last: int | None = None, is_done: bool = False) -> None:
        self.found: list[int] = []
        self._replace, self._folder = os.replace, folder
        self._last, self._is_done = last, is_done
        self.calls = 0

    def __call__(self, source: Any, target: Any) -> None:
        self.found.append(read(self._folder))
        if self.calls == self._last and not self._is_done:
            raise Killed
        self._replace(source, target)
        self.found.append(read(self._folder))
        if self.calls == self._last:
            raise Killed
        self.calls += 1


def test_while_a_pair_is_replaced_the_old_one_or_the_new_one_is_read(tmp_path, monkeypatch):
    write(tmp_path, 1)
    replaces = Replaces(tmp_path)
    monkeypatch.setattr(os, "replace", replaces)

    write(tmp_path, 2)

    assert replaces.found == sorted(replaces.found)
    assert set(replaces.found) == {1, 2}
    assert read(tmp_path) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair.json", "pair.safetensors"]


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_writer_that_is_killed_loses_no_pair(last, is_done, tmp_path, monkeypatch):
    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", Replaces(tmp_path, last, is_done))
        with pytest.raises(Killed):
            write(tmp_path, 2)

    assert read(tmp_path) in (1, 2)
    write(tmp_path, 3)
    assert read(tmp_path) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair.json", "pair.safetensors"]
    PAIR.remove(tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_of_a_pair_is_left_when_it_is_removed_after_a_kill(tmp_path, monkeypatch):
    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", Replaces(tmp_path, 1, is_done=True))
        with pytest.raises(Killed):
            write(tmp_path, 2)

    PAIR.remove(tmp_path)

    assert not list(tmp_path.iterdir())


def test_a_pair_that_is_replaced_between_its_two_files_is_read_again(tmp_path):
    class Slow(SavedPair):
        """Another process replaces the pair when the manifest has been read."""

        def _bytes_of(self, path: Path) -> bytes:
            content = super()._bytes_of(path)
            if path.name == self.manifest and b'"number": 1' in content:
                write(tmp_path, 2)
            return content

    write(tmp_path, 1)

    assert read(tmp_path, Slow("pair.json", "pair.safetensors", "pair", (1,), 1)) == 2
