"""A model of time in a run: what it reads, what it is refused, and what a request without times gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.embeddings.config import EvictionConfig
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.tasks.features import features_of
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import FeatureBatch
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.features.neighbors import NO_TIME
from rayrec.samples.reading.reader import SampleReader, evaluation_batches
from rayrec.samples.stores import EventBatch, StoreManifest, open_store
from tests.helpers.data import small_dataset, without_history_times
from tests.helpers.runs import MODELS, make_run

CUT = {"op": "truncate", "inputs": ["item_ids", "timestamps"], "length": 3}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return small_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), "hstu")


def config(data: Path, model: str = "hstu", **data_settings: Any) -> RunConfig:
    return RunConfig.parse(
        {
            "data": {"path": str(data), **data_settings},
            "model": MODELS[model],
            "training": {"batch_size": 8},
        }
    )


def first_batch(assembly: Assembly) -> FeatureBatch:
    plan = assembly.plan
    rows = SampleReader(plan.spec).read_batch(plan.batch(0))
    (features,) = features_of(assembly.config, assembly.rows.columns).training(0, rows)
    return features


def times_by_user(dataset: Dataset) -> dict[int, dict[int, int]]:
    """User -> item -> time, in which no user has an item twice."""
    users = dict(
        zip(dataset.users["user_key"].to_pylist(), dataset.users["user_id"].to_pylist(), strict=True)
    )
    return {
        user: dict(zip(dataset.history_of(key).tolist(), dataset.history_times_of(key).tolist(), strict=True))
        for key, user in users.items()
    }


def test_a_model_of_time_gets_the_time_of_every_event_it_reads(dataset: Dataset):
    features = first_batch(assemble(config(dataset.root)))
    batch = TensorBatch.build(features, {}, seed=0, device=torch.device("cpu"), training=False)
    known = times_by_user(dataset)
    train = pa.concat_tables(pq.read_table(dataset.root / name) for name in dataset.train_files)
    users = dict(zip(map(tuple, train["item_ids"].to_pylist()), train["user_id"].to_pylist(), strict=True))

    assert batch.times_N is not None
    for row in range(features.num_rows):
        low, high = features.offsets_B1[row : row + 2]
        inputs = dataset.items.ids_I[features.items_N[low:high]].tolist()
        whole = tuple(inputs) + tuple(dataset.items.ids_I[features.targets_N[low:high]][-1:].tolist())
        if inputs:
            mine = known[users[whole]]
            assert batch.times_N[low:high].tolist() == [mine[item] for item in inputs]


def test_other_models_read_no_times_and_get_the_same_rows(dataset: Dataset):
    with_times, without = (assemble(config(dataset.root, model)) for model in ("hstu", "sasrec"))

    assert with_times.plan.spec.schema.names == ["user_id", "item_ids", "timestamps"]
    assert without.plan.spec.schema.names == ["user_id", "item_ids"]
    timed, plain = first_batch(with_times), first_batch(without)
    assert plain.times_N is None
    for name in ("row_keys_B", "offsets_B1", "items_N", "targets_N"):
        assert getattr(timed, name).tolist() == getattr(plain, name).tolist()


def test_an_earlier_data_set_is_refused_only_where_times_are_needed(tmp_path: Path):
    old = without_history_times(small_dataset(tmp_path))

    with pytest.raises(InputError, match=r"times of the histories .* are missing, which the model needs"):
        assemble(config(old.root))
    first_batch(assemble(config(old.root, "sasrec")))
    untimed = RunConfig.parse(
        {
            "data": {"path": str(old.root)},
            "model": MODELS["hstu"] | {"backbone": MODELS["hstu"]["backbone"] | {"num_time_buckets": 0}},
        }
    )
    assert first_batch(assemble(untimed)).times_N is None


def test_operations_on_items_and_times_together_keep_them_together(dataset: Dataset):
    whole, cut = (first_batch(assemble(config(dataset.root, features=f))) for f in ([], [CUT]))

    assert np.diff(cut.offsets_B1).max() == 2
    for row in range(whole.num_rows):
        low, high = whole.offsets_B1[row : row + 2]
        cut_low, cut_high = cut.offsets_B1[row : row + 2]
        assert cut.times_N[cut_low:cut_high].tolist() == whole.times_N[low:high][-2:].tolist()


def test_histories_to_rank_for_go_through_operations_with_their_times(dataset: Dataset):
    assembly = assemble(config(dataset.root, features=[CUT]))
    (samples,) = evaluation_batches(dataset, "test", batch_size=100, with_times=True)

    features = assembly.features.ranking(samples)

    assert np.diff(features.offsets_B1).max() == 3
    expected = [
        samples.times_N[low:high][-3:].tolist()
        for low, high in zip(samples.offsets_B1, samples.offsets_B1[1:], strict=False)
    ]
    assert features.times_N.tolist() == [time for row in expected for time in row]


def test_operations_do_not_make_a_history_without_times_one_of_1970(dataset: Dataset):
    """It is one of this moment: all that the graph has is before it."""
    (samples,) = evaluation_batches(dataset, "test", batch_size=100, with_times=True)
    timeless = dataclasses.replace(samples, times_N=np.full_like(samples.times_N, NO_TIME))
    at_0 = dataclasses.replace(samples, times_N=np.zeros_like(samples.times_N))
    cut, uncut = (
        assemble(config(dataset.root, "gnn", features=features)).features for features in ([CUT], [])
    )

    assert cut.ranking(timeless).neighbor_weights_NJ.any(axis=1).mean() > 0.5
    assert not cut.ranking(at_0).neighbor_weights_NJ.any()
    assert uncut.ranking(timeless).neighbor_weights_NJ.any(axis=1).mean() > 0.5
    assert not cut.ranking(timeless).times_N.any()


def test_an_operation_that_forgets_the_times_is_found_in_the_first_batch(dataset: Dataset):
    assembly = assemble(config(dataset.root, features=[CUT | {"inputs": ["item_ids"]}]))

    with pytest.raises(InputError, match="operations that change one have to change both"):
        first_batch(assembly)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (None, "rows need a column 'timestamps' of lists of seconds.*since the model reads when events were"),
        (pa.array([1.5, 2.5]), "it is double"),
    ],
)
def test_raw_rows_without_times_are_refused_when_the_run_is_checked(
    dataset: Dataset, tmp_path: Path, column: pa.Array | None, message: str
):
    columns = {"user_id": [1, 2], "item_ids": [[1, 2], [3]]}
    pq.write_table(
        pa.table(columns | ({} if column is None else {"timestamps": column})), tmp_path / "a.parquet"
    )

    with pytest.raises(InputError, match=message):
        _ = assemble(config(dataset.root, samples=str(tmp_path))).features
    _ = assemble(config(dataset.root, "sasrec", samples=str(tmp_path))).features


@pytest.mark.parametrize("model", ["sasrec", "hstu"])
def test_ties_are_read_in_another_order_in_every_step_if_so_set(dataset: Dataset, tmp_path: Path, model: str):
    items = dataset.items.ids_I[:8]
    rows = {"user_id": [1], "item_ids": [items], "timestamps": [[5, 6, 6, 6, 6, 6, 6, 9]]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    settings = config(dataset.root, model, samples=str(tmp_path), redraw_ties=True)
    assembly = assemble(settings)
    features = features_of(settings, assembly.rows.columns)

    rows_read = SampleReader(assembly.plan.spec).read_batch(assembly.plan.batch(0))
    batches = [features.training(step, rows_read)[0] for step in range(5)]

    read = [items[[*batch.items_N, *batch.targets_N[-1:]]].tolist() for batch in batches]
    assert {order[0] for order in read} == {items[0]}
    assert {order[-1] for order in read} == {items[-1]}
    assert all(sorted(order) == sorted(items.tolist()) for order in read)
    assert len({tuple(order) for order in read}) == 5
    (again,) = features.training(2, rows_read)
    assert again.items_N.tolist() == batches[2].items_N.tolist()
    assert [batch.times_N is None for batch in batches] == [model == "sasrec"] * 5


def test_batches_say_their_time_where_rows_live_for_hours(dataset: Dataset, tmp_path: Path):
    items = dataset.items.ids_I[:4]
    rows = {"user_id": [1, 2], "item_ids": [items, items], "timestamps": [[5, 6, 7, 9], [1, 2, 11, 4]]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    plain = config(dataset.root, "sasrec", samples=str(tmp_path))
    plain = plain.model_copy(update={"model": plain.model.model_copy(update={"user_embedding": True})})
    settings = plain.model_copy(
        update={"sparse": plain.sparse.model_copy(update={"eviction": EvictionConfig(ttl_hours=1)})}
    )
    # Of both rows' newest, 9 and 11, the one in the middle: a single wrong time moves nothing.
    for each, expected in ((settings, 9), (plain, None)):
        assembly = assemble(each)
        batch = SampleReader(assembly.plan.spec).read_batch(assembly.plan.batch(0))
        for share in features_of(each, assembly.rows.columns).training(0, batch):
            assert share.newest_event == expected
            assert share.times_N is None
    pq.write_table(pa.table({"user_id": [1], "item_ids": [[1, 2]]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"'timestamps' .* eviction\.ttl_hours goes by when events were"):
        _ = assemble(settings).features


def test_rows_whose_ties_are_redrawn_have_to_have_times(dataset: Dataset, tmp_path: Path):
    pq.write_table(pa.table({"user_id": [1], "item_ids": [[1, 2]]}), tmp_path / "a.parquet")

    with pytest.raises(InputError, match=r"'timestamps' .* since data\.redraw_ties goes by when events were"):
        _ = assemble(config(dataset.root, "sasrec", samples=str(tmp_path), redraw_ties=True)).features


def test_an_event_store_gives_items_their_times(dataset: Dataset, tmp_path: Path):
    ids, moment = dataset.items.ids_I[:4], 1_700_000_000
    store = open_store(tmp_path / "store", create=StoreManifest(name="log", time_unit="us"))
    times = 1_000_000 * (moment + np.array([10, 20, 30, 40]))
    store.append(EventBatch(np.full(4, 7), times, ids, {}))
    store.close()
    keys = {
        "user_id": [7],
        "item_id": ids[3:],
        "timestamp": pa.array([1000 * (moment + 40)], pa.timestamp("ms")),
    }
    (tmp_path / "samples").mkdir()
    pq.write_table(pa.table(keys), tmp_path / "samples" / "a.parquet")
    join = {
        "op": "join_history",
        "store": str(tmp_path / "store"),
        "outputs": {"item_ids": "items", "timestamps": "times"},
    }
    appended = [
        {"op": "concat", "inputs": [many, one], "output": many}
        for many, one in (("item_ids", "item_id"), ("timestamps", "timestamp"))
    ]
    assembly = assemble(config(dataset.root, samples=str(tmp_path / "samples"), features=[join, *appended]))

    features = first_batch(assembly)

    assert features.items_N.tolist() == [0, 1, 2]
    assert features.times_N.tolist() == [moment + 10, moment + 20, moment + 30]
    row = {"user_id": 7, "item_id": int(ids[3]), "timestamp": keys["timestamp"][0].as_py()}
    assert assembly.features.history_of(row).times_N.tolist() == [moment + t for t in (10, 20, 30, 40)]


def test_evaluation_ranks_with_the_times_of_the_histories(run: Path):
    recommender = Recommender.load(run)
    report = evaluate(run, "test")

    assert recommender.needs_times
    (samples,) = evaluation_batches(recommender.dataset, "test", batch_size=100, with_times=True)
    scores = recommender.recommend_samples(samples, 5, exclude_seen=False).scores_BK
    at_once = dataclasses.replace(samples, times_N=np.zeros_like(samples.times_N))
    assert not np.allclose(scores, recommender.recommend_samples(at_once, 5, exclude_seen=False).scores_BK)
    assert report.count == len(samples.user_ids_B)


def test_a_query_without_times_is_one_whose_events_are_of_one_time(run: Path):
    recommender = Recommender.load(run)
    stored = recommender.query_of_user("u0")
    assert stored is not None
    assert stored.times is not None
    untimed, at_once = (
        Query(stored.history_ids),
        Query(stored.history_ids, times=np.full_like(stored.times, 77)),
    )

    answers = recommender.recommend([untimed, at_once, dataclasses.replace(stored, user_id=None)], k=5)

    assert answers[0] == answers[1]
    assert answers[0] != answers[2]
    assert recommender.query_of_user("nobody") is None


def test_a_query_with_too_few_times_is_a_mistake(run: Path):
    with pytest.raises(ValueError, match="2 history_ids and 1 times"):
        Recommender.load(run).recommend([Query(np.array([1, 2]), times=np.array([5]))], k=1)


def test_a_raw_row_may_leave_its_times_out(run: Path):
    recommender = Recommender.load(run)
    query = recommender.query_of_user("u1")
    row = {"user_id": query.user_id, "item_ids": query.history_ids.tolist()}

    assert recommender.query_of(row).times is None
    timed = recommender.query_of(row | {"timestamps": query.times.tolist()})
    assert timed.times.tolist() == query.times.tolist()


@pytest.mark.slow
def test_a_model_of_time_trains_validates_and_goes_on_through_actors(dataset: Dataset, tmp_path: Path):
    settings = config(dataset.root).model_dump()
    settings["model"] |= {"item_matrix": "sparse", "loss": "bce", "negatives_per_event": 2}
    settings["pipeline"] |= {"num_trainers": 2, "trainer_threads": 1, "cpus_per_trainer": 0.5}
    settings["training"] |= {"epochs": 2}

    once = train(RunConfig.parse(settings), tmp_path / "once", cluster=in_process)
    settings["training"] |= {"epochs": 1}
    train(RunConfig.parse(settings), tmp_path / "resumed", cluster=in_process)
    settings["training"] |= {"epochs": 2}
    resumed = train(RunConfig.parse(settings), tmp_path / "resumed", resume=True, cluster=in_process)

    assert resumed.final_loss == once.final_loss
    assert (
        evaluate(tmp_path / "resumed").to_json()["results"]
        == evaluate(tmp_path / "once").to_json()["results"]
    )


@pytest.mark.slow
def test_rows_that_live_for_hours_are_given_up_alike_by_a_run_that_goes_on(dataset: Dataset, tmp_path: Path):
    """By the times of events: what is repeated, on another number of servers, gives up the same rows."""
    items, samples = dataset.items.ids_I, tmp_path / "samples"
    samples.mkdir()
    rows = {
        "user_id": list(range(40)),
        "item_ids": [items[(row + np.arange(4)) % len(items)].tolist() for row in range(40)],
        "timestamps": [(36_000 * row + np.arange(4)).tolist() for row in range(40)],
    }
    pq.write_table(pa.table(rows), samples / "a.parquet")
    settings = config(dataset.root, samples=str(samples)).model_dump()
    settings["model"] |= {"item_matrix": "sparse", "loss": "bce", "negatives_per_event": 2}
    settings["pipeline"] |= {"num_trainers": 2, "trainer_threads": 1, "cpus_per_trainer": 0.5}
    settings["training"] |= {"batch_size": 4}
    settings["sparse"] |= {"eviction": {"ttl_hours": 1, "every_steps": 1}, "num_servers": 1}
    settings["training"] |= {"epochs": 2}

    once = train(RunConfig.parse(settings), tmp_path / "once", cluster=in_process)
    settings["training"] |= {"epochs": 1}
    settings["sparse"] |= {"num_servers": 2}
    first = train(RunConfig.parse(settings), tmp_path / "resumed", cluster=in_process)
    settings["training"] |= {"epochs": 2}
    resumed = train(RunConfig.parse(settings), tmp_path / "resumed", resume=True, cluster=in_process)

    assert first.stages["sparse_rows_evicted"] > 0
    assert resumed.final_loss == once.final_loss
    assert (
        evaluate(tmp_path / "resumed").to_json()["results"]
        == evaluate(tmp_path / "once").to_json()["results"]
    )
