"""Ranking models through the pipeline: the same run in every mode, snapshots, scoring, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from rayrec.models.program.program import ProgramPlacement
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.scorer import Scorer
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.tasks.impressions import LabeledRows, Scored
from rayrec.pipelines.training.initial_weights import initial_snapshot
from rayrec.pipelines.training.memory_plan import plan_memory
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.devices import get_device
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.prepare import prepare_impressions
from rayrec.samples.reading.reader import SampleReader
from tests.helpers.impressions import NUM_ROWS, ctr_config, impression_dataset
from tests.helpers.runs import make_run, trained
from tests.models.keras.programs import needs_tensorflow

KERAS: dict[str, Any] = {"name": "keras", "builder": "tests.models.keras.networks:mlp", "dim": 4}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ImpressionDataset:
    return impression_dataset(tmp_path_factory.mktemp("impressions"))


@pytest.fixture(scope="module")
def run(dataset: ImpressionDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(ctr_config(dataset, training={"batch_size": 4}), tmp_path_factory.mktemp("run") / "run")


@pytest.mark.parametrize("name", ["dlrm", "deepfm", "dcn_v2", "din", "mmoe"])
def test_every_model_takes_the_batches_of_a_run(dataset: ImpressionDataset, name: str):
    model: dict[str, Any] = {"name": name, "dim": 4, "hidden_dims": [8]}
    if name == "din":
        model["attention"] = {"history": "item"}
    config = RunConfig.parse(
        {"data": {"path": str(dataset.root)}, "model": model, "training": {"batch_size": 32}}
    )
    assembly = assemble(config)
    program = assembly.task.program(assembly.dense_optimizer()).build(
        ProgramPlacement(get_device("cpu").torch, config.seed)
    )
    rows = SampleReader(assembly.plan.spec).read_batch(assembly.plan.batch(0))
    (batch,) = assembly.features.training(0, rows)
    (table,) = assembly.tables
    ids_M = batch.lookups[table.name].ids_M
    drawn_MD = np.random.default_rng(0).normal(size=(len(ids_M), table.dim)).astype(np.float32)

    gradients = program.backward(batch, {table.name: drawn_MD})
    program.update()

    assert np.isfinite(gradients.loss_sum)
    grads_MD = gradients.row_grads[table.name]
    assert grads_MD.shape == drawn_MD.shape
    assert (np.abs(grads_MD).sum(1) > 0).all(), "every id of the batch is learned"
    assert program.flops(batch, {table.name: table.dim}) > 0


def test_a_trained_model_knows_who_clicks_what(run: Path):
    report = evaluate(run)

    figures, constant = (report.results[f"{name}, click"] for name in ("model", "rate of training"))
    assert report.unit == "impressions"
    assert figures["auc"].value > 0.8
    assert figures["gauc"].value > 0.8
    assert figures["log_loss"].value < constant["log_loss"].value
    assert constant["auc"].value == 0.5
    assert set(report.results) == {
        f"{name}, {label}" for name in ("model", "rate of training") for label in ("click", "like")
    }


def test_rows_as_the_source_has_them_are_scored_as_those_of_the_data_set(
    run: Path, dataset: ImpressionDataset
):
    scorer = Scorer.load(run)
    columns = scorer.features.scored_columns.names
    prepared = dataset.split_table("test", columns)
    prepared = prepared.filter(pc.is_valid(prepared["price"])).combine_chunks()
    places = (prepared["price"].to_numpy() * NUM_ROWS).round().astype(int)  # which is what prices say
    source = pq.read_table(dataset.root.parent / "source.parquet", columns=columns)
    rows = source.take(places).to_pylist()

    scores_BT = scorer.score_rows(rows)

    assert scorer.labels == ("click", "like")
    (batch,) = prepared.to_batches()
    np.testing.assert_array_equal(scores_BT, scorer.score(RowBatch(np.arange(len(rows)), batch)))
    assert len(np.unique(scores_BT)) > len(rows), "rows are told apart"
    again_BT = np.concatenate([scorer.score_rows([row]) for row in rows])
    np.testing.assert_allclose(again_BT, scores_BT, atol=1e-6)
    without = [{name: value for name, value in row.items() if name != "history"} for row in rows]
    empty = [row | {"history": []} for row in rows]
    np.testing.assert_array_equal(scorer.score_rows(without), scorer.score_rows(empty))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"usr": 5}, "row 0: there is no field 'usr'; known are price, user, item, history"),
        ({"user": 1.5}, "column user has the type double; expected texts, integers or booleans"),
        ({"user": 2**64}, "user: the values of the rows do not fit"),
        ({"user": [1]}, "column user has the type list"),
        ({"price": "dear"}, "row 0: price is 'dear'; expected a number or nothing"),
        ({"price": 1e60}, r"row 0: price is 1e\+60; expected a finite number"),
        ({"history": 5}, "column history has the type int64; expected lists"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(run: Path, row: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        Scorer.load(run).score_rows([row])


def test_a_key_is_the_same_as_a_number_and_as_a_text(run: Path):
    scorer = Scorer.load(run)

    texts = scorer.score_rows([{"user": "3", "item": "4", "history": ["1", "2"]}])

    np.testing.assert_array_equal(scorer.score_rows([{"user": 3, "item": 4, "history": [1, 2]}]), texts)
    assert (scorer.score_rows([{"user": 3, "item": 5, "history": [1, 2]}]) != texts).any()


def test_impressions_of_nobody_known_are_in_no_order(dataset: ImpressionDataset):
    """Together they would be one user, whose impressions outweigh all others."""
    scored = Scored(("click",))
    labels_BT = np.array([[1], [0], [1], [0]], np.float32)
    groups = pa.chunked_array([pa.array([7, 7, None, None])])
    scored.add(LabeledRows(0, RowBatch(np.arange(4), pa.record_batch({})), labels_BT, groups), SCORES_BT)

    assert scored.figures()["gauc"].value == 1.0


SCORES_BT = np.array([[0.9], [0.1], [0.2], [0.8]], np.float32)
"""Right of the user 7, wrong of nobody."""


def test_each_kind_of_run_is_refused_where_the_other_is_meant(run: Path, tmp_path: Path):
    with pytest.raises(InputError, match="'dlrm' scores what is shown, and names no items"):
        Recommender.load(run)
    with pytest.raises(InputError, match="'sasrec' recommends items, and scores no impressions"):
        Scorer.load(make_run(tmp_path))


def test_what_is_set_has_to_fit_the_columns(dataset: ImpressionDataset):
    with pytest.raises(InputError, match="'nobody'"):
        assemble(ctr_config(dataset, {"label_weights": {"nobody": 2.0}}))
    with pytest.raises(InputError, match=r"'dlrm'.* recommends nothing"):
        ctr_config(dataset, evaluation={"instruction": {"behavior": "click"}})


def test_a_keras_model_on_an_accelerator_is_refused_before_anything_is_built(
    dataset: ImpressionDataset, run: Path
):
    model = {"name": "keras", "builder": "nowhere:build"}

    with pytest.raises(InputError, match="device is 'cuda', and Keras models have been run on the CPU alone"):
        assemble(ctr_config(dataset, model, device="cuda"))


@needs_tensorflow
@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"precision": "bfloat16"}, r"training\.precision is 'bfloat16', which is for PyTorch's own"),
        ({"micro_batches": 2}, r"training\.micro_batches is 2, and the Keras model draws"),
    ],
)
def test_recipes_that_keras_models_do_not_know_are_refused_before_a_run_begins(
    dataset: ImpressionDataset, training: dict[str, Any], message: str
):
    model = KERAS | {"arguments": {"dropout": 0.2}}

    with pytest.raises(InputError, match=message):
        assemble(ctr_config(dataset, model, training=training))


def test_a_data_set_of_histories_is_refused_by_name(tmp_path: Path):
    make_run(tmp_path)
    settings = {"data": {"path": str(tmp_path / "data")}, "model": {"name": "dlrm"}}

    with pytest.raises(InputError, match=str(tmp_path / "data")):
        assemble(RunConfig.parse(settings))


def test_memory_is_planned_for_all_ids(dataset: ImpressionDataset):
    plan = plan_memory(assemble(ctr_config(dataset, sparse={"num_servers": 1})))

    num_rows = sum(shard.num_rows for shard in plan.shards)
    assert num_rows == sum(dataset.num_ids.values()) + len(dataset.num_ids)


def figures_of(config: RunConfig, folder: Path) -> tuple[list[float], float]:
    losses: list[float] = []
    result = train(config, folder, on_step=lambda *step: losses.append(step[2]), cluster=in_process)
    return losses, result.best_value


def test_runs_are_the_same_in_every_mode_and_by_any_number_of_trainers(dataset, tmp_path: Path):
    settings: dict[str, Any] = {"evaluation": {"response_metric": "gauc"}}
    sync, prefetched, shared = (
        figures_of(ctr_config(dataset, pipeline=pipeline, **settings), tmp_path / str(place))
        for place, pipeline in enumerate(
            [
                {"mode": "sync", "trainer_threads": 1},
                {"mode": "exact_prefetch", "trainer_threads": 1},
                {"num_trainers": 2, "trainer_threads": 1},
            ]
        )
    )

    assert prefetched == sync
    np.testing.assert_allclose(shared[0], sync[0], rtol=1e-4)
    assert np.mean(sync[0][-5:]) < np.mean(sync[0][:5])


def test_a_run_goes_on_from_its_snapshot_to_the_same_numbers(dataset, tmp_path: Path):
    config = ctr_config(dataset, training={"epochs": 2})
    whole, best = figures_of(config, tmp_path / "whole")
    first = config.model_copy(update={"training": config.training.model_copy(update={"epochs": 1})})
    begun, _ = figures_of(first, tmp_path / "run")
    rest: list[float] = []

    result = train(
        config, tmp_path / "run", resume=True, on_step=lambda *step: rest.append(step[2]), cluster=in_process
    )

    assert [*begun, *rest] == whole
    assert result.best_value == best


def going_on(dataset: ImpressionDataset, **training: Any) -> RunConfig:
    """Settings that hardly change what a run begins with."""
    sparse = {"optimizer": {"kind": "rowwise_adagrad", "lr": 1e-12}}
    training |= {"optimizer": {"learning_rate": 1e-12}}
    return ctr_config(dataset, training=training, sparse=sparse)


def test_training_goes_on_with_the_rows_of_another_day(run: Path, tmp_path: Path):
    today = impression_dataset(tmp_path / "today", num_rows=NUM_ROWS // 2)
    weights = read_snapshot(RunFolder.open(run).chosen_snapshot("best")).weights

    losses, _ = figures_of(going_on(today, init_from=str(run)), tmp_path / "second")

    after = read_snapshot(RunFolder.open(tmp_path / "second").chosen_snapshot("last")).weights
    for name, weight in weights.items():
        np.testing.assert_allclose(after[name], weight, atol=1e-6)
    untrained, _ = figures_of(going_on(today), tmp_path / "fresh")
    assert np.mean(losses) < 0.8 * np.mean(untrained), "its rows are there, too"


def test_weights_of_other_columns_are_refused(run: Path, tmp_path: Path):
    source = impression_dataset(tmp_path / "other").root.parent / "source.parquet"
    config = ImpressionsConfig(
        layout="table",
        labels=("click", "like"),
        ids={"item": "item", "user": "user"},
        lists={"history": "item"},
    )
    prepare_impressions(source, tmp_path / "today", config)
    today = ImpressionDataset.open(tmp_path / "today")

    with pytest.raises(InputError, match=r"was trained on the numbers price, and .*today has none"):
        initial_snapshot(assemble(going_on(today, init_from=str(run))))


def test_a_metric_that_validation_cannot_have_is_refused_before_anything_starts(
    tmp_path: Path, dataset: ImpressionDataset
):
    gauc = {"response_metric": "gauc"}
    ungrouped = impression_dataset(tmp_path / "ungrouped", group=None)
    with pytest.raises(InputError, match="nothing says whose impressions"):
        train(ctr_config(ungrouped, evaluation=gauc), tmp_path / "run", cluster=in_process)
    with pytest.raises(InputError, match="in 1 validation rows no group has both values of click"):
        train(ctr_config(dataset, evaluation=gauc | {"max_users": 1}), tmp_path / "run", cluster=in_process)
    with pytest.raises(InputError, match=r"there are not both values of click.* hold out more rows"):
        train(ctr_config(dataset, evaluation={"max_users": 1}), tmp_path / "run", cluster=in_process)
    assert not (tmp_path / "run").exists()
