"""What kind of event each one was, and where it happened: lists of codes beside the list of items.

A label is a small set of names that the log says of its events, one of them of each: the *behavior* (view,
like, buy) and the *scenario* (home feed, item page, search). Data sets have their codes, and the names of the
codes in the manifest; -1 (`UNKNOWN`) stands for an event of which the label is not known.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt

from rayrec.platform.event_labels import LABELS, Label

LABEL_COLUMNS: dict[Label, str] = {"behavior": "behaviors", "scenario": "scenarios"}
"""Columns of lists beside `item_ids`, in training rows and in the file of histories."""
HISTORY_LABELS: dict[Label, str] = {label: f"history_{name}" for label, name in LABEL_COLUMNS.items()}
"""The same beside `history`, in the rows to evaluate on."""
TARGET_LABELS: dict[Label, str] = {label: f"target_{label}" for label in LABELS}
"""Of the target, beside it."""

LABEL_TYPE = pa.int16()
"""Of codes in files."""


def are_event_labels(dtype: pa.DataType) -> bool:
    """Whether a column of this type can hold the codes of events."""
    return (pt.is_list(dtype) or pt.is_large_list(dtype)) and pt.is_integer(dtype.value_type)
