"""The layout `movielens`: would the user rate this film highly?

A row per rating, in any form that `rayrec prepare` reads (ml-100k, ml-1m, RecBole's files, ratings.csv).
The label `liked` is 1 from a rating of `positive_rating` on. What is known of the user's past is of times
strictly before the rating: the list `history` (the newest films liked), the numbers `num_rated` and
`share_liked`; with `history_events: all` the newest films rated, and no `share_liked`.
Nothing is known of what others thought of the film: that would be a statistic over the whole log.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.importers import load_source
from rayrec.samples.importers.tables import RawTable
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.history_rule import HistoryRule
from rayrec.samples.impressions.layouts.histories import PastEvents, past_events_by_rule
from rayrec.samples.impressions.layouts.logs import (
    by_event,
    checked_log,
    column_of,
    described,
    source_of_events,
    split_of_events,
)
from rayrec.samples.impressions.layouts.query_columns import Columns, QueryColumns
from rayrec.samples.impressions.source import ImpressionSource

LABEL = "liked"

_AGES = np.array([18, 25, 35, 45, 50, 56])
"""The lower ends of MovieLens 1M, which has codes for ages; below the first one is "1"."""
_NO_GENRES = "(no genres listed)"


def load(source: Path, config: ImpressionsConfig) -> ImpressionSource:
    """Open a source of this layout.

    Raises:
        InputError: no ratings, or something of them is not as it should be.
    """
    raw, _ = load_source(source, PrepareConfig())
    log = raw.interactions
    users, items, times_E = checked_log(log, config)
    liked_E = _ratings(log) >= config.positive_rating
    user_codes_E = pd.factorize(users.to_pandas(), sort=True)[0]
    item_codes_E = pd.factorize(items.to_pandas(), sort=True)[0]
    rule = HistoryRule(events=config.history_events, length=config.history_length)
    histories = past_events_by_rule(rule, user_codes_E, times_E, items, liked_E)
    of_pasts = columns_of_pasts(histories)
    if rule.events != "liked":
        del of_pasts["share_liked"]  # of all films kept, which is always 1
    of_users = by_event(columns_of_users, described(raw.users, "user_id", users))
    of_items = by_event(columns_of_items, described(raw.items, "item_id", items))
    plain = {"user": users, "item": items, **of_pasts, **of_users, **of_items}

    def take(events_R: Int64Array) -> dict[str, pa.Array]:
        rows = pa.array(events_R)
        return {
            LABEL: pa.array(liked_E[events_R].astype(np.int8)),
            "history": histories.of(events_R),
            **{name: column.take(rows) for name, column in plain.items()},
        }

    schema = ImpressionSchema(
        labels=(LABEL,),
        numbers=(*of_pasts, *(["release_year"] if "release_year" in of_items else [])),
        ids={name: name for name in ("user", "item", *of_users)},
        lists={**({"genres": "genre"} if "genres" in of_items else {}), "history": "item"},
        group="user",
    )
    events_R = np.lexsort((item_codes_E, user_codes_E))
    split = split_of_events(users, items, times_E, events_R, config)
    return source_of_events(raw.name, schema, log, times_E, events_R, split, rule, take)


def query_columns(rule: HistoryRule) -> QueryColumns:
    """Columns that can be made for a request: all but those that depend on which films a user liked."""
    not_told = (
        "is made of the films that a user liked, which histories of a recommender do not say; prepare the "
        "impressions with history_events (--history-events) all"
    )
    told = rule.events != "liked"
    return QueryColumns(
        # Without the columns that are not told, what was liked no longer matters.
        rule if told else rule.model_copy(update={"events": "all"}),
        user=("user",),
        item=("item",),
        history=("history",) if told else (),
        of_users=columns_of_users,
        of_items=columns_of_items,
        of_pasts=lambda histories: {"num_rated": columns_of_pasts(histories)["num_rated"]},
        unknown={} if told else dict.fromkeys(("history", "share_liked"), not_told),
    )


def columns_of_pasts(histories: PastEvents) -> Columns:
    """[E] of the user's past; the rule of the histories is taken to keep the films liked."""
    num_rated_E, num_liked_E = histories.num_events_E, histories.num_kept_E
    return {
        "num_rated": pa.array(num_rated_E),
        "share_liked": pa.array(num_liked_E / np.maximum(num_rated_E, 1), mask=num_rated_E == 0),
    }


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


def _numbers(column: pa.Array) -> pa.DoubleArray:
    """Null for what is no number: MovieLens 100K has a film of the year "unkonwn"."""
    return pa.array(pd.to_numeric(column.to_pandas(), errors="coerce").to_numpy(np.float64), from_pandas=True)


def columns_of_users(users: pa.Table) -> Columns:
    """Gender, occupation, age group and region, as far as the source describes them."""
    columns = {name: column_of(users, name) for name in ("gender", "occupation")}
    if (ages := column_of(users, "age")) is not None:
        years_U = _numbers(ages).fill_null(np.nan).to_numpy(zero_copy_only=False)
        lower_ends = np.concatenate([[1], _AGES])
        groups_U = lower_ends[np.searchsorted(_AGES, np.nan_to_num(years_U), side="right")]
        columns["age_group"] = pa.array(groups_U, mask=np.isnan(years_U))
    if (zip_codes := column_of(users, "zip_code")) is not None:
        # Three digits are a region of the United States; whole codes have one user each.
        columns["zip_prefix"] = pc.utf8_slice_codeunits(zip_codes.cast(pa.string()), 0, 3)
    return {name: column for name, column in columns.items() if column is not None}


def columns_of_items(films: pa.Table) -> Columns:
    """Year and genres, as far as the source describes them."""
    columns: Columns = {}
    if (years := column_of(films, "release_year", "year")) is not None:
        columns["release_year"] = _numbers(years)
    if (genres := column_of(films, "genres", "class")) is not None:
        columns["genres"] = _genre_lists(genres)
    return columns


def _genre_lists(texts: pa.Array) -> pa.ListArray:
    """Genres of a text in which blanks or bars stand between them."""
    plain = pc.replace_substring(texts.cast(pa.string()), _NO_GENRES, "")
    return pc.split_pattern_regex(pc.replace_substring(plain, "|", " "), " +")
