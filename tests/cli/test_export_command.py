"""`rayrec export`: what is written scores as the run does, and what cannot be written is said."""

import json

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.models.keras.export import SavedModelScorer
from rayrec.pipelines.inference.scorer import Scorer
from rayrec.samples.base.batches import RowBatch
from tests.helpers.ranking import prepared_clicks, ranker_run
from tests.helpers.runs import make_run
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
    of_torch, recommender = ranker_run(dataset, tmp_path / "ranker"), make_run(tmp_path)

    for run, model in ((of_torch, "dlrm"), (recommender, "sasrec")):
        message = refused("export", run, tmp_path / "model")
        assert f"{run.name}: '{model}' {CAN_BE}" in message
    assert not (tmp_path / "model").exists()
