"""Which events of a log a data set of histories holds out, so that impressions can hold out the same ones.

Axes: E events of the log, S events of the data set, U its users.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.platform.arrays import Int64Array
from rayrec.samples.base.event_times import TIMES
from rayrec.samples.base.jagged import list_values
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import HISTORY_FILE
from rayrec.samples.impressions.source import SPLITS

TRAIN, VALID, TEST = range(len(SPLITS))
_PER_SECOND = 1_000_000


def split_codes_like(dataset: Dataset, users: pa.Array, items: pa.Array, times_E: Int64Array) -> Int64Array:
    """[E] index in `SPLITS`: events that a recommender trains on train; of a user's others, those before the
    one that is tested validate; with a split by time, those before the later boundary.

    An event that cannot be told from one that is held out, or that the data set has not, is held out as
    well, the latter unless it is before all that is held out of its user.

    Args:
        users, items: [E] keys.
        times_E: microseconds.

    Raises:
        InputError: the data set has no times.
    """
    dataset.check_times()
    held = _events_of(dataset)
    log = pd.DataFrame(
        {"user": users.to_pandas(), "item": items.to_pandas(), "second": times_E // _PER_SECOND}
    )
    # Of several events of one pair and second the last: then none of them is a label or row of training.
    known = held.groupby(["user", "item", "second"], as_index=False)["split"].max()
    codes_E = log.merge(known, how="left", on=["user", "item", "second"])["split"].to_numpy()
    starts = {split: held[held["split"] >= split].groupby("user")["second"].min() for split in (VALID, TEST)}
    by_time_E = sum((log["second"] >= log["user"].map(start)).to_numpy(np.int64) for start in starts.values())
    return np.where(np.isnan(codes_E), by_time_E, codes_E).astype(np.int64)


def _events_of(dataset: Dataset) -> pd.DataFrame:
    """[S] user, item, second and split of all events."""
    users = dataset.users
    sequences = pq.read_table(dataset.root / HISTORY_FILE, columns=["item_ids", TIMES])
    item_ids_S, offsets_U1 = list_values(sequences["item_ids"])
    seconds_S, _ = list_values(sequences[TIMES])
    lengths_U = np.diff(offsets_U1)
    rows_S = np.repeat(np.arange(len(lengths_U)), lengths_U)
    indices_S = np.arange(len(rows_S)) - offsets_U1[:-1][rows_S]
    user_index = pd.Index(users["user_id"].to_numpy())
    num_train_U = np.zeros(len(lengths_U), dtype=np.int64)
    for name in dataset.train_files:
        rows = pq.read_table(dataset.root / name, columns=["user_id", "item_ids"])
        lengths = np.diff(list_values(rows["item_ids"])[1])
        num_train_U[user_index.get_indexer(pd.Index(rows["user_id"].to_numpy()))] = lengths
    split = dataset.manifest.split
    if split.kind == "time" and split.test_start is not None:  # whichever event of the period is tested
        is_before_S = seconds_S < math.floor(split.test_start)
    else:
        test_at_U = lengths_U.copy()
        tested = dataset.evaluation_rows("test")
        test_at_U[user_index.get_indexer(pd.Index(tested.user_ids_B))] = np.diff(tested.offsets_B1)
        is_before_S = indices_S < test_at_U[rows_S]
    keys = dataset.items.keys.to_pandas().to_numpy()
    return pd.DataFrame(
        {
            "user": users["user_key"].to_pandas().to_numpy()[rows_S],
            "item": keys[dataset.item_positions(item_ids_S)],
            "second": seconds_S,
            "split": np.where(indices_S < num_train_U[rows_S], TRAIN, np.where(is_before_S, VALID, TEST)),
        }
    )
