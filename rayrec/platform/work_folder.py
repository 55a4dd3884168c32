"""What work in many tasks has done, in a folder beside its result: work that was killed goes on there.

    .NAME.preparing/plan.json     what is made, and how
                    results/      what the tasks that are done have found
                    data/         the files of the result, until it is renamed
                    spill/        tables between the passes, unless they lie in another folder

When `data/` has become the result, only the plan is left of it: work that is killed then begins again, since
its tasks would all count as done.

A result is written when the files of its task are whole. What a power cut leaves of files is not looked at:
then delete the folder, and begin again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pickle
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rayrec.platform.errors import InputError, MachineError, NoRoomError
from rayrec.platform.files import no_room, remove_unfinished, write_json, written_whole
from rayrec.platform.tasks import RunTasks, Task

logger = logging.getLogger(__name__)

_PLAN = "plan.json"
_MADE_BY = "preparation.json"
"""In a result, what it was made of and how: a command that is repeated can tell that it is done."""
_SPILLED = "spilled.txt"
"""Says where the tables between the passes are."""


@dataclass(frozen=True)
class Work:
    """What work is called: in the name of its folder, and in messages."""

    suffix: str
    noun: str
    at_it: str
    """What another process does at the moment."""
    again: str
    """What to do after the folder was deleted."""


PREPARATION = Work("preparing", "preparation", "prepares this data set", "prepare")


class WorkFolder:
    """The folder of one piece of work, held by one process at a time."""

    def __init__(self, out: Path, spill_to: Path | None, work: Work) -> None:
        """
        Args:
            spill_to: another folder for the tables between the passes.
        """
        self.path = out.parent / f".{out.name}.{work.suffix}"
        name = hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:12]
        self._spill_name = f"{out.name}.{work.suffix}-{name}"
        self.spill = self.path / "spill" if spill_to is None else spill_to / self._spill_name
        self._work = work
        self.data = self.path / "data"

    @classmethod
    @contextmanager
    def open(
        cls,
        out: Path,
        spill: Path | None,
        plan: Mapping[str, Any],
        resume: bool,
        work: Work = PREPARATION,
    ) -> Iterator[WorkFolder]:
        """The folder inside the block. It is gone after the block, and after an error that would come again;
        after an interruption it stays.

        Args:
            out: the folder to write.
            spill: another folder for the tables between the passes.
            plan: what is made, and how; plain values. `files` has pairs of a file and its version.
            resume: go on with what interrupted work has done, if there is some.

        Raises:
            MachineError: another process is at work.
            InputError: one is there and is not to be resumed, had another plan, or is another user's.
        """
        if spill is not None and not spill.is_dir():  # a disk that is not mounted, which would be another one
            raise InputError(f"{spill}: no such folder for the tables between the passes; create it")
        folder = cls(out, spill, work)
        path = folder.path
        try:
            path.mkdir(0o700, parents=True, exist_ok=True)
            _check_owner(path)
            with (path / "lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise MachineError(
                        f"{out}: another process {work.at_it} at the moment; wait for it"
                    ) from None
                if folder._has_begun():
                    folder._check(plan, resume)
                    folder._make()
                    for one in (path, folder.spill):  # nobody else is at work: what is half written stays so
                        remove_unfinished(one)
                else:
                    folder._begin(plan)
                try:
                    yield folder
                except (InputError, NoRoomError):
                    folder.delete()
                    raise
                folder.delete()
        except OSError as error:
            if (full := no_room(error, path.parent)) is not None:
                folder.delete()
                raise full from error
            raise

    def run(
        self,
        stage: str,
        run_tasks: RunTasks,
        task: Task,
        shared: Any,
        arguments: Sequence[Any],
        on_result: Callable[[int, Any], None] = lambda index, result: None,
        keep: bool = True,
    ) -> list[Any]:
        """The results of the tasks of a stage, in the order of the arguments; those that are done are read.

        Args:
            on_result: called with (index of the argument, result) of each.
            keep: whether results are returned; else they are left to `on_result`, so that not all are held.
        """
        results: dict[int, Any] = {}
        for index in range(len(arguments)):
            path = self._result(stage, index)
            if path.exists():
                result = pickle.loads(path.read_bytes())
                on_result(index, result)
                results[index] = result if keep else None
        missing = [index for index in range(len(arguments)) if index not in results]
        # Closed before an error leaves here: no task writes any more when the folder is deleted.
        with closing(run_tasks(task, shared, [arguments[index] for index in missing])) as found:
            for at, result in found:
                index = missing[at]
                self._save(self._result(stage, index), result)
                on_result(index, result)
                results[index] = result if keep else None
        return [results[index] for index in range(len(arguments))]

    def results(self, stage: str, count: int) -> Iterator[Any]:
        """The results of the tasks of a stage that has run, one after the other: not all are held."""
        for index in range(count):
            yield pickle.loads(self._result(stage, index).read_bytes())

    def remove_spilled(self, pattern: str) -> None:
        """Delete spilled tables that no later pass reads."""
        for path in self.spill.glob(pattern):
            path.unlink(missing_ok=True)

    def keep_plan(self, report: Any = None) -> None:
        """Leave in the result what it was made of, for `finished_report`.

        Args:
            report: plain values of what a repeated command should say.
        """
        plan = json.loads((self.path / _PLAN).read_text())
        write_json(self.data / _MADE_BY, {"plan": plan, "report": report})

    def delete(self) -> None:
        """Delete all of it; what stays after a kill meanwhile is not gone on with."""
        with contextlib.suppress(OSError):
            (self.path / _PLAN).unlink()
        shutil.rmtree(self.spill, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def _has_begun(self) -> bool:
        """Whether there is something to go on with: neither is the result in its place, nor is it deleted."""
        return (self.path / _PLAN).exists() and self.data.is_dir()

    def _begin(self, plan: Mapping[str, Any]) -> None:
        """Start with nothing, whatever work that was killed at its beginning or its end has left."""
        noted = self._noted_spill()
        (self.path / _PLAN).unlink(missing_ok=True)
        for left in (self._results, self.data, self.spill, *([] if noted is None else [noted])):
            if left.exists():
                shutil.rmtree(left)
        self._make()
        with written_whole(self.path / _SPILLED) as unfinished:
            unfinished.write_text(str(self.spill.absolute()))
        write_json(self.path / _PLAN, plan)  # last: now it has begun

    def _make(self) -> None:
        for folder in (self._results, self.data, self.spill):
            folder.mkdir(0o700, parents=True, exist_ok=True)

    @property
    def _results(self) -> Path:
        return self.path / "results"

    def _result(self, stage: str, index: int) -> Path:
        return self._results / f"{stage}-{index:06}.pickle"

    def _save(self, path: Path, result: Any) -> None:
        with written_whole(path) as unfinished:
            unfinished.write_bytes(pickle.dumps(result))

    def _check(self, plan: Mapping[str, Any], resume: bool) -> None:
        before = json.loads((self.path / _PLAN).read_text())
        if not resume:
            raise InputError(
                f"{self.path}: a {self._work.noun} that was interrupted has got this far; go on with it "
                f"(--resume), or delete {' and '.join(self._folders())}"
            )
        found = _difference(before, plan, f"the interrupted {self._work.noun} began")
        if found is not None:
            folders = " and ".join(self._folders())
            raise InputError(
                f"{found.what}; delete {folders}, and {self._work.again} again"
                if found.remedy is None
                else f"{found.what}; {found.remedy}, or delete {folders}"
            )

    def _folders(self) -> list[str]:
        """What interrupted work has left, wherever it spilled."""
        spilled = self._noted_spill()
        return [str(self.path), *([] if spilled is None else [str(spilled)])]

    def _noted_spill(self) -> Path | None:
        """The other folder that interrupted work has spilled to; None: it has not.

        It has the name that such folders get, or is none: it may be deleted, so a note that is damaged must
        not name just any folder.
        """
        note = self.path / _SPILLED
        spilled = Path(note.read_text()) if note.is_file() else Path()
        return spilled if spilled.is_absolute() and spilled.name == self._spill_name else None

    def _delete_finished(self, plan: Mapping[str, Any]) -> None:
        """Delete what work of this plan that was killed at its very end has left; nothing else."""
        with contextlib.suppress(OSError):
            _check_owner(self.path)
            with (self.path / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = self.path / _PLAN
                if found.exists() and json.loads(found.read_text()) != plan:  # else it was being deleted
                    logger.warning(
                        "%s: interrupted work of another plan; nothing of it is deleted", self.path
                    )
                    return
                self.spill = self._noted_spill() or self.spill
                self.delete()


def finished_report(out: Path, plan: Mapping[str, Any], work: Work = PREPARATION) -> Any:
    """What `WorkFolder.keep_plan` was given, of a result that is whole.

    Deletes what the same work has left beside it, if it was killed at its very end.

    Raises:
        InputError: the result is of another plan, or does not say of which.
    """
    remedy = "give a new folder, or set overwrite (--overwrite)"
    try:
        made_by = json.loads((out / _MADE_BY).read_text())
    except FileNotFoundError:
        raise InputError(
            f"{out}: a data set is there already, and does not say what it was made of, as those do that "
            f"--resume can go on with; {remedy}"
        ) from None
    found = _difference(made_by["plan"], plan, "the data set was made")
    if found is not None:
        raise InputError(f"{out}: {found.what}; {remedy}")
    try:
        WorkFolder(out, None, work)._delete_finished(made_by["plan"])
    except InputError as error:  # the result is whole, although something else lies beside it
        logger.warning("%s", error)
    return made_by["report"]


class _Difference(NamedTuple):
    what: str
    remedy: str | None
    """None: it cannot be undone."""


def _difference(before: Mapping[str, Any], plan: Mapping[str, Any], since: str) -> _Difference | None:
    """The first difference between two plans.

    Args:
        since: when the earlier one was made, as the end of a sentence.
    """
    then, now = dict(before), json.loads(json.dumps(plan))
    was, are = (dict(map(tuple, one.pop("files"))) for one in (then, now))
    for file in sorted(was.keys() | are.keys()):
        if was.get(file) != are.get(file):
            what = "is new" if file not in was else "is gone" if file not in are else "has changed"
            return _Difference(f"{file}: the file {what} since {since}", None)
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            what = f"{name} is {now.get(name)!r}, but {since} with {then.get(name)!r}"
            return _Difference(what, "set it to that")
    return None


def _check_owner(path: Path) -> None:
    """Refuse a folder that somebody else may have filled: results are unpickled, which can run code."""
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(
            f"{path}: the folder belongs to another user, or others may write to it, and what lies in it "
            "would be trusted; delete it, and begin again"
        )
