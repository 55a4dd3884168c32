"""The feed of a store: what came to it lately, in the order in which it came, for others that follow it.

An append to a store with both sides writes its events here in the same transaction, in entries of a bounded
size; the newest entries are kept. A position names the last entry that was read. It is good for as long as
that entry is kept: where it is gone, entries behind it may be, too, and the reader reads the store again.

Events may come again: an append whose success was not known is repeated, and readers keep sets.

Axes: E events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rayrec.platform.arrays import Int16Array, Int64Array
from rayrec.platform.event_labels import UNKNOWN

MOST_ENTRIES = 50_000
"""That are kept."""
ENTRY_EVENTS = 256
"""At most, of an entry. So a feed has no more than 333 MB, of a store that takes in large batches."""
START = ""
"""The position before the first entry that there ever was."""

_EVENT = np.dtype([("user", "<i8"), ("item", "<i8"), ("time", "<i8"), ("kind", "<i2")])


class FeedGoneError(LookupError):
    """The entry that a position names is not kept any more, or the store is another one."""


class FeedEvents(NamedTuple):
    """Events, in the order in which they came."""

    users_E: Int64Array
    items_E: Int64Array
    times_E: Int64Array
    """In the store's unit."""
    kinds_E: Int16Array
    """Codes of behaviors; -1 where there are none."""


def packed(
    users_E: Int64Array, items_E: Int64Array, times_E: Int64Array, kinds_E: np.ndarray | None
) -> Iterator[bytes]:
    """Entries of some events."""
    events_E = np.empty(len(users_E), _EVENT)
    events_E["user"], events_E["item"], events_E["time"] = users_E, items_E, times_E
    events_E["kind"] = UNKNOWN if kinds_E is None else kinds_E
    for start in range(0, len(events_E), ENTRY_EVENTS):
        yield events_E[start : start + ENTRY_EVENTS].tobytes()


def unpacked(entries: Sequence[bytes]) -> FeedEvents:
    events_E = np.frombuffer(b"".join(entries), _EVENT)
    users_E, items_E, times_E, kinds_E = (np.ascontiguousarray(events_E[name]) for name in _EVENT.names or ())
    return FeedEvents(users_E, items_E, times_E, kinds_E)
