import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayrec.models.tokenizers.code_tuples import tuple_groups
from rayrec.models.tokenizers.collisions import (
    COLLISION_POLICIES,
    Evidence,
    add_extra_digit,
    reassign_last_code,
    share_tuple,
)
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans
from tests.helpers.examples import examples


def line_codebooks(num_levels=2):
    """Level 0 at 0 and 100 (where there are two levels), the last level at 0, 10, 20 and 30."""
    coarse, fine = [[0.0], [100.0], [200.0], [300.0]], [[0.0], [10.0], [20.0], [30.0]]
    codebooks_LKD = np.array([coarse, fine][-num_levels:], dtype=np.float32)
    return ResidualKMeans(num_levels, codebook_size=4).restore({"codebooks_LKD": codebooks_LKD})


def encoded(vectors_ID, kmeans):
    """Codes, and what a policy may go by."""
    codes_IL = kmeans.encode(vectors_ID)

    def distances(items_G):
        return kmeans.last_level_distances(vectors_ID[items_G], codes_IL[items_G]).numpy()

    return codes_IL.numpy(), Evidence(kmeans.codebook_size, distances)


def test_extra_digit_numbers_the_items_of_a_tuple_in_catalog_order():
    codes_IL = np.array([[5, 1], [2, 2], [5, 1], [5, 0], [2, 2], [5, 1]])
    out = add_extra_digit(codes_IL, Evidence(6))

    assert np.array_equal(out[:, :2], codes_IL)
    assert out[:, 2].tolist() == [0, 0, 1, 0, 1, 2]


def test_extra_digit_is_zero_when_nobody_collides():
    codes_IL = np.array([[5, 1], [2, 2], [5, 0]])
    assert add_extra_digit(codes_IL, Evidence(6))[:, 2].tolist() == [0, 0, 0]


def test_items_that_share_a_tuple_are_listed_by_popularity_and_then_in_catalog_order():
    codes_IL = np.array([[5, 1], [2, 2], [5, 1], [5, 0], [5, 1], [5, 1]])
    popularity_I = np.array([3, 0, 9, 4, 3, 9])

    assert share_tuple(codes_IL, Evidence(6))[:, 2].tolist() == [0, 0, 1, 0, 2, 3]
    assert share_tuple(codes_IL, Evidence(6, popularity_I=popularity_I))[:, 2].tolist() == [2, 0, 0, 0, 3, 1]


def test_reassign_moves_the_farther_items_to_the_nearest_free_codes():
    # Under code 1 (at 100): three items at 10 of which the nearest stays, one that owns 20.
    vectors_ID = torch.tensor([[111.0], [109.5], [114.0], [121.0], [1.0]])
    codes_IL, evidence = encoded(vectors_ID, line_codebooks())
    assert codes_IL.tolist() == [[1, 1], [1, 1], [1, 1], [1, 2], [0, 0]]

    out = reassign_last_code(codes_IL, evidence)

    # 114 is farthest and chooses first: 20 is taken, 0 is 14 away, 30 is 16 away. Then 111 takes 30.
    assert out.tolist() == [[1, 3], [1, 1], [1, 0], [1, 2], [0, 0]]


def test_reassign_works_with_one_level():
    out = reassign_last_code(*encoded(torch.tensor([[10.0], [10.0], [12.0]]), line_codebooks(num_levels=1)))
    # Of the equally near items the first in the catalog keeps the tuple.
    assert out.tolist() == [[1], [0], [2]]


def test_reassign_refuses_a_prefix_with_more_items_than_codes():
    vectors_ID = torch.tensor([[100.0]] * 5 + [[0.0]])
    with pytest.raises(
        ValueError, match=r"5 items share the prefix \[1\], but the last level has only 4 codes"
    ):
        reassign_last_code(*encoded(vectors_ID, line_codebooks()))


def test_reassign_needs_codebooks():
    with pytest.raises(ValueError, match="came without codebooks; choose the policy extra_digit or share"):
        reassign_last_code(np.array([[0], [0]]), Evidence(4))


@examples(30)
@given(st.integers(0, 1000), st.integers(4, 20))
def test_every_policy_gives_distinct_tuples_and_keeps_the_prefixes(seed, num_items):
    values = np.random.default_rng(seed).integers(0, 400, num_items)
    codes_IL, evidence = encoded(torch.from_numpy(values[:, None].astype(np.float32)), line_codebooks())

    for policy in COLLISION_POLICIES.values():
        if policy.digit == "none" and np.bincount(codes_IL[:, 0]).max() > 4:
            continue
        out = policy.resolve(codes_IL, evidence)
        assert len(np.unique(out, axis=0)) == num_items
        assert np.array_equal(out[:, 0], codes_IL[:, 0])
        # Every tuple that was in use still is: somebody keeps it.
        assert set(map(tuple, codes_IL.tolist())) <= set(map(tuple, out[:, :2].tolist()))
        if policy.digit != "none":
            assert np.array_equal(out[:, :2], codes_IL)


def test_tuple_groups_counts_each_tuple():
    group_I, sizes = tuple_groups(np.array([[1, 2], [0, 9], [1, 2], [1, 3]]))
    assert group_I.tolist() == [1, 0, 1, 2]
    assert sizes.tolist() == [1, 2, 1]
