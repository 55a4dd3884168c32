"""What the benchmarks of the tables measure on: ids that do not repeat, the same for both sides."""

import numpy as np
import pytest

from benchmarks import sparse
from benchmarks.harness import BenchOptions
from rayrec.embeddings.shard.contributions import UpdateTag


def test_batches_are_skewed_and_scattered_and_come_once():
    batches = sparse.Batches(num_rows=100_000, size=20_000)
    first, second = batches.rows_N(0), batches.rows_N(1)

    assert (first == batches.rows_N(0)).all()
    assert (first != second).mean() > 0.9
    assert 0 <= first.min() < first.max() < 100_000
    rows_M, counts_M = np.unique(first, return_counts=True)
    popular = rows_M[np.argsort(counts_M)[-100:]]
    assert counts_M.max() > 50 * np.median(counts_M)
    assert np.histogram(popular, bins=10, range=(0, 100_000))[0].min() > 0


@pytest.mark.parametrize("num_rows", [10, 1_000, 99_990])
def test_every_row_has_a_popularity(num_rows: int):
    stride = sparse._coprime_stride(num_rows)

    assert len(np.unique(np.arange(num_rows) * stride % num_rows)) == num_rows


def test_a_filled_shard_has_every_row():
    shard = sparse.filled_shard(1_000, dim=4)

    assert shard.stats().num_rows == {"item": 1_000}


def test_our_side_trains_as_a_shard_that_is_given_the_summed_gradients(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sparse, "BATCH", 200)
    ours, plain = sparse.OurTable(100, num_threads=2), sparse.filled_shard(100)
    rows_N = np.random.default_rng(0).integers(100, size=200)
    grads_ND = np.random.default_rng(1).standard_normal((200, sparse.DIM), dtype=np.float32)

    ours.step(ours.inputs(rows_N), grads_ND)

    summed_RD = np.zeros((100, sparse.DIM), dtype=np.float32)
    np.add.at(summed_RD, rows_N, grads_ND)
    updated = np.unique(rows_N)
    plain.apply(UpdateTag(0, 1, 0), {"item": (sparse.ids_of_rows(updated), summed_RD[updated])})
    every = {"item": sparse.ids_of_rows(np.arange(100))}
    assert (ours.shard.lookup(every)["item"] == plain.lookup(every)["item"]).all()


def test_fbgemm_of_ids_trains_the_rows_that_it_trains_by_their_numbers(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("fbgemm_gpu")
    monkeypatch.setattr(sparse, "BATCH", 200)
    rows_N = np.random.default_rng(0).integers(100, size=200)
    grads_ND = np.random.default_rng(1).standard_normal((200, sparse.DIM), dtype=np.float32)
    weights = []
    for table in (sparse.FbgemmTable(100, "bags of one"), sparse.FbgemmOfIds(100, "bags of one")):
        module = getattr(table, "_table", table)._module
        module.weights_host.data.fill_(0.5)
        table.step(table.inputs(rows_N), grads_ND)
        weights.append(module.weights_host.detach().numpy().copy())

    assert (weights[0] != 0.5).any()
    assert (weights[0] == weights[1]).all()


def test_a_large_table_without_memory_for_it_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sparse, "_available_bytes", lambda: 1_000)

    bar = sparse._large_bar(sparse.Batches(1_000, 100), BenchOptions())

    assert (bar.value, bar.ok) == (None, None)
