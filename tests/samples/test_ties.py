import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.features.row_features import with_shuffled_ties


def batch_of(rows, step=0, keys=None):
    """Of rows of (item, time)."""
    events = [event for row in rows for event in row]
    return SampleBatch(
        step=step,
        row_keys_B=np.arange(len(rows)) if keys is None else np.array(keys),
        user_ids_B=np.arange(len(rows)),
        item_ids_N=np.array([item for item, _ in events], dtype=np.int64),
        offsets_B1=np.cumsum([0, *map(len, rows)]),
        times_N=np.array([time for _, time in events], dtype=np.int64),
        labels={"behavior": np.array([item * 10 for item, _ in events], dtype=np.int64)},
    )


def rows_of(batch):
    pairs = list(zip(batch.item_ids_N.tolist(), batch.times_N.tolist(), strict=True))
    return [pairs[low:high] for low, high in zip(batch.offsets_B1, batch.offsets_B1[1:], strict=False)]


@given(
    rows=st.lists(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3)), max_size=9), max_size=5),
    step=st.integers(0, 9),
)
def test_events_move_among_neighbors_of_their_time_alone(rows, step):
    rows = [sorted(row, key=lambda event: event[1]) for row in rows]

    shuffled = with_shuffled_ties(batch_of(rows, step), seed=1)

    for row, other in zip(rows, rows_of(shuffled), strict=True):
        assert sorted(row) == sorted(other)
        assert [time for _, time in row] == [time for _, time in other]
    assert (shuffled.labels["behavior"] == shuffled.item_ids_N * 10).all()


def test_every_order_comes_and_none_more_often_than_others():
    row = [(item, 7) for item in range(3)]

    orders = [
        tuple(item for item, _ in shuffled)
        for step in range(60)
        for shuffled in rows_of(with_shuffled_ties(batch_of([row] * 100, step), seed=0))
    ]

    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert abs(counts - 1000).max() < 150  # five standard deviations


def test_the_order_hangs_on_seed_step_and_row_alone():
    row, other = [(item, 7) for item in range(50)], [(1, 3), (2, 3)]

    def order(rows, which, **where):
        seed = where.pop("seed", 0)
        return rows_of(with_shuffled_ties(batch_of(rows, **where), seed))[which]

    alone = order([row], 0, keys=[5])
    assert order([other, row], 1, keys=[2, 5]) == alone
    assert order([row], 0, keys=[6]) != alone
    assert order([row], 0, keys=[5], step=1) != alone
    assert order([row], 0, keys=[5], seed=1) != alone


def test_events_of_different_times_stay_where_they_are_also_between_rows():
    rows = [[(1, 5), (2, 6)], [(3, 6), (4, 7)]]

    for step in range(20):
        assert rows_of(with_shuffled_ties(batch_of(rows, step), seed=0)) == rows
