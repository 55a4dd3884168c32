"""Kernels in images whose package cannot be written, run as users without a home."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rayrec.platform import kernel_cache
from rayrec.platform.kernel_cache import SETTING, choose_kernel_cache


@pytest.fixture
def writable(monkeypatch, tmp_path) -> set[Path]:
    """Folders that may be written to; root may write everywhere, so access is made up."""
    allowed: set[Path] = set()
    monkeypatch.delenv(SETTING, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(kernel_cache.os, "access", lambda path, mode: Path(path) in allowed)
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(kernel_cache.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "a new one"))
    return allowed


def test_numba_chooses_where_it_can(writable, tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    writable.add(package)
    choose_kernel_cache(package)
    assert SETTING not in os.environ

    writable.clear()
    (tmp_path / "cache").mkdir()
    writable.add(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache" / "not yet made"))
    choose_kernel_cache(package)
    assert SETTING not in os.environ


def test_where_nothing_can_be_written_a_folder_of_the_users_own_is_named(writable, tmp_path, monkeypatch):
    choose_kernel_cache(tmp_path / "package")

    folder = Path(os.environ[SETTING])
    assert folder == tmp_path / f"rayrec-kernels-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.delenv(SETTING)
    choose_kernel_cache(tmp_path / "package")
    assert os.environ[SETTING] == str(folder)  # kernels are compiled once
    monkeypatch.setenv(SETTING, "/of the user")
    choose_kernel_cache(tmp_path / "package")
    assert os.environ[SETTING] == "/of the user"


def test_kernels_are_not_loaded_from_a_folder_that_others_can_write(writable, tmp_path, monkeypatch):
    folder = tmp_path / f"rayrec-kernels-{os.getuid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    choose_kernel_cache(tmp_path / "package")
    assert os.environ[SETTING] == str(tmp_path / "a new one")

    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    monkeypatch.delenv(SETTING)
    choose_kernel_cache(tmp_path / "package")
    assert os.environ[SETTING] == str(tmp_path / "a new one")
