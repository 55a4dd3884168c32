"""What users did last, oldest first, with times of one unit whatever the store's is.

Axes: E events of a user, N of all, B users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.platform.arrays import Int64Array
from rayrec.platform.event_labels import UNKNOWN
from rayrec.samples.stores.lookup import histories_before
from rayrec.samples.stores.manifest import BEHAVIORS, ITEMS, PER_SECOND
from rayrec.samples.stores.store import KeyValueEvents


@dataclass(frozen=True)
class UserEvents:
    """Events of one user, or of many at a time where they are appended."""

    times_us_E: Int64Array
    items_E: Int64Array
    behaviors_E: Int64Array
    """Codes by the behaviors of the store; -1 where nothing is known."""


def newest_events(store: KeyValueEvents, user_ids: Sequence[int], last: int) -> list[UserEvents]:
    """The newest events of users, in one request.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    keys_B = np.array(user_ids, dtype=np.int64)
    all_times_B = np.full(len(keys_B), np.iinfo(np.int64).max)
    wanted = {ITEMS, BEHAVIORS} & set(store.manifest.types)
    found = histories_before(store, keys_B, all_times_B, last, wanted)
    times_N = converted(found.times_N, PER_SECOND[store.manifest.time_unit], 1_000_000)
    items_N = found.columns[ITEMS]
    codes_N = found.columns.get(BEHAVIORS, np.full(len(items_N), UNKNOWN)).astype(np.int64)
    cuts = found.offsets_K1[1:-1]
    parts = (np.split(column, cuts) for column in (times_N, items_N, codes_N))
    return [UserEvents(*columns) for columns in zip(*parts, strict=True)][: len(keys_B)]


def converted(times_E: Int64Array, per_s: int, to_per_s: int) -> Int64Array:
    """Times in another unit, so many to the second."""
    # In integers: a float64 does not hold all microseconds of the years that events may be of.
    if to_per_s >= per_s:
        return times_E * (to_per_s // per_s)
    return times_E // (per_s // to_per_s)
