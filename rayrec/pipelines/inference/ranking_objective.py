"""What candidates are ordered by: one number of the probabilities of all labels.

Axes: B queries, K candidates of each, T labels.
"""

from __future__ import annotations

import numpy as np

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.platform.errors import InputError

_LEAST = 1e-12
"""A probability of 0 in a product would make all that have one alike."""


class Objective:
    """A weighted sum or product of the labels' probabilities, and of the recommender's score."""

    def __init__(self, config: RankingConfig, labels: tuple[str, ...], run: str) -> None:
        """
        Args:
            run: of the ranking model, for messages.

        Raises:
            InputError: a label that there is not, or none of several.
        """
        weights = config.objective
        if not weights:
            if len(labels) > 1:
                raise InputError(
                    f"{run} predicts {', '.join(labels)}; say what counts with objective (--objective "
                    f"{labels[0]}=1)"
                )
            weights = dict.fromkeys(labels, 1.0)
        if unknown := [label for label in weights if label not in labels]:
            raise InputError(
                f"objective names the label {unknown[0]!r}, but {run} predicts {', '.join(labels)}"
            )
        self._weights_T = np.array([weights.get(label, 0.0) for label in labels])
        self._is_product = config.combine == "product"
        self._generator_weight = config.generator_weight

    def __call__(self, probabilities_BKT: np.ndarray, scores_BK: np.ndarray) -> np.ndarray:
        """[B, K] the larger the better; scores are those of the recommender."""
        of_labels_BK = self.of_labels(probabilities_BKT)
        if not self._generator_weight:  # zero times the -inf of a missing candidate is no number
            return of_labels_BK
        return of_labels_BK + self._generator_weight * scores_BK

    def of_labels(self, probabilities_BKT: np.ndarray) -> np.ndarray:
        """[B, K] the part that hangs on what the ranking model says."""
        if self._is_product:
            return np.log(np.maximum(probabilities_BKT, _LEAST)) @ self._weights_T
        return probabilities_BKT @ self._weights_T
