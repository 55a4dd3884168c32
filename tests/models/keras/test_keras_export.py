import numpy as np
import pytest

from rayrec.models.keras.export import SavedModelScorer, export_saved_model
from rayrec.platform.errors import InputError
from tests.models.keras.impressions import batch, table_rows
from tests.models.keras.programs import needs_tensorflow, program, train

pytestmark = needs_tensorflow


def test_an_exported_model_scores_as_the_program_does(tmp_path):
    trained = program("heads")
    train(trained, range(3))
    export_saved_model(trained.model, tmp_path / "model")

    scorer = SavedModelScorer.load(tmp_path / "model", num_threads=1)

    for num_rows in (1, 20):
        features = batch(num_rows, num_labels=0)
        rows = table_rows(features)
        expected = trained.predict(features, rows)
        np.testing.assert_allclose(scorer.predict(features, rows), expected, rtol=0, atol=1e-6)
    # What is exported is a copy: training goes on.
    train(trained, range(3, 4))
    assert not np.allclose(scorer.predict(features, rows), trained.predict(features, rows), rtol=0, atol=1e-6)


def test_an_export_overwrites_nothing_and_a_scorer_reads_nothing_else(tmp_path):
    with pytest.raises(InputError, match="this one exists; name another"):
        export_saved_model(program().model, tmp_path)
    with pytest.raises(InputError, match=r"expected a SavedModel with rayrec_inputs\.json"):
        SavedModelScorer.load(tmp_path)
