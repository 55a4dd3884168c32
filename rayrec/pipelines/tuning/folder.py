"""What a search leaves on disk.

FOLDER/tuning.yaml         the settings of the search
FOLDER/base.yaml           the run that it begins with, as it was then
FOLDER/journal.jsonl       one line for how it began, then one per trial, in order; only ever added to
FOLDER/trials/NUMBER/      the run of each trial, which `rayrec runs` and `rayrec evaluate` read
FOLDER/trials.csv          the trials as a table, written again after each
FOLDER/best.yaml           the run of the best one so far, for `rayrec train`
FOLDER/finalists.json      what leading trials are worth on all validation users, by number
FOLDER/.lock               held by the process that searches
"""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.tuning.config import TuningConfig
from rayrec.pipelines.tuning.outcome import Outcome
from rayrec.pipelines.tuning.space import SearchSpace, Settings
from rayrec.platform.config import differing_keys, is_among, read_values
from rayrec.platform.errors import InputError, MachineError
from rayrec.platform.files import append_line, is_unfinished, write_atomically, write_json

logger = logging.getLogger(__name__)

SETTINGS_FILE, BASE_FILE, JOURNAL_FILE = "tuning.yaml", "base.yaml", "journal.jsonl"
LOCK_FILE, TRIALS, BEST_FILE, TABLE_FILE = ".lock", "trials", "best.yaml", "trials.csv"
FINALISTS_FILE = "finalists.json"
FREE_OF_SEARCH = ("config", "folder", "trials", "keep", "trial.", "finalists")
"""Settings of a search that may change when it goes on: no trial that was tried depends on them. The config
is compared by what is in it."""
FREE_OF_RUN = (
    *("data.path", "data.semantic_ids"),  # their content is compared, by the journal's first line
    *("cluster.", "placement.", "tracking.", "recovery.", "snapshots."),
    *("pipeline.num_readers", "pipeline.num_feature_workers", "pipeline.queue_depth"),
    *("pipeline.cpus_per_actor", "sparse.wait_timeout_s", "sparse.server_memory"),
)
"""Settings of the run that may change when a search goes on. Fewer than of a run that goes on: what a run may
change for a resume may change bits (`training.compile`), and trials before and after are compared."""
_DELETED = (
    "the search keeps those of its best trial alone; search with keep: all, or train the settings again, "
    "which are in trials.csv"
)


@dataclass(frozen=True)
class Entry:
    """One trial of the journal."""

    settings: Settings
    outcome: Outcome


class TuningFolder:
    """The folder of one search."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def holds_search(self) -> bool:
        """Whether a search was begun here: not where the first line of its journal was cut short."""
        path = self.path / JOURNAL_FILE
        return path.is_file() and any(True for _ in _lines(path))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside the block, no other process searches in the folder, which is made where it is missing.

        Raises:
            MachineError: one does.
            InputError: the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / LOCK_FILE, "a+")  # noqa: SIM115
        except OSError as error:
            raise InputError(
                f"{self.path}: the folder of the search cannot be made ({error.strerror}); choose another "
                "with --folder"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise MachineError(
                    f"{self.path}: another process searches in this folder; wait until it ends, or choose "
                    "another with --folder"
                ) from error
            yield

    def check_free(self) -> None:
        """Refuse to begin where there is something already.

        Raises:
            InputError: says what is there.
        """
        if self.holds_search:
            raise InputError(
                f"{self.path}: this folder holds a search already; continue it with --resume, or choose "
                "another with --folder"
            )
        left = {LOCK_FILE, SETTINGS_FILE, BASE_FILE, JOURNAL_FILE}  # of a search that was killed as it began
        if self.path.exists() and not (
            self.path.is_dir()
            and all(entry.name in left or is_unfinished(entry.name) for entry in self.path.iterdir())
        ):
            raise InputError(f"{self.path}: not an empty folder; choose another one with --folder")

    def begin(self, tuning: TuningConfig, space: SearchSpace, how: dict[str, Any]) -> None:
        """Write what the search is.

        Args:
            how: what its suggestions depend on besides: versions, and what decides.
        """
        write_atomically(self.path / SETTINGS_FILE, tuning.to_yaml().encode())
        write_atomically(self.path / BASE_FILE, _yaml(space.values))
        write_atomically(self.path / JOURNAL_FILE, json.dumps(how).encode() + b"\n")

    def check_continues(self, tuning: TuningConfig, space: SearchSpace) -> None:
        """Refuse to go on with another search.

        Raises:
            InputError: names what differs.
        """
        if not self.holds_search:
            raise InputError(f"{self.path}: holds no search to go on with; leave --resume out to begin one")
        begun = TuningConfig.load(self.path / SETTINGS_FILE)
        changed = [key for key in differing_keys(begun, tuning) if not is_among(key, FREE_OF_SEARCH)]
        base = RunConfig.parse(read_values(self.path / BASE_FILE), str(self.path / BASE_FILE))
        of_run = differing_keys(base, space.base)
        changed += [f"the run's {key}" for key in of_run if not is_among(key, FREE_OF_RUN)]
        if changed:
            raise InputError(
                f"{self.path}: holds another search, which differs in {', '.join(changed)}; use what it was "
                f"begun with ({self.path / SETTINGS_FILE}), or choose another folder with --folder"
            )

    def go_on(self, tuning: TuningConfig) -> None:
        """Write the settings with which the search goes on."""
        write_atomically(self.path / SETTINGS_FILE, tuning.to_yaml().encode())

    def read_journal(self) -> tuple[dict[str, Any], list[Entry]]:
        """How the search began, and its trials from the first on.

        Raises:
            InputError: the journal is not as it was written.
        """
        path = self.path / JOURNAL_FILE
        lines = list(_lines(path))
        if not lines or "trial" in lines[0]:
            raise InputError(f"{path}: does not say how the search began; the file was changed")
        entries: list[Entry] = []
        for line in lines[1:]:
            if line.get("trial") != len(entries):
                raise InputError(
                    f"{path}: trial {line.get('trial')} follows {len(entries)} trials; the file was changed"
                )
            entries.append(Entry(line["settings"], Outcome.of_json(line)))
        return lines[0], entries

    def add(self, number: int, settings: Settings, outcome: Outcome, further: dict[str, Any]) -> None:
        """Add a trial to the journal; on disk when this returns.

        Args:
            further: what is noted of it besides.
        """
        self._append({"trial": number, "settings": settings, **further, **outcome.to_json()})

    def trial_path(self, number: int) -> Path:
        return self.path / TRIALS / f"{number:03d}"

    def has_snapshots(self, number: int) -> bool:
        """Whether a trial can be judged: its snapshots were deleted neither by the search nor by hand."""
        path = self.trial_path(number)
        try:
            return (path / "run.json").is_file() and RunFolder(path).chosen_snapshot("best").is_dir()
        except InputError:
            return False

    def delete_snapshots(self, number: int) -> None:
        """Leave of a trial's run its logs and settings."""
        path = self.trial_path(number)
        if not (path / "run.json").is_file():
            return
        run = RunFolder(path)
        # First run.json: a snapshot that it names has to be there.
        if run.state.get("last") is not None:
            run.update(best=None, last=None, deleted=_DELETED)
        if run.snapshots.is_dir():
            run.keep_only(set())

    def write_best(self, values: dict[str, Any], head: str) -> None:
        """Write the run of the best trial.

        Args:
            head: a line of comment.
        """
        write_atomically(self.path / BEST_FILE, f"# {head}\n".encode() + _yaml(values))

    def read_judged(self) -> dict[int, float]:
        """What `write_judged` wrote; nothing before.

        Raises:
            InputError: the file was changed.
        """
        path = self.path / FINALISTS_FILE
        if not path.is_file():
            return {}
        try:
            return {int(number): float(value) for number, value in json.loads(path.read_bytes()).items()}
        except (ValueError, AttributeError, TypeError) as error:
            raise InputError(f"{path}: is not as it was written; the file was changed") from error

    def write_judged(self, values: Mapping[int, float]) -> None:
        """Write a metric of some trials on all validation users, by number."""
        write_json(self.path / FINALISTS_FILE, {str(number): value for number, value in values.items()})

    def _append(self, record: dict[str, Any]) -> None:
        append_line(self.path / JOURNAL_FILE, json.dumps(record, default=str).encode())


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Records of the journal, without one that a power cut has cut short: its trial is tried again."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            record = json.loads(line) if line else None
        except ValueError:
            record = None
        if isinstance(record, dict):
            yield record
        elif line:
            logger.warning("%s: line %d was cut short and is left out", path, number)


def _yaml(values: dict[str, Any]) -> bytes:
    text: str = yaml.safe_dump(values, sort_keys=False)
    return text.encode()
