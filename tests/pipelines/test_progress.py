"""Which validation is the best one."""

from __future__ import annotations

import json
import math

from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.training.progress import RunProgress


def test_what_is_no_number_does_not_stay_the_best():
    progress = (
        RunProgress().validated(math.nan, 10).validated(0.6, 20).validated(0.5, 30).validated(math.nan, 40)
    )

    assert (progress.best_value, progress.best_step, progress.stale) == (0.6, 20, 2)


def test_what_is_no_number_is_no_improvement_and_ends_the_patience_with_it():
    progress = RunProgress().validated(math.nan, 10).validated(math.nan, 20).validated(math.nan, 30)

    assert (progress.best_step, progress.stale) == (10, 2)


def test_of_equal_values_the_first_is_the_best():
    progress = RunProgress().validated(0.5, 10).validated(0.5, 20)

    assert (progress.best_step, progress.stale) == (10, 1)


def test_records_are_json_whatever_the_figures_are(tmp_path):
    folder = object.__new__(RunFolder)
    object.__setattr__(folder, "path", tmp_path)

    folder.log({"step": 1, "valid": {"gauc": math.nan, "auc": 0.5}, "more": [math.inf, 2.0]})

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "valid": {"gauc": None, "auc": 0.5}, "more": [None, 2.0]}
