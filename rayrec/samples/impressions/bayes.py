"""How good a ranking can be at best, where the true probabilities are known.

Axis: B impressions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rayrec.platform.arrays import Float64Array
from rayrec.platform.errors import InputError


def auc(scores_B: Float64Array, labels_B: NDArray[np.integer]) -> float:
    """Probability that a positive impression stands above a negative one; ties count half.

    Raises:
        InputError: all labels are the same.
    """
    positives_B = np.asarray(labels_B, dtype=np.float64)
    return _share_of_pairs(scores_B, positives_B, 1 - positives_B, np.zeros(len(positives_B)))


def expected_auc(probabilities_B: Float64Array) -> float:
    """AUC of the true probabilities over all labels that could have been drawn: expected well-ordered pairs
    of a positive and a negative impression, as a part of the expected pairs.

    Raises:
        InputError: there are no two impressions that may differ.
    """
    negatives_B = 1 - probabilities_B
    # An impression makes no pair with itself.
    return _share_of_pairs(probabilities_B, probabilities_B, negatives_B, probabilities_B * negatives_B)


def entropy(probabilities_B: Float64Array) -> float:
    """Mean log loss (natural logarithm) of the true probabilities, expected over labels."""
    with np.errstate(divide="ignore", invalid="ignore"):
        terms_B = [np.where(p > 0, -p * np.log(p), 0.0) for p in (probabilities_B, 1 - probabilities_B)]
    return float((terms_B[0] + terms_B[1]).mean())


def _share_of_pairs(
    scores_B: Float64Array, positives_B: Float64Array, negatives_B: Float64Array, own_pairs_B: Float64Array
) -> float:
    """Weights of the pairs in which the positive one stands above, of all pairs.

    Args:
        positives_B, negatives_B: how much of each impression is the one, and the other.
        own_pairs_B: weight of the pair of each impression with itself, which is none.
    """
    _, places_B = np.unique(scores_B, return_inverse=True)
    positives_S, negatives_S = np.bincount(places_B, positives_B), np.bincount(places_B, negatives_B)
    below_S = np.cumsum(negatives_S) - negatives_S
    own = own_pairs_B.sum()
    above = (positives_S * (below_S + negatives_S / 2)).sum() - own / 2
    pairs = positives_B.sum() * negatives_B.sum() - own
    if pairs <= 0:
        raise InputError("an AUC needs a positive and a negative impression; give more rows")
    return float(above / pairs)
