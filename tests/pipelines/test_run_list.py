import json

import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.run_list import list_runs
from rayrec.platform.errors import InputError

CONFIG = RunConfig.parse({"data": {"path": "data"}, "model": {"name": "sasrec"}})


def test_runs_say_how_they_stand_and_why_they_stopped(tmp_path):
    for name in ("alive", "died", "failed", "finished"):
        RunFolder.create(tmp_path / name, CONFIG)
    RunFolder(tmp_path / "failed").update(state="failed", error="DivergedError: step 7: the loss is nan")
    RunFolder(tmp_path / "finished").update(
        state="finished", last="step-000000120", progress={"best_value": 0.25}, rollbacks=2
    )
    RunFolder(tmp_path / "alive").update(metric="ndcg@10", now={"step": 60, "steps": 240, "is_total": True})
    RunFolder(tmp_path / "died").update(now={"step": 60, "steps": 80, "is_total": False})
    (tmp_path / "something else").mkdir()

    with RunFolder.locked(tmp_path / "alive", "run"):
        runs = {run.name: run for run in list_runs(tmp_path)}

    assert {name: run.condition for name, run in runs.items()} == {
        "alive": "running",
        "died": "died",
        "failed": "failed",
        "finished": "finished",
    }
    assert runs["failed"].reason == "DivergedError: step 7: the loss is nan"
    assert "ended without a word" in (runs["died"].reason or "")
    assert runs["alive"].reason is None
    finished = runs["finished"]
    assert (finished.saved_steps, finished.best_value, finished.num_rollbacks) == (120, 0.25, 2)
    assert (runs["alive"].step, runs["alive"].total_steps, runs["alive"].metric) == (60, 240, "ndcg@10")
    assert (runs["died"].step, runs["died"].total_steps) == (60, None)  # a folder that grows
    assert runs["failed"].step is None
    json.dumps([vars(run) for run in runs.values()])  # what --json prints


def test_no_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        list_runs(tmp_path / "nowhere")
