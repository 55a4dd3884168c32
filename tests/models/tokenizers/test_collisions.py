import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.models.tokenizers.code_tuples import tuple_groups
from rayrec.models.tokenizers.collisions import add_extra_digit, reassign_last_code
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans


def line_codebooks(num_levels=2):
    """Level 0 at 0 and 100 (where there are two levels), the last level at 0, 10, 20 and 30."""
    coarse, fine = [[0.0], [100.0], [200.0], [300.0]], [[0.0], [10.0], [20.0], [30.0]]
    return ResidualKMeans.from_codebooks(torch.tensor([coarse, fine][-num_levels:]))


def test_extra_digit_numbers_the_items_of_a_tuple_in_catalogue_order():
    codes_IL = torch.tensor([[5, 1], [2, 2], [5, 1], [5, 0], [2, 2], [5, 1]])
    out = add_extra_digit(codes_IL, torch.zeros(6, 1), line_codebooks())

    assert torch.equal(out[:, :2], codes_IL)
    assert out[:, 2].tolist() == [0, 0, 1, 0, 1, 2]


def test_extra_digit_is_zero_when_nobody_collides():
    codes_IL = torch.tensor([[5, 1], [2, 2], [5, 0]])
    assert add_extra_digit(codes_IL, torch.zeros(3, 1), line_codebooks())[:, 2].tolist() == [0, 0, 0]


def test_reassign_moves_the_farther_items_to_the_nearest_free_codes():
    kmeans = line_codebooks()
    # Under code 1 (at 100): three items at 10 of which the nearest stays, one that owns 20.
    vectors_ID = torch.tensor([[111.0], [109.5], [114.0], [121.0], [1.0]])
    codes_IL = kmeans.encode(vectors_ID)
    assert codes_IL.tolist() == [[1, 1], [1, 1], [1, 1], [1, 2], [0, 0]]

    out = reassign_last_code(codes_IL, vectors_ID, kmeans)

    # 114 is farthest and chooses first: 20 is taken, 0 is 14 away, 30 is 16 away. Then 111 takes 30.
    assert out.tolist() == [[1, 3], [1, 1], [1, 0], [1, 2], [0, 0]]


def test_reassign_works_with_one_level():
    kmeans = line_codebooks(num_levels=1)
    vectors_ID = torch.tensor([[10.0], [10.0], [12.0]])
    out = reassign_last_code(kmeans.encode(vectors_ID), vectors_ID, kmeans)
    # Of the equally near items the first in the catalogue keeps the tuple.
    assert out.tolist() == [[1], [0], [2]]


def test_reassign_refuses_a_prefix_with_more_items_than_codes():
    kmeans = line_codebooks()
    vectors_ID = torch.tensor([[100.0]] * 5 + [[0.0]])
    with pytest.raises(
        ValueError, match=r"5 items share the prefix \[1\], but the last level has only 4 codes"
    ):
        reassign_last_code(kmeans.encode(vectors_ID), vectors_ID, kmeans)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(4, 20))
def test_every_policy_gives_distinct_tuples_and_keeps_the_prefixes(seed, num_items):
    values = np.random.default_rng(seed).integers(0, 400, num_items)
    vectors_ID = torch.from_numpy(values[:, None].astype(np.float32))
    kmeans = line_codebooks()
    codes_IL = kmeans.encode(vectors_ID)

    numbered = add_extra_digit(codes_IL, vectors_ID, kmeans)
    assert len(numbered.unique(dim=0)) == num_items
    assert torch.equal(numbered[:, :2], codes_IL)

    if int(codes_IL[:, 0].bincount().max()) <= 4:
        moved = reassign_last_code(codes_IL, vectors_ID, kmeans)
        assert len(moved.unique(dim=0)) == num_items
        assert torch.equal(moved[:, 0], codes_IL[:, 0])
        # Every tuple that was in use still is: somebody keeps it.
        assert set(map(tuple, codes_IL.tolist())) <= set(map(tuple, moved.tolist()))


def test_tuple_groups_counts_each_tuple():
    group_I, sizes = tuple_groups(np.array([[1, 2], [0, 9], [1, 2], [1, 3]]))
    assert group_I.tolist() == [1, 0, 1, 2]
    assert sizes.tolist() == [1, 2, 1]
