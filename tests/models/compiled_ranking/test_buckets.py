"""Batches go to the smallest shape that holds them."""

from __future__ import annotations

import pytest

from rayrec.models.compiled_ranking.buckets import Bucket, Buckets, geometric


def test_sizes_grow_by_a_factor_and_end_with_the_last():
    assert geometric(1, 8) == [1, 2, 4, 8]
    assert geometric(32, 100) == [32, 64, 100]
    assert geometric(5, 5) == [5]
    assert geometric(3, 50, factor=4) == [3, 12, 48, 50]


def test_the_smallest_bucket_that_holds_a_batch_is_its_own():
    buckets = Buckets([8, 1, 2], [64, 32])

    assert buckets.of(1, 0, 10) == Bucket(1, 32, 10)
    assert buckets.of(3, 33, 10) == Bucket(8, 64, 10)
    assert buckets.of(8, 64, 100) == Bucket(8, 64, 100)


def test_what_is_larger_than_all_buckets_has_none():
    buckets = Buckets([1, 8], [32, 64])

    assert buckets.of(9, 1, 10) is None
    assert buckets.of(1, 65, 10) is None


@pytest.mark.parametrize(("rows", "lengths"), [([], [1]), ([0], [1]), ([1], []), ([1], [-1])])
def test_sizes_that_hold_nothing_are_refused(rows, lengths):
    with pytest.raises(ValueError, match="at least one number from 1"):
        Buckets(rows, lengths)


def test_no_size_grows_by_a_factor_of_one():
    with pytest.raises(ValueError, match="factor of at least 2"):
        geometric(1, 8, factor=1)
