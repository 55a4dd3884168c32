"""The layout `avazu`: the Avazu click-through challenge, and what is cut from it.

Comma-separated: id, click, hour (YYMMDDHH, UTC), C1, banner_pos, site_*, app_*, device_*, C14 to C21. Parts
that others have cut have the header in the first file alone. The id of the impression is no feature: it
occurs once. The hour becomes the hour of the day and the day of the week, since no hour of training comes
again. `-1` in C20 and the busiest device_id stand for nothing known, and are categories like others.
Source: https://www.kaggle.com/c/avazu-ctr-prediction/data
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.importers.delimited import DelimitedFile, first_line
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.layouts.split_files import split_files
from rayrec.samples.impressions.source import ImpressionSource, SourcePart, SplitName

_IDS = (
    "C1",
    "banner_pos",
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
    "device_type",
    "device_conn_type",
    *(f"C{number}" for number in range(14, 22)),
)
COLUMNS = ("id", "click", "hour", *_IDS)
HOUR_OF_DAY = "hour_of_day"
WEEKDAY = "weekday"
"""0 is Monday."""
_TIME = "time"

_SUFFIXES = (".csv", "", ".csv.gz", ".gz")


def load(source: Path, config: ImpressionsConfig) -> ImpressionSource:
    """Open a source of this layout.

    Raises:
        InputError: a file or a column is missing.
    """
    files = split_files(source, _SUFFIXES, _is_labeled) if source.is_dir() else {"train": source}
    ids = {name: name for name in (HOUR_OF_DAY, WEEKDAY, *_IDS)}
    return ImpressionSource(
        name=source.resolve().name.split(".")[0],
        schema=ImpressionSchema(labels=("click",), ids=ids),
        parts=tuple(_part(path, split if len(files) > 1 else None) for split, path in files.items()),  # type: ignore[arg-type]
        time=_TIME,
        files=tuple(files.values()),
    )


def _is_labeled(path: Path) -> bool:
    names = first_line(path, ",")
    return "click" in names if "id" in names else len(names) != len(COLUMNS) - 1


def _part(path: Path, split: SplitName | None) -> SourcePart:
    if "id" in first_line(path, ","):
        file = DelimitedFile.detect(path, delimiter=",")
        missing = [name for name in COLUMNS if name not in file.columns]
        if missing:
            raise InputError(
                f"{path}: no column {', '.join(missing)}; found {', '.join(file.columns)}; expected those of "
                "the challenge's training file"
            )
    else:
        file = DelimitedFile(path, COLUMNS, has_header=False, delimiter=",", quoted=True)

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        derived = (HOUR_OF_DAY, WEEKDAY, _TIME)
        needs_hour = any(name in columns for name in derived)
        plain = [name for name in columns if name not in derived]
        first = 0
        for batch in file.read([*plain, *(["hour"] if needs_hour else [])]):
            made = {name: batch.column(name) for name in plain}
            if needs_hour:
                times = _times(batch.column("hour"), file, first)
                made[_TIME] = times
                made[HOUR_OF_DAY], made[WEEKDAY] = pc.hour(times), pc.day_of_week(times)
            yield pa.record_batch({name: made[name] for name in columns})
            first += len(batch)

    return SourcePart(read, file.where, split)


def _times(hours: pa.StringArray, file: DelimitedFile, first: int) -> pa.TimestampArray:
    """Times of hours as Avazu writes them, YYMMDDHH.

    Raises:
        InputError: a value is no hour.
    """
    shaped = pc.match_substring_regex(hours, "^[0-9]{8}$")
    times = pc.strptime(
        pc.if_else(shaped, hours, pa.scalar(None, pa.string())), "%y%m%d%H", "s", error_is_null=True
    )
    if times.null_count:
        row = int(np.argmax(times.is_null().to_numpy(zero_copy_only=False)))
        raise InputError(
            f"{file.where(first + row)}: hour is {hours[row].as_py()!r}; expected YYMMDDHH, as in 14102100"
        )
    return times
