"""Rows of a table with all that belongs to them, as they leave it and come back.

Axes: M rows, D numbers of a row, S numbers of its optimizer state, X ids whose rows were given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rayrec.embeddings.base.layout import NEVER
from rayrec.embeddings.base.routing import NUM_BUCKETS
from rayrec.embeddings.table.admission import Sighted
from rayrec.embeddings.table.event_clock import ClockState
from rayrec.embeddings.table.eviction import Evicted
from rayrec.platform.arrays import Float32Array, Int32Array, Int64Array


class Forgotten(NamedTuple):
    """What of some buckets' ids is remembered no longer than until a step: `NEVER` for none."""

    sighted_step: int = NEVER
    """Ids that were named last in this step or before wait no longer."""
    evicted_step: int = NEVER
    """Tombstones of this step and of those before are gone."""
    buckets: range = range(NUM_BUCKETS)


_NOTHING_FORGOTTEN, _NO_CLOCK = Forgotten(), ClockState()


@dataclass(frozen=True)
class TableRows:
    """Rows of a table with everything needed to go on training them."""

    ids_M: Int64Array
    weights_MD: Float32Array
    """Float32, also where the table keeps 16 bits of them."""
    state_MS: Float32Array
    steps_M: Int32Array
    """Last step that changed the row."""
    counts_M: Int32Array
    """Steps that changed the row."""
    sighted: Sighted = field(default_factory=Sighted.nothing)
    """Ids that wait for admission."""
    evicted: Evicted = field(default_factory=Evicted.nothing)
    """Ids whose rows were given up."""
    since: int | None = None
    """With a step, these are not all rows, but those that a later step has changed; and of the ids that wait
    or were evicted, those of later steps. Who has a row waits no longer."""
    removed_X: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    """Ids whose rows steps after `since` gave up, to be done before rows are put in."""
    unread_X: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    """With `since`: ids that have got or lost a row, of which no more is said here, as their rows are known.
    They wait no longer."""
    forgotten: Forgotten = _NOTHING_FORGOTTEN
    """With `since`: what is over by the step of these rows; in one part for all of its buckets."""
    clock: ClockState = _NO_CLOCK
    """Of a table whose rows live for some hours; in the first part."""


def joined(parts: Sequence[TableRows]) -> TableRows:
    """Parts that `export_parts` gave, as one."""
    if len(parts) == 1:
        return parts[0]
    return TableRows(
        ids_M=np.concatenate([part.ids_M for part in parts]),
        weights_MD=np.concatenate([part.weights_MD for part in parts]),
        state_MS=np.concatenate([part.state_MS for part in parts]),
        steps_M=np.concatenate([part.steps_M for part in parts]),
        counts_M=np.concatenate([part.counts_M for part in parts]),
        sighted=parts[0].sighted,
        evicted=parts[0].evicted,
        clock=parts[0].clock,
    )
