"""A canary, as its commands are typed."""

import shutil
from pathlib import Path

import pytest

from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.lists import MODEL, MODEL_UNMASKED
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.samples.dataset.dataset import Dataset
from tests.cli.commands import rayrec
from tests.cli.test_version_commands import answer, refused
from tests.helpers.later_data import grown_dataset
from tests.helpers.runs import make_run, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), snapshots_after=(0,))


@pytest.fixture
def store(run, tmp_path):
    answer("publish", run, tmp_path / "store", "--snapshot", "previous")
    return tmp_path / "store"


def test_a_version_is_published_as_a_canary_shown_and_promoted(run, tmp_path):
    store = tmp_path / "store"
    assert "no version serves, so a canary has no baseline" in refused("publish", run, store, "--canary", 0.1)
    assert "nothing was published here" in refused("versions", store)
    answer("publish", run, store, "--snapshot", "previous")
    assert "no canary was started here" in refused("canary", "status", store)
    published = answer("publish", run, store, "--canary", 0.1)
    assert (published["version"], published["serving"]) == (2, 1)
    assert "version 2 is a canary already" in refused("publish", run, store, "--canary", 0.1)
    shown = answer("canary", "status", store)
    assert (shown["version"], shown["baseline"], shown["state"]) == (2, 1, "open")
    assert shown["reason"] == "0 of 1,000 requests so far"
    promoted = answer("canary", "promote", store)
    assert (promoted["state"], promoted["serving"]) == ("promoted", 2)
    assert "is promoted already" in refused("canary", "stop", store)
    assert answer("versions", store)["is_held"] is False
    assert answer("canary", "status", store)["state"] == "promoted"


@pytest.mark.parametrize("refusal", [("--min-overlap", 1), ("--snapshot", "none")])
def test_a_version_that_is_not_published_leaves_nothing_held(run, store, refusal, monkeypatch):
    monkeypatch.setattr("rayrec.pipelines.versions.publisher.overlap", lambda probes, before: 0.5)
    refused("publish", run, store, "--canary", 0.1, *refusal)
    listed = answer("versions", store)
    assert (listed["serving"], listed["is_held"], len(listed["versions"])) == (1, False, 1)


def test_one_is_started_of_what_is_there_and_stopped(run, store, tmp_path):
    answer("publish", run, store)
    assert "version 2 serves already" in refused("canary", "start", store)
    (tmp_path / "canary.yaml").write_text("share: 0.2\nmin_requests: 50\n")
    started = answer("canary", "start", store, "--version", 1, "--settings", tmp_path / "canary.yaml")
    assert (started["version"], started["baseline"], started["share"]) == (1, 2, 0.2)
    stopped = answer("canary", "stop", store)
    assert (stopped["state"], stopped["serving"]) == ("stopped", 2)
    assert answer("versions", store)["is_held"] is False
    assert "--share" in refused("canary", "start", store, "--version", 1, "--share", 0)


def test_one_that_was_stopped_does_not_serve_where_a_rollback_is_undone(run, store):
    answer("publish", run, store, "--canary", 0.1)
    assert "version 2 is a canary" in refused("rollback", store, "--undo")
    answer("canary", "stop", store)
    code, stdout, stderr = rayrec("rollback", store, "--undo")
    assert code == 0, stderr
    assert "Version 1 serves now" in stdout
    assert "taken back as canaries: 2" in " ".join(stderr.split())
    assert answer("publish", run, store)["serving"] == 3


def test_a_folder_may_be_called_like_a_tag_of_markup(run, tmp_path):
    folder, store = tmp_path / "run[bold]", tmp_path / "s[/t]"
    shutil.copytree(run, folder)
    code, stdout, stderr = rayrec("publish", folder, store)
    assert code == 0, stderr
    assert "Version 1: run[bold] after" in stdout
    answer("publish", folder, store)
    answer("rollback", store)
    assert answer("canary", "start", store, "--version", 2)["baseline"] == 1
    assert answer("canary", "stop", store)["serving"] == 1
    assert "run[bold], step-" in rayrec("data", "cursor", folder)[1]


def test_held_out_data_say_whether_it_is_worse(run, store, monkeypatch):
    answer("publish", run, store, "--canary", 0.1)
    data = RunFolder.open(run).config.data.path
    found = answer("canary", "evaluate", store, "--data", data, "--max-users", 20)
    assert found["is_worse"] is False
    assert (found["evaluation"]["num_users"], found["evaluation"]["split"]) == (20, "test")
    assert answer("canary", "status", store)["evaluation"] == found["evaluation"]
    from rayrec.pipelines.versions import canary

    worse = "0.5 times as much"
    monkeypatch.setattr(canary.OfflineEvaluation, "failure", lambda self, settings: worse)
    assert answer("canary", "evaluate", store, "--data", data)["is_worse"] is True
    shown = answer("canary", "status", store)
    assert (shown["state"], shown["reason"]) == ("returned", worse)
    said = refused("canary", "start", store, "--version", 2, "--data", data)
    assert f"version 2 is not started as a canary: {worse}" in said
    assert answer("canary", "status", store)["state"] == "returned"


def test_validation_events_are_held_out_as_well(run, store):
    answer("publish", run, store, "--canary", 0.1)
    data = RunFolder.open(run).config.data.path

    found = answer("canary", "evaluate", store, "--data", data, "--split", "valid")

    assert found["evaluation"]["split"] == "valid"
    assert found["evaluation"]["num_users"] == Dataset.open(data).num_evaluated("valid")


@pytest.mark.parametrize("exclude_seen", [True, False])
def test_lists_are_those_that_the_serving_run_is_validated_by(run, tmp_path, exclude_seen):
    config = RunFolder.open(run).config
    evaluation = config.evaluation.model_copy(update={"exclude_seen": exclude_seen})
    own = trained(config.model_copy(update={"evaluation": evaluation}), tmp_path / "own")
    answer("publish", own, tmp_path / "store")
    answer("publish", own, tmp_path / "store", "--canary", 0.1)

    found = answer("canary", "evaluate", tmp_path / "store", "--data", config.data.path)

    results = evaluate(own, baselines=False).results
    expected = results[MODEL if exclude_seen else MODEL_UNMASKED]["ndcg@10"].value
    assert found["evaluation"]["baseline"] == pytest.approx(expected)
    assert results[MODEL] != results[MODEL_UNMASKED]


def test_a_version_that_may_have_learned_what_is_predicted_is_named(run, store, tmp_path, caplog):
    longer = trained(RunFolder.open(run).config.with_data(grown_dataset(tmp_path).root), tmp_path / "run")
    answer("publish", longer, store, "--canary", 0.1, "--other-catalog")

    answer("canary", "evaluate", store, "--data", RunFolder.open(run).config.data.path)

    assert "version 2 was trained on another data set than" in caplog.text
    assert "version 1 was" not in caplog.text


def test_data_of_something_else_is_refused(run, store, tmp_path):
    answer("publish", run, store, "--canary", 0.1)
    (tmp_path / "other").mkdir()
    said = refused("canary", "evaluate", store, "--data", tmp_path / "other")
    assert "not a data set, dataset.json is missing" in said
