"""`rayrec data keys`: samples that name a user and a time instead of carrying a history.

One row for each event that has something before it: `user_id`, `item_id` (the target) and `timestamp`, which
is all that `join_history` needs. Rows stand user after user, in the order of the users' ids, and by time;
readers shuffle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayrec.platform.errors import InputError
from rayrec.samples.prepare.writer import RowGroupWriter, whole_folder
from rayrec.samples.stores.batches import Histories
from rayrec.samples.stores.manifest import ITEMS
from rayrec.samples.stores.store import KeyValueEvents

ROWS_PER_GROUP = 65_536
ROWS_PER_FILE = 4_194_304

_KEYS_AT_ONCE = 1024


@dataclass(frozen=True)
class KeySamplesReport:
    """What was written."""

    path: str
    fingerprint: str
    """Of the store; `join_history` can insist on it."""
    users: int
    events: int
    samples: int
    bytes: int

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("samples", f"{self.samples:,} of {self.events:,} events of {self.users:,} users"),
            ("store's fingerprint", self.fingerprint),
            ("size", f"{self.bytes:,} bytes in {self.path}"),
        ]


def write_key_samples(
    store: KeyValueEvents,
    out: str | Path,
    progress: Callable[[int], None] = lambda samples: None,
    rows_per_group: int = ROWS_PER_GROUP,
) -> KeySamplesReport:
    """Write the samples of a store into a new folder; it appears when it is whole.

    Raises:
        InputError: something is there already, or the store is empty.
        StoreUnavailableError: the store did not answer.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out}: something is there already; give a new folder for the samples")
    schema = pa.schema(
        [
            ("user_id", pa.int64()),
            ("item_id", pa.int64()),
            ("timestamp", pa.timestamp(store.manifest.time_unit)),
        ]
    )
    users = events = samples = 0
    with whole_folder(out) as folder:
        writer = RowGroupWriter(
            lambda number: folder / f"part-{number:05d}.parquet", schema, rows_per_group, ROWS_PER_FILE
        )
        for keys_K in store.key_batches(_KEYS_AT_ONCE):
            histories = store.get_many(keys_K, columns=(ITEMS,))
            rows = _samples(keys_K, histories, schema)
            writer.write(rows)
            users += len(keys_K)
            events += len(histories.times_N)
            samples += len(rows)
            progress(samples)
        written = writer.close()
        if not samples:
            raise InputError(f"{store.name}: no event has another one before it, so there are no samples")
        num_bytes = sum(path.stat().st_size for path in written)
    return KeySamplesReport(str(out), store.manifest.fingerprint, users, events, samples, num_bytes)


def _samples(keys_K: np.ndarray, histories: Histories, schema: pa.Schema) -> pa.Table:
    times_N, lengths_K = histories.times_N, np.diff(histories.offsets_K1)
    # Strictly later than the first: what shares its time has no history, as `join_history` sees it.
    kept_N = times_N > np.repeat(times_N[histories.offsets_K1[:-1]], lengths_K)
    columns = (np.repeat(keys_K, lengths_K), histories.columns[ITEMS], times_N)
    return pa.table(
        [pa.array(column[kept_N]).cast(field.type) for column, field in zip(columns, schema, strict=True)],
        schema=schema,
    )
