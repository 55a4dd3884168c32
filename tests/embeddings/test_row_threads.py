"""A call on several threads, or for many rows, leaves the same bits as on one thread and row by row."""

import numpy as np
import pytest

from rayrec.embeddings.base.threads import ROWS_PER_THREAD, in_parts
from rayrec.embeddings.config import RowwiseAdagradConfig, TableConfig
from rayrec.embeddings.optim.optimizers import make_optimizer
from rayrec.embeddings.optim.row_kernels import apply_row
from rayrec.embeddings.storage.records import Records
from rayrec.embeddings.table.row_operations import RowOperations
from rayrec.platform.compiled import kernel_input

NUM_ROWS = 5 * ROWS_PER_THREAD


def trained(config: TableConfig, num_threads: int) -> tuple[np.ndarray, np.ndarray]:
    """([M, D] what a lookup of rows and absent ids gives, [M, W] records) after three steps."""
    random = np.random.default_rng(5)
    operations = RowOperations(config, num_threads)
    records = Records(operations.num_words)
    records.reserve(NUM_ROWS)
    rows_M = kernel_input(random.permutation(NUM_ROWS), np.int64)
    ids_M = kernel_input(random.integers(-(2**63), 2**63, size=NUM_ROWS), np.int64)
    records.write(rows_M, 0, operations.new_records(ids_M))
    for step in range(3):
        grads_MD = random.standard_normal((NUM_ROWS, config.dim), dtype=np.float32)
        operations.apply(records, rows_M, ids_M, grads_MD, step)
    found_M = np.where(random.random(NUM_ROWS) < 0.1, -1, rows_M)
    looked_up_MD = np.empty((NUM_ROWS, config.dim), dtype=np.float32)
    operations.gather(records, found_M, ids_M, looked_up_MD)
    return looked_up_MD, records.read(rows_M, 0, operations.num_words)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_depend_on_the_number_of_threads(dtype: str):
    config = TableConfig(name="item", dim=12, weight_dtype=dtype)
    one, one_records = trained(config, num_threads=1)

    for num_threads in (2, 3, 8):
        several, several_records = trained(config, num_threads)
        assert (several.view(np.int32) == one.view(np.int32)).all()
        assert (several_records == one_records).all()


def test_a_row_given_twice_to_different_threads_is_noticed():
    operations = RowOperations(TableConfig(name="item", dim=4), num_threads=2)
    records = Records(operations.num_words)
    records.reserve(NUM_ROWS)
    ids_M = np.arange(NUM_ROWS)
    records.write(ids_M, 0, operations.new_records(ids_M))
    ids_M[-1] = ids_M[0]

    with pytest.raises(AssertionError, match="1 rows of 'item' were given step 7 twice"):
        operations.apply(records, ids_M, ids_M, np.ones((NUM_ROWS, 4), dtype=np.float32), step=7)


@pytest.mark.parametrize("dim", [1, 7, 16, 33, 64, 127])
def test_rows_change_in_a_step_as_each_does_alone(dim: int):
    # Both are compiled, each into its own loop, and both may sum squares in any order.
    config = TableConfig(name="item", dim=dim, optimizer=RowwiseAdagradConfig(weight_decay=0.01))
    operations, records = RowOperations(config), Records(dim + 3)
    optimizer = make_optimizer(config.optimizer, config.schedule)
    records.reserve(30)
    rows_M = np.arange(30)
    records.write(rows_M, 0, operations.new_records(rows_M))
    weights_MD = records.read(rows_M, 0, dim).view(np.float32).copy()
    state_M1 = np.zeros((30, 1), dtype=np.float32)
    random = np.random.default_rng(0)
    for step in range(3):
        grads_MD = random.standard_normal((30, dim), dtype=np.float32)
        operations.apply(records, rows_M, rows_M, grads_MD, step)
        for row in rows_M:
            grad_D, rates = kernel_input(grads_MD[row], np.float32), optimizer.rates(step)
            apply_row(optimizer.kernel, weights_MD[row], state_M1[row], grad_D, rates)

    assert (records.read(rows_M, 0, dim).view(np.float32) == weights_MD).all()
    assert (operations.state(records, rows_M) == state_M1).all()


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
