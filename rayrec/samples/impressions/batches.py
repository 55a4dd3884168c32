"""A batch of impressions, ready for lookup and dense compute.

Axes: B impressions, F columns of numbers, C columns of one id each, N elements of a column of lists, T tasks,
1 an extra element.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.samples.base.batches import TableLookup


@dataclass(frozen=True)
class ImpressionBatch:
    """One trainer's share of a global batch, or rows to be scored."""

    step: int
    row_keys_B: Int64Array
    num_targets: int
    """Impressions in the *global* batch: the divisor of the summed loss."""
    numbers_BF: Float32Array
    labels_BT: Float32Array
    """0, 1, or NaN where it is not known; [B, 0] of rows to be scored."""
    lookups: dict[str, TableLookup]
    """One table, `FEATURE_TABLE`. Its inverse is [B * C + N + N' + ...]: the ids of all columns with one
    each, row by row, then the elements of each column of lists."""
    num_id_columns: int
    list_offsets_B1: dict[str, Int64Array] = field(default_factory=dict)
    """By column of lists, in the order of the inverse: row b has elements offsets[b] to offsets[b + 1]."""
    counts: dict[str, int] = field(default_factory=dict)
    """Dropped work, by reason."""

    @property
    def num_rows(self) -> int:
        return len(self.row_keys_B)

    @property
    def num_tokens(self) -> int:
        return self.num_rows

    @property
    def newest_event(self) -> None:
        return None
