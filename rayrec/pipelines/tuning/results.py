"""What a search shows of itself while it goes on: journal, table, best config, and snapshots that stay."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from rayrec.pipelines.tuning.config import TuningConfig
from rayrec.pipelines.tuning.folder import TABLE_FILE, TuningFolder
from rayrec.pipelines.tuning.search import Tried
from rayrec.pipelines.tuning.space import SearchSpace
from rayrec.platform.files import write_atomically


class Results:
    """Keeps the folder of a search as it stands after each trial."""

    def __init__(self, folder: TuningFolder, tuning: TuningConfig, space: SearchSpace, metric: str) -> None:
        self._folder = folder
        self._tuning = tuning
        self._space = space
        self._metric = metric
        self._tried: list[Tried] = []
        self._leading: Sequence[Tried] = ()

    def told(self, tried: Tried, leading: Sequence[Tried]) -> None:
        """Note a trial; one of the journal changes what a search that was killed has left undone.

        Args:
            leading: so far, with this one, best first.
        """
        self._tried.append(tried)
        if tried.is_new:
            seed = self._space.base.seed
            self._folder.add(tried.number, tried.settings, tried.outcome, {"seed": seed})
        if leading and (not self._leading or leading[0] is not self._leading[0]):
            self._write_best(leading[0], leading[0].outcome.value, "in validation")
        self._keep(leading, (*self._leading, tried))
        self._leading = leading
        write_atomically(self._folder.path / TABLE_FILE, table(self._tried, self._metric).encode())

    def won(self, winner: Tried, value: float | None) -> None:
        """Note which of the leading trials is the best.

        Args:
            value: of the metric, on all validation users; None: there was nothing to compare it with.
        """
        if value is not None:
            self._write_best(winner, value, "on all validation users")
        self._keep((winner,), self._leading)

    def _keep(self, kept: Sequence[Tried], of: Sequence[Tried]) -> None:
        if self._tuning.keep == "best":
            numbers = {tried.number for tried in kept}
            for tried in of:
                if tried.number not in numbers:
                    self._folder.delete_snapshots(tried.number)

    def _write_best(self, best: Tried, value: float | None, where: str) -> None:
        self._folder.write_best(
            self._space.values_of(best.settings),
            f"Trial {best.number} of `rayrec tune`: {self._metric} {value:.4f} {where}.",
        )


def table(tried: Sequence[Tried], metric: str) -> str:
    """The trials as CSV, in order."""
    keys = list(tried[0].settings) if tried else []
    head = [
        "trial",
        "state",
        metric,
        *keys,
        "steps",
        "best_step",
        "minutes",
        "cpu_minutes",
        "same_as",
        "reason",
    ]
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(head)
    for each in tried:
        outcome = each.outcome
        writer.writerow(
            [
                each.number,
                outcome.state,
                outcome.value,
                *(_cell(each.settings[key]) for key in keys),
                outcome.steps,
                outcome.best_step,
                round(outcome.minutes, 2),
                None if outcome.cpu_minutes is None else round(outcome.cpu_minutes, 2),
                outcome.same_as,
                outcome.reason,
            ]
        )
    return written.getvalue()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value
