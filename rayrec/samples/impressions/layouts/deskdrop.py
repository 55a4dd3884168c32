"""The layout `deskdrop`: articles that people opened, and what they did with them.

A row is the first interaction of a person with an article: that is when it was seen. The labels say whether
the person liked, bookmarked or followed it or wrote a comment, at that time or later, but within the period
of the row's split: a like of the test period is no label of training, since it was unknown when training
ended. So labels are a little rarer towards the end of each period. `history` has the articles opened strictly
before, the number `num_opened` says how many these are.
Source: https://www.kaggle.com/datasets/gspmoreira/articles-sharing-reading-from-cit-deskdrop
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
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.history_rule import HistoryRule
from rayrec.samples.impressions.layouts.histories import PastEvents, is_first_of_item, past_events_by_rule
from rayrec.samples.impressions.layouts.logs import (
    by_event,
    checked_log,
    column_of,
    described,
    source_of_events,
    split_of_events,
)
from rayrec.samples.impressions.layouts.query_columns import Columns, QueryColumns
from rayrec.samples.impressions.source import SPLITS, ImpressionSource

LABELS = {"LIKE": "like", "BOOKMARK": "bookmark", "FOLLOW": "follow", "COMMENT CREATED": "comment"}
"""Kind of event -> label."""

_OF_EVENTS = {"userCountry": "country", "userRegion": "region", "userAgent": "device"}
_OF_ARTICLES = {"authorPersonId": "author", "lang": "language", "contentType": "content_type"}
"""Columns of the source that are ids, where it has them."""
_NEVER = len(SPLITS)


def load(source: Path, config: ImpressionsConfig) -> ImpressionSource:
    """Open a source of this layout.

    Raises:
        InputError: no events, or something of them is not as it should be.
    """
    raw, _ = load_source(source, PrepareConfig())
    log = raw.interactions
    users, items, times_E = checked_log(log, config)
    if "behavior" not in log.table.schema.names:
        raise InputError(
            f"{log.file}: no column eventType, which labels are made of; "
            f"found {', '.join(log.table.schema.names)}"
        )
    kinds_E = log.table["behavior"].cast(pa.string()).to_pandas().to_numpy()
    user_codes_E = pd.factorize(users.to_pandas(), sort=True)[0]
    item_codes_E, keys = pd.factorize(items.to_pandas(), sort=True)
    pairs_E = user_codes_E.astype(np.int64) * len(keys) + item_codes_E
    is_opened_E = is_first_of_item(user_codes_E, times_E, items)
    events_V = np.flatnonzero(is_opened_E)[np.argsort(pairs_E[is_opened_E])]
    split = split_of_events(users, items, times_E, events_V, config)
    labels = _labels(pairs_E, kinds_E, events_V, split.codes_E)
    rule = HistoryRule(events="first", length=config.history_length)
    histories = past_events_by_rule(rule, user_codes_E, times_E, items)
    of_pasts = columns_of_pasts(histories)
    ids = columns_of_times(pa.array(times_E).cast(pa.timestamp("us")))
    ids |= _chosen(log.table, _OF_EVENTS)
    ids |= by_event(columns_of_items, described(raw.items, "item_id", items))

    def take(events_R: Int64Array) -> dict[str, pa.Array]:
        rows = pa.array(events_R)
        return {
            **{label: pa.array(values_E[events_R]) for label, values_E in labels.items()},
            **{name: column.take(rows) for name, column in of_pasts.items()},
            "user": users.take(rows),
            "item": items.take(rows),
            **{name: column.take(rows) for name, column in ids.items()},
            "history": histories.of(events_R),
        }

    schema = ImpressionSchema(
        labels=tuple(LABELS.values()),
        numbers=tuple(of_pasts),
        ids={name: name for name in ("user", "item", *ids)},
        lists={"history": "item"},
        group="user",
    )
    return source_of_events(raw.name, schema, log, times_E, events_V, split, rule, take)


def query_columns(rule: HistoryRule) -> QueryColumns:
    """What can be made of those who ask for articles: all, but for what a log says of each event."""
    return QueryColumns(
        rule,
        user=("user",),
        item=("item",),
        history=("history",),
        of_items=columns_of_items,
        of_pasts=columns_of_pasts,
        of_times=columns_of_times,
        unknown=dict.fromkeys(
            _OF_EVENTS.values(),
            "is of the moment in which an article was opened, which those who ask do not say; prepare the "
            "impressions without it (leave_out, --leave-out)",
        ),
    )


def columns_of_pasts(histories: PastEvents) -> Columns:
    """[E] of the user's past."""
    return {"num_opened": pa.array(histories.num_kept_E)}


def columns_of_times(times: pa.TimestampArray) -> Columns:
    """When it was, in UTC; of days of the week, 0 is Monday."""
    return {"hour_of_day": pc.hour(times), "weekday": pc.day_of_week(times)}


def columns_of_items(articles: pa.Table) -> Columns:
    """Author, language and type, as far as the source describes them."""
    return _chosen(articles, _OF_ARTICLES)


def _chosen(table: pa.Table, names: dict[str, str]) -> Columns:
    columns = {ours: column_of(table, theirs) for theirs, ours in names.items()}
    return {name: column for name, column in columns.items() if column is not None}


def _labels(
    pairs_E: Int64Array, kinds_E: np.ndarray, events_V: Int64Array, split_codes_E: Int64Array
) -> dict[str, np.ndarray]:
    """[E] labels of the events that are impressions; what stands at others means nothing."""
    pairs_V = pd.Index(pairs_E[events_V])  # in ascending order, each once
    labels = {}
    for kind, label in LABELS.items():
        of_kind_K = np.flatnonzero(kinds_E == kind)
        # None is before the impression, which is the first event of the pair.
        earliest_V = np.full(len(events_V), _NEVER)
        np.minimum.at(earliest_V, pairs_V.get_indexer(pd.Index(pairs_E[of_kind_K])), split_codes_E[of_kind_K])
        values_E = np.zeros(len(pairs_E), dtype=np.int8)
        values_E[events_V] = earliest_V <= split_codes_E[events_V]
        labels[label] = values_E
    return labels
