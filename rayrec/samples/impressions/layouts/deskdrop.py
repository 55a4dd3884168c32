"""The layout `deskdrop`: articles that people opened, and what they did with them.

A row is the first interaction of a person with an article: that is when it was seen. The labels say whether
the person liked, bookmarked or followed it or wrote a comment, at that time or later, but within the period
of the row's split: a like of the test period is no label of training, since nobody knew of it when training
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

from rayrec.platform.errors import InputError
from rayrec.platform.impression_schema import ImpressionSchema
from rayrec.samples.batches import Int64Array
from rayrec.samples.config import PrepareConfig
from rayrec.samples.importers import load_source
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.layouts.histories import histories_before
from rayrec.samples.impressions.layouts.logs import boundaries_of, checked_log, described, source_of_events
from rayrec.samples.impressions.source import ImpressionSource

LABELS = {"LIKE": "like", "BOOKMARK": "bookmark", "FOLLOW": "follow", "COMMENT CREATED": "comment"}
"""Kind of event -> label."""

_OF_EVENTS = {"userCountry": "country", "userRegion": "region", "userAgent": "device"}
_OF_ARTICLES = {"authorPersonId": "author", "lang": "language", "contentType": "content_type"}
"""Columns of the source that are ids, where it has them."""
_NEVER = np.iinfo(np.int64).max


def load(source: Path, config: ImpressionsConfig) -> ImpressionSource:
    """
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
    # Of events of one time the first of the source.
    by_pair_E = np.lexsort((times_E, pairs_E))
    is_first = np.concatenate([[True], np.diff(pairs_E[by_pair_E]) != 0])
    events_V = by_pair_E[is_first]
    boundaries = boundaries_of(times_E[events_V], config)
    labels = _labels(pairs_E, times_E, kinds_E, events_V, boundaries)
    is_opened_E = np.zeros(len(times_E), dtype=bool)
    is_opened_E[events_V] = True
    histories = histories_before(user_codes_E, times_E, items, is_opened_E, config.history_length)
    moments = pa.array(times_E).cast(pa.timestamp("us"))
    ids = {"hour_of_day": pc.hour(moments), "weekday": pc.day_of_week(moments)}
    ids |= {
        name: log.table[column].combine_chunks()
        for column, name in _OF_EVENTS.items()
        if column in log.table.schema.names
    }
    if (articles := described(raw.items, "item_id", items)) is not None:
        table, rows = articles
        ids |= {
            name: table[column].combine_chunks().take(rows)
            for column, name in _OF_ARTICLES.items()
            if column in table.schema.names
        }

    def take(events_R: Int64Array) -> dict[str, pa.Array]:
        rows = pa.array(events_R)
        return {
            **{label: pa.array(values_E[events_R]) for label, values_E in labels.items()},
            "num_opened": pa.array(histories.num_kept_E[events_R]),
            "user": users.take(rows),
            "item": items.take(rows),
            **{name: column.take(rows) for name, column in ids.items()},
            "history": histories.of(events_R),
        }

    schema = ImpressionSchema(
        labels=tuple(LABELS.values()),
        numbers=("num_opened",),
        ids={name: name for name in ("user", "item", *ids)},
        lists={"history": "item"},
        group="user",
    )
    return source_of_events(raw.name, schema, log, times_E, events_V, boundaries, take)


def _labels(
    pairs_E: Int64Array,
    times_E: Int64Array,
    kinds_E: np.ndarray,
    events_V: Int64Array,
    boundaries: tuple[float, float],
) -> dict[str, np.ndarray]:
    """[E] labels of the events that are impressions; what stands at others means nothing."""
    ends = np.array([*(round(start * 1_000_000) for start in boundaries), _NEVER])
    ends_V = ends[np.searchsorted(ends, times_E[events_V], side="right").clip(max=2)]
    pairs_V = pd.Index(pairs_E[events_V])  # in ascending order, each once
    labels = {}
    for kind, label in LABELS.items():
        of_kind_K = np.flatnonzero(kinds_E == kind)
        # None is before the impression, which is the first event of the pair.
        earliest_V = np.full(len(events_V), _NEVER)
        np.minimum.at(earliest_V, pairs_V.get_indexer(pd.Index(pairs_E[of_kind_K])), times_E[of_kind_K])
        values_E = np.zeros(len(times_E), dtype=np.int8)
        values_E[events_V] = earliest_V < ends_V
        labels[label] = values_E
    return labels
