import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.pipelines.metrics.response_metrics import auc, summarize

NAN = float("nan")
ROWS = st.lists(
    st.tuples(st.booleans(), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 1.0]), st.integers(0, 3)),
    max_size=30,
)


def auc_by_hand(labels, predictions) -> float:
    """Of all pairs, those in order; ties are half of one."""
    pairs = [
        (p > q) + 0.5 * (p == q)
        for y, p in zip(labels, predictions, strict=True)
        for z, q in zip(labels, predictions, strict=True)
        if y and not z
    ]
    return sum(pairs) / len(pairs) if pairs else NAN


@given(ROWS)
def test_auc_is_the_share_of_pairs_in_order(rows):
    labels, predictions = [row[0] for row in rows], [row[1] for row in rows]

    found = auc(np.array(labels, dtype=bool), np.array(predictions, dtype=float))

    assert found == pytest.approx(auc_by_hand(labels, predictions), nan_ok=True)


@given(ROWS)
def test_gauc_weighs_each_group_with_both_labels_by_its_impressions(rows):
    weighted = weight = 0.0
    for group in {row[2] for row in rows}:
        labels = [row[0] for row in rows if row[2] == group]
        value = auc_by_hand(labels, [row[1] for row in rows if row[2] == group])
        if not np.isnan(value):
            weighted, weight = weighted + len(labels) * value, weight + len(labels)

    table = np.array(rows, dtype=float).reshape(-1, 3)
    found = summarize(table[:, 0], table[:, 1], table[:, 2].astype(int), num_resamples=2)

    assert found["gauc"].value == pytest.approx(weighted / weight if weight else NAN, nan_ok=True)


def test_worked_numbers():
    found = summarize(np.array([1, 0, 0, 0]), np.array([0.5, 0.25, 0.25, 0.5]), num_resamples=2)

    log_loss = -(2 * np.log(0.5) + 2 * np.log(0.75)) / 4
    entropy = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    assert found["auc"].value == pytest.approx(2.5 / 3)
    assert found["log_loss"].value == pytest.approx(log_loss)
    assert found["normalized_entropy"].value == pytest.approx(log_loss / entropy)
    assert found["calibration"].value == pytest.approx(0.375 / 0.25)
    assert "gauc" not in found


def test_metrics_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    predictions = rng.random(2000).round(2)
    labels = (rng.random(2000) < predictions).astype(float)

    found = summarize(labels, predictions, num_resamples=2)

    assert found["auc"].value == pytest.approx(metrics.roc_auc_score(labels, predictions))
    clipped = predictions.clip(1e-7, 1 - 1e-7)
    assert found["log_loss"].value == pytest.approx(metrics.log_loss(labels, clipped))


def test_rows_with_unknown_labels_are_left_out():
    labels, predictions = np.array([1, NAN, 0, 1, NAN]), np.array([0.7, NAN, 0.3, 0.2, 0.9])
    groups, known = np.array(["a", "b", "a", "c", "c"]), [0, 2, 3]

    assert summarize(labels, predictions, groups) == summarize(
        labels[known], predictions[known], groups[known]
    )


def test_one_class_has_no_order_and_no_entropy():
    found = summarize(np.zeros(3), np.array([0.1, 0.2, 0.3]), np.array([0, 0, 1]))

    assert all(np.isnan(found[name].value) for name in ("auc", "gauc", "normalized_entropy", "calibration"))
    assert all(np.isnan(found[name].low) for name in ("auc", "gauc", "normalized_entropy", "calibration"))
    assert np.isfinite(found["log_loss"]).all()


def test_no_known_label_says_nothing():
    found = summarize(np.full(2, NAN), np.array([0.1, 0.2]))

    assert np.isnan([*found.values()]).all()


def test_one_group_has_no_interval():
    found = summarize(np.array([0, 1, 0]), np.array([0.1, 0.2, 0.3]), np.zeros(3, dtype=int))

    assert found["gauc"].value == 0.5
    assert np.isnan([found["gauc"].low, found["gauc"].high]).all()


def test_certain_and_wrong_is_bad_but_finite():
    assert summarize(np.array([1.0, 0.0]), np.array([0.0, 1.0]))["log_loss"].value == pytest.approx(
        -np.log(1e-7)
    )


@pytest.mark.parametrize("bad", [1.5, -0.1, NAN])
def test_what_is_no_probability_is_refused(bad):
    with pytest.raises(ValueError, match="must be probabilities"):
        summarize(np.array([0.0, 1.0]), np.array([bad, 0.5]))


def test_equal_inputs_have_equal_intervals():
    rng = np.random.default_rng(1)
    labels, predictions = (rng.random(3000) < 0.3).astype(float), rng.random(3000)

    assert summarize(labels, predictions) == summarize(labels, predictions)


@pytest.mark.parametrize("num_rows", [300, 3000])
def test_intervals_of_the_auc_are_those_of_resampled_rows(num_rows):
    """Also where rows are pooled: 3,000 are more than are resampled one by one."""
    rng = np.random.default_rng(2)
    predictions = rng.random(num_rows)
    labels = (rng.random(num_rows) < predictions).astype(float)
    resampled = []
    for _ in range(400):
        drawn = rng.integers(num_rows, size=num_rows)
        resampled.append(auc(labels[drawn] > 0, predictions[drawn]))
    low, high = np.quantile(resampled, [0.025, 0.975])

    found = summarize(labels, predictions)["auc"]

    assert found.low < found.value < found.high
    assert [found.low, found.high] == pytest.approx([low, high], abs=0.15 * (high - low))


def test_intervals_of_groups_are_wider_where_groups_differ():
    """Every group's labels are one and the same: 50 groups of 20 rows say as much as 50 rows."""
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(50), 20)
    labels = (rng.random(50) < 0.5).astype(float)[groups]
    predictions = np.full(1000, 0.5)

    by_rows = summarize(labels, predictions)["calibration"]
    by_groups = summarize(labels, predictions, groups)["calibration"]

    ratio = (by_groups.high - by_groups.low) / (by_rows.high - by_rows.low)
    assert ratio == pytest.approx(20**0.5, rel=0.25)


def test_many_rows_take_bounded_time():
    """A thousand resamples of these rows one by one would take minutes."""
    rng = np.random.default_rng(4)
    labels, predictions = (rng.random(200_000) < 0.1).astype(float), rng.random(200_000)

    began = time.process_time()
    summarize(labels, predictions, rng.integers(20_000, size=200_000))

    assert time.process_time() - began < 10
