import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.base.routing import bucket_of
from rayrec.embeddings.config import AdamConfig, RowwiseAdagradConfig, TableConfig
from rayrec.embeddings.storage import records
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.embeddings.table.table_rows import TableRows
from rayrec.platform.hashing import combine64
from tests.helpers.examples import examples

CONFIG = TableConfig(name="items", dim=3, seed=7, init_scale=0.1)
OPTIMIZERS = [RowwiseAdagradConfig(lr=0.1, initial_accumulator=0.01, weight_decay=0.05), AdamConfig(lr=0.1)]
INT64 = st.one_of(st.integers(-2, 2), st.integers(-(2**63), 2**63 - 1))


def array(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def initial(config: TableConfig, ids_M: np.ndarray) -> np.ndarray:
    h = combine64(config.seed, ids_M[:, None], np.arange(config.dim))
    u = (h >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    return np.float32(config.init_scale) * u


class ReferenceTable:
    """A dictionary of rows, updated one by one in double precision."""

    def __init__(self, config: TableConfig) -> None:
        self.config = config
        self.rows: dict[int, np.ndarray] = {}
        self.states: dict[int, np.ndarray] = {}
        self.stamps: dict[int, tuple[int, int]] = {}

    def lookup(self, i: int) -> np.ndarray:
        return self.rows.get(i, initial(self.config, array(i))[0].astype(float))

    def apply(self, i: int, g: np.ndarray, step: int) -> None:
        w, o, g = self.lookup(i), self.config.optimizer, g.astype(float)
        if isinstance(o, RowwiseAdagradConfig):
            g = g + o.weight_decay * w
            state = self.states.get(i, np.array([o.initial_accumulator])) + np.mean(g * g)
            w = w - o.lr * g / (np.sqrt(state) + o.eps)
        else:
            m, v = np.split(self.states.get(i, np.zeros(2 * len(g))), 2)
            (b1, b2), t = o.betas, step + 1
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            w = w - o.lr * np.sqrt(1 - b2**t) / (1 - b1**t) * m / (np.sqrt(v) + o.eps)
            state = np.concatenate((m, v))
        self.rows[i], self.states[i] = w, state
        self.stamps[i] = (step, self.stamps.get(i, (0, 0))[1] + 1)


def gradients(seed: int, num: int, dim: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, dim)).astype(np.float32)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
@examples(40)
@given(steps=st.lists(st.lists(INT64, max_size=8, unique=True), max_size=6))
def test_table_behaves_like_a_dictionary_of_rows(optimizer, steps):
    config = CONFIG.model_copy(update={"optimizer": optimizer})
    table, reference = EmbeddingTable(config), ReferenceTable(config)
    for step, ids in enumerate(steps):
        grads_MD = gradients(step, len(ids))
        table.apply(array(*ids), grads_MD, step)
        for i, g in zip(ids, grads_MD, strict=True):
            reference.apply(i, g, step)
    rows = table.export()
    ids = rows.ids_M.tolist()
    assert sorted(ids) == sorted(reference.rows)
    assert table.num_rows == len(ids)
    for m, i in enumerate(ids):
        np.testing.assert_allclose(rows.weights_MD[m], reference.rows[i], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(rows.state_MS[m], reference.states[i], rtol=1e-4, atol=1e-6)
        assert (rows.steps_M[m], rows.counts_M[m]) == reference.stamps[i]
    assert (table.lookup(rows.ids_M) == rows.weights_MD).all()


def test_an_absent_id_has_its_documented_initial_value_and_is_not_created():
    table = EmbeddingTable(CONFIG)
    ids_M = array(0, -1, 5, -(2**63), 2**63 - 1)
    assert (table.lookup(ids_M) == initial(CONFIG, ids_M)).all()
    assert table.num_rows == 0
    assert np.abs(table.lookup(np.arange(10_000))).max() <= np.float32(0.1)


def test_a_row_starts_from_its_initial_value_whatever_came_before_it():
    # First step of Adam moves every element by lr, against the sign of its gradient.
    table = EmbeddingTable(CONFIG.model_copy(update={"optimizer": AdamConfig(lr=0.5)}))
    table.apply(array(9, 4), np.array([[1, -1, 2], [3, 4, -5]], dtype=np.float32), 0)
    moved = table.lookup(array(4, 9)) - initial(CONFIG, array(4, 9))
    np.testing.assert_allclose(moved, [[-0.5, -0.5, 0.5], [-0.5, 0.5, -0.5]], rtol=1e-5)


def test_order_of_ids_and_of_arrival_leaves_no_trace():
    ids_M, grads_MD = np.arange(-500, 500), gradients(0, 1000)
    first, second = EmbeddingTable(CONFIG), EmbeddingTable(CONFIG)
    first.apply(ids_M, grads_MD, 0)
    shuffled = np.random.default_rng(1).permutation(1000)
    second.apply(ids_M[shuffled], grads_MD[shuffled], 0)
    assert_same(first.export(), second.export())


def test_rows_keep_their_values_while_blocks_are_added(monkeypatch):
    monkeypatch.setattr(records, "block_bytes", lambda memory: 256)  # eight rows
    table, ids_M = EmbeddingTable(CONFIG), np.arange(100)
    for step, part in enumerate(np.split(ids_M, 10)):
        table.apply(part, np.zeros((10, 3), dtype=np.float32), step)
    assert (table.lookup(ids_M) == initial(CONFIG, ids_M)).all()
    assert table.export().steps_M[np.argsort(table.export().ids_M)].tolist() == (ids_M // 10).tolist()


@pytest.mark.parametrize("gib", [1, 24, 128, 1000, 4096, 24_000])
def test_all_memory_of_a_machine_makes_few_enough_blocks_for_the_kernel(gib):
    memory = gib * 2**30
    assert memory / records.block_bytes(memory) <= 2**13
    assert records.block_bytes(memory) <= max(16 * 2**20, memory / 2**12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_nothing_changes(bad):
    table = EmbeddingTable(CONFIG)
    table.apply(array(1, 2), gradients(0, 2), 0)
    before = table.export()
    grads_MD = gradients(1, 3)
    grads_MD[2, 1] = bad
    with pytest.raises(ValueError, match=rf"'items'.*id 30 is {bad} at element 1"):
        table.apply(array(1, 20, 30), grads_MD, 1)
    assert_same(table.export(), before)


@pytest.mark.parametrize(
    ("ids_M", "grads_MD", "message"),
    [
        (array(1), np.zeros((1, 4), np.float32), r"shape \(1, 3\).*shape \(1, 4\)"),
        (array(1, 2), np.zeros((1, 3), np.float32), r"shape \(2, 3\).*shape \(1, 3\)"),
        (array(1), np.zeros((1, 3)), "float32.*float64"),
        (np.array([1], dtype=np.int32), np.zeros((1, 3), np.float32), "int64.*int32"),
        (array(1)[:, None], np.zeros((1, 3), np.float32), "one-dimensional"),
    ],
)
def test_wrong_shapes_and_types_are_named(ids_M, grads_MD, message):
    with pytest.raises(ValueError, match=message):
        EmbeddingTable(CONFIG).apply(ids_M, grads_MD, 0)


def test_an_id_given_twice_to_one_step_is_caught():
    with pytest.raises(AssertionError, match="1 rows of 'items' were given step 0 twice"):
        EmbeddingTable(CONFIG).apply(array(8, 8), gradients(0, 2), 0)


def test_no_memory_for_new_rows_is_an_error_that_changes_nothing(monkeypatch):
    table = EmbeddingTable(CONFIG)

    def no_memory(*args, **kwargs):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(records.mmap, "mmap", no_memory)
    with pytest.raises(MemoryError, match="no memory for another block"):
        table.apply(array(1), gradients(0, 1), 0)
    assert table.num_rows == 0
    assert len(table.export().ids_M) == 0


def test_export_is_ordered_by_bucket_then_id():
    table = EmbeddingTable(CONFIG)
    table.apply(np.arange(-100_000, 100_000), np.zeros((200_000, 3), np.float32), 0)
    ids_M = table.export().ids_M
    keys = list(zip(bucket_of(ids_M).tolist(), ids_M.view(np.uint64).tolist(), strict=True))
    assert keys == sorted(keys)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.kind)
def test_a_loaded_table_goes_on_as_if_it_had_never_stopped(optimizer):
    config = CONFIG.model_copy(update={"optimizer": optimizer})
    table, loaded = EmbeddingTable(config), EmbeddingTable(config)
    table.apply(np.arange(10), gradients(0, 10), 0)
    loaded.load([table.export()])
    for each in (table, loaded):
        each.apply(np.arange(5, 15), gradients(1, 10), 1)
    assert_same(table.export(), loaded.export())


def test_rows_that_do_not_fit_are_not_loaded():
    table = EmbeddingTable(CONFIG)
    table.apply(array(1, 2), gradients(0, 2), 0)
    rows = table.export()
    with pytest.raises(ValueError, match="has 2 rows; load into an empty one"):
        table.load([rows])
    with pytest.raises(ValueError, match="shapes"):
        EmbeddingTable(CONFIG.model_copy(update={"dim": 4})).load([rows])
    twice = TableRows(array(1, 1), rows.weights_MD, rows.state_MS, rows.steps_M, rows.counts_M)
    with pytest.raises(ValueError, match="id 1 comes twice"):
        EmbeddingTable(CONFIG).load([twice])


def assert_same(first: TableRows, second: TableRows) -> None:
    for name, values in vars(first).items():
        if isinstance(values, np.ndarray):
            assert values.tobytes() == getattr(second, name).tobytes(), name
        elif name in ("forgotten", "clock"):
            assert values == getattr(second, name), name
        elif name != "since":
            assert_same(values, getattr(second, name))


@pytest.mark.parametrize("num_rows", [0, 1, 65_536, 200_000])
def test_an_export_comes_in_parts_of_a_row_group_in_the_order_of_buckets(num_rows):
    table, ids_M = EmbeddingTable(CONFIG), np.random.default_rng(0).permutation(num_rows) - 1000
    grads_MD = np.random.default_rng(1).standard_normal((num_rows, 3)).astype(np.float32)
    table.apply(ids_M, grads_MD, 0)

    parts = list(table.export_parts())

    assert [len(part.ids_M) for part in parts] == {
        0: [0],
        1: [1],
        65_536: [65_536],
        200_000: [65_536, 65_536, 65_536, 3392],
    }[num_rows]
    found_M = np.concatenate([part.ids_M for part in parts])
    assert np.array_equal(found_M, ids_M[np.lexsort((ids_M.view(np.uint64), bucket_of(ids_M)))])
    weights_MD = np.concatenate([part.weights_MD for part in parts])
    assert np.array_equal(weights_MD, table.lookup(found_M))
