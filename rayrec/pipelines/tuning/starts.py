"""How often a trial was started without coming any further, which outlives the processes that it ends."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.platform.files import write_json


class Starts:
    """Counts the starts of a trial since its last snapshot."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: of the trial. The count lies beside it: a run begins in an empty folder.
        """
        self._file = folder.with_name(f"{folder.name}.starts.json")
        self._snapshot = RunFolder(folder).state.get("last") if (folder / "run.json").is_file() else None
        known = json.loads(self._file.read_bytes()) if self._file.is_file() else {}
        came_further = known.get("snapshot") != self._snapshot
        self.number: int = 0 if came_further else known.get("number", 0)
        self.ended: str = known.get("ended", _DIED)
        """The last time, in words."""

    def count(self) -> None:
        """Note one more, before it: nothing is noted by a process that dies."""
        self._write(self.number + 1, _DIED)

    def take_back(self) -> None:
        """The last one ended for a reason that is not the trial's."""
        with suppress(OSError):  # what ended it is said in any case, also where a disk is full or away
            if self.number > 1:
                self._write(self.number - 1, self.ended)
            else:
                self.forget()

    def note(self, error: str) -> None:
        """The last one ended with an error."""
        with suppress(OSError):
            self._write(self.number, f"it ended with an error, the last time: {error}")

    def forget(self) -> None:
        """The trial is over."""
        self._file.unlink(missing_ok=True)

    def _write(self, number: int, ended: str) -> None:
        self.number, self.ended = number, ended
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._file, {"number": number, "snapshot": self._snapshot, "ended": ended})


_DIED = "its process died without a word"
