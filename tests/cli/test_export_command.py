"""`rayrec export`: what is written scores as the run does, and what cannot be written is said."""

import json

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.models.keras.export import SavedModelScorer
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.scorer import Scorer
from rayrec.samples.base.batches import RowBatch
from tests.helpers.ranking import prepared_clicks, ranker_run
from tests.helpers.runs import NUM_ITEMS, make_run
from tests.models.keras.programs import needs_tensorflow

KERAS = {"name": "keras", "builder": "tests.models.keras.networks:heads_of_columns", "dim": 4}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepared_clicks(tmp_path_factory.mktemp("clicks") / "clicks")


def rayrec(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return result.exit_code, result.stdout, result.stderr


def refused(*arguments):
    code, stdout, stderr = rayrec(*arguments)
    assert (code, stdout) == (2, "")
    return stderr.splitlines()[-1]


@needs_tensorflow
def test_an_exported_run_scores_rows_as_the_run_does(dataset, tmp_path):
    run, folder = ranker_run(dataset, tmp_path / "run", KERAS), tmp_path / "exports" / "model"

    code, stdout, stderr = rayrec("export", run, folder, "--snapshot", "last")

    assert code == 0, stderr
    found = json.loads(stdout.splitlines()[-1])
    scorer, exported = Scorer.load(run, "last"), SavedModelScorer.load(folder, num_threads=1)
    assert found == {
        "run": str(run),
        "folder": str(folder),
        "layout": "SavedModel",
        "snapshot_step": scorer.committed_step + 1,
        "labels": ["click", "like"],
        "num_items": None,
    }
    assert exported.labels == scorer.labels
    table: pa.Table = dataset.split_table("test", scorer.features.scored_columns.names)
    (batch,) = table.combine_chunks().to_batches()
    rows = RowBatch(np.arange(len(table)), batch)
    scores_BT = scorer.score(rows)
    assert len(np.unique(scores_BT)) > 10
    np.testing.assert_allclose(exported.predict(*scorer.network_inputs(rows)), scores_BT, rtol=0, atol=1e-6)
    # Nothing is overwritten, and nothing is left of what was begun.
    assert "this one exists; name another" in refused("export", run, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


CAN_BE = "cannot be exported; a SavedModel is made of a ranking model of Keras on TensorFlow"


def test_other_runs_are_told_what_can_be_exported(dataset, tmp_path):
    of_torch, generates = ranker_run(dataset, tmp_path / "ranker"), make_run(tmp_path, "generative")

    assert f"ranker: 'dlrm' {CAN_BE}" in refused("export", of_torch, tmp_path / "model")
    assert "run: 'light_decoder' has no vectors of items to export" in refused(
        "export", generates, tmp_path / "model"
    )
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("sasrec", {}),
        ("sasrec", {"item_matrix": "sparse", "num_negatives": 8}),
        ("hstu", {"temperature": 0.1}),
        ("bsarec", {"content": {"min_items": 1}}),
        ("gnn", {"item_matrix": "sparse", "num_negatives": 8}),
        ("prefix", {"softmax": "items"}),
    ],
)
def test_items_have_the_vectors_that_they_are_scored_by(model, settings, tmp_path):
    run, folder = make_run(tmp_path, model, **settings), tmp_path / "vectors"

    code, stdout, stderr = rayrec("export", run, folder, "--snapshot", "last")

    assert code == 0, stderr
    report = json.loads(stdout.splitlines()[-1])
    assert (report["layout"], report["num_items"]) == ("item vectors", NUM_ITEMS)
    keys = (folder / "items.txt").read_text().splitlines()
    vectors_ID = np.load(folder / "items.npy")
    recommender = Recommender.load(run, "last")
    (found,) = recommender.recommend([recommender.query_of_user("u3")], k=NUM_ITEMS)
    vectors_WD = vectors_ID[[keys.index(item.item_key) for item in found]]
    scores_W = np.array([item.score for item in found])
    # All scores are inner products with one vector, that of the history: there are more scores than numbers
    # in it.
    assert len(scores_W) > 2 * vectors_WD.shape[1]
    history_D, *_ = np.linalg.lstsq(vectors_WD, scores_W, rcond=None)
    np.testing.assert_allclose(vectors_WD @ history_D, scores_W, rtol=0, atol=1e-4 * np.ptp(scores_W))
    assert "is there already" in refused("export", run, folder)
