"""Values of items from a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.platform.errors import InputError
from rayrec.rl.rewards.item_facts import BusinessValue
from tests.rl.rewards.rl_lists import lists_of

KEYS = pd.Index(["a", "007", "c", "d"])


def table(folder: Path, text: str) -> Path:
    path = folder / "margins.csv"
    path.write_text(text)
    return path


def read(path: Path, keys: pd.Index = KEYS) -> BusinessValue:
    return BusinessValue.read(path, "item_id", "margin", keys)


def test_values_are_found_by_key_and_unknown_items_are_0_and_counted(tmp_path):
    # Not in the table: d. Without a value: c. Not in the catalog: z. Keys stay texts: 007 is not 7.
    value = read(table(tmp_path, "margin,item_id\n2.5,007\n-1,a\n,c\n9,z\n"))

    assert value.value_I.tolist() == [-1.0, 2.5, 0.0, 0.0]
    assert value.num_unknown == 2
    assert value(lists_of([[1, -1, 3, 0]])).tolist() == [[2.5, 0, 0, -1]]


@pytest.mark.parametrize("dtype", [pa.int64(), pa.float32(), pa.decimal128(21, 1)])
def test_parquet_with_keys_of_any_kind_and_numbers_of_any_kind(tmp_path, dtype):
    path = tmp_path / "margins.parquet"
    pq.write_table(
        pa.table({"item_id": pa.array([12, 3]), "margin": pa.array([4, 5]).cast(dtype)}),
        path,
    )

    assert read(path, pd.Index(["3", "12"])).value_I.tolist() == [5.0, 4.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "item_id,price\na,1\n",
            r"margins.csv: no column 'margin' for the reward business_value; found item_id, p",
        ),
        ("sku,margin\na,1\n", r"no column 'item_id' for the reward business_value; found sku, margin"),
        ("item_id,margin\na,1\nc,cheap\n", r"the column 'margin' has string; a reward needs numbers"),
        ("item_id,margin\na,1\nc,inf\n", r"margins.csv line 3: margin is inf; a reward needs finite"),
        ("item_id,margin\na,1\nc,2\na,3\n", r"line 4: the item 'a' is there a second time"),
        ("item_id,margin\na,1\n,2\n", r"line 3: no item in the column 'item_id'"),
        ("item_id,margin\nx,1\ny,2\n", r"none of its 2 values in 'item_id' is the key of an item"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read(table(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read(tmp_path / "margins.csv")


def test_a_column_of_nothing_makes_all_items_unknown(tmp_path):
    path = tmp_path / "margins.parquet"
    pq.write_table(pa.table({"item_id": ["a"], "margin": pa.nulls(1)}), path)

    value = read(path)

    assert value.num_unknown == 4
    assert np.count_nonzero(value.value_I) == 0
