"""A second home of a run: its folder, copied to another file system as it goes, and back.

A snapshot's manifest is copied last, and run.json after that: what run.json names is whole.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from pyarrow import fs

from rayrec.pipelines.runs.run_folder import ACCEPTED_FILE, ATTENTION_FILES, COLUMNS_FILE
from rayrec.pipelines.runs.snapshots import MANIFEST
from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import remote_folder

SNAPSHOTS = "snapshots"
_DESCRIPTIONS = ("config.yaml", COLUMNS_FILE, ACCEPTED_FILE, "metrics.jsonl", "run.json")
"""In the order in which they are copied."""


class RunCopy:
    """The copy of one run."""

    def __init__(self, url: str) -> None:
        self._there = remote_folder(url)
        self._here = fs.LocalFileSystem()

    def holds_run(self) -> bool:
        return self._exists("run.json")

    def update(self, run: Path, snapshots: set[str]) -> None:
        """Let the copy have these snapshots and no others, and what the folder says of the run.

        Raises:
            OSError: the other file system fails; what it had before is still whole.
        """
        there = self._there
        for name in sorted(snapshots):
            manifest = f"{SNAPSHOTS}/{name}/{MANIFEST}"
            if not self._is_same(run, manifest):
                if self._exists(manifest):  # of the same step, before the run went back behind it
                    there.filesystem.delete_file(there.path_of(manifest))
                files = [entry.name for entry in (run / SNAPSHOTS / name).iterdir()]
                for file in sorted(files, key=lambda file: file == MANIFEST):
                    self._send(run, f"{SNAPSHOTS}/{name}/{file}")
        measured = sorted(path.name for path in run.glob(ATTENTION_FILES))
        for name in (*measured, *_DESCRIPTIONS):
            if (run / name).exists():
                self._send(run, name)
        for name in self._snapshots() - snapshots:
            # Its manifest first: half a snapshot must not look like one.
            there.filesystem.delete_file(there.path_of(f"{SNAPSHOTS}/{name}/{MANIFEST}"))
            there.filesystem.delete_dir(there.path_of(f"{SNAPSHOTS}/{name}"))

    def restore(self, run: Path) -> None:
        """Make the run's folder out of the copy; run.json comes last: what it names is whole here, too.

        Raises:
            InputError: there is no copy of a run.
        """
        if not self.holds_run():
            raise InputError(f"{self._there.url}: there is no copy of a run here (snapshots.copy_to)")
        for name in sorted(self._snapshots()):
            folder = fs.FileSelector(self._there.path_of(f"{SNAPSHOTS}/{name}"))
            for file in self._there.filesystem.get_file_info(folder):
                if not file.base_name.startswith("."):  # never arrived whole
                    self._fetch(run, f"{SNAPSHOTS}/{name}/{file.base_name}")
        for name in (*self._measured(), *_DESCRIPTIONS):
            if self._exists(name):
                self._fetch(run, name)

    def _exists(self, name: str) -> bool:
        (info,) = self._there.filesystem.get_file_info([self._there.path_of(name)])
        return bool(info.type == fs.FileType.File)

    def _is_same(self, run: Path, name: str) -> bool:
        if not self._exists(name):
            return False
        with self._there.filesystem.open_input_file(self._there.path_of(name)) as file:
            return bool(file.read() == (run / name).read_bytes())

    def _measured(self) -> list[str]:
        there = self._there
        infos = there.filesystem.get_file_info(fs.FileSelector(there.path_of("")))
        return [info.base_name for info in infos if fnmatch(info.base_name, ATTENTION_FILES)]

    def _snapshots(self) -> set[str]:
        """Those that are whole."""
        selector = fs.FileSelector(self._there.path_of(SNAPSHOTS), allow_not_found=True)
        names = {info.base_name for info in self._there.filesystem.get_file_info(selector)}
        return {name for name in names if self._exists(f"{SNAPSHOTS}/{name}/{MANIFEST}")}

    def _send(self, run: Path, name: str) -> None:
        there, target = self._there.filesystem, self._there.path_of(name)
        folder, _, file = target.rpartition("/")
        there.create_dir(folder, recursive=True)
        # Object stores show a file when all of it has arrived; a disk shows what is there of it.
        is_disk = isinstance(there, fs.LocalFileSystem)
        sent = f"{folder}/.{file}.unfinished" if is_disk else target
        fs.copy_files(str(run / name), sent, self._here, there)
        if is_disk:
            there.move(sent, target)

    def _fetch(self, run: Path, name: str) -> None:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.unfinished")
        fs.copy_files(self._there.path_of(name), str(unfinished), self._there.filesystem, self._here)
        unfinished.replace(path)
