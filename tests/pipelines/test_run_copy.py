"""A run's second home, on a file system that is not this machine's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from rayrec.pipelines.runs import run_copy
from rayrec.pipelines.runs.run_copy import RunCopy
from rayrec.platform.errors import InputError

URL = "memory://bucket/runs/mine"


@pytest.fixture(autouse=True)
def _empty_memory() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").rm("/bucket", recursive=True) if there() else None


def there() -> list[str]:
    memory = fsspec.filesystem("memory")
    return sorted(memory.find("/bucket")) if memory.exists("/bucket") else []


def run_with(folder: Path, *snapshots: str) -> Path:
    (folder / "run.json").parent.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(f'{{"last": "{snapshots[-1]}"}}')
    (folder / "config.yaml").write_text("seed: 0\n")
    for name in snapshots:
        (folder / "snapshots" / name).mkdir(parents=True, exist_ok=True)
        (folder / "snapshots" / name / "item-00000.parquet").write_bytes(b"rows of " + name.encode())
        (folder / "snapshots" / name / "manifest.json").write_text("{}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_comes_back_as_it_was(tmp_path):
    run = run_with(tmp_path / "run", "step-5", "step-9")
    RunCopy(URL).update(run, {"step-5", "step-9"})

    RunCopy(URL).restore(tmp_path / "elsewhere")

    assert contents(tmp_path / "elsewhere") == contents(run)


def test_snapshots_that_are_not_kept_go_and_those_that_are_there_are_not_sent_again(tmp_path):
    run = run_with(tmp_path / "run", "step-5", "step-9")
    copy = RunCopy(URL)
    copy.update(run, {"step-5", "step-9"})
    (run / "snapshots" / "step-9" / "item-00000.parquet").write_bytes(b"would be sent")

    copy.update(run_with(run, "step-12"), {"step-9", "step-12"})

    found = {path.split("/")[5] for path in there() if "/snapshots/" in path}
    assert found == {"step-9", "step-12"}
    copy.restore(tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere/snapshots/step-9/item-00000.parquet").read_bytes() == b"rows of step-9"
    assert '"step-12"' in (tmp_path / "elsewhere" / "run.json").read_text()


def test_half_a_snapshot_is_none(tmp_path):
    """It was being sent, or being deleted, when the machine went down."""
    run = run_with(tmp_path / "run", "step-5", "step-9")
    copy = RunCopy(URL)
    copy.update(run, {"step-5", "step-9"})
    fsspec.filesystem("memory").rm("/bucket/runs/mine/snapshots/step-9/manifest.json")

    copy.restore(tmp_path / "elsewhere")
    assert [path.name for path in (tmp_path / "elsewhere" / "snapshots").iterdir()] == ["step-5"]

    copy.update(run, {"step-5", "step-9"})
    copy.restore(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(run)


def test_no_copy_is_said_to_be_none(tmp_path):
    assert not RunCopy(URL).holds_run()
    with pytest.raises(InputError, match=f"^{URL}: there is no copy of a run here"):
        RunCopy(URL).restore(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_snapshot_of_a_step_that_was_trained_anew_replaces_the_one_before(tmp_path):
    run = run_with(tmp_path / "run", "step-5", "step-9")
    copy = RunCopy(URL)
    copy.update(run, {"step-5", "step-9"})
    (run / "snapshots" / "step-9" / "item-00000.parquet").write_bytes(b"of three servers now")
    (run / "snapshots" / "step-9" / "manifest.json").write_text('{"incarnation": 1}')

    copy.update(run, {"step-5", "step-9"})

    copy.restore(tmp_path / "elsewhere")
    assert contents(tmp_path / "elsewhere") == contents(run)


def test_a_copy_that_was_brought_back_in_part_is_no_run_yet(tmp_path, monkeypatch):
    """Its run.json would name snapshots that are not there, and nobody would bring them."""
    run = run_with(tmp_path / "run", "step-5", "step-9")
    copy = RunCopy(URL)
    copy.update(run, {"step-5", "step-9"})
    fetch, elsewhere = RunCopy._fetch, tmp_path / "elsewhere"

    for num_files in range(len(contents(run))):
        left = iter(range(num_files))

        def killed(self: RunCopy, run: Path, name: str, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            fetch(self, run, name)

        with monkeypatch.context() as patch:
            patch.setattr(RunCopy, "_fetch", killed)
            with pytest.raises(KeyboardInterrupt):
                copy.restore(elsewhere)
        assert not (elsewhere / "run.json").exists()

    copy.restore(elsewhere)
    assert contents(elsewhere) == contents(run)


def test_a_file_that_is_on_its_way_to_a_disk_does_not_show(tmp_path, monkeypatch):
    run = run_with(tmp_path / "run", "step-5")
    url = (tmp_path / "other disk").as_uri()
    RunCopy(url).update(run, {"step-5"})
    before = contents(tmp_path / "other disk")
    run_with(run, "step-5", "step-9")

    def disk_full(source: str, target: str, *args: object) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:3])
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(run_copy.fs, "copy_files", disk_full)
        with pytest.raises(OSError, match="no space left"):
            RunCopy(url).update(run, {"step-5", "step-9"})

    shown = {name: content for name, content in contents(tmp_path / "other disk").items() if "/." not in name}
    assert shown == before
    RunCopy(url).restore(tmp_path / "elsewhere")
    assert contents(tmp_path / "elsewhere") == before
    RunCopy(url).update(run, {"step-5", "step-9"})
    RunCopy(url).restore(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(run)
