"""Rows of a batch and sums of its gradients: bit-equal for any number of threads."""

import numpy as np
import pytest

from rayrec.embeddings.batch_rows import expand_rows, sum_rows
from rayrec.embeddings.threads import in_parts
from rayrec.platform.deduplication import deduplicate


def batch(num_ids: int, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    distinct_M, inverse_N = deduplicate(random.integers(num_ids // 3, size=num_ids))
    return distinct_M, inverse_N, random.standard_normal((num_ids, dim), dtype=np.float32)


@pytest.mark.parametrize(("num_ids", "dim"), [(20_000, 40), (20_000, 8), (50, 64)])
def test_sums_are_those_of_a_loop_over_the_batch(num_ids: int, dim: int):
    distinct_M, inverse_N, grads_ND = batch(num_ids, dim)
    expected_MD = np.zeros((len(distinct_M), dim), dtype=np.float32)
    np.add.at(expected_MD, inverse_N, grads_ND)

    summed_MD = sum_rows(grads_ND, inverse_N, len(distinct_M))

    assert (summed_MD == expected_MD).all()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("dim", [8, 40])
def test_rows_are_spread_over_the_batch(num_threads: int, dim: int):
    distinct_M, inverse_N, _ = batch(20_000, dim)
    rows_MD = np.arange(len(distinct_M) * dim, dtype=np.float32).reshape(-1, dim)
    out_ND = np.full((20_000, dim), np.nan, dtype=np.float32)

    assert expand_rows(rows_MD, inverse_N, out_ND, num_threads) is out_ND
    assert (out_ND == rows_MD[inverse_N]).all()


def test_what_was_in_the_output_before_does_not_count():
    out_MD = np.full((2, 1), 99, dtype=np.float32)

    sum_rows(np.array([[1], [2], [4]], dtype=np.float32), np.array([0, 1, 0]), 2, out_MD)

    assert out_MD.tolist() == [[5], [2]]


@pytest.mark.parametrize("inverse", [[1, 0], [0, 2], [0, 0], [-1, 0]])
def test_places_in_another_order_than_that_of_first_appearance_are_refused(inverse: list[int]):
    with pytest.raises(ValueError, match="order of first appearance"):
        sum_rows(np.ones((2, 1), dtype=np.float32), np.array(inverse), 2)


@pytest.mark.parametrize("place", [-1, 2])
def test_a_place_without_a_row_is_refused(place: int):
    with pytest.raises(ValueError, match="from 0 to 1"):
        expand_rows(np.ones((2, 1), dtype=np.float32), np.array([place]))


def test_an_output_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(1, 1\)"):
        expand_rows(np.ones((2, 1), dtype=np.float32), np.array([0]), np.empty((2, 1), dtype=np.float32))


def test_parts_cover_everything_once_and_errors_of_any_part_are_raised():
    assert in_parts(3, 10, lambda first, last: list(range(first, last)), least=2) == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8, 9],
    ]
    assert in_parts(3, 0, lambda first, last: last) == [0]

    def fail_last(first: int, last: int) -> None:
        if last == 10:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        in_parts(2, 10, fail_last, least=2)
