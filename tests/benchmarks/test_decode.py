"""What the benchmark of decoding measures on, and that its two sides mean the same."""

import numpy as np
import pytest

from benchmarks import decode
from benchmarks.harness import BenchOptions


def test_the_synthetic_catalog_is_shaped_like_the_real_one():
    codes_IL, level_sizes = decode.catalog(BenchOptions())

    assert codes_IL.shape == (12_101, 4)
    assert len(np.unique(codes_IL, axis=0)) == 12_101
    assert (codes_IL.max(axis=0) < level_sizes).all()
    # Of Amazon Beauty: 9,162 prefixes of two codes and 11,703 of three.
    assert len(np.unique(codes_IL[:, :2], axis=0)) == pytest.approx(9_162, rel=0.1)
    assert len(np.unique(codes_IL[:, :3], axis=0)) == pytest.approx(11_703, rel=0.05)


def test_histories_are_as_long_as_real_ones_and_come_once():
    draws = decode.HistoryDraws(1_000, seed=0)
    lengths = np.array([len(items_T) for items_T in draws.draw(4_000)])

    assert lengths.min() == 4
    assert lengths.max() == 50
    assert np.median(lengths) == 5
    assert lengths.mean() == pytest.approx(7.9, abs=1.0)
    assert [items_T.tolist() for items_T in draws.draw(3)] != [items_T.tolist() for items_T in draws.draw(3)]


@pytest.mark.slow
def test_both_sides_find_the_same_items_with_the_same_scores():
    pytest.importorskip("transformers")
    codes_IL, level_sizes = decode.catalog(BenchOptions())
    model = decode.recommender(codes_IL, level_sizes, dim=32, num_layers=1)

    decode.check_same_results(
        decode.Ours(model, codes_IL),
        decode.Peer(model),
        decode.HistoryDraws(len(codes_IL), seed=2),
        sizes=(8, 1),
    )
