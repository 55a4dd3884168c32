"""The comparison of frameworks and libraries on a small drawn set: all that are installed run through it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.ctr_quality import KERAS, OURS, RECHUB, TORCH, compare
from benchmarks.synthetic_impressions import synthetic_impressions
from rayrec.pipelines.config.run import RunConfig
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.errors import InputError

RECIPE = CHECKOUT / "configs" / "synthetic-dlrm.yaml"


def recipe(folder, *overrides: str) -> RunConfig:
    synthetic_impressions(folder / "data", 4_000, num_columns=4, ids_per_column=10)
    small = ("training.batch_size=64", "training.epochs=2", "pipeline.trainer_threads=1")
    return RunConfig.load(RECIPE, (f"data.path={folder / 'data'}", *small, *overrides))


@pytest.mark.ray
@pytest.mark.slow
def test_what_is_installed_is_compared_and_learns(ray_cluster, tmp_path):
    trained = compare(recipe(tmp_path))

    assert TORCH in trained
    for found in trained.values():
        assert len(found.losses) == 100
        assert found.figures["auc"].value > 0.6
    if KERAS in trained:
        np.testing.assert_allclose(trained[KERAS].losses, trained[TORCH].losses, rtol=0, atol=1e-4)
        apart = trained[KERAS].figures["auc"].value - trained[TORCH].figures["auc"].value
        assert abs(apart) < 0.002
    assert (OURS in trained) == (RECHUB in trained)


@pytest.mark.slow
def test_a_recipe_that_frameworks_cannot_share_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"model\.dropout 0"):
        compare(recipe(tmp_path, "model.dropout=0.1"))
