"""Whole runs through real actors: how they end, how they go on, how they fail.

Each takes seconds to start its actors, so several tests look at the same runs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rayrec.embeddings.snapshot.saved_files import checksum_file
from rayrec.embeddings.transport.shared_blocks import why_unavailable
from rayrec.pipelines.config.sections import TrackingConfig
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, metric_names
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import MANIFEST, Snapshot, read_snapshot
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.devices import KINDS, why_missing
from rayrec.platform.errors import InputError, MachineError
from tests.helpers.runs import change_manifest
from tests.helpers.training_runs import (
    EPOCHS,
    assert_no_actor_survives,
    last_snapshot,
    no_cluster,
    settings,
    sparse_rows,
    walks,
)

STEPS_PER_EPOCH = 5  # 40 users in batches of 8


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return walks(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(ray_cluster, data, tmp_path_factory) -> tuple[Path, list[float]]:
    """A finished run and the loss of each of its steps."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    losses: list[float] = []

    def on_step(done: int, total: int, loss: float) -> None:
        losses.append(loss)
        assert (done, total) == (len(losses), EPOCHS * STEPS_PER_EPOCH)

    near = "auto" if why_unavailable() else "shared_memory"
    result = train(settings(data, sparse__transport=near), run, on_step=on_step)

    assert_no_actor_survives()
    assert (result.steps, result.epochs, result.final_loss) == (len(losses), EPOCHS, losses[-1])
    return run, losses


@pytest.fixture(scope="module")
def interrupted(data, tmp_path_factory) -> Path:
    """A run that was stopped in its second epoch, of which it has one snapshot."""
    run = tmp_path_factory.mktemp("interrupted") / "run"

    def on_step(done: int, total: int, loss: float) -> None:
        if done == STEPS_PER_EPOCH + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(settings(data), run, on_step=on_step, cluster=in_process)
    return run


def test_a_run_trains_every_step_and_its_loss_falls(uninterrupted):
    run, losses = uninterrupted

    assert len(losses) == EPOCHS * STEPS_PER_EPOCH
    assert np.mean(losses[-STEPS_PER_EPOCH:]) < np.mean(losses[:STEPS_PER_EPOCH]) - 0.3
    assert RunFolder.open(run).state["state"] == "finished"


def test_every_validation_is_logged_with_where_the_time_went(uninterrupted):
    run, losses = uninterrupted
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    assert [record["step"] for record in records] == [5, 10, 15]
    assert records[0]["loss"] == pytest.approx(np.mean(losses[:STEPS_PER_EPOCH]), rel=0.1)
    for record in records:
        assert set(record["valid"]) == set(metric_names(LIST_LENGTH))
        assert all(seconds >= 0 for seconds in record["stages"].values())
        assert record["stages"]["dense_busy_s"] > 0
    assert records[-1]["stages"]["sparse_rows"] > 40  # every user, and the items


def test_the_loss_is_logged_between_validations(data, tmp_path):
    config = settings(data).model_copy(update={"tracking": TrackingConfig(every_steps=2)})
    losses = []

    train(config, tmp_path / "run", on_step=lambda done, total, loss: losses.append(loss), cluster=in_process)

    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = {record["step"]: record["training_loss"] for record in records if "training_loss" in record}
    assert found == {step: losses[step - 1] for step in range(2, len(losses) + 1, 2)}
    state = RunFolder.open(tmp_path / "run").state
    assert state["now"] == {"step": len(losses), "steps": len(losses), "is_total": True}
    assert state["metric"] == "ndcg@10"


def test_the_best_and_the_last_snapshot_are_kept(uninterrupted):
    run, _ = uninterrupted
    folder = RunFolder.open(run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = max(records, key=lambda record: record["valid"]["ndcg@10"])  # the first of equal ones

    assert read_snapshot(folder.chosen_snapshot("best")).committed_step == best["step"] - 1
    assert folder.state["progress"]["best_value"] == best["valid"]["ndcg@10"]
    assert last_snapshot(run).committed_step == EPOCHS * STEPS_PER_EPOCH - 1
    before_the_last = "step-000000010"
    assert set(folder.snapshot_names()) == {folder.state["best"], before_the_last, folder.state["last"]}


def test_an_interrupted_run_says_so_and_has_what_it_had(interrupted):
    state = RunFolder.open(interrupted).state

    assert (state["state"], state["error"]) == ("stopped", "interrupted")
    assert last_snapshot(interrupted).committed_step == STEPS_PER_EPOCH - 1


def test_a_run_that_is_terminated_says_so(data, tmp_path):
    """Ray turns SIGTERM into an exit of the driver."""

    def terminated(*arguments: object) -> None:
        raise SystemExit(15)

    with pytest.raises(SystemExit):
        train(settings(data), tmp_path / "run", on_step=terminated, cluster=in_process)

    state = RunFolder.open(tmp_path / "run").state
    assert (state["state"], state["error"]) == ("stopped", "terminated")


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_never_stopped(
    uninterrupted, interrupted, data, tmp_path
):
    """Also on moved data, other numbers of servers, readers and feature workers, in the other mode, and in
    this process, where the run that was not stopped was on Ray.
    """
    expected_run, losses = uninterrupted
    run = tmp_path / "run"
    shutil.copytree(interrupted, run)
    shutil.copytree(data, tmp_path / "moved")
    elsewhere = settings(
        tmp_path / "moved",
        sparse__num_servers=2,
        pipeline__num_readers=2,
        pipeline__num_feature_workers=2,
        pipeline__mode="sync",
    )

    result = train(elsewhere, run, resume=True, cluster=in_process)

    found, expected = last_snapshot(run), last_snapshot(expected_run)
    assert result.final_loss == losses[-1]
    assert found.committed_step == expected.committed_step
    for part in ("weights", "optimizer_state"):
        arrays, expected_arrays = getattr(found, part), getattr(expected, part)
        assert arrays.keys() == expected_arrays.keys()
        for name in arrays:
            assert arrays[name].tobytes() == expected_arrays[name].tobytes(), name
    assert len(found.sparse_chain[0]) == 2 * len(expected.sparse_chain[0])
    assert sparse_rows(found) == sparse_rows(expected)
    progress, expected_progress = (
        RunFolder.open(folder).state["progress"] | {"training_s": None} for folder in (run, expected_run)
    )
    assert progress == expected_progress
    assert RunFolder.open(run).config.data.path == str(tmp_path / "moved")


def test_what_a_run_counts_goes_on_when_it_is_resumed(interrupted, data, tmp_path):
    """The time before the interruption, and the items of the training rows that are not in the catalog."""
    run = tmp_path / "run"
    shutil.copytree(interrupted, run)
    folder = RunFolder.open(run)
    progress = last_snapshot(run).state.progress
    change_manifest(run, progress=progress | {"training_s": 1000.0, "dropped": {"unknown_items": 3}})
    folder.update(incarnation=2)  # it has recovered twice from the same snapshot

    result = train(settings(data), run, resume=True, cluster=in_process)

    assert folder.state["incarnation"] == last_snapshot(run).state.incarnation == 3
    assert 1000 < result.training_s < 1500
    assert result.steps_per_s == result.steps / result.training_s
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["training_s"] == result.training_s == folder.state["progress"]["training_s"]
    assert last["dropped"] == {"unknown_items": 3, "unread_events": 0, "rows_without_target": 0}


def test_a_finished_run_that_is_resumed_keeps_its_result_and_starts_nothing(
    uninterrupted, data, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted[0], run)
    before = RunFolder.open(run).state
    no_cluster(monkeypatch)

    result = train(settings(data), run, resume=True)

    assert RunFolder.open(run).state == before
    assert (result.run, result.training_s) == (str(run), before["result"]["training_s"])
    assert result.final_loss == uninterrupted[1][-1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dataset_fingerprint": "of other data"}, "was trained on another data set"),
        (
            {"read_position": {"epoch": 0, "rows": 16, "order": "of other rows"}},
            "its run goes on in epoch 0 after 16 rows, and this one would read in another order",
        ),
        ({"committed_step": 3}, r"from another place \(epoch 0, 32 rows\)"),
        ({"checksums": {"dense.safetensors": "of others"}}, "its checksum differs"),
    ],
    ids=["other data", "other order", "other place", "damaged"],
)
def test_a_snapshot_that_does_not_fit_is_refused_before_anything_starts(
    interrupted, data, tmp_path, monkeypatch, changes, expected
):
    run = tmp_path / "run"
    shutil.copytree(interrupted, run)
    change_manifest(run, **changes)
    before = (run / "run.json").read_bytes(), (run / "config.yaml").read_bytes()
    no_cluster(monkeypatch)

    with pytest.raises(InputError, match=expected):
        train(settings(data, pipeline__num_readers=2), run, resume=True)

    assert before == ((run / "run.json").read_bytes(), (run / "config.yaml").read_bytes())


def test_a_run_that_is_alive_is_not_resumed_a_second_time(interrupted, data, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(interrupted, run)
    no_cluster(monkeypatch)

    with RunFolder.locked(run, "run"), pytest.raises(MachineError, match="a run is alive in this folder"):
        train(settings(data), run, resume=True)


def test_a_stage_that_fails_ends_the_run_with_its_own_error(tmp_path):
    """A training file is damaged while the run is under way; a later epoch reads it again."""
    data = walks(tmp_path)
    damaged = sorted((data / "train").glob("*.parquet"))[0]

    def on_step(done: int, total: int, loss: float) -> None:
        if done == 1:
            damaged.write_bytes(b"PAR1 no longer PAR1")

    with pytest.raises(InputError, match=rf"^{damaged}: the file has changed since") as raised:
        train(settings(data), tmp_path / "run", on_step=on_step, cluster=in_process)

    state = RunFolder.open(tmp_path / "run").state
    assert state["state"] == "failed"
    assert state["error"] == f"InputError: {raised.value}"
    # Nothing of the steps before it is lost, however far the reader had decoded ahead by then.
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert last_snapshot(tmp_path / "run").committed_step >= json.loads(records[-1])["step"] - 1


@pytest.mark.slow
def test_one_of_two_trainers_that_diverges_ends_the_run(ray_cluster, interrupted, data, tmp_path):
    """Only one has the long history in its share; the other would wait for its gradients for ever."""
    run = tmp_path / "run"
    shutil.copytree(interrupted, run)
    poison(last_snapshot(run))

    with pytest.raises(
        FloatingPointError, match=r"^step \d+: the loss is nan.* Rows of the batch: .*parquet \d+ to"
    ):
        train(settings(data, pipeline__num_trainers=2), run, resume=True)

    assert_no_actor_survives()
    state = RunFolder.open(run).state
    assert state["error"].startswith("DivergedError: step")
    assert state["refused_steps"] == 1


def poison(snapshot: Snapshot) -> None:
    """Make a weight NaN, under a manifest that vouches for it."""
    weights = snapshot.weights
    weights["backbone.positions_TD"][6] = np.nan  # where only the long history has a place
    safetensors.numpy.save_file(weights, snapshot.path / "dense.safetensors")
    checksums = json.loads((snapshot.path / MANIFEST).read_text())["checksums"]
    checksums["dense.safetensors"] = checksum_file(snapshot.path / "dense.safetensors")
    change_manifest(snapshot.path.parents[1], checksums=checksums)


def test_patience_ends_a_run_of_two_trainers_and_keeps_the_best(data, tmp_path):
    """With rates of next to nothing the ranking never changes: the first validation stays the best."""
    config = settings(
        data,
        pipeline__num_trainers=2,
        training__optimizer__learning_rate=1e-12,
        sparse__optimizer__lr=1e-12,
        training__epochs=50,
        evaluation__patience=1,
    )

    result = train(config, tmp_path / "run", cluster=in_process)

    assert result.steps == 2 * STEPS_PER_EPOCH
    assert result.best_step == STEPS_PER_EPOCH
    folder = RunFolder.open(tmp_path / "run")
    assert folder.state["state"] == "finished"
    assert (folder.state["best"], folder.state["last"]) == ("step-000000005", "step-000000010")


def test_mistakes_are_found_before_anything_is_started(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        train(settings(tmp_path / "nowhere"), tmp_path / "run")

    assert not (tmp_path / "run").exists()


ABSENT = next((kind for kind in KINDS if why_missing(kind) is not None), "")


@pytest.mark.skipif(not ABSENT, reason="this machine has every device")
def test_a_device_that_is_not_there_is_refused_before_anything_starts(data, tmp_path, monkeypatch):
    """Where the run would start a cluster of its own, on this machine."""
    monkeypatch.setattr("rayrec.pipelines.training.placements.starts_cluster", lambda config: True)
    no_cluster(monkeypatch)

    with pytest.raises(InputError, match=f"device: '{ABSENT}' was asked for"):
        train(settings(data, device=ABSENT), tmp_path / "run")

    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not ABSENT, reason="this machine has every device")
def test_a_joined_cluster_without_the_accelerator_is_not_waited_for(ray_cluster, data, tmp_path):
    with pytest.raises(InputError, match=r"the trainers need 2 [GN]PU and the Ray cluster has 0"):
        train(settings(data, device=ABSENT, pipeline__num_trainers=2), tmp_path / "run")

    assert_no_actor_survives()
    assert RunFolder.open(tmp_path / "run").state["state"] == "failed"
