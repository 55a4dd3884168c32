"""`rayrec data cursor` as it is typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import CURSOR
from tests.helpers.data import write_log
from tests.helpers.runs import change_manifest, make_run


def cursor(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["data", "cursor", *map(str, arguments), "--json"])
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def answer(*arguments: object) -> dict:
    code, stdout, stderr = cursor(*arguments)
    assert code == 0, stderr
    return json.loads(stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


def test_epochs_come_first_and_files_if_they_are_asked_for(run):
    shown = answer(run)

    assert shown["epochs"] == [{"epoch": 0, "files": 3, "consumed": 40, "unreadable": 0, "rows": 40}]
    assert (shown["steps"], shown["snapshot"], shown["unknown"]) == (3, "step-000000003", None)
    assert "files" not in shown
    _, stdout, _ = cursor(run, "--files")
    assert "train/part-00000.parquet" in stdout
    lines = json.loads(stdout.splitlines()[-1])["files"]
    assert len(lines) == 3
    assert all(line["consumed"] == line["rows"] for line in lines)


def test_without_the_rows_it_says_what_was_consumed_and_why_no_more(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    config = RunFolder.open(copy).config.with_data(tmp_path / "nowhere")
    (copy / "config.yaml").write_text(config.to_yaml())

    shown = answer(copy, "--files")

    assert shown["epochs"] == [{"epoch": 0, "files": 3, "consumed": 40, "unreadable": 0, "rows": None}]
    assert "nowhere" in shown["unknown"]


def test_of_a_growing_folder_it_is_what_was_accepted(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    files = [{"name": f"train/part-0000{number}.parquet", "group_rows": [14]} for number in range(3)]
    segments = [{"files": files, "num_rows": 42, "num_steps": 6}]
    change_manifest(copy, followed={"order": {"filters": []}, "segments": segments})

    shown = answer(copy, "--files")

    assert shown["epochs"][0]["rows"] == 42
    assert [line["rows"] for line in shown["files"]] == [14, 14, 14]
    change_manifest(copy, followed={"order": {"filters": [["a"]]}, "segments": segments})
    assert [line["rows"] for line in answer(copy, "--files")["files"]] == [None] * 3


def test_rows_that_are_others_now_are_not_counted(tmp_path):
    def data_of(dataset) -> dict:
        write_log(tmp_path / "log", {"a.parquet": 20})
        return {"samples": str(tmp_path / "log")}

    run = make_run(tmp_path, data_of=data_of)
    assert answer(run)["epochs"][0]["rows"] == 20
    write_log(tmp_path / "log", {"a.parquet": 20}, seed=1)

    assert "belongs to another data set" in answer(run)["unknown"]


def test_refusals_name_the_run_and_the_file(run, tmp_path):
    code, _, stderr = cursor(tmp_path / "nowhere")
    assert (code, "not a run folder" in stderr) == (2, True)
    code, _, stderr = cursor(run, "--snapshot", "step-7")
    assert (code, "has no snapshot 'step-7'" in stderr) == (2, True)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = copy / "snapshots" / "step-000000003" / CURSOR
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    code, _, stderr = cursor(copy)
    assert (code, "cursor.parquet: its checksum differs" in stderr) == (2, True)
