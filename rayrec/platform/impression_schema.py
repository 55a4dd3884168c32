"""What the columns of impressions mean: names that data sets and ranking models have in common.

An impression is something that was shown to somebody, and what came of it: clicked or not, bought or not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

FEATURE_TABLE = "feature"
"""The embedding table that has the rows of all ids: no two spaces share an id."""


@dataclass(frozen=True)
class ImpressionSchema:
    """Which columns a ranking model reads, and as what."""

    labels: tuple[str, ...]
    """Columns of 0, 1 or null (not known), one per task: what is to be predicted."""
    numbers: tuple[str, ...] = ()
    """Columns of numbers."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """Columns with one id each, to the name of their space: columns of one space share rows."""
    lists: Mapping[str, str] = field(default_factory=dict)
    """Columns of lists of ids, oldest first where there is an order, to the name of their space."""
    group: str | None = None
    """The column by which rows are grouped for GAUC, usually the user; one of `ids`, or one of its own."""

    def without(self, features: Collection[str]) -> ImpressionSchema:
        """The same columns but these."""
        return replace(
            self,
            numbers=tuple(name for name in self.numbers if name not in features),
            ids={name: space for name, space in self.ids.items() if name not in features},
            lists={name: space for name, space in self.lists.items() if name not in features},
        )

    @property
    def features(self) -> tuple[str, ...]:
        """All that a model reads, in the order in which batches have it."""
        return (*self.numbers, *self.ids, *self.lists)
