from itertools import pairwise

import pytest
import torch

from rayrec.models.sequence.feature_lookups import pooled, sequence

ROWS = [[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]]
INVERSE = [0, 2, 0, 1]
OFFSETS = [0, 2, 2, 4]  # two ids, none, two
WEIGHTS = [1.0, 0.5, 2.0, 3.0]


@pytest.mark.parametrize(
    ("pooling", "weighted", "expected"),
    [
        ("sum", False, [[101, 202], [0, 0], [11, 22]]),
        ("mean", False, [[50.5, 101], [0, 0], [5.5, 11]]),
        ("sum", True, [[51, 102], [0, 0], [32, 64]]),
        ("mean", True, [[25.5, 51], [0, 0], [16, 32]]),
    ],
)
def test_bags_are_pooled(pooling, weighted, expected):
    weights_N = torch.tensor(WEIGHTS) if weighted else None

    vectors_BD = pooled(
        torch.tensor(ROWS),
        torch.tensor(INVERSE),
        torch.tensor(OFFSETS, dtype=torch.int32),
        pooling,
        weights_N,
    )

    assert vectors_BD.tolist() == expected


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_those_of_plain_sums(pooling, weighted):
    rows_MD = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weights_N = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def vectors(rows_MD, weights_N):
        return pooled(
            rows_MD, torch.tensor(INVERSE), torch.tensor(OFFSETS), pooling, weights_N if weighted else None
        )

    def plainly(rows_MD, weights_N):
        factors = weights_N if weighted else torch.ones(4, dtype=torch.float64)
        of_ids = rows_MD[torch.tensor(INVERSE)] * factors[:, None]
        bags = [of_ids[start:stop] for start, stop in pairwise(OFFSETS)]
        return torch.stack([bag.sum(0) / (max(1, len(bag)) if pooling == "mean" else 1) for bag in bags])

    torch.testing.assert_close(vectors(rows_MD, weights_N), plainly(rows_MD, weights_N))
    weight = torch.randn(3, 2, dtype=torch.float64)
    inputs = (rows_MD, weights_N) if weighted else (rows_MD,)
    ours = torch.autograd.grad((vectors(rows_MD, weights_N) * weight).sum(), inputs)
    theirs = torch.autograd.grad((plainly(rows_MD, weights_N) * weight).sum(), inputs)
    torch.testing.assert_close(ours, theirs)


def test_a_sequence_has_the_row_of_every_id_and_adds_up_gradients():
    rows_MD = torch.tensor(ROWS, requires_grad=True)

    vectors_ND = sequence(rows_MD, torch.tensor(INVERSE))
    vectors_ND.sum().backward()

    assert vectors_ND.tolist() == [ROWS[m] for m in INVERSE]
    assert rows_MD.grad.tolist() == [[2, 2], [1, 1], [1, 1]]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_batch_without_ids_has_zeros_and_a_gradient(pooling, num_rows, weighted):
    rows_MD = torch.zeros(num_rows, 2, requires_grad=True)
    nothing = torch.empty(0, dtype=torch.int64)

    vectors_BD = pooled(
        rows_MD, nothing, torch.zeros(5, dtype=torch.int64), pooling, torch.empty(0) if weighted else None
    )
    vectors_BD.sum().backward()

    assert vectors_BD.tolist() == [[0, 0]] * 4
    assert rows_MD.grad.tolist() == [[0, 0]] * num_rows
    assert sequence(rows_MD, nothing).shape == (0, 2)
