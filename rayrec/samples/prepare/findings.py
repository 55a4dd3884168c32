"""What is wrong with rows of a source: counted by kind with the first example, over batches, and merged.

Rows of a kind that is allowed are left out of the data set, or kept where that is what allowing it means, and
counted. All kinds that are not allowed are refused together, in one sentence each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from rayrec.platform.errors import InputError
from rayrec.samples.base.config import Allowance

_KINDS: dict[Allowance, tuple[str, str]] = {
    "missing-ids": ("rows without an id", "leave the rows out"),
    "bad-times": ("rows without a usable time", "leave the rows out"),
    "repeated-descriptions": ("such rows", "keep the first of each"),
    "unmatched-ids": ("", "prepare it nevertheless"),
    "ids-alike": ("such ids", "keep them apart"),
    "duplicates": ("duplicate events in all", "keep the first of each"),
    "short-users": ("such users", "only train on them"),
    "cold-items": ("such items", "keep them in the catalog"),
}
"""What is counted, and what allowing it does; in the order of messages."""
_ADVICE: dict[Allowance, str] = {
    "missing-ids": "fill it in or remove the rows",
    "bad-times": "mend or remove the rows",
    "repeated-descriptions": "keep one row for each",
    "unmatched-ids": "write the ids alike in both",
    "ids-alike": "write each id in one way",
    "duplicates": "remove them",
    "short-users": "remove them",
    "cold-items": "remove them",
}


@dataclass
class Finding:
    """Rows of one kind."""

    count: int
    row: int
    """The first of them, in its table."""
    where: Callable[[int], str]
    """Where a row is."""
    describe: Callable[[int], str]
    """What is wrong with a row, as a clause."""


@dataclass(frozen=True)
class FoundRows:
    """Rows of one kind in a part of a source, with the clause about the first of them; it can be pickled."""

    kind: Allowance
    count: int
    row: int
    clause: str


@dataclass
class Findings:
    """Rows that need a decision, by kind."""

    found: dict[Allowance, Finding] = field(default_factory=dict)

    def add_rows(
        self,
        kind: Allowance,
        are_it_R: np.ndarray,
        where: Callable[[int], str],
        describe: Callable[[int], str],
    ) -> None:
        """Count the rows of a table that are of a kind."""
        if are_it_R.any():
            self.add(kind, int(are_it_R.sum()), int(np.argmax(are_it_R)), where, describe)

    def add(
        self,
        kind: Allowance,
        count: int,
        row: int,
        where: Callable[[int], str],
        describe: Callable[[int], str],
    ) -> None:
        """Count rows of a kind; among several calls, the first row is the example."""
        if not count:
            return
        before = self.found.get(kind)
        if before is None:
            self.found[kind] = Finding(count, row, where, describe)
            return
        before.count += count
        if row < before.row:
            before.row, before.where, before.describe = row, where, describe

    def of_part(self, first_row: int) -> list[FoundRows]:
        """What was found in a part of a table that begins at a row of it."""
        return [
            FoundRows(kind, one.count, first_row + one.row, one.describe(one.row))
            for kind, one in self.found.items()
        ]

    def merge(self, found: Iterable[FoundRows], where: Callable[[int], str]) -> None:
        """Take the findings of a part into account.

        Args:
            where: where a row of the whole table is.
        """
        for one in found:
            self.add(one.kind, one.count, one.row, where, lambda row, clause=one.clause: clause)  # type: ignore[misc]

    def count(self, kind: Allowance) -> int:
        """Rows of a kind."""
        return self.found[kind].count if kind in self.found else 0

    def refuse(self, allowed: Collection[Allowance]) -> None:
        """Refuse what was found and is not allowed.

        Raises:
            InputError: a sentence for each kind.
        """
        sentences = [
            f"{self._described(kind)}, or allow {kind} (--allow {kind}) to {effect}"
            for kind, (_, effect) in _KINDS.items()
            if kind in self.found and kind not in allowed
        ]
        if len(sentences) > 1:
            sentences.append("--clean allows all of it")
        if sentences:
            raise InputError(". ".join(sentences))

    def refuse_all(self) -> None:
        """Refuse a log of which these findings leave no row, whatever is allowed.

        Raises:
            InputError: a sentence for each kind.
        """
        if self.found:
            sentences = [self._described(kind) for kind in _KINDS if kind in self.found]
            raise InputError(". ".join((*sentences, "Without these rows there are none")))

    def _described(self, kind: Allowance) -> str:
        one, (counted, _) = self.found[kind], _KINDS[kind]
        number = f" ({one.count:,} {counted})" if counted else ""
        return f"{one.where(one.row)}: {one.describe(one.row)}{number}; {_ADVICE[kind]}"
