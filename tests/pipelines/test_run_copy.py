"""A run's second home, on a file system that is not this machine's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


ID = "7f3a"


def there() -> list[str]:
    memory = fsspec.filesystem("memory")
    return sorted(memory.find("/bucket")) if memory.exists("/bucket") else []


def folders_there() -> set[str]:
    return {path.split("/")[5] for path in there() if "/snapshots/" in path}


def run_with(folder: Path, *snapshots: str, run: str = ID, start: str = "first") -> Path:
    (folder / "run.json").parent.mkdir(parents=True, exist_ok=True)
    last = snapshots[-1] if snapshots else None
    (folder / "run.json").write_text(json.dumps({"id": run, "start": start, "last": last}))
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

    assert folders_there() == {"step-9.first", "step-12.first"}
    copy.restore(tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere/snapshots/step-9/item-00000.parquet").read_bytes() == b"rows of step-9"
    assert '"step-12"' in (tmp_path / "elsewhere" / "run.json").read_text()


def test_what_a_run_lost_by_hand_stays_in_its_copy_where_others_build_on_it(tmp_path):
    run = run_with(tmp_path / "run", "step-5", "step-9")
    RunCopy(URL).update(run, {"step-5", "step-9"})

    RunCopy(URL).update(run, {"step-9"}, deletes_others=False)
    RunCopy(URL).restore(tmp_path / "elsewhere")

    assert contents(tmp_path / "elsewhere") == contents(run)


def test_a_copy_that_lost_its_index_still_has_the_snapshots_by_their_names(tmp_path):
    run = run_with(tmp_path / "run", "step-5", "step-9")
    RunCopy(URL).update(run, {"step-5", "step-9"})
    fsspec.filesystem("memory").rm("/bucket/runs/mine/copy.json")

    RunCopy(URL).restore(tmp_path / "elsewhere")

    assert contents(tmp_path / "elsewhere") == contents(run)


def test_a_start_that_finds_no_index_knows_the_snapshots_by_their_names(tmp_path):
    RunCopy(URL).update(run_with(tmp_path / "run", "step-5", "step-9"), {"step-5", "step-9"})
    fsspec.filesystem("memory").rm("/bucket/runs/mine/copy.json")

    RunCopy(URL).claim(run_with(tmp_path / "run", "step-5", "step-9", start="second"))
    RunCopy(URL).restore(tmp_path / "elsewhere")  # before anything else has been copied

    snapshots = tmp_path / "elsewhere" / "snapshots"
    assert sorted(folder.name for folder in snapshots.iterdir()) == ["step-5", "step-9"]


def test_half_a_snapshot_is_none(tmp_path):
    """It was being sent, or being deleted, when the machine went down."""
    run = run_with(tmp_path / "run", "step-5", "step-9")
    copy = RunCopy(URL)
    copy.update(run, {"step-5", "step-9"})
    fsspec.filesystem("memory").rm("/bucket/runs/mine/snapshots/step-9.first/manifest.json")

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
    before, of_run = contents(tmp_path / "other disk"), contents(run)
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
    assert contents(tmp_path / "elsewhere") == of_run
    RunCopy(url).update(run, {"step-5", "step-9"})
    RunCopy(url).restore(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(run)


def write_again(run: Path, name: str) -> None:
    (run / "snapshots" / name / "item-00000.parquet").write_bytes(b"of three servers now")
    (run / "snapshots" / name / "manifest.json").write_text('{"checksums": {"item-00000.parquet": "other"}}')


@pytest.mark.parametrize("url", [URL, "a disk"])
def test_the_copy_of_one_run_is_refused_to_another(tmp_path, url):
    """Two runs were begun with one YAML; the second deleted the snapshots of the first."""
    url = (tmp_path / "disk").as_uri() if url == "a disk" else url
    first = run_with(tmp_path / "first", "step-5")
    RunCopy(url).update(first, {"step-5"})
    second = run_with(tmp_path / "second", "step-9", run="another")

    for refused in (RunCopy(url).check_free, RunCopy(url).claim):
        with pytest.raises(InputError, match=r"this is the copy of the run 'first', not of .*/second"):
            refused(second)
    with pytest.raises(InputError, match="copy of the run 'first'"):
        RunCopy(url).update(second, {"step-9"})
    with pytest.raises(InputError, match="copy of the run 'first'"):
        RunCopy(url).check_free(tmp_path / "not begun")

    RunCopy(url).restore(tmp_path / "elsewhere")
    assert contents(tmp_path / "elsewhere") == contents(first)


def test_a_run_that_has_copied_nothing_yet_holds_its_copy_until_it_ends(tmp_path):
    first, second = run_with(tmp_path / "first"), run_with(tmp_path / "second", run="another")
    RunCopy(URL).claim(first)
    with pytest.raises(InputError, match="copy of the run 'first'"):
        RunCopy(URL).claim(second)

    RunCopy(URL).release(second)
    RunCopy(URL).check_free(first)
    RunCopy(URL).release(first)

    RunCopy(URL).claim(second)


def test_a_job_whose_folder_is_gone_before_its_first_snapshot_begins_again(tmp_path):
    RunCopy(URL).claim(run_with(tmp_path / "a machine" / "mine"))
    again = run_with(tmp_path / "another machine" / "mine", run="begun again")
    with pytest.raises(InputError, match="copy of the run 'mine'"):
        RunCopy(URL).claim(again)

    RunCopy(URL).claim(again, takes_empty=True)

    RunCopy(URL).check_free(again)


def test_a_process_that_was_given_up_does_not_overwrite_what_the_next_one_copies(tmp_path):
    old = run_with(tmp_path / "a machine" / "mine", "step-5")
    copy_of_old = RunCopy(URL)
    copy_of_old.update(old, {"step-5"})
    RunCopy(URL).restore(tmp_path / "another machine" / "mine")
    new = run_with(tmp_path / "another machine" / "mine", "step-5", start="second")
    RunCopy(URL).claim(new)
    RunCopy(URL).update(new, {"step-5"})

    with pytest.raises(InputError, match="was started again elsewhere"):
        copy_of_old.update(run_with(old, "step-5", "step-9"), {"step-9"})

    RunCopy(URL).restore(tmp_path / "third")
    assert contents(tmp_path / "third") == contents(new)


FILES = ["item-00000.parquet", "manifest.json", "config.yaml", "run.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("url", [URL, "a disk"])
def test_a_process_that_is_given_up_while_it_copies_takes_nothing_back(tmp_path, monkeypatch, url, file):
    """An upload takes minutes: the next process had copied its snapshots, and the old one deleted them."""
    url = (tmp_path / "disk").as_uri() if url == "a disk" else url
    old = run_with(tmp_path / "a machine" / "mine", "step-5")
    RunCopy(url).update(old, {"step-5"})
    run_with(old, "step-5", "step-9")
    elsewhere, next_one, send = tmp_path / "another machine" / "mine", RunCopy(url), RunCopy._send

    def taken_over(self: RunCopy, run: Path, name: str, to: str | None = None) -> None:
        if self is not next_one and name.endswith(file) and not elsewhere.exists():
            next_one.restore(elsewhere)
            run_with(elsewhere, "step-5", start="second")
            next_one.claim(elsewhere)
            write_again(run_with(elsewhere, "step-7", "step-9", start="second"), "step-9")
            next_one.update(elsewhere, {"step-7", "step-9"})
        send(self, run, name, to)

    with monkeypatch.context() as patch:
        patch.setattr(RunCopy, "_send", taken_over)
        with pytest.raises(InputError, match="was started again elsewhere"):
            RunCopy(url).update(old, {"step-5", "step-9"})

    next_one.restore(tmp_path / "third")
    kept = {name: content for name, content in contents(elsewhere).items() if "step-5" not in name}
    if file == "run.json":  # what the old one was writing at that moment; the next copy brings it again
        kept["run.json"] = contents(old)["run.json"]
    assert contents(tmp_path / "third") == kept
    next_one.update(elsewhere, {"step-7", "step-9"})
    next_one.restore(tmp_path / "fourth")
    kept["run.json"] = contents(elsewhere)["run.json"]
    assert contents(tmp_path / "fourth") == kept


def test_a_process_that_is_given_up_before_it_deletes_deletes_nothing(tmp_path, monkeypatch):
    old = run_with(tmp_path / "a machine" / "mine", "step-5", "step-9")
    RunCopy(URL).update(old, {"step-5"})
    elsewhere, write_index = tmp_path / "another machine" / "mine", RunCopy._write_index
    indices = []

    def taken_over(self: RunCopy, copy: dict[str, Any]) -> None:
        write_index(self, copy)
        indices.append(copy)
        if len(indices) == 2:  # it has just let go of step-5
            RunCopy(URL).claim(run_with(elsewhere, "step-11", start="second"))
            on_its_way = "/bucket/runs/mine/snapshots/step-11.second/rows"
            fsspec.filesystem("memory").pipe(on_its_way, b"rows")

    monkeypatch.setattr(RunCopy, "_write_index", taken_over)
    with pytest.raises(InputError, match="was started again elsewhere"):
        RunCopy(URL).update(old, {"step-9"})

    assert folders_there() == {"step-5.first", "step-9.first", "step-11.second"}
    RunCopy(URL).update(elsewhere, {"step-11"})
    assert folders_there() == {"step-11.second"}


def test_a_process_that_ends_leaves_the_empty_copy_of_the_next_one(tmp_path):
    old = run_with(tmp_path / "a machine" / "mine")
    RunCopy(URL).claim(old)
    RunCopy(URL).claim(run_with(tmp_path / "another machine" / "mine", start="second"))

    RunCopy(URL).release(old)

    with pytest.raises(InputError, match="copy of the run 'mine'"):
        RunCopy(URL).check_free(tmp_path / "somebody else's")


def test_a_job_does_not_bring_back_the_run_of_another_name(tmp_path):
    RunCopy(URL).update(run_with(tmp_path / "first", "step-5"), {"step-5"})

    RunCopy(URL).check_brings_back(tmp_path / "another machine" / "first")
    with pytest.raises(InputError, match="this is the copy of the run 'first'"):
        RunCopy(URL).check_brings_back(tmp_path / "second")


def test_a_copy_of_an_earlier_version_goes_on_with_a_run_that_has_snapshots(tmp_path):
    """It does not say whose it is."""
    run = run_with(tmp_path / "run", "step-5")
    RunCopy(URL).update(run, {"step-5"})
    fsspec.filesystem("memory").rm("/bucket/runs/mine/copy.json")
    with fsspec.filesystem("memory").open("/bucket/runs/mine/run.json", "w") as file:
        file.write('{"last": "step-5"}')

    with pytest.raises(InputError, match="copy of another run"):
        RunCopy(URL).check_free(tmp_path / "new")
    RunCopy(URL).update(run_with(run, "step-5", "step-9"), {"step-9"})

    assert not any("step-5" in path for path in there())


def test_a_step_that_is_sent_again_leaves_a_whole_snapshot_wherever_it_stops(tmp_path, monkeypatch):
    """What run.json names is whole, before the other file system fails and after."""
    send = RunCopy._send

    for num_files in itertools.count():
        run = run_with(tmp_path / str(num_files), "step-5", "step-9")
        url = f"memory://bucket/runs/{num_files}"
        copy = RunCopy(url)
        copy.update(run, {"step-5", "step-9"})
        before = contents(run)
        write_again(run, "step-9")
        left = iter(range(num_files))

        def fails(self: RunCopy, *arguments: Any, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise OSError("the other file system fails")
            send(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(RunCopy, "_send", fails)
            try:
                copy.update(run, {"step-9"})
            except OSError:
                pass
            else:
                break

        RunCopy(url).restore(tmp_path / f"{num_files} again")
        name = "snapshots/step-9/item-00000.parquet"
        found = contents(tmp_path / f"{num_files} again")
        assert found[name] in (before[name], contents(run)[name])
        assert set(found) == set(before)
        copy.update(run, {"step-9"})
        RunCopy(url).restore(tmp_path / f"{num_files} at last")
        assert contents(tmp_path / f"{num_files} at last")[name] == contents(run)[name]
    assert num_files > 3


def test_what_a_snapshot_says_of_its_run_is_sent_without_its_rows(tmp_path, monkeypatch):
    run = run_with(tmp_path / "run", "step-5")
    manifest = run / "snapshots" / "step-5" / "manifest.json"
    manifest.write_text('{"checksums": {"item-00000.parquet": "a"}, "progress": 1}')
    copy, sent, send = RunCopy(URL), [], RunCopy._send
    copy.update(run, {"step-5"})
    manifest.write_text('{"checksums": {"item-00000.parquet": "a"}, "progress": 2}')

    monkeypatch.setattr(RunCopy, "_send", lambda self, *names: (sent.append(names[1]), send(self, *names)))
    copy.update(run, {"step-5"})

    assert [name for name in sent if "snapshots" in name] == ["snapshots/step-5/manifest.json"]
    RunCopy(URL).restore(tmp_path / "elsewhere")
    assert contents(tmp_path / "elsewhere") == contents(run)
