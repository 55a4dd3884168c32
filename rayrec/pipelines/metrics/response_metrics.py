"""How good predicted probabilities of responses (clicks, purchases) are, with intervals.

| name | what it says |
| --- | --- |
| auc | how often a positive is above a negative, ties counting half |
| gauc | the same within each group; mean over groups with both labels, weighted by their impressions |
| log_loss | mean of -log of the probability of what came |
| normalized_entropy | log_loss over that of predicting the mean label for all; below 1 is better than that |
| calibration | mean prediction over mean label |

Where the labels are of one class there is no pair to order: auc and gauc are NaN, and so is what would be
divided by an entropy or mean of 0. Without any known label, all are.

**Intervals.** Bootstrap resamples of rows, or of groups, whose rows hang together (one user's responses are
not independent). Resampling a million rows a thousand times would take minutes, so it is bounded in two ways:

- Each metric is a function of sums over rows. Those of log_loss, normalized_entropy, calibration and gauc are
  obvious. The AUC is nearly such a sum: of each row's placement, the share of the other class that it is
  ordered right with. The changes of the mean placement of positives and of negatives add up to that of the
  AUC to first order (DeLong et al., Biometrics 1988); the term that is left out is of the order of
  1 / (number of rows). So there is one sort, and none for each resample.
- Beyond `MOST_UNITS` rows or groups, these are put at random into so many pools of equal size, and the pools
  are resampled: the variance of a sum over pools is that of the sum over what is in them. The width of the
  interval then has itself an error of about 1 / sqrt(2 MOST_UNITS), 2 %.

Sources: He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014 (normalized
entropy, calibration); Zhu et al., "Optimized Cost per Click in Taobao Display Advertising", KDD 2017,
arXiv:1703.02091 (GAUC); Efron, 1979 (percentile bootstrap).

Axes: B impressions, K of them with a known label, G groups, U units that are resampled, R resamples, S sums.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.platform.arrays import Float64Array

MOST_UNITS = 1000
"""Rows or groups that are resampled one by one; more are pooled."""
IS_LARGER_BETTER = {"auc": True, "gauc": True, "log_loss": False, "normalized_entropy": False}
"""Of the metrics that have a better side: a calibration is best at 1."""
SMALLEST = 1e-7
"""Probabilities are kept so far from 0 and 1 in logarithms: about where float32 cannot tell them from 1."""


class _Sums(NamedTuple):
    """What the metrics are made of: [...] sums over rows, or over all of them."""

    rows: Float64Array
    positives: Float64Array
    predictions: Float64Array
    losses: Float64Array
    positive_placements: Float64Array
    negative_placements: Float64Array
    ordered_rows: Float64Array
    """Rows of groups with both labels."""
    group_aucs: Float64Array
    """Of such a group its AUC, in each of its rows."""


def summarize(
    labels_B: np.ndarray,
    predictions_B: np.ndarray,
    groups_B: np.ndarray | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Every metric of one task with its 95 % interval; `gauc` only where there are groups.

    Args:
        labels_B: 0, 1, or NaN where it is not known: such rows are left out.
        predictions_B: probabilities of label 1.
        groups_B: whose impression each is: integers or texts.

    Returns:
        By name. Both ends of an interval are NaN where there are not two rows (or groups) to resample.
        Resamples of which a metric is not defined, as of few rows with one class alone, are left out.

    Raises:
        ValueError: a prediction for a known label is not in [0, 1].
    """
    known_B = ~np.isnan(labels_B)
    positive_K = labels_B[known_B] > 0
    predictions_K = np.asarray(predictions_B, dtype=np.float64)[known_B]
    groups_K = None if groups_B is None else np.unique(groups_B[known_B], return_inverse=True)[1]
    outside_K = ~((predictions_K >= 0.0) & (predictions_K <= 1.0))
    if outside_K.any():
        raise ValueError(
            f"predictions must be probabilities, got {predictions_K[outside_K][0]} for one of "
            f"{outside_K.sum()} impressions: no metric would mean anything"
        )
    sums_KS = _sums_of_rows(positive_K, predictions_K, groups_K)
    whole_auc = auc(positive_K, predictions_K)
    values = _metrics(_Sums(*sums_KS.sum(axis=0)), whole_auc) | {"auc": whole_auc}
    resampled = _metrics(_Sums(*_resample(sums_KS, groups_K, num_resamples, seed).T), whole_auc)
    if groups_K is None:
        del resampled["gauc"]
    return {name: _estimate(float(values[name]), values_R) for name, values_R in resampled.items()}


def auc(positive_K: np.ndarray, predictions_K: np.ndarray) -> float:
    """Exact, ties counting half; NaN without a pair to order. Takes one sort.

    Args:
        positive_K: bool.
    """
    one_group_K = np.zeros(len(positive_K), dtype=np.int64)
    return float(_group_aucs(positive_K, predictions_K, one_group_K, 1)[0])


def _sums_of_rows(
    positive_K: np.ndarray, predictions_K: Float64Array, groups_K: np.ndarray | None
) -> Float64Array:
    """[K, S] what each row adds to `_Sums`."""
    num_rows, positives_K = len(positive_K), positive_K.astype(np.float64)
    kept_K = np.clip(predictions_K, SMALLEST, 1.0 - SMALLEST)
    losses_K = -np.where(positive_K, np.log(kept_K), np.log1p(-kept_K))
    placements_K = _placements(positive_K, predictions_K)
    in_ordered_K = group_aucs_K = np.zeros(num_rows)
    if groups_K is not None and num_rows:
        aucs_K = _group_aucs(positive_K, predictions_K, groups_K, int(groups_K.max()) + 1)[groups_K]
        in_ordered_K, group_aucs_K = (~np.isnan(aucs_K)).astype(np.float64), np.nan_to_num(aucs_K)
    rows = _Sums(
        rows=np.ones(num_rows),
        positives=positives_K,
        predictions=predictions_K,
        losses=losses_K,
        positive_placements=placements_K * positives_K,
        negative_placements=placements_K * (1.0 - positives_K),
        ordered_rows=in_ordered_K,
        group_aucs=group_aucs_K,
    )
    return np.stack(rows, axis=1)


def _placements(positive_K: np.ndarray, predictions_K: Float64Array) -> Float64Array:
    """[K] the share of the other class that each row is ordered right with, ties counting half.

    Its mean over the positives is the AUC, and so is that over the negatives. NaN without the other class.
    """
    _, place_K = np.unique(predictions_K, return_inverse=True)
    num_places = int(place_K.max(initial=-1)) + 1
    positives_P = np.bincount(place_K[positive_K], minlength=num_places)
    negatives_P = np.bincount(place_K[~positive_K], minlength=num_places)
    negatives_below_P = np.cumsum(negatives_P) - negatives_P + 0.5 * negatives_P
    positives_above_P = positives_P.sum() - np.cumsum(positives_P) + 0.5 * positives_P
    right_K = np.where(positive_K, negatives_below_P[place_K], positives_above_P[place_K])
    with np.errstate(invalid="ignore"):
        return right_K / np.where(positive_K, negatives_P.sum(), positives_P.sum())


def _group_aucs(
    positive_K: np.ndarray, predictions_K: np.ndarray, groups_K: np.ndarray, num_groups: int
) -> Float64Array:
    """[G] the AUC of each group; NaN where it has one class. Takes one sort for all of them."""
    order_K = np.lexsort((predictions_K, groups_K))
    group_K, prediction_K, positive_K = groups_K[order_K], predictions_K[order_K], positive_K[order_K]
    # Runs of equal predictions within a group: of each, where it begins.
    is_new_K = np.ones(len(order_K), dtype=bool)
    is_new_K[1:] = (group_K[1:] != group_K[:-1]) | (prediction_K[1:] != prediction_K[:-1])
    starts_P = np.flatnonzero(is_new_K)
    group_P = group_K[starts_P]
    positives_P = np.add.reduceat(positive_K.astype(np.int64), starts_P) if len(starts_P) else starts_P
    negatives_P = np.diff(starts_P, append=len(order_K)) - positives_P
    positives_G = np.bincount(group_P, positives_P, num_groups)
    negatives_G = np.bincount(group_P, negatives_P, num_groups)
    # Negatives of the same group in runs before: all before, but for those of groups before.
    of_groups_before_P = (np.cumsum(negatives_G) - negatives_G)[group_P]
    below_P = np.cumsum(negatives_P) - negatives_P - of_groups_before_P
    wins_G = np.bincount(group_P, positives_P * (below_P + 0.5 * negatives_P), num_groups)
    with np.errstate(invalid="ignore"):
        return wins_G / (positives_G * negatives_G)


def _resample(
    sums_KS: Float64Array, groups_K: np.ndarray | None, num_resamples: int, seed: int
) -> Float64Array:
    """[R, S] sums of resamples of rows or groups; NaN where there are not two of them."""
    generator = np.random.default_rng(seed)
    unit_K = np.arange(len(sums_KS)) if groups_K is None else groups_K
    num_units = int(unit_K.max(initial=-1)) + 1
    if num_units < 2:
        return np.full((num_resamples, sums_KS.shape[1]), np.nan)
    if num_units > MOST_UNITS:
        unit_K = generator.permutation(num_units)[unit_K] % MOST_UNITS
        num_units = MOST_UNITS
    sums_US = np.stack([np.bincount(unit_K, sums_K, num_units) for sums_K in sums_KS.T], axis=1)
    counts_RU = generator.multinomial(num_units, np.full(num_units, 1.0 / num_units), num_resamples)
    return counts_RU.astype(np.float64) @ sums_US


def _metrics(sums: _Sums, whole_auc: float) -> dict[str, Float64Array]:
    """Of sums over rows, or of [R] resampled ones; NaN where not defined.

    Args:
        whole_auc: that of all rows, around which the AUC of a resample is a sum.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = sums.positives / sums.rows
        log_loss = sums.losses / sums.rows
        entropy = -(rate * np.log(rate) + (1.0 - rate) * np.log1p(-rate))  # NaN of one class
        of_positives = sums.positive_placements / sums.positives
        of_negatives = sums.negative_placements / (sums.rows - sums.positives)
        return {
            "auc": np.clip(of_positives + of_negatives - whole_auc, 0.0, 1.0),
            "gauc": sums.group_aucs / sums.ordered_rows,
            "log_loss": log_loss,
            "normalized_entropy": log_loss / entropy,
            "calibration": np.where(rate > 0.0, sums.predictions / sums.positives, np.nan),
        }


def _estimate(value: float, values_R: Float64Array) -> Estimate:
    """A value with the percentile interval of its resamples, those left out that are not defined."""
    defined_R = values_R[np.isfinite(values_R)]
    if np.isnan(value) or not len(defined_R):
        return Estimate(value, np.nan, np.nan)
    low, high = np.quantile(defined_R, [0.025, 0.975])
    return Estimate(value, float(low), float(high))
