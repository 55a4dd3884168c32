"""Item vectors and codes, judged by next items, on catalogs that can be counted by hand."""

import numpy as np
import pytest

from rayrec.models.tokenizers.vector_report import NextPairs, prefixes_in_common, vectors_compared


def pairs(*each: tuple[int, int]) -> NextPairs:
    from_P, to_P = (np.array(column) for column in zip(*each, strict=True))
    return NextPairs(from_P, to_P)


def circle(num_items: int) -> np.ndarray:
    """Items on half a circle: neighbors by number are the nearest."""
    angle_I = np.linspace(0, np.pi, num_items)
    return np.stack([np.cos(angle_I), np.sin(angle_I)], axis=1).astype(np.float32)


def test_the_next_item_is_found_where_few_are_nearer():
    near = circle(100)
    far = near[np.random.default_rng(0).permutation(100)]

    found = vectors_compared(
        {"near": near, "far": far, "again": 3 * near}, pairs((0, 5), (0, 10), (0, 40), (7, 99))
    )

    recalls = {block["name"]: (block["recall@10"], block["recall@50"]) for block in found["blocks"]}
    assert recalls["near"] == recalls["again"] == (0.5, 0.75)  # item 10 is the tenth
    assert found["overlap"]["near, again"] == 1.0
    assert found["overlap"]["near, far"] < 0.5
    assert found["pairs"] == 4


def test_an_item_without_a_vector_is_found_by_nobody_and_finds_nobody():
    vectors = circle(6)
    vectors[[2, 4]] = np.nan

    found = vectors_compared({"one": vectors, "other": circle(6)}, pairs((2, 1), (1, 2), (0, 1)))

    one, other = found["blocks"]
    assert (one["items"], other["items"]) == (4, 6)
    assert one["recall@10"] == pytest.approx(1 / 3)
    assert other["recall@10"] == 1.0
    assert found["overlap"]["one, other"] == pytest.approx(1.0), "of the first items that both know"


def test_items_that_are_all_alike_find_the_next_one_by_chance():
    vectors = np.ones((201, 3), dtype=np.float32)

    (block,) = vectors_compared({"alike": vectors}, pairs(*((0, item) for item in range(1, 201))))["blocks"]

    assert block["recall@10"] == 0.0, "half of the 200 others are nearer"


def test_with_more_items_fewer_pairs_are_compared():
    many = pairs(*((item % 5, 1 + item % 4) for item in range(9000)))

    assert len(many.sample(10).from_P) == 5000
    assert len(many.sample(100_000).from_P) == 2000
    assert len(many.sample(10**9).from_P) == 200


def test_prefixes_of_next_items_are_compared_with_those_of_others():
    codes_IL = np.array([[0, 0], [0, 1], [1, 0], [1, 0]])

    first, second = prefixes_in_common(codes_IL, pairs(*[(0, 1)] * 50, *[(2, 3)] * 50))

    assert first["same"] == 1.0
    assert first["by_chance"] == pytest.approx(0.5, abs=0.1)
    assert second["same"] == 0.5
