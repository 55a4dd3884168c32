"""`rayrec tune` as a person meets it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrec.cli.tuning import _table
from rayrec.platform.checkout import CHECKOUT
from tests.cli.commands import answer, rayrec, refused
from tests.helpers.training_runs import settings, walks

RATE = "training.optimizer.learning_rate"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A run's config, and a search that begins with it."""
    folder = tmp_path_factory.mktemp("tune")
    run, search = folder / "run.yaml", folder / "search.yaml"
    run.write_text(yaml.safe_dump(settings(walks(folder)).model_dump(mode="json", exclude_unset=True)))
    search.write_text(
        f"config: {run}\ntrials: 3\nspace:\n  {RATE}: {{kind: float, low: 0.0001, high: 0.05, log: true}}\n"
    )
    return run, search


def test_a_search_ends_with_a_table_and_a_config_to_train(files, tmp_path):
    _, search = files
    code, stdout, stderr = rayrec("tune", search, "--folder", tmp_path / "search", "--local")

    assert code == 0, stderr
    assert "best.yaml" in stdout
    assert "3 complete, 0 ended early, 0 failed" in stdout
    assert [line.split(":")[0] for line in stderr.splitlines() if line.startswith("trial ")] == [
        "trial 0",
        "trial 1",
        "trial 2",
    ]
    trained = answer("train", tmp_path / "search" / "best.yaml", "--run", tmp_path / "run", "--local")
    found = answer("tune", search, "--folder", tmp_path / "search", "--local", "--resume")
    assert trained["best_value"] == found["best_value"]
    assert found["best_settings"].keys() == {RATE}


def trial(number: int, value: float) -> dict[str, Any]:
    """One that is complete."""
    told = {"state": "complete", "same_as": None, "minutes": 1.0}
    return {"trial": number, "settings": {RATE: 0.1}, "value": value, **told}


@pytest.mark.parametrize(("is_larger_better", "then"), [(True, "4310"), (False, "0134")])
def test_the_table_has_the_best_trials_wherever_the_winner_of_finalists_stands(is_larger_better, then):
    """The third one, of middling value, won on all validation users."""
    trials = [trial(number, value) for number, value in enumerate([0.1, 0.2, 0.3, 0.5, 0.6])]

    table = _table(trials, "ndcg@10", 2, is_larger_better)

    assert "".join(table.columns[0].cells) == f"2{then}"


def test_what_is_wrong_is_said_before_anything_starts(files, tmp_path):
    run, search = files
    to = ("--folder", tmp_path / "search", "--local")

    assert "did you mean 'space'?" in refused("tune", search, *to, "--set", "spce=1")
    assert "no such config file" in refused("tune", tmp_path / "none.yaml", *to)
    assert "no such config file" in refused("tune", search, *to, "--set", f"config={tmp_path / 'none.yaml'}")
    assert "did you mean 'recall@10'?" in refused("tune", search, *to, "--set", "metric=recll@10")
    assert "trial.actors is set" in refused("tune", search, *to, "--set", "trial.actors=true")
    nowhere = f"settings={{data.path: {tmp_path / 'nowhere'}}}"
    assert str(tmp_path / "nowhere") in refused("tune", search, *to, "--set", nowhere)
    assert not (tmp_path / "search").exists()

    other = tmp_path / "other.yaml"
    other.write_text(search.read_text().replace(RATE, "training.optimiser.learning_rate"))
    line = refused("tune", other, *to)
    assert (
        f"no setting 'training.optimiser.learning_rate' in the run of {run}; did you mean '{RATE}'?" in line
    )


@pytest.mark.slow
def test_a_search_whose_process_is_killed_goes_on_to_the_same_trials(files, tmp_path):
    _, search = files

    def command(folder: Path, *more: str) -> list[str]:
        arguments = ("tune", str(search), "--folder", str(folder), "--local", "--set", "trials=6", *more)
        return [sys.executable, "-m", "rayrec", *arguments]

    def journal(folder: Path) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
        timed = ("minutes", "cpu_minutes")
        return [{name: value for name, value in line.items() if name not in timed} for line in lines]

    subprocess.run(command(tmp_path / "whole"), check=True, cwd=CHECKOUT, timeout=200)
    killed = subprocess.Popen(command(tmp_path / "killed"), cwd=CHECKOUT)
    snapshots = tmp_path / "killed" / "trials" / "002" / "snapshots"
    try:
        while not list(snapshots.glob("step-*")):
            assert killed.poll() is None
            time.sleep(0.01)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
    assert len(journal(tmp_path / "killed")) < 7

    subprocess.run(command(tmp_path / "killed", "--resume"), check=True, cwd=CHECKOUT, timeout=200)

    assert journal(tmp_path / "killed") == journal(tmp_path / "whole")
    same = [(tmp_path / name / "best.yaml").read_bytes() for name in ("killed", "whole")]
    assert same[0] == same[1]
