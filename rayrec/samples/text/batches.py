"""A batch of rows of tokens, ready for lookup and dense compute.

Axes: B rows, N tokens of all rows, P places that stand for rows of tables, 1 an extra element.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.samples.base.batches import TableLookup


@dataclass(frozen=True)
class TextBatch:
    """One trainer's share of a global batch, or rows to be judged or continued."""

    step: int
    row_keys_B: Int64Array
    tokens_N: Int64Array
    is_target_N: BoolArray
    """Whether a token is to be predicted from those before it; never a row's first."""
    offsets_B1: Int64Array
    num_targets: int
    """In the *global* batch: the divisor of the summed loss."""
    filled_P: dict[str, Int64Array] = field(default_factory=dict)
    """By table, which tokens stand for a row of it, in ascending order."""
    lookups: dict[str, TableLookup] = field(default_factory=dict)
    """By table; element p of `inverse` is the row of place p."""
    given: tuple[str, ...] = ()
    """Of rows to be continued, the text of each that is asked about: what a form of answers may go by."""
    counts: dict[str, int] = field(default_factory=dict)
    """Dropped work, by reason."""

    @property
    def num_rows(self) -> int:
        return len(self.row_keys_B)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_N)

    @property
    def newest_event(self) -> None:
        return None

    @property
    def targets_B(self) -> Int64Array:
        """Targets of each row."""
        before = np.concatenate([[0], np.cumsum(self.is_target_N)])
        found: Int64Array = np.diff(before[self.offsets_B1])
        return found
