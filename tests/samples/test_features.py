import dataclasses
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.platform.errors import InputError
from rayrec.platform.shares import balanced_bounds
from rayrec.samples.features.features import SequenceFeatures, code_ids
from rayrec.samples.features.neighbors import NO_TIME
from tests.helpers.data import sample_batch

CATALOG = np.array([50, 10, 40, 20, 30])  # position 0 is item 50, position 1 item 10, ...


def restored(lookup):
    return lookup.ids_M[lookup.inverse].tolist()


def test_inputs_and_targets_are_the_newest_items_shifted_by_one():
    (features,) = SequenceFeatures(CATALOG, max_length=2)(sample_batch([[10, 20, 30, 40], [50, 10]]))
    assert features.offsets_B1.tolist() == [0, 2, 3]
    assert features.items_N.tolist() == [3, 4, 0]  # 20, 30 | 50
    assert features.targets_N.tolist() == [4, 2, 1]  # 30, 40 | 10
    assert features.num_targets == 3
    assert restored(features.lookups["item"]) == [20, 30, 50]
    assert features.counts["unread_events"] == 1


def test_every_event_of_a_long_row_is_a_target_once():
    features = SequenceFeatures(CATALOG, max_length=2, windows=3, tables=["item", "user"])
    batch = sample_batch([[10, 20, 30, 40, 50, 10], [50, 10]])
    (found,) = features(batch)
    # 40, 50 -> 50, 10 | 20, 30 -> 30, 40 | 10 -> 20; then the other row.
    assert found.offsets_B1.tolist() == [0, 2, 4, 5, 6]
    assert CATALOG[found.items_N].tolist() == [40, 50, 20, 30, 10, 50]
    assert CATALOG[found.targets_N].tolist() == [50, 10, 30, 40, 20, 10]
    assert len(set(found.row_keys_B.tolist())) == 4
    assert found.row_keys_B[[0, 3]].tolist() == batch.row_keys_B.tolist()
    assert found.lookups["user"].ids_M[found.lookups["user"].inverse].tolist() == [100, 100, 100, 101]
    assert (found.counts["rows"], found.counts["events"], found.counts["unread_events"]) == (2, 8, 0)


def test_of_a_row_with_too_many_windows_every_step_reads_others():
    features = SequenceFeatures(CATALOG, max_length=1, windows=2)
    seen = set()
    for step in range(40):
        (found,) = features(dataclasses.replace(sample_batch([[10, 20, 30, 40, 50]]), step=step))
        assert found.num_targets == 2
        assert found.counts["unread_events"] == 2
        seen |= set(CATALOG[found.targets_N].tolist())
    assert seen == {20, 30, 40, 50}


@given(num_events=st.integers(0, 40), step=st.sampled_from([1, 2, 3, 6]), windows=st.sampled_from([1, 2, 50]))
def test_windows_of_steps_begin_where_serving_reads_from(num_events, step, windows):
    catalog = np.arange(100, 140)
    features = SequenceFeatures(catalog, max_length=6, windows=windows, window_step=step)
    row = catalog[:num_events].tolist()
    ranked = features.ranking(sample_batch([row]))
    start = num_events - len(ranked.items_N)
    assert start % step == 0
    assert num_events <= 6 or 6 - step < len(ranked.items_N) <= 6
    np.testing.assert_array_equal(ranked.items_N, np.arange(start, num_events))

    (trained,) = features(sample_batch([[*row, 139]]))
    windows_V = np.split(trained.items_N, trained.offsets_B1[1:-1])
    assert all(not len(window) or window[0] % step == 0 for window in windows_V)
    if windows != 2:  # of a row with more than two, others are drawn
        np.testing.assert_array_equal(windows_V[0], ranked.items_N)
    if windows == 50 and num_events < 39:
        assert sorted(trained.targets_N) == [*range(1, num_events), *([39] if num_events else [])]
        assert trained.counts["unread_events"] == 0


def test_a_step_that_is_more_than_the_window_is_refused():
    with pytest.raises(ValueError, match="more than max_length"):
        SequenceFeatures(CATALOG, max_length=5, window_step=6)


@given(
    num_events=st.integers(0, 40),
    size=st.integers(1, 5),
    newest=st.integers(1, 6),
    windows=st.sampled_from([1, 2, 50]),
    most=st.integers(1, 9),
)
def test_what_is_before_a_window_goes_with_it_in_chunks(num_events, size, newest, windows, most):
    """By brute force: which chunks, of which events, how far back, and what nobody reads."""
    catalog = np.arange(100, 140)
    row = catalog[:num_events].tolist()
    features = SequenceFeatures(
        catalog,
        max_length=newest + size - 1,
        window_step=size,
        chunk_events=size,
        max_chunks=most,
        windows=windows,
        label_sizes={"behavior": 50},
    )
    batch = dataclasses.replace(sample_batch([row, []]), labels={"behavior": np.arange(num_events)})

    def check(found, of_training):
        chunks = found.old_chunks
        for number, (first, stop) in enumerate(pairwise(found.offsets_B1)):
            events = found.items_N[first:stop].tolist()
            mine = slice(*chunks.offsets_B1[number : number + 2])
            if not events:
                assert mine.start == mine.stop
                continue
            begins, num_chunks = events[0], min(events[0] // size, most)
            assert begins % size == 0
            expected = np.arange(begins - num_chunks * size, begins).reshape(-1, size)
            np.testing.assert_array_equal(chunks.items_XC[mine], expected)
            np.testing.assert_array_equal(chunks.labels["behavior"][mine], expected)
            assert chunks.ages_X[mine].tolist() == list(range(num_chunks))[::-1]
        read = set(found.items_N.tolist()) | set(chunks.items_XC.ravel().tolist())
        if of_training:
            read |= set(found.targets_N.tolist())
        return read

    asked = features.ranking(batch)
    read = check(asked, of_training=False)
    first = max(num_events - newest, 0) // size * size
    assert np.diff(asked.offsets_B1).tolist() == [num_events - first, 0]
    assert asked.counts["unread_events"] == len(set(range(num_events)) - read)

    (trained,) = features(batch)
    read = check(trained, of_training=True)
    if windows == 50 and most == 9 and num_events > 1:
        assert sorted(trained.targets_N.tolist()) == list(range(1, num_events))
    if num_events > 1:
        assert trained.counts["unread_events"] == len(set(range(num_events)) - read)


def test_chunks_go_with_the_rows_of_their_trainer():
    features = SequenceFeatures(
        CATALOG, max_length=2, window_step=2, chunk_events=2, max_chunks=9, num_trainers=2
    )
    batch = sample_batch([[10, 20, 30, 40, 50], [50, 10], [20, 10, 50, 40, 30, 10, 20]])

    shares = features(batch)

    found = [CATALOG[share.old_chunks.items_XC].tolist() for share in shares]
    assert found == [[[10, 20]], [[20, 10], [50, 40]]]
    assert [share.old_chunks.offsets_B1.tolist() for share in shares] == [[0, 1], [0, 0, 2]]


def test_windows_are_divided_among_trainers_and_counted_once():
    batch = sample_batch([[10, 20, 30, 40, 50, 10], [50], []])
    shares = SequenceFeatures(CATALOG, max_length=2, windows=9, num_trainers=2)(batch)
    assert sum(len(share.items_N) for share in shares) == 5
    counts = {name: sum(share.counts[name] for share in shares) for name in shares[0].counts}
    assert counts == {
        "rows": 3,
        "events": 7,
        "unknown_items": 0,
        "unread_events": 0,
        "rows_without_target": 2,
    }


def test_unknown_items_are_skipped_and_counted():
    (features,) = SequenceFeatures(CATALOG, max_length=5)(sample_batch([[10, 99, 20], [98, 30], [], [97]]))
    assert features.items_N.tolist() == [1]
    assert features.targets_N.tolist() == [3]
    assert features.offsets_B1.tolist() == [0, 1, 1, 1, 1]
    assert features.counts == {
        "rows": 4,
        "events": 6,
        "unknown_items": 3,
        "unread_events": 0,
        "rows_without_target": 3,
    }


def test_ranking_reads_the_whole_history_and_knows_no_target():
    features = SequenceFeatures(CATALOG, max_length=2, tables=["item", "user"], num_negatives=3)
    ranked = features.ranking(sample_batch([[10, 20, 30], [], [40]], targets=[40, 99, 50]))
    assert ranked.items_N.tolist() == [3, 4, 2]
    assert ranked.offsets_B1.tolist() == [0, 2, 2, 3]
    assert ranked.targets_N is None
    assert ranked.negatives_S is None
    assert restored(ranked.lookups["item"]) == [20, 30, 40]
    assert restored(ranked.lookups["user"]) == [100, 101, 102]
    assert ranked.counts == {"unknown_items": 0, "unread_events": 1, "rows_without_history": 1}


def test_seen_items_are_those_of_the_whole_history():
    features = SequenceFeatures(CATALOG, max_length=1)
    assert features.seen(sample_batch([[10, 99, 20], [], [30]])).tolist() == [[1, 3], [-1, -1], [4, -1]]


def test_codes_of_different_levels_have_different_ids():
    codes_IL = np.array([[0, 1], [1, 1], [2, 0], [3, 3], [4, 4]])
    (features,) = SequenceFeatures(CATALOG, max_length=5, tables=["code"], codes_IL=codes_IL)(
        sample_batch([[10, 50, 20]])
    )
    second_level = 1 << 32
    assert restored(features.lookups["code"]) == [[1, second_level | 1], [0, second_level | 1]]
    assert len(features.lookups["code"].ids_M) == 3
    assert code_ids(codes_IL)[4].tolist() == [4, second_level | 4]


def test_negatives_are_shared_and_looked_up_behind_tokens_and_targets():
    rows = [[10, 20, 30], [40, 50]]
    features = SequenceFeatures(CATALOG, max_length=5, num_negatives=4, seed=3, num_trainers=2)
    first, second = features(sample_batch(rows, step=7))
    expected_S = np.unique(np.random.default_rng([3, 2, 7]).integers(5, size=4))
    assert first.negatives_S.tolist() == second.negatives_S.tolist() == expected_S.tolist()
    assert restored(first.lookups["item"]) == [10, 20, 20, 30, *CATALOG[expected_S]]
    assert restored(second.lookups["item"]) == [40, 50, *CATALOG[expected_S]]


@pytest.mark.slow
def test_popular_negatives_follow_the_training_counts():
    counts_I = np.array([0, 1, 2, 0, 5])
    features = SequenceFeatures(
        CATALOG, max_length=5, num_negatives=2, negatives="popularity", train_counts_I=counts_I
    )
    np.testing.assert_allclose(np.exp(features.negative_log_q_I()), counts_I / 8)
    has_I = np.zeros(5)
    for step in range(4000):
        (batch,) = features(sample_batch([[10, 20]], step=step))
        assert len(np.unique(batch.negatives_S)) == len(batch.negatives_S)
        has_I[batch.negatives_S] += 1
    np.testing.assert_allclose(has_I / 4000, 1 - (1 - counts_I / 8) ** 2, atol=0.03)


def test_uniform_negatives_have_one_probability():
    features = SequenceFeatures(CATALOG, max_length=5, num_negatives=1)
    np.testing.assert_allclose(features.negative_log_q_I(), np.log(np.full(5, 0.2)))


rows_of_items = st.lists(
    st.lists(st.sampled_from([10, 20, 30, 40, 50, 99]), max_size=7), min_size=1, max_size=9
)


@given(rows_of_items, st.integers(1, 4), st.integers(1, 5))
def test_shares_of_several_trainers_together_are_the_batch_of_one(rows, num_trainers, max_length):
    settings = {"max_length": max_length, "tables": ["item", "user"], "num_negatives": 2}
    batch = sample_batch(rows)
    (whole,) = SequenceFeatures(CATALOG, **settings)(batch)
    shares = SequenceFeatures(CATALOG, **settings, num_trainers=num_trainers)(batch)

    assert len(shares) == num_trainers
    for name in ("items_N", "targets_N", "row_keys_B"):
        assert (
            np.concatenate([getattr(share, name) for share in shares]).tolist()
            == getattr(whole, name).tolist()
        )
    lengths = [length for share in shares for length in np.diff(share.offsets_B1)]
    assert lengths == np.diff(whole.offsets_B1).tolist()
    tokens = [len(share.items_N) for share in shares]
    assert max(tokens) - min(tokens) <= 2 * max(lengths)
    for reason, count in whole.counts.items():
        assert sum(share.counts[reason] for share in shares) == count
    for share in shares:
        assert share.num_targets == whole.num_targets
        for table, lookup in share.lookups.items():
            assert sorted(lookup.updated_ids) == sorted(whole.lookups[table].ids_M)


def test_features_travel_and_take_arrays_that_cannot_be_written():
    features = SequenceFeatures(CATALOG, max_length=5, tables=["item", "user"])
    batch = sample_batch([[10, 20, 99], [30]])
    for name in ("row_keys_B", "user_ids_B", "item_ids_N", "offsets_B1"):
        getattr(batch, name).flags.writeable = False
    (features_there,) = pickle.loads(pickle.dumps(features))(batch)
    assert features_there.items_N.tolist() == features(batch)[0].items_N.tolist() == [1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"num_trainers": 0}, "num_trainers must be at least 1"),
        ({"tables": ["itms"]}, "no table 'itms'; known tables: item, user, code"),
        ({"tables": ["code"]}, "needs codes_IL"),
        ({"codes_IL": np.zeros((4, 2), int)}, "one row of codes for each of the 5 items"),
        ({"codes_IL": np.full((5, 2), -1)}, "negative code at position 0"),
        ({"negatives": "popularity"}, "need train_counts_I"),
        ({"item_ids_I": np.array([1, 1])}, "holds an id twice"),
        ({"num_negatives": 1, "negatives_per_event": 1}, "are of two losses"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SequenceFeatures(**({"item_ids_I": CATALOG, "max_length": 5} | settings))


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 5))
def test_shares_of_a_batch_are_whole_and_of_about_equal_length(lengths, num_shares):
    lengths_B = np.array(lengths, dtype=np.int64)

    bounds = balanced_bounds(lengths_B, num_shares)

    assert bounds[0] == 0
    assert bounds[-1] == len(lengths)
    assert bounds == sorted(bounds)
    sums = [lengths_B[low:high].sum() for low, high in pairwise(bounds)]
    assert len(sums) == num_shares
    assert max(abs(total - lengths_B.sum() / num_shares) for total in sums) <= lengths_B.max(initial=0)


def test_rows_without_tokens_are_shared_out_too():
    assert balanced_bounds(np.zeros(4, dtype=np.int64), 2) == [0, 2, 4]


def with_times(rows, times, **further):
    return dataclasses.replace(
        sample_batch(rows, **further), times_N=np.array([t for row in times for t in row])
    )


def test_times_go_where_their_items_go_and_targets_leave_theirs_behind():
    batch = with_times([[10, 99, 20, 30, 40], [50, 10], [98]], [[1, 2, 3, 4, 5], [6, 7], [8]])
    (features,) = SequenceFeatures(CATALOG, max_length=2)(batch)
    assert features.items_N.tolist() == [3, 4, 0]  # 20, 30 | 50
    assert features.times_N.tolist() == [3, 4, 6]
    ranked = SequenceFeatures(CATALOG, max_length=2).ranking(batch)
    assert ranked.items_N.tolist() == [4, 2, 0, 1]  # 30, 40 | 50, 10
    assert ranked.times_N.tolist() == [4, 5, 6, 7]
    first, second = SequenceFeatures(CATALOG, max_length=2, num_trainers=2)(batch)
    assert [*first.times_N, *second.times_N] == [3, 4, 6]


def test_without_times_features_have_none():
    features = SequenceFeatures(CATALOG, max_length=2)
    assert features(sample_batch([[10, 20]]))[0].times_N is None
    assert features.ranking(sample_batch([[10, 20]])).times_N is None


@given(rows_of_items, st.integers(1, 4), st.integers(1, 3))
def test_no_negative_of_an_event_is_an_item_of_its_row(rows, max_length, per_event):
    rows = [row for row in rows if not {10, 20, 30, 40, 50} <= set(row)]
    if not rows:
        return
    features = SequenceFeatures(CATALOG, max_length=max_length, negatives_per_event=per_event, seed=5)
    (batch,) = features(sample_batch(rows, step=3))
    assert batch.negatives_NK.shape == (len(batch.items_N), per_event)
    for row, items in enumerate(rows):
        low, high = batch.offsets_B1[row : row + 2]
        drawn = CATALOG[batch.negatives_NK[low:high]]
        assert not set(drawn.reshape(-1).tolist()) & set(items)
    looked_up = restored(batch.lookups["item"])[2 * len(batch.items_N) :]
    assert looked_up == CATALOG[batch.negatives_NK].reshape(-1).tolist()


def test_every_item_that_a_row_lacks_is_drawn_alike():
    features = SequenceFeatures(np.arange(6), max_length=9, negatives_per_event=30_000)
    (batch,) = features(sample_batch([[5, 2], [0, 1]]))
    for row, left in enumerate(([0, 1, 3, 4], [2, 3, 4, 5])):
        shares = np.bincount(batch.negatives_NK[row], minlength=6) / 30_000
        np.testing.assert_allclose(shares[left], 0.25, atol=0.01)
        assert shares[left].sum() == pytest.approx(1)


def test_negatives_of_an_event_depend_on_seed_step_row_and_place_alone():
    rows = [[10, 20, 30], [40, 50], [10, 40]]

    def drawn(rows, row_keys, step=7, seed=3, num_trainers=1):
        features = SequenceFeatures(
            CATALOG, max_length=5, negatives_per_event=9, seed=seed, num_trainers=num_trainers
        )
        batch = dataclasses.replace(sample_batch(rows, step), row_keys_B=np.array(row_keys))
        return np.concatenate([share.negatives_NK for share in features(batch)]).tolist()

    together = drawn(rows, [5, 6, 7])
    assert together == drawn(rows, [5, 6, 7], num_trainers=2)
    last, middle, *first = drawn(rows[::-1], [7, 6, 5])
    assert together == [*first, middle, last]
    assert together[2:3] == drawn(rows[1:2], [6])
    assert together[2:3] != drawn(rows[1:2], [6], step=8)
    assert together[2:3] != drawn(rows[1:2], [6], seed=4)
    assert together[2:3] != drawn(rows[1:2], [8])
    assert together[0] != together[1]


def test_a_row_with_the_whole_catalog_has_no_negatives():
    features = SequenceFeatures(CATALOG, max_length=2, negatives_per_event=1)
    with pytest.raises(InputError, match="user 101 has all 5 items of the catalog in a row of step 4"):
        features(sample_batch([[10], [10, 20, 30, 40, 50]], step=4))


def test_a_trigger_is_the_newest_event_with_the_time_of_the_one_before():
    features = SequenceFeatures(CATALOG, max_length=3)
    batch = dataclasses.replace(
        sample_batch([[10, 20], [], [30, 10], [20]]),
        times_N=np.array([5, 6, 7, 8, 9]),
        labels={"behavior": np.array([0, 1, 0, 1, 0])},
        instruction={"trigger_item": np.array([0, 1, -1, np.flatnonzero(CATALOG == 20)[0]])},
    )

    triggered = features.with_triggers(batch)

    first, second = CATALOG[:2].tolist()
    assert triggered.item_ids_N.tolist() == [10, 20, first, second, 30, 10, 20]  # the last is there already
    assert triggered.offsets_B1.tolist() == [0, 3, 4, 6, 7]
    assert triggered.times_N.tolist() == [5, 6, 6, NO_TIME, 7, 8, 9]
    assert triggered.labels["behavior"].tolist() == [0, 1, -1, -1, 0, 1, 0]
    assert features.with_triggers(sample_batch([[10]])).item_ids_N.tolist() == [10]
