"""Published data sets whose files `rayrec prepare` does not read as they are, in a layout that it reads.

What is written lies in a temporary folder while a data set is prepared: nothing of it is kept.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.platform.errors import InputError
from rayrec.samples.importers.lists import described_items

_PERIODS = {"h": "train", "v": "valid", "t": "test"}


def divided_industrial(source: Path, folder: Path) -> None:
    """Write MiniOneRec's Industrial and Scientific as the layout `splits`.

    `sequences_recovered.tsv` has each user's items, oldest first, and the period of each: all events of all
    users were sorted by time and divided there, so this is a split by time of a log whose times are not
    known: the place of an event in its user's history stands for it. Of several events of a user in a period,
    the first is predicted.

    Raises:
        InputError: a file is missing, or not as described.
    """
    file = source / "sequences_recovered.tsv"
    if not file.is_file():
        raise InputError(f"{file}: no such file; expected user, items and periods in three columns")
    events: dict[str, list[tuple[str, str, int]]] = {period: [] for period in _PERIODS}
    for number, row in enumerate(file.read_text().splitlines()[1:], start=2):
        user, items, periods = (column.split() for column in row.split("\t"))
        in_order = [period for period in _PERIODS for _ in range(periods.count(period))]
        if len(items) != len(periods) or periods != in_order:
            raise InputError(f"{file} line {number}: expected a period h, v or t of each item, in this order")
        for at, (item, period) in enumerate(zip(items, periods, strict=True)):
            events[period].append((user[0], item, at))
    for period, name in _PERIODS.items():
        users, of_users, order = zip(*events[period], strict=True)
        # Not lines of items: some users begin again with all that they had.
        table = pa.table({"user_id": users, "item_id": of_users, "timestamp": order})
        pq.write_table(table, folder / f"{name}.parquet")
    described = described_items(source / "Industrial_and_Scientific.item.json.gz")
    pq.write_table(described.table, folder / "items.parquet")
