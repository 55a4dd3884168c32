"""The layout `movielens`: would the user rate this film highly?

A row per rating, in any form that `rayrec prepare` reads (ml-100k, ml-1m, RecBole's files, ratings.csv).
The label `liked` is 1 from a rating of `positive_rating` on. What is known of the user's past is of times
strictly before the rating: the list `history` (the newest films liked), the numbers `num_rated` and
`share_liked`.
Nothing is known of what others thought of the film: that would be a statistic over the whole log.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.batches import Int64Array
from rayrec.samples.config import PrepareConfig
from rayrec.samples.importers import load_source
from rayrec.samples.importers.tables import RawTable
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.layouts.histories import histories_before
from rayrec.samples.impressions.layouts.logs import boundaries_of, checked_log, described, source_of_events
from rayrec.samples.impressions.source import ImpressionSource

LABEL = "liked"

_AGES = np.array([18, 25, 35, 45, 50, 56])
"""The lower ends of MovieLens 1M, which has codes for ages; below the first one is "1"."""
_NO_GENRES = "(no genres listed)"


def load(source: Path, config: ImpressionsConfig) -> ImpressionSource:
    """
    Raises:
        InputError: no ratings, or something of them is not as it should be.
    """
    raw, _ = load_source(source, PrepareConfig())
    log = raw.interactions
    users, items, times_E = checked_log(log, config)
    liked_E = _ratings(log) >= config.positive_rating
    user_codes_E = pd.factorize(users.to_pandas(), sort=True)[0]
    item_codes_E = pd.factorize(items.to_pandas(), sort=True)[0]
    histories = histories_before(user_codes_E, times_E, items, liked_E, config.history_length)
    of_users = _user_columns(described(raw.users, "user_id", users))
    of_items = described(raw.items, "item_id", items)
    genres = _column(of_items, "genres", "class")
    years = _column(of_items, "release_year", "year")
    year = None if years is None else _numbers(years)

    def take(events_R: Int64Array) -> dict[str, pa.Array]:
        rows = pa.array(events_R)
        num_rated_R, num_liked_R = histories.num_events_E[events_R], histories.num_kept_E[events_R]
        columns = {
            LABEL: pa.array(liked_E[events_R].astype(np.int8)),
            "num_rated": pa.array(num_rated_R),
            "share_liked": pa.array(num_liked_R / np.maximum(num_rated_R, 1), mask=num_rated_R == 0),
            "user": users.take(rows),
            "item": items.take(rows),
            "history": histories.of(events_R),
        } | {name: column.take(rows) for name, column in of_users.items()}
        if year is not None:
            columns["release_year"] = year.take(rows)
        if genres is not None:
            columns["genres"] = _genre_lists(genres.take(rows))
        return columns

    schema = ImpressionSchema(
        labels=(LABEL,),
        numbers=("num_rated", "share_liked", *(["release_year"] if year is not None else [])),
        ids={name: name for name in ("user", "item", *of_users)},
        lists={**({"genres": "genre"} if genres is not None else {}), "history": "item"},
        group="user",
    )
    boundaries = boundaries_of(times_E, config)
    events_R = np.lexsort((item_codes_E, user_codes_E))
    return source_of_events(raw.name, schema, log, times_E, events_R, boundaries, take)


def _ratings(log: RawTable) -> np.ndarray:
    """[E] ratings.

    Raises:
        InputError: there is no such column, or a value is no number.
    """
    if "rating" not in log.table.schema.names:
        raise InputError(
            f"{log.file}: no column rating, which the label is made of; "
            f"found {', '.join(log.table.schema.names)}"
        )
    column = log.table["rating"].combine_chunks()
    try:
        ratings_E = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        raise InputError(f"{log.file}: a rating is not a number ({error})") from error
    if (missing_E := np.isnan(ratings_E)).any():
        raise InputError(f"{log.where(int(np.argmax(missing_E)))}: the rating is missing; leave the row out")
    return ratings_E


def _column(found: tuple[pa.Table, pa.Array] | None, *names: str) -> pa.Array | None:
    """[E] the first of these columns that there is; null for what is not described."""
    if found is None:
        return None
    table, rows = found
    name = next((name for name in names if name in table.schema.names), None)
    return None if name is None else table[name].combine_chunks().take(rows)


def _numbers(column: pa.Array) -> pa.DoubleArray:
    """Null for what is no number: MovieLens 100K has a film of the year "unkonwn"."""
    return pa.array(pd.to_numeric(column.to_pandas(), errors="coerce").to_numpy(np.float64), from_pandas=True)


def _user_columns(found: tuple[pa.Table, pa.Array] | None) -> dict[str, pa.Array]:
    """[E] gender, occupation, age group and region of the users, as far as the source describes them."""
    columns = {name: _column(found, name) for name in ("gender", "occupation")}
    if (ages := _column(found, "age")) is not None:
        years_E = _numbers(ages).fill_null(np.nan).to_numpy(zero_copy_only=False)
        lower_ends = np.concatenate([[1], _AGES])
        groups_E = lower_ends[np.searchsorted(_AGES, np.nan_to_num(years_E), side="right")]
        columns["age_group"] = pa.array(groups_E, mask=np.isnan(years_E))
    if (zip_codes := _column(found, "zip_code")) is not None:
        # Three digits are a region of the United States; whole codes have one user each.
        columns["zip_prefix"] = pc.utf8_slice_codeunits(zip_codes.cast(pa.string()), 0, 3)
    return {name: column for name, column in columns.items() if column is not None}


def _genre_lists(texts: pa.Array) -> pa.ListArray:
    """Genres of a text in which blanks or bars stand between them."""
    plain = pc.replace_substring(texts.cast(pa.string()), _NO_GENRES, "")
    return pc.split_pattern_regex(pc.replace_substring(plain, "|", " "), " +")
