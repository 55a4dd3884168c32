"""A run that begins with the weights of another, on other rows: pre-training and fine-tuning."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.training.initial_weights import initial_snapshot
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import random_events, write_source
from tests.helpers.runs import MODELS, NUM_ITEMS, NUM_USERS, make_run, trained


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("pretrain"), "generative")


def config_from(run, model=None, training=None, **further) -> RunConfig:
    values = RunFolder.open(run).config.model_dump(mode="json")
    values["model"] |= model or {}
    values["training"] |= {"init_from": str(run)} | (training or {})
    return RunConfig.parse(values | further)


def test_a_run_begins_with_nothing_unless_told_so(pretrained):
    assert initial_snapshot(assemble(RunFolder.open(pretrained).config)) is None


@pytest.mark.parametrize("setting", [{"label_smoothing": 0.1}, {"softmax": "children"}])
def test_what_the_weights_do_not_depend_on_may_differ(pretrained, setting):
    changed = config_from(pretrained, {"beam_width": 3} | setting, {"batch_size": 4})

    snapshot = initial_snapshot(assemble(changed))

    assert snapshot is not None
    assert snapshot.path.parent.parent == pretrained


def test_another_model_is_refused_by_its_settings(pretrained):
    with pytest.raises(InputError, match=r"init_from: the model of .* differs .* in model.decoder_dim, so"):
        initial_snapshot(assemble(config_from(pretrained, {"decoder_dim": 8})))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("encoder"), "encoder")


SECTIONS = {
    "retrieval": {"max_length": 20, "num_events": 8, "num_recent": 2},
    "instruction": {"parts": ["trigger_item"]},
    "experts": {"count": 2},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_part_of_the_network_that_the_run_had_not_is_refused_by_name(encoder, section):
    changed = config_from(encoder, {section: SECTIONS[section]})

    with pytest.raises(InputError, match=rf"differs from this one in model\.{section}, so"):
        initial_snapshot(assemble(changed))


def test_a_part_of_the_network_that_only_the_run_had_is_refused_by_name(tmp_path):
    run = make_run(tmp_path, "encoder", retrieval=SECTIONS["retrieval"])

    with pytest.raises(InputError, match=r"differs from this one in model\.retrieval, so"):
        initial_snapshot(assemble(config_from(run, {"retrieval": None})))


def test_another_catalog_is_refused_by_name(pretrained, tmp_path):
    other = make_run(tmp_path, "generative", integer_users=True)
    config = config_from(pretrained, data={"path": str(other.parent / "data")})

    with pytest.raises(
        InputError, match=r"snapshots/step-\d+: its data set has user ids of the kind 'string', and .*data"
    ):
        initial_snapshot(assemble(config))


def test_a_folder_that_is_no_run_is_refused_before_anything_starts(pretrained, tmp_path):
    config = config_from(pretrained, training={"init_from": str(tmp_path / "gone")})

    with pytest.raises(InputError, match=r"gone: not a run folder"):
        train(config, tmp_path / "run", cluster=in_process)

    assert not (tmp_path / "run").exists()


def test_fine_tuning_goes_on_with_weights_and_rows_and_nothing_else(pretrained, tmp_path):
    """With rates of almost nothing the run ends where it began."""
    before = read_snapshot(RunFolder.open(pretrained).chosen_snapshot("last"))
    training = {
        "optimizer": {"learning_rate": 1e-12},
        "precision": "bfloat16",
        "micro_batches": 2,
        "epochs": 2,
    }
    config = config_from(
        pretrained,
        training=training,
        sparse={"optimizer": {"kind": "sgd", "lr": 1e-12}, "num_servers": 3},
        evaluation={"max_users": 8},
    )
    rows_before = rows_of(before)

    result = train(config, tmp_path / "run", cluster=in_process)

    after = read_snapshot(RunFolder.open(tmp_path / "run").chosen_snapshot("last"))
    for name, weight in after.weights.items():
        np.testing.assert_allclose(weight, before.weights[name], atol=1e-6)
    rows_after = rows_of(after)
    for ident, weights in rows_before.items():
        np.testing.assert_allclose(rows_after[ident], weights, atol=1e-6)
    assert after.optimizer_state["step"] == result.steps < before.committed_step + 1 + result.steps
    assert set(after.cursor.to_table()["epoch"].to_pylist()) == {0, 1}

    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < record["mfu"] < 1 for record in records)
    assert 0 < result.stages["mfu"] < result.stages["dense_mfu"] < 1
    assert result.stages["model_flops"] > 1e5

    # Of which nothing is left to do.
    resumed = train(config, tmp_path / "run", resume=True, cluster=in_process)
    assert resumed.steps == result.steps


def rows_of(snapshot) -> dict[tuple[str, int], np.ndarray]:
    import pyarrow.parquet as pq

    rows = {}
    for path in snapshot.sparse_chain[-1]:
        table = pq.read_table(path)
        if "weights" not in table.column_names:
            continue
        for ident, weights in zip(table["id"].to_pylist(), table["weights"].to_pylist(), strict=True):
            rows[path.name.split("-")[0], ident] = np.frombuffer(weights, dtype=np.float32)
    return rows


def described_run(folder):
    """A run that reads words, and a data set of which two items have no training event."""
    keys = [f"i{item}" for item in range(NUM_ITEMS)]
    titles = [f"w{item % 7} w{item % 3}" for item in range(NUM_ITEMS)]
    events = random_events(NUM_USERS, NUM_ITEMS)
    events += [(user, key, 2000 + n) for user in "xy" for n, key in enumerate(["i0", "new1", "new2"])]
    items = {"item_id": [*keys, "new1", "new2"], "title": [*titles, "w1 rare", "w2 rare"]}
    prepare(write_source(folder / "source", events, items=items), folder / "data", PrepareConfig())
    settings = {
        "data": {"path": str(folder / "data")},
        "model": MODELS["sasrec"] | {"content": {"min_items": 2}},
        "pipeline": {"trainer_threads": 1},
        "training": {"batch_size": 16, "epochs": 1},
    }
    return trained(RunConfig.parse(settings), folder / "run")


def test_words_weigh_as_in_the_run_that_training_begins_with(tmp_path):
    """It did not count items without an event; which items rows from elsewhere have is not known."""
    run = described_run(tmp_path)
    base = RunFolder.open(run)
    values = base.config.model_dump(mode="json")
    values["data"]["samples"] = str(tmp_path / "data" / "train")
    values["training"] |= {"init_from": str(run)}
    config = RunConfig.parse(values)
    counted = read_snapshot(base.chosen_snapshot("last")).state.content_items
    assert assemble(config).task.content_items != counted

    second = tmp_path / "second"
    train(config, second, cluster=in_process)

    last = read_snapshot(RunFolder.open(second).chosen_snapshot("last"))
    assert last.state.content_items == counted
    before, after = (Recommender.load(folder).ranking_model.catalog.content for folder in (run, second))
    assert after.features_P.tolist() == before.features_P.tolist()
    assert after.weights_P.tobytes() == before.weights_P.tobytes()
    # As training had them, also where it is resumed.
    assembly = assemble(config)
    for going_on in (
        assembly.learning_on(initial_snapshot(assembly)),
        assembly.learning_on(last).going_on_from(last, second),
    ):
        content = going_on.task.program(going_on.dense_optimizer()).catalog.content
        assert content.weights_P.tobytes() == before.weights_P.tobytes()
