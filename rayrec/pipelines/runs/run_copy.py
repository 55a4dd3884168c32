"""A second home of a run: its folder, copied to another file system as it goes, and back.

COPY/copy.json             the run that the copy is of, and the folder below that each snapshot lies in
COPY/snapshots/step-N.S/   a snapshot that start S of the run copied; `step-N.S.K`: the step written again
COPY/run.json, ...         what the run's folder says of the run

A snapshot's manifest is copied last, copy.json after it, and then run.json: what run.json names is whole.
What is replaced is deleted after that. So at every moment there is a whole snapshot, once there was one.

An upload takes minutes, and the run may be started elsewhere meanwhile. So a process writes to folders of
its own, and looks again at whom the copy belongs to before it writes what others read and before it deletes.
"""

from __future__ import annotations

import itertools
import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pyarrow import fs

from rayrec.pipelines.runs.run_folder import ACCEPTED_FILE, ATTENTION_FILES, COLUMNS_FILE
from rayrec.pipelines.runs.snapshots import MANIFEST
from rayrec.platform.errors import InputError
from rayrec.platform.files import is_plain_name, written_whole
from rayrec.platform.remote_files import remote_folder

COPY, SNAPSHOTS = "copy.json", "snapshots"
_DESCRIPTIONS = ("config.yaml", COLUMNS_FILE, ACCEPTED_FILE, "metrics.jsonl", "run.json")
"""In the order in which they are copied."""


class RunCopy:
    """The copy of one run, which it belongs to. Not thread-safe."""

    def __init__(self, url: str) -> None:
        self._there = remote_folder(url)
        self._here = fs.LocalFileSystem()

    def holds_run(self) -> bool:
        """Whether a run can be brought back from here."""
        return self._there.exists("run.json")

    def check_free(self, run: Path, takes_empty: bool = False) -> None:
        """Refuse the copy of another run to the one in a folder, or to one that will begin there.

        Args:
            takes_empty: a run of the same name that was begun, and left nothing here, does not count: a job
                that is started again, and whose folder is gone.

        Raises:
            InputError: it is the copy of another run.
        """
        mine = _read_json(run / "run.json") or {}
        copy = self._index()
        if copy is None:
            held = self._state() or {}
            # A copy of an earlier version does not say whose it is: a run with snapshots may go on with it.
            is_free = not held or ("id" in held and held["id"] == mine.get("id"))
            is_free = is_free or ("id" not in held and mine.get("last") is not None)
            name = "another run"
        else:
            is_free = copy["run"] == mine.get("id")
            name = f"the run {copy['name']!r}"
            if takes_empty and copy["name"] == run.resolve().name and not self.holds_run():
                is_free = True
        if not is_free:
            raise InputError(
                f"{self._there.url}: this is the copy of {name}, not of {run}; give each run its own folder "
                "(snapshots.copy_to), or delete this one if nobody needs it"
            )

    def check_brings_back(self, run: Path) -> None:
        """Refuse to bring a run back under another name where nobody asked for that run.

        Raises:
            InputError: it is the copy of a run whose folder has another name.
        """
        copy = self._index()
        if copy is not None and copy["name"] != run.resolve().name:
            raise InputError(
                f"{self._there.url}: this is the copy of the run {copy['name']!r}, not of {run}; give each "
                "run its own folder (snapshots.copy_to), or bring that run back here with --resume"
            )

    def claim(self, run: Path, takes_empty: bool = False) -> None:
        """Let the copy belong to the run in a folder, as it was started last, and to no other.

        A process of the same run that was started before, on a machine that was given up, is refused from
        now on. File systems know no locks: of two runs that claim within the same moment, the first is
        refused at its first update.

        Args:
            takes_empty: as in `check_free`.

        Raises:
            InputError: it is the copy of another run.
            OSError: the other file system fails.
        """
        self.check_free(run, takes_empty)
        mine = _read_json(run / "run.json") or {}
        folders = (self._index() or {}).get("folders")
        if folders is None:
            folders = self._by_snapshot(self._whole())
        self._write_index(
            {
                "run": mine.get("id"),
                "start": mine.get("start"),
                "name": run.resolve().name,
                "folders": folders,
            }
        )

    def release(self, run: Path) -> None:
        """Let go of a copy that has nothing, when the run ends."""
        copy, mine = self._index(), _read_json(run / "run.json") or {}
        if (
            copy is not None
            and (copy["run"], copy["start"]) == (mine.get("id"), mine.get("start"))
            and not copy["folders"]
            and not self.holds_run()
        ):
            self._there.filesystem.delete_file(self._there.path_of(COPY))

    def update(self, run: Path, snapshots: set[str], deletes_others: bool = True) -> None:
        """Let the copy have these snapshots and no others, and what the folder says of the run.

        Args:
            deletes_others: False: others that the copy has stay.

        Raises:
            InputError: the copy belongs to another run, or to this one as it was started elsewhere since.
            OSError: the other file system fails; what it had before is still whole.
        """
        before: dict[str, str] = self._own_index(run)["folders"]
        folders = dict(before)
        for name in sorted(snapshots):
            folders[name] = self._send_snapshot(run, name, before.get(name))
        # Here and below, a process that takes the copy between the look and the write of one small file
        # is overwritten: file systems know no locks. If that file is the index, the other process is
        # refused at its next update, and the copy loses what it sent within that moment, which its own
        # folder still has.
        if folders != before:
            self._write_index(self._own_index(run) | {"folders": folders})
        measured = sorted(path.name for path in run.glob(ATTENTION_FILES))
        for name in (*measured, *_DESCRIPTIONS):
            if (run / name).exists():
                self._own_index(run)
                self._send(run, name)
        kept = {name: folders[name] for name in sorted(snapshots)} if deletes_others else folders
        if kept != folders:
            self._write_index(self._own_index(run) | {"folders": kept})
        self._delete_unnamed(run)

    def restore(self, run: Path) -> None:
        """Make the run's folder out of the copy; run.json comes last: what it names is whole here, too.

        Raises:
            InputError: there is no copy of a run.
        """
        if not self.holds_run():
            raise InputError(f"{self._there.url}: there is no copy of a run here (snapshots.copy_to)")
        copy = self._index()
        whole = self._whole()
        folders = self._by_snapshot(whole) if copy is None else copy["folders"]
        for name, there in sorted(folders.items()):
            if there not in whole:
                continue
            folder = fs.FileSelector(self._there.path_of(f"{SNAPSHOTS}/{there}"))
            for file in self._there.filesystem.get_file_info(folder):
                if not file.base_name.startswith("."):  # never arrived whole
                    self._fetch(
                        f"{SNAPSHOTS}/{there}/{file.base_name}", run / SNAPSHOTS / name / file.base_name
                    )
        for name in (*self._measured(), *_DESCRIPTIONS):
            if self._there.exists(name):
                self._fetch(name, run / name)

    def _by_snapshot(self, whole: set[str]) -> dict[str, str]:
        """Folders by the snapshot that they have, where copy.json is lost: of one step, what came last."""

        def came(folder: str) -> tuple[int, str]:
            manifest = self._there.path_of(f"{SNAPSHOTS}/{folder}/{MANIFEST}")
            return self._there.filesystem.get_file_info([manifest])[0].mtime_ns or 0, folder

        return {folder.partition(".")[0]: folder for folder in sorted(whole, key=came)}

    def _send_snapshot(self, run: Path, name: str, before: str | None) -> str:
        """Name of the folder in the copy that has the snapshot as it is now.

        Args:
            before: the folder that has it as it was when it was copied last.
        """
        mine = (run / SNAPSHOTS / name / MANIFEST).read_bytes()
        if before is not None:
            theirs = self._there.read(f"{SNAPSHOTS}/{before}/{MANIFEST}")
            if theirs == mine:
                return before
            if theirs is not None and _files_in(theirs) == _files_in(mine):
                self._own_index(run)
                self._send(run, f"{SNAPSHOTS}/{name}/{MANIFEST}", f"{SNAPSHOTS}/{before}/{MANIFEST}")
                return before  # weights and rows are the same: it only says something else of its run
        # Never over what is there: that stays whole until run.json is the new one. And never where another
        # start of the run writes.
        taken, start = self._whole(), (_read_json(run / "run.json") or {}).get("start")
        own = name if start is None else f"{name}.{start[:8]}"
        free = (f"{own}.{number}" if number else own for number in itertools.count())
        folder = next(each for each in free if each not in taken)
        self._delete_folder(folder)  # what is left of it arrived in part
        files = [entry.name for entry in (run / SNAPSHOTS / name).iterdir()]
        for file in sorted(files, key=lambda file: file == MANIFEST):
            self._send(run, f"{SNAPSHOTS}/{name}/{file}", f"{SNAPSHOTS}/{folder}/{file}")
        return folder

    def _delete_unnamed(self, run: Path) -> None:
        """Delete the folders that the copy does not name.

        Those that were there before the look: what another process brings, it brings after it has taken the
        copy, so that either the look finds it the owner or its folders are not among these.
        """
        there = self._folders()
        named = set(self._own_index(run)["folders"].values())
        for folder in sorted(there - named):
            self._delete_folder(folder)

    def _delete_folder(self, name: str) -> None:
        there, manifest = self._there, f"{SNAPSHOTS}/{name}/{MANIFEST}"
        if self._there.exists(manifest):  # first: half a snapshot must not look like one
            there.filesystem.delete_file(there.path_of(manifest))
        (info,) = there.filesystem.get_file_info([there.path_of(f"{SNAPSHOTS}/{name}")])
        if info.type == fs.FileType.Directory:
            there.filesystem.delete_dir(info.path)

    def _own_index(self, run: Path) -> dict[str, Any]:
        """What copy.json says now; an InputError where it says that another process has the copy."""
        copy, mine = self._index(), _read_json(run / "run.json") or {}
        if copy is None or copy["run"] != mine.get("id"):
            self.claim(run)
            copy = self._index()
            assert copy is not None, "it has just been written"
        if copy["start"] != mine.get("start"):
            raise InputError(
                f"{self._there.url}: this run was started again elsewhere, and the copy belongs to that "
                f"process; stop one of the two: this one, in {run}, copies nothing"
            )
        return copy

    def _index(self) -> dict[str, Any] | None:
        """What copy.json says; None where there is none: nothing was copied, or by an earlier version."""
        content = self._there.read(COPY)
        if content is None:
            return None
        try:
            copy: dict[str, Any] = json.loads(content)
            _ = copy["run"], copy["start"], copy["name"]
            if not all(is_plain_name(name) for pair in copy["folders"].items() for name in pair):
                raise ValueError("it names folders outside of the copy")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{self._there.shown(COPY)}: not what a copy of a run says of itself; the file was changed"
            ) from error
        return copy

    def _write_index(self, copy: dict[str, Any]) -> None:
        with (
            self._there.written_whole(COPY) as target,
            self._there.filesystem.open_output_stream(target) as file,
        ):
            file.write((json.dumps(copy, indent=2) + "\n").encode())

    def _state(self) -> dict[str, Any] | None:
        content = self._there.read("run.json")
        return None if content is None else dict(json.loads(content))

    def _measured(self) -> list[str]:
        there = self._there
        infos = there.filesystem.get_file_info(fs.FileSelector(there.path_of("")))
        return [info.base_name for info in infos if fnmatch(info.base_name, ATTENTION_FILES)]

    def _whole(self) -> set[str]:
        """Folders of snapshots that have their manifest."""
        return {name for name in self._folders() if self._there.exists(f"{SNAPSHOTS}/{name}/{MANIFEST}")}

    def _folders(self) -> set[str]:
        """Folders of snapshots, also of those that arrived in part."""
        selector = fs.FileSelector(self._there.path_of(SNAPSHOTS), allow_not_found=True)
        return {info.base_name for info in self._there.filesystem.get_file_info(selector)}

    def _send(self, run: Path, name: str, to: str | None = None) -> None:
        with self._there.written_whole(to or name) as target:
            fs.copy_files(str(run / name), target, self._here, self._there.filesystem)

    def _fetch(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as unfinished:
            fs.copy_files(self._there.path_of(name), str(unfinished), self._there.filesystem, self._here)


def _files_in(manifest: bytes) -> object:
    """Names and checksums of the files of a snapshot, which do not depend on what it says of its run."""
    try:
        return json.loads(manifest)["checksums"]
    except (ValueError, KeyError):
        return manifest  # damaged: it is the same as nothing else


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
