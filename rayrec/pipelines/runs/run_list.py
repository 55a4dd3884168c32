"""The runs below a folder, in short."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.platform.errors import InputError


@dataclass(frozen=True)
class RunSummary:
    """How a run stands."""

    name: str
    condition: str
    """As `RunFolder.condition` says it."""
    saved_steps: int
    """Steps that its last snapshot has."""
    step: int | None
    """Steps that it has trained; None in the folders of earlier versions."""
    total_steps: int | None
    """Steps of the whole run; None where that is not known."""
    metric: str | None
    """That it validates by."""
    best_value: float | None
    """Of that metric."""
    last_snapshot: str | None
    num_rollbacks: int
    """Times that it went back to its last snapshot by itself."""
    reason: str | None
    """Why it stopped; None while it runs, and where it is finished."""


_DIED = "its process ended without a word (killed, or its machine went down); --resume continues it"


def list_runs(folder: Path) -> list[RunSummary]:
    """Runs directly below a folder, by name.

    Raises:
        InputError: there is no such folder.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; give the one that holds the folders of runs")
    runs = [RunFolder(path) for path in sorted(folder.iterdir()) if (path / "run.json").is_file()]
    return [_summary(run) for run in runs]


def _summary(run: RunFolder) -> RunSummary:
    condition, state = run.condition, run.state
    last: str | None = state["last"]
    now = state.get("now") or {}
    result = state.get("result") or {}
    return RunSummary(
        name=run.name,
        condition=condition,
        saved_steps=0 if last is None else int(last.removeprefix("step-")),
        step=result.get("steps", now.get("step")) if condition == "finished" else now.get("step"),
        total_steps=now.get("steps") if now.get("is_total") else None,
        metric=state.get("metric") or result.get("best_metric"),
        best_value=(state.get("progress") or {}).get("best_value"),
        last_snapshot=last,
        num_rollbacks=state.get("rollbacks", 0),
        reason=_DIED if condition == "died" else state.get("error"),
    )
