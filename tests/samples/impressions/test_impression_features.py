"""Rows of impressions as batches: what is missing, what is shared, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import FEATURE_TABLE, ImpressionSchema
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.base.intervals import Interval, Intervals
from rayrec.samples.impressions.features import ImpressionFeatures
from rayrec.samples.impressions.ids import null_id
from rayrec.samples.operations.program import FeatureProgram

SCHEMA = ImpressionSchema(("click", "like"), ("price",), {"user": "user", "item": "item"}, {"seen": "item"})
COLUMNS = pa.schema(
    {
        "click": pa.int8(),
        "like": pa.int8(),
        "price": pa.float32(),
        "user": pa.int64(),
        "item": pa.int64(),
        "seen": pa.list_(pa.int64()),
    }
)


def features(num_trainers: int = 1) -> ImpressionFeatures:
    return ImpressionFeatures(SCHEMA, FeatureProgram.compile((), COLUMNS), num_trainers=num_trainers)


def rows(**columns: list) -> RowBatch:
    values = {
        "click": [1, 0, 1],
        "like": [None, 1, 0],
        "price": [2.0, None, 0.5],
        "user": [10, 11, 10],
        "item": [20, None, 21],
        "seen": [[21, 20], None, [22]],
    } | columns
    batch = pa.RecordBatch.from_pydict(values, COLUMNS)
    cursor = Intervals.of([Interval("train/part-0.parquet", 5, 5 + len(batch))])
    return RowBatch(np.arange(len(batch)), batch, cursor)


def ids_of(batch) -> np.ndarray:
    lookup = batch.lookups[FEATURE_TABLE]
    return lookup.ids_M[lookup.inverse]


def test_a_batch_has_numbers_labels_and_ids_column_by_column():
    (batch,) = features().training(7, rows())

    assert (batch.step, batch.num_targets, batch.num_id_columns) == (7, 3, 2)
    assert batch.numbers_BF.tolist() == [[2.0], [0.0], [0.5]]
    np.testing.assert_array_equal(batch.labels_BT, np.array([[1, np.nan], [0, 1], [1, 0]], np.float32))
    missing = null_id("item")
    assert ids_of(batch).tolist() == [10, 20, 11, missing, 10, 21, 21, 20, 22]
    assert batch.list_offsets_B1["seen"].tolist() == [0, 2, 2, 3]


def test_every_id_is_looked_up_once():
    (batch,) = features().training(0, rows())

    ids_M = batch.lookups[FEATURE_TABLE].ids_M
    assert len(set(ids_M.tolist())) == len(ids_M) == 6


@pytest.mark.parametrize("num_trainers", [2, 3, 5])
def test_shares_are_the_batch_cut_by_rows(num_trainers):
    (whole,), shares = features().training(0, rows()), features(num_trainers).training(0, rows())

    assert len(shares) == num_trainers
    assert np.concatenate([share.row_keys_B for share in shares]).tolist() == [0, 1, 2]
    assert {share.num_targets for share in shares} == {3}
    singles, lists = [], []
    for share in shares:
        ids, split = ids_of(share), share.num_rows * share.num_id_columns
        singles.append(ids[:split])
        at = share.list_offsets_B1["seen"]
        lists += [ids[split:][low:high].tolist() for low, high in pairwise(at)]
    assert np.concatenate(singles).tolist() == ids_of(whole)[:6].tolist()
    assert lists == [[21, 20], [], [22]]
    updated_ids = {tuple(sorted(share.lookups[FEATURE_TABLE].updated_ids)) for share in shares}
    assert updated_ids == {tuple(sorted(whole.lookups[FEATURE_TABLE].ids_M))}


def test_rows_to_be_scored_need_no_labels():
    scored = rows()
    unlabeled = RowBatch(scored.row_keys_B, scored.rows.drop_columns(["click", "like"]))

    batch = features().scoring(0, unlabeled)

    (trained,) = features().training(0, rows())
    assert batch.labels_BT.shape == (3, 0)
    assert ids_of(batch).tolist() == ids_of(trained).tolist()
    assert batch.numbers_BF.tolist() == trained.numbers_BF.tolist()


def test_a_label_that_is_neither_0_nor_1_is_refused_with_its_place():
    with pytest.raises(InputError, match=r"label 'like' is 3 in one of the rows 5 to 7 of train/part-0"):
        features().training(0, rows(like=[None, 3, 0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_by_column(value):
    with pytest.raises(InputError, match=r"column 'price' is (nan|inf) in one of the rows"):
        features().training(0, rows(price=[1.0, value, 2.0]))


def integers(column: str, values: list[int]) -> tuple[ImpressionFeatures, RowBatch]:
    """Features of rows, of which a column has other types than a prepared data set's."""
    given = rows()
    place = given.rows.schema.get_field_index(column)
    batch = given.rows.set_column(place, column, pa.array(values, pa.int64()))
    return ImpressionFeatures(SCHEMA, FeatureProgram.compile((), batch.schema)), replace(given, rows=batch)


@pytest.mark.parametrize("value", [1_700_000_001, 2**60 + 1])
def test_whole_numbers_that_float32_has_not_are_rounded(value):
    of_integers, given = integers("price", [value, 0, 1])

    (batch,) = of_integers.training(0, given)

    assert batch.numbers_BF[0, 0] == np.float32(value)


def test_a_label_far_from_0_and_1_is_refused():
    of_integers, given = integers("like", [0, 2**40 + 1, 0])

    with pytest.raises(InputError, match=r"label 'like' is 1\.09951e\+12"):
        of_integers.training(0, given)


def test_what_is_missing_in_a_list_is_left_out_and_other_ids_stay_as_they_are():
    large = 2**62 + 1
    (batch,) = features().training(0, rows(seen=[[large, None], None, [None, large + 1, large]]))

    assert batch.list_offsets_B1["seen"].tolist() == [0, 1, 1, 3]
    assert ids_of(batch)[-3:].tolist() == [large, large + 1, large]
