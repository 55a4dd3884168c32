"""Each optimizer beside the torch one (or the equation) that it is meant to be."""

import numpy as np
import pytest
import torch

from rayrec.embeddings.config import (
    AdagradConfig,
    AdamConfig,
    FtrlConfig,
    PartialRowwiseAdamConfig,
    RowwiseAdagradConfig,
    SgdConfig,
    TableConfig,
)
from rayrec.embeddings.optim.optimizers import OPTIMIZERS
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.platform.schedule import RateSchedule


def steps(num_rows: int, dim: int, num_steps: int):
    rng = np.random.default_rng(0)
    for step in range(num_steps):
        ids_M = np.sort(rng.choice(num_rows, size=num_rows // 3, replace=False))
        yield step, ids_M, rng.standard_normal((len(ids_M), dim)).astype(np.float32)


def sparse(ids_M: np.ndarray, grads_MD: np.ndarray, shape: torch.Size) -> torch.Tensor:
    ids, grads = torch.from_numpy(ids_M)[None], torch.from_numpy(grads_MD)
    return torch.sparse_coo_tensor(ids, grads, shape, check_invariants=True)


@pytest.mark.parametrize("dim", [1, 16, 19])
def test_adam_is_torch_sparse_adam(dim):
    config = TableConfig(name="t", dim=dim, optimizer=AdamConfig(lr=0.01, betas=(0.8, 0.99), eps=1e-6))
    table, ids = EmbeddingTable(config), np.arange(30)
    weight = torch.nn.Parameter(torch.from_numpy(table.lookup(ids)))
    optimizer = torch.optim.SparseAdam([weight], lr=0.01, betas=(0.8, 0.99), eps=1e-6)
    for step, ids_M, grads_MD in steps(30, dim, 20):
        table.apply(ids_M, grads_MD, step)
        weight.grad = sparse(ids_M, grads_MD, weight.shape)
        optimizer.step()
        np.testing.assert_allclose(table.lookup(ids), weight.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_adam_with_decay_moves_rows_of_every_step_as_adamw_and_leaves_the_others():
    config = TableConfig(name="t", dim=5, optimizer=AdamConfig(lr=0.01, weight_decay=0.5))
    table, read, others = EmbeddingTable(config), np.arange(10), np.arange(10, 20)
    left_MD = table.lookup(others)
    weight = torch.nn.Parameter(torch.from_numpy(table.lookup(read)))
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.5)
    for step in range(20):
        grads_MD = np.random.default_rng(step).standard_normal((10, 5)).astype(np.float32)
        table.apply(read, grads_MD, step)
        weight.grad = torch.from_numpy(grads_MD)
        optimizer.step()
    np.testing.assert_allclose(table.lookup(read), weight.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(table.lookup(others), left_MD)


@pytest.mark.parametrize("dim", [1, 16, 19])
def test_rowwise_adagrad_is_its_equation(dim):
    optimizer = RowwiseAdagradConfig(lr=0.1, eps=1e-6, initial_accumulator=0.5, weight_decay=0.01)
    table, ids = EmbeddingTable(TableConfig(name="t", dim=dim, optimizer=optimizer)), np.arange(30)
    weights, sums = table.lookup(ids).astype(float), np.full(30, 0.5)
    for step, ids_M, grads_MD in steps(30, dim, 20):
        table.apply(ids_M, grads_MD, step)
        g = grads_MD + 0.01 * weights[ids_M]
        sums[ids_M] += (g * g).mean(axis=1)
        weights[ids_M] -= 0.1 * g / (np.sqrt(sums[ids_M])[:, None] + 1e-6)
        np.testing.assert_allclose(table.lookup(ids), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 15, 16, 50, 64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_squares_are_added_in_an_order_that_no_machine_chooses(dim, weight_decay):
    """Number d goes to lane d mod 16, each in ascending order; then the upper half to the lower one."""
    optimizer = RowwiseAdagradConfig(lr=0.1, weight_decay=weight_decay)
    table, ids = EmbeddingTable(TableConfig(name="t", dim=dim, optimizer=optimizer)), np.arange(100)
    grads_MD = np.random.default_rng(dim).standard_normal((100, dim)).astype(np.float32)
    decayed_MD = grads_MD + np.float32(weight_decay) * table.lookup(ids)
    lanes_M16 = np.zeros((100, 16), np.float32)
    for d in range(dim):
        lanes_M16[:, d % 16] += decayed_MD[:, d] * decayed_MD[:, d]
    for half in (8, 4, 2, 1):
        lanes_M16[:, :half] += lanes_M16[:, half : 2 * half]

    table.apply(ids, grads_MD, 0)

    expected_M = lanes_M16[:, 0] / np.float32(dim)
    assert table.export().state_MS[:, 0].tobytes() == expected_M[table.export().ids_M].tobytes()


def test_rowwise_adagrad_of_one_element_is_torch_adagrad():
    table = EmbeddingTable(
        TableConfig(name="t", dim=1, optimizer=RowwiseAdagradConfig(lr=0.1, eps=1e-10, weight_decay=0))
    )
    ids = np.arange(12)
    weight = torch.nn.Parameter(torch.from_numpy(table.lookup(ids)))
    optimizer = torch.optim.Adagrad([weight], lr=0.1, eps=1e-10)
    for step, ids_M, grads_MD in steps(12, 1, 20):
        table.apply(ids_M, grads_MD, step)
        weight.grad = torch.zeros_like(weight)  # of which Adagrad takes no notice in the other rows
        weight.grad[ids_M] = torch.from_numpy(grads_MD)
        optimizer.step()
    np.testing.assert_allclose(table.lookup(ids), weight.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 16, 19])
@pytest.mark.parametrize(
    ("config", "make"),
    [
        (
            AdagradConfig(lr=0.1, eps=1e-6, initial_accumulator=0.5, weight_decay=0.01),
            lambda weight: torch.optim.Adagrad(
                [weight], lr=0.1, eps=1e-6, initial_accumulator_value=0.5, weight_decay=0.01
            ),
        ),
        (
            SgdConfig(lr=0.1, weight_decay=0.01),
            lambda weight: torch.optim.SGD([weight], lr=0.1, weight_decay=0.01),
        ),
    ],
    ids=["adagrad", "sgd"],
)
def test_rows_of_a_step_move_as_torch_moves_them(config, make, dim):
    """torch moves every row by its weight decay; ours only those of the step: each row is compared then."""
    table, ids = EmbeddingTable(TableConfig(name="t", dim=dim, optimizer=config)), np.arange(30)
    rows = [torch.nn.Parameter(row) for row in torch.from_numpy(table.lookup(ids))]
    optimizers = [make(row) for row in rows]
    for step, ids_M, grads_MD in steps(30, dim, 20):
        table.apply(ids_M, grads_MD, step)
        for ident, grad_D in zip(ids_M, torch.from_numpy(grads_MD), strict=True):
            rows[ident].grad = grad_D
            optimizers[ident].step()
        expected = torch.stack([row.detach() for row in rows]).numpy()
        np.testing.assert_allclose(table.lookup(ids), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 16, 19])
def test_partial_rowwise_adam_is_its_equation(dim):
    optimizer = PartialRowwiseAdamConfig(lr=0.01, betas=(0.8, 0.99), eps=1e-6)
    table, ids = EmbeddingTable(TableConfig(name="t", dim=dim, optimizer=optimizer)), np.arange(30)
    weights = table.lookup(ids).astype(float)
    first, second = np.zeros((30, dim)), np.zeros((30, 1))
    for step, ids_M, grads_MD in steps(30, dim, 20):
        table.apply(ids_M, grads_MD, step)
        first[ids_M] = 0.8 * first[ids_M] + 0.2 * grads_MD
        second[ids_M] = 0.99 * second[ids_M] + 0.01 * np.square(grads_MD).mean(axis=1, keepdims=True)
        corrected = first[ids_M] / (1 - 0.8 ** (step + 1))
        root = np.sqrt(second[ids_M] / (1 - 0.99 ** (step + 1)))
        weights[ids_M] -= 0.01 * corrected / (root + 1e-6)
        np.testing.assert_allclose(table.lookup(ids), weights, rtol=1e-5, atol=1e-6)


def test_partial_rowwise_adam_of_one_element_is_torch_adam():
    optimizer = PartialRowwiseAdamConfig(lr=0.01, betas=(0.8, 0.99), eps=1e-6)
    table, ids = EmbeddingTable(TableConfig(name="t", dim=1, optimizer=optimizer)), np.arange(8)
    weight = torch.nn.Parameter(torch.from_numpy(table.lookup(ids)))
    adam = torch.optim.Adam([weight], lr=0.01, betas=(0.8, 0.99), eps=1e-6)
    for step in range(20):  # every row in every step: then lazy and ordinary Adam are one
        grads_MD = np.random.default_rng(step).standard_normal((8, 1)).astype(np.float32)
        table.apply(ids, grads_MD, step)
        weight.grad = torch.from_numpy(grads_MD)
        adam.step()
    np.testing.assert_allclose(table.lookup(ids), weight.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("l1", [0.0, 0.8])
def test_ftrl_is_algorithm_1_of_its_paper(l1):
    alpha, beta, l2, dim = 0.1, 0.5, 0.02, 7
    optimizer = FtrlConfig(alpha=alpha, beta=beta, l1=l1, l2=l2)
    table, ids = EmbeddingTable(TableConfig(name="t", dim=dim, optimizer=optimizer)), np.arange(30)
    weights = table.lookup(ids).astype(float)
    z, n = np.zeros((30, dim)), np.zeros((30, dim))
    for step, ids_M, grads_MD in steps(30, dim, 20):
        table.apply(ids_M, grads_MD, step)
        g = grads_MD.astype(float)
        sigma = (np.sqrt(n[ids_M] + g * g) - np.sqrt(n[ids_M])) / alpha
        z[ids_M] += g - sigma * weights[ids_M]
        n[ids_M] += g * g
        rate = (beta + np.sqrt(n[ids_M])) / alpha + l2
        shrunk = np.sign(z[ids_M]) * np.maximum(np.abs(z[ids_M]) - l1, 0)
        weights[ids_M] = -shrunk / rate
        np.testing.assert_allclose(table.lookup(ids), weights, rtol=1e-4, atol=1e-5)
    assert (table.lookup(ids) == 0).any() == (l1 > 0)


def test_the_schedule_scales_the_learning_rate_of_a_step():
    def moved(schedule):
        table = EmbeddingTable(
            TableConfig(name="t", dim=2, optimizer=AdamConfig(lr=0.1), init_scale=0.0, schedule=schedule)
        )
        ids = np.array([5], dtype=np.int64)
        table.apply(ids, np.ones((1, 2), dtype=np.float32), step=0)
        return table.lookup(ids)

    np.testing.assert_allclose(moved(RateSchedule(warmup_steps=4)), 0.25 * moved(RateSchedule()), rtol=1e-6)


def test_compiled_code_tells_the_optimizers_apart_by_their_numbers():
    assert sorted(optimizer.kernel for optimizer in OPTIMIZERS.values()) == list(range(len(OPTIMIZERS)))
