"""RUN/accepted.jsonl: which files of a growing folder a run has accepted, and in which order.

A snapshot knows the files that were accepted when it was made. Those that came after it are here, written
before the first of their rows is read: a run that goes back to a snapshot, or is killed and resumed, finds
the same rows in the same steps.

The first line says how rows are put in order, every other one is a segment. A line that was cut short by
the death of its writer counts for nothing: none of its rows was read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rayrec.pipelines.runs.run_folder import ACCEPTED_FILE
from rayrec.platform.files import sync, write_atomically
from rayrec.samples.reading.followed_plan import FollowedPlan


class AcceptedFiles:
    """The file of one run."""

    def __init__(self, run: Path) -> None:
        self._path = run / ACCEPTED_FILE
        self._num_kept: int | None = None
        """Segments that are in the file by our own doing; None before the first."""

    def state_since(self, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """The state of a plan (`FollowedPlan.to_json`) with the segments that were accepted after it.

        Args:
            state: that of a snapshot; None begins with the first step.

        Returns:
            None if nothing was accepted.
        """
        lines = self._lines()
        if not lines:
            return state
        head, *segments = lines
        if state is None:
            return {**head, "segments": segments, "unreadable": {}}
        before = state["segments"]
        if [_content(one) for one in segments[: len(before)]] != [_content(one) for one in before]:
            return state  # of another life of the folder: brought back from a copy
        return {**state, "segments": [*before, *segments[len(before) :]]}

    def keep(self, plan: FollowedPlan) -> None:
        """Write down what the plan has accepted; on disk when this returns."""
        # Only what is new is looked at: the training loop waits for this, however many files there have been.
        if self._num_kept is None:
            lines = [plan.head_to_json(), *plan.segments_to_json(0)]
            write_atomically(self._path, b"".join(_line(one) for one in lines))
        elif plan.num_segments > self._num_kept:
            with open(self._path, "ab") as file:
                file.writelines(_line(one) for one in plan.segments_to_json(self._num_kept))
            sync(self._path)
        self._num_kept = plan.num_segments

    def _lines(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        lines = self._path.read_bytes().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _content(segment: dict[str, Any]) -> list[Any]:
    """What makes the segment what it is, but for the times at which files were last put in place."""
    files = [(file["name"], file["size"], file["footer"]) for file in segment["files"]]
    return [segment["num_steps"], *files]
