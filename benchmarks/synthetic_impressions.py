"""Impressions whose true probabilities are known, so that the best possible AUC is known, too.

    python -m benchmarks.synthetic_impressions OUT --rows 1000000 [--columns 8] [--ids-per-column 1000]

The result is a data set as `rayrec impressions` writes them.

    P(click) = sigmoid(bias + effects of the ids + interactions of pairs of ids + weights of the numbers)

A column's ids follow Zipf's law. Effects are hashes of (seed, column, id), so that nothing has to be kept:
10 million rows of a million ids take no more memory than one chunk, and the test rows' probabilities.

Axes: R rows of a chunk, B impressions, C columns of ids, F columns of numbers, K factors of an id, S distinct
scores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.console import print_rows
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.prepare import write_impressions
from rayrec.samples.impressions.report import ImpressionsReport
from rayrec.samples.impressions.source import BATCH_ROWS, SPLITS, ImpressionSource, SourcePart, SplitName

_NUM_FACTORS = 4
_BIAS = -1.5
_EFFECTS_STD = 1.2
"""Of the sum over columns, whatever their number; those of the other parts likewise."""
_INTERACTIONS_STD = 0.8
_NUMBERS_STD = 0.5


@dataclass(frozen=True)
class Chunk:
    """Rows that are sampled together, and their true probabilities."""

    numbers_RF: Float64Array
    ids_RC: Int64Array
    """From 0, the most frequent one, in each column."""
    probabilities_R: Float64Array
    labels_R: NDArray[np.int8]


class ClickLaw:
    """Samples impressions and clicks; the same ones for the same seed, split and number of a chunk."""

    def __init__(
        self, num_columns: int, ids_per_column: int, num_numbers: int, seed: int, zipf: float
    ) -> None:
        self._num_columns, self._num_numbers, self._seed = num_columns, num_numbers, seed
        weights = 1.0 / np.arange(1, ids_per_column + 1) ** zipf
        self._cumulative = np.cumsum(weights / weights.sum())
        # Every column takes part in one interaction, with its neighbor.
        self._pairs = [(first, first + 1) for first in range(0, num_columns - 1, 2)]
        self._weights_F = np.random.default_rng(seed).normal(size=num_numbers)

    def sample(self, split: SplitName, number: int, num_rows: int) -> Chunk:
        random = np.random.default_rng([self._seed, SPLITS.index(split), number])
        uniform_RC = random.random((num_rows, self._num_columns))
        ids_RC = np.searchsorted(self._cumulative, uniform_RC, side="right")
        ids_RC = np.minimum(ids_RC, len(self._cumulative) - 1)
        numbers_RF = random.normal(size=(num_rows, self._num_numbers))
        probabilities_R = 1 / (1 + np.exp(-self._logits(ids_RC, numbers_RF)))
        labels_R = (random.random(num_rows) < probabilities_R).astype(np.int8)
        return Chunk(numbers_RF, ids_RC, probabilities_R, labels_R)

    def _logits(self, ids_RC: Int64Array, numbers_RF: Float64Array) -> Float64Array:
        logits_R = np.full(len(ids_RC), _BIAS)
        for column in range(self._num_columns):
            logits_R += self._effect(column, ids_RC[:, column], 0) * (_EFFECTS_STD / self._num_columns**0.5)
        for first, second in self._pairs:
            scale = _INTERACTIONS_STD / (len(self._pairs) * _NUM_FACTORS) ** 0.5
            for factor in range(1, _NUM_FACTORS + 1):
                factors_R = self._effect(first, ids_RC[:, first], factor)
                logits_R += scale * factors_R * self._effect(second, ids_RC[:, second], factor)
        if self._num_numbers:
            logits_R += numbers_RF @ (self._weights_F * _NUMBERS_STD / self._num_numbers**0.5)
        return logits_R

    def _effect(self, column: int, ids_R: Int64Array, purpose: int) -> Float64Array:
        """[R] a number of each id, the same whenever it occurs: uniform, with mean 0 and variance 1."""
        hashed_R = combine64(self._seed, column, purpose, ids_R) >> np.uint64(11)
        return (hashed_R / 2.0**53 - 0.5) * 12**0.5


def synthetic_impressions(
    out: str | Path,
    num_rows: int,
    num_columns: int = 8,
    ids_per_column: int = 1000,
    seed: int = 0,
    zipf: float = 1.1,
    num_numbers: int = 2,
    overwrite: bool = False,
) -> ImpressionsReport:
    """Write a data set of sampled impressions; a tenth each validates and is tested.

    Columns are click, N1, N2, ..., C1, C2, ... (each a space of its own). `extra` of the manifest says how
    well the true probabilities rank the test rows: `bayes_auc` with the labels sampled, `bayes_auc_expected`
    over all labels, and `bayes_log_loss`, expected, too.

    Raises:
        InputError: a size that makes no data set, or `out` is taken.
    """
    sizes = {
        "num_rows": (num_rows, 100),
        "num_columns": (num_columns, 1),
        "ids_per_column": (ids_per_column, 2),
    }
    for name, (value, least) in {**sizes, "num_numbers": (num_numbers, 0), "seed": (seed, 0)}.items():
        if value < least:
            raise InputError(f"{name} must be at least {least}, got {value}")
    if not zipf >= 0:
        raise InputError(f"zipf must be at least 0 (all ids alike), got {zipf}")
    law = ClickLaw(num_columns, ids_per_column, num_numbers, seed, zipf)
    held_out = num_rows // 10
    rows: dict[SplitName, int] = {
        "train": num_rows - 2 * held_out,
        "valid": held_out,
        "test": held_out,
    }
    numbers = tuple(f"N{number}" for number in range(1, num_numbers + 1))
    ids = {name: name for name in (f"C{number}" for number in range(1, num_columns + 1))}
    source = ImpressionSource(
        name="synthetic",
        schema=ImpressionSchema(labels=("click",), numbers=numbers, ids=ids),
        parts=tuple(_part(law, split, count) for split, count in rows.items()),
    )
    described = (
        f"{num_rows} rows, {num_columns} columns of {ids_per_column} ids, {num_numbers} numbers, "
        f"zipf {zipf:g}, seed {seed}"
    )
    # The layout says what columns are for, and here the source does.
    config = ImpressionsConfig(layout="criteo", overwrite=overwrite)
    return write_impressions(
        source, Path(out), config, described, layout="synthetic", extra=_best_possible(law, rows["test"])
    )


def _chunks(law: ClickLaw, split: SplitName, num_rows: int) -> Iterator[Chunk]:
    for number, start in enumerate(range(0, num_rows, BATCH_ROWS)):
        yield law.sample(split, number, min(BATCH_ROWS, num_rows - start))


def _part(law: ClickLaw, split: SplitName, num_rows: int) -> SourcePart:
    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for chunk in _chunks(law, split, num_rows):
            made = {"click": chunk.labels_R}
            made |= {f"N{at + 1}": column_R for at, column_R in enumerate(chunk.numbers_RF.T)}
            made |= {f"C{at + 1}": column_R for at, column_R in enumerate(chunk.ids_RC.T)}
            yield pa.record_batch({name: pa.array(made[name]) for name in columns})

    return SourcePart(read, lambda row: f"{split} row {row + 1}", split)


def _best_possible(law: ClickLaw, num_rows: int) -> dict[str, float]:
    chunks = list(_chunks(law, "test", num_rows))
    probabilities_B = np.concatenate([chunk.probabilities_R for chunk in chunks])
    labels_B = np.concatenate([chunk.labels_R for chunk in chunks])
    return {
        "bayes_auc": auc(probabilities_B, labels_B),
        "bayes_auc_expected": expected_auc(probabilities_B),
        "bayes_log_loss": entropy(probabilities_B),
    }


def auc(scores_B: Float64Array, labels_B: NDArray[np.integer]) -> float:
    """Probability that a positive impression stands above a negative one; ties count half.

    Raises:
        InputError: all labels are the same.
    """
    positives_B = np.asarray(labels_B, dtype=np.float64)
    return _share_of_pairs(scores_B, positives_B, 1 - positives_B, np.zeros(len(positives_B)))


def expected_auc(probabilities_B: Float64Array) -> float:
    """AUC of the true probabilities over all possible labels: the expected number of pairs in order,
    divided by the expected number of pairs.

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
    _, score_B = np.unique(scores_B, return_inverse=True)
    positives_S, negatives_S = np.bincount(score_B, positives_B), np.bincount(score_B, negatives_B)
    below_S = np.cumsum(negatives_S) - negatives_S
    own = own_pairs_B.sum()
    above = (positives_S * (below_S + negatives_S / 2)).sum() - own / 2
    pairs = positives_B.sum() * negatives_B.sum() - own
    if pairs <= 0:
        raise InputError("an AUC needs a positive and a negative impression; give more rows")
    return float(above / pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="benchmarks.synthetic_impressions")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--ids-per-column", type=int, default=1000)
    parser.add_argument("--numbers", type=int, default=2)
    parser.add_argument("--zipf", type=float, default=1.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true")
    given = parser.parse_args(arguments)
    report = synthetic_impressions(
        given.out,
        given.rows,
        given.columns,
        given.ids_per_column,
        given.seed,
        given.zipf,
        given.numbers,
        given.overwrite,
    )
    print_rows("Impressions", report.rows())


if __name__ == "__main__":
    main()
