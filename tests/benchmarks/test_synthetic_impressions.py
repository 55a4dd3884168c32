"""Sampled impressions, and how well they can be ranked."""

import itertools

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.synthetic_impressions import ClickLaw, auc, entropy, expected_auc, main, synthetic_impressions
from rayrec.platform.errors import InputError
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.ids import id_of


def test_auc_counts_ties_half():
    assert auc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([0, 0, 1, 1])) == (4 - 0.5) / 4


def test_the_expected_auc_is_that_of_all_labels():
    probabilities = np.array([0.2, 0.5, 0.5, 0.9])
    above = pairs = 0.0
    for labels in itertools.product([0, 1], repeat=4):
        weight = np.prod(np.where(labels, probabilities, 1 - probabilities))
        num_pairs = sum(labels) * (4 - sum(labels))
        if num_pairs:
            above += weight * num_pairs * auc(probabilities, np.array(labels))
            pairs += weight * num_pairs
    assert expected_auc(probabilities) == pytest.approx(above / pairs)


def test_entropy_of_coins():
    assert entropy(np.array([0.5, 1.0, 0.0])) == pytest.approx(np.log(2) / 3)


def test_the_manifest_knows_how_well_the_rows_can_be_ranked(tmp_path):
    report = synthetic_impressions(tmp_path / "data", 20_000, num_columns=3, ids_per_column=50, seed=4)
    dataset = ImpressionDataset.open(tmp_path / "data")
    assert report.manifest.rows == {"train": 16_000, "valid": 2000, "test": 2000}
    truth = ClickLaw(3, 50, 2, seed=4, zipf=1.1).sample("test", 0, 2000)
    test = dataset.split_table("test")
    assert test["click"].to_pylist() == truth.labels_R.tolist()
    assert test["C2"].to_pylist()[:20] == [id_of("C2", int(key)) for key in truth.ids_RC[:20, 1]]
    extra = dataset.manifest.extra
    assert extra["bayes_auc"] == auc(truth.probabilities_R, truth.labels_R)
    assert extra["bayes_auc"] == pytest.approx(extra["bayes_auc_expected"], abs=0.04)
    assert 0.7 < extra["bayes_auc_expected"] < 0.9


def test_rows_depend_on_the_seed_and_ids_follow_zipfs_law(tmp_path):
    first = synthetic_impressions(tmp_path / "a", 5000, num_columns=2, ids_per_column=100, seed=1)
    again = synthetic_impressions(tmp_path / "b", 5000, num_columns=2, ids_per_column=100, seed=1)
    other = synthetic_impressions(tmp_path / "c", 5000, num_columns=2, ids_per_column=100, seed=2)
    assert first.manifest.fingerprint == again.manifest.fingerprint != other.manifest.fingerprint
    train = pq.read_table(first.path / "train")
    counts = train["C1"].value_counts().to_pylist()
    most = max(counts, key=lambda entry: entry["counts"])
    assert most["values"] == id_of("C1", 0)
    weights = 1 / np.arange(1, 101) ** 1.1
    assert most["counts"] / 4000 == pytest.approx(1 / weights.sum(), abs=0.03)


def test_the_command_writes_a_data_set(tmp_path):
    main([str(tmp_path / "data"), "--rows", "1000", "--columns", "2"])

    assert 0.5 < ImpressionDataset.open(tmp_path / "data").manifest.extra["bayes_auc_expected"] < 1


def test_sizes_that_make_no_data_set(tmp_path):
    with pytest.raises(InputError, match="num_rows must be at least 100, got 5"):
        synthetic_impressions(tmp_path / "data", 5)
    assert not (tmp_path / "data").exists()
