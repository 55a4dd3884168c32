"""Asking a running training for a snapshot, through its folder: every user who can write to it can ask.

RUN/requests/ID             asks
RUN/requests/ID.answer      name of the snapshot, or why there is none
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.platform.errors import InputError, MachineError
from rayrec.platform.files import write_atomically, write_json

FOLDER = "requests"
_ANSWER = ".answer"
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class SnapshotAnswer:
    """What became of a request."""

    snapshot: str | None
    error: str | None = None


class SnapshotRequests:
    """The training's end."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._folder.mkdir(exist_ok=True)

    def pending(self) -> list[str]:
        """Requests without an answer."""
        try:
            names = {entry.name for entry in self._folder.iterdir()}
        except FileNotFoundError:  # somebody has deleted it; who asks makes it again
            return []
        return sorted(
            name
            for name in names
            if not name.startswith(".") and not name.endswith(_ANSWER) and name + _ANSWER not in names
        )

    def answer(self, requests: list[str], answer: SnapshotAnswer) -> None:
        for request in requests:
            if (self._folder / request).exists():  # an answer is deleted by who waits for it
                with suppress(FileNotFoundError):  # the folder is deleted just now
                    write_json(self._folder / (request + _ANSWER), asdict(answer))


def request_snapshot(run: Path, timeout_s: float, sleep: Callable[[float], None] = time.sleep) -> Path:
    """Let the process that trains in a run's folder write a snapshot at the next step, and wait for it.

    Raises:
        InputError: nothing trains there.
        MachineError: it ends before it has answered, does not answer in time, or could not write it.
    """
    folder = RunFolder.open(run)
    if not folder.is_alive:
        raise InputError(f"{run}: nothing trains in this folder now (its state: {folder.condition})")
    request = run / FOLDER / uuid.uuid4().hex
    answer_path = request.with_name(request.name + _ANSWER)
    request.parent.mkdir(exist_ok=True)
    write_atomically(request, b"")
    try:
        ends = time.monotonic() + timeout_s
        while True:
            is_alive = folder.is_alive  # first: its last act may be the answer
            if answer_path.exists():
                break
            if not is_alive:
                raise MachineError(
                    f"{run}: the run ended before it wrote the snapshot (its state: {folder.condition})"
                )
            if time.monotonic() > ends:
                raise MachineError(f"{run}: no snapshot after {timeout_s:.0f} s; ask with a longer --timeout")
            sleep(_LOOK_EVERY_S)
        answer = SnapshotAnswer(**json.loads(answer_path.read_text()))
    finally:
        request.unlink(missing_ok=True)
        answer_path.unlink(missing_ok=True)
    if answer.snapshot is None:
        raise MachineError(f"{run}: the snapshot could not be written: {answer.error}")
    return folder.path / "snapshots" / answer.snapshot
