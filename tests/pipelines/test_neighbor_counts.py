"""A ranking model that reads how often an item was met before its row, from a graph and kept columns."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.inference.scorer import Scorer
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.errors import InputError
from rayrec.samples.graph import GraphConfig, TemporalGraph
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.prepare import prepare_impressions
from rayrec.samples.prepare.ids import ids_of_kind
from rayrec.samples.reading.reader import SampleReader

DAY, T0 = 86_400, 1_767_225_600
NUM_ROWS, NUM_ITEMS = 800, 10


def met_within(times: np.ndarray, at: int, seconds: int) -> int:
    return int(((times < at) & (times >= at - seconds)).sum())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Events of items, and impressions that are clicked if their item was met within a day."""
    folder = tmp_path_factory.mktemp("clicks")
    random = np.random.default_rng(0)
    users_E, items_E = random.integers(50, size=300), random.integers(NUM_ITEMS, size=300)
    times_E = T0 + random.integers(20 * DAY, size=300)
    graph = TemporalGraph(GraphConfig(log="shop", id_kinds={"user": "integer", "item": "string"}))
    graph.append(users_E, ids_of_kind(pa.array([f"i{item}" for item in items_E]), "string", "item"), times_E)
    graph.save(folder / "graph")
    items_R = random.integers(NUM_ITEMS, size=NUM_ROWS)
    times_R = T0 + random.integers(20 * DAY, size=NUM_ROWS)
    met_R = [met_within(times_E[items_E == item], at, DAY) for item, at in zip(items_R, times_R, strict=True)]
    columns = {
        "click": [int(met > 0) for met in met_R],
        "item": [f"i{item}" for item in items_R],
        "when": times_R,
        "met": met_R,
    }
    pq.write_table(pa.table(columns), folder / "clicks.parquet")
    return folder


def impressions(folder: Path, out: str, **more: object) -> Path:
    values = {
        "layout": "table",
        "labels": ["click"],
        "ids": {"item": "item"},
        "time": "when",
        "split": "time",
    }
    prepare_impressions(folder / "clicks.parquet", folder / out, ImpressionsConfig.parse(values | more))
    return folder / out


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return impressions(folder, "data", kept={"when": "when", "item": "item_key", "met": "met_key"})


def config(folder: Path, data: Path, counts: str = "met_today") -> RunConfig:
    joined = {"op": "join_neighbors", "graph": str(folder / "graph"), "time": "when", "item": "item_key"}
    return RunConfig.parse(
        {
            "data": {
                "path": str(data),
                "features": [joined | {"counts": {counts: DAY}}],
                "numbers": ["met_today"],
            },
            "model": {"name": "dlrm", "dim": 4, "hidden_dims": [8], "bottom_dims": [4]},
            "pipeline": {"trainer_threads": 1},
            "training": {"batch_size": 32, "epochs": 20, "optimizer": {"learning_rate": 0.02}},
        }
    )


def test_columns_that_are_kept_are_there_in_all_splits_as_times_and_texts(data):
    for file in ("train/part-00000.parquet", "valid.parquet", "test.parquet"):
        schema = pq.read_schema(data / file)
        assert schema.field("when").type == pa.timestamp("us", "UTC")
        assert schema.field("item_key").type == pa.string()


@pytest.mark.slow
def test_the_model_reads_counts_of_what_was_before_each_row_in_training_and_after_it(folder, data, tmp_path):
    assembly = assemble(config(folder, data))
    rows = SampleReader(assembly.plan.spec).read_batch(assembly.plan.batch(0))
    (batch,) = assembly.features.training(0, rows)
    whole = pq.read_table(data / "train" / "part-00000.parquet")
    met_of = dict(
        zip(
            zip(whole["item_key"].to_pylist(), whole["when"].to_pylist(), strict=True),
            map(int, whole["met_key"].to_pylist()),
            strict=True,
        )
    )
    keys = zip(rows.rows["item_key"].to_pylist(), rows.rows["when"].to_pylist(), strict=True)
    assert batch.numbers_BF[:, 0].tolist() == [met_of[key] for key in keys]

    train(config(folder, data), tmp_path / "run", cluster=in_process)

    assert evaluate(tmp_path / "run").results["model"]["auc"].value > 0.9
    scorer = Scorer.load(tmp_path / "run")
    item, at = next(key for key, met in met_of.items() if met > 1)
    long_ago = datetime(2025, 12, 1, tzinfo=UTC)
    fields = {"item": item, "item_key": item}
    popular, unknown = scorer.score_rows([fields | {"when": at}, fields | {"when": long_ago}])[:, 0]
    assert popular > unknown
    with pytest.raises(InputError, match=r"when: give a date and time \(datetime\)"):
        scorer.score_rows([fields | {"when": 1_767_225_600}])


def test_what_operations_read_is_missed_before_anything_is_trained(folder, data, tmp_path):
    with pytest.raises(InputError, match="there is no column 'when'"):
        train(config(folder, impressions(folder, "bare")), tmp_path / "bare", cluster=in_process)
    raw = config(folder, folder / "bare")
    samples = raw.data.model_copy(update={"samples": str(data / "train")})
    with pytest.raises(InputError, match=r"valid.parquet: there is no column 'when'.*--keep when"):
        train(raw.model_copy(update={"data": samples}), tmp_path / "raw", cluster=in_process)
    assert not (tmp_path / "raw").exists()


def test_numbers_that_nothing_makes_or_that_are_there_already_are_refused(folder, data):
    with pytest.raises(InputError, match="'met_today' of numbers"):
        _ = assemble(config(folder, data, counts="met_lately")).features
    named = config(folder, data).data.model_copy(update={"numbers": ("item",)})
    with pytest.raises(InputError, match=r"'item' is a column of .* already"):
        assemble(config(folder, data).model_copy(update={"data": named}))
    with pytest.raises(InputError, match=r"--keep item: there is another column 'item'.*item:item_key"):
        impressions(folder, "twice", kept={"item": "item"})


def test_the_recipe_of_the_guide_fits_its_settings():
    recipe = RunConfig.load(CHECKOUT / "configs" / "clicks-neighbors.yaml")

    assert set(recipe.data.numbers) == set(recipe.data.features[0].counts)
