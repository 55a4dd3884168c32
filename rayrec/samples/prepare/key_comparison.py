"""Whether the ids of a log and of a table that describes users or items are the same ones.

Keys are compared as they are, and those that one side alone has in a plain spelling, too: `00012`, `12.0` and
`12` may be meant to be one id. Comparisons of parts merge if equal keys are in the same part; those of
spellings, if keys of one plain spelling are.

Axes: H distinct keys of the log in a part, T of the table, each with the row in which it is first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.platform.arrays import Int64Array
from rayrec.samples.prepare.findings import Findings
from rayrec.samples.prepare.ids import plain_spelling

_NUMBER = r"^[0-9]+(\.0+)?$"

FirstKey = tuple[int, str]
"""(row, key)."""


@dataclass(frozen=True)
class AloneKeys:
    """Keys that one side alone has, in the order of their rows."""

    keys: pa.Array
    rows: Int64Array

    @property
    def first(self) -> FirstKey | None:
        return (int(self.rows[0]), self.keys[0].as_py()) if len(self.keys) else None


@dataclass
class KeysCompared:
    """How many keys both sides have, and the first that one of them has alone."""

    here: int = 0
    """Of the log."""
    alone_here: int = 0
    there: int = 0
    """Of the table."""
    alone_there: int = 0
    first_here: FirstKey | None = None
    first_there: FirstKey | None = None

    @classmethod
    def of(
        cls, here_H: pa.Array, here_rows_H: Int64Array, there_T: pa.Array, there_rows_T: Int64Array
    ) -> tuple[KeysCompared, AloneKeys, AloneKeys]:
        """Compare the keys of a part; also returns those that each side alone has."""
        one = _alone(here_H, here_rows_H, there_T)
        other = _alone(there_T, there_rows_T, here_H)
        found = cls(len(here_H), len(one.keys), len(there_T), len(other.keys), one.first, other.first)
        return found, one, other

    def merge(self, other: KeysCompared) -> None:
        """Take another part into account."""
        self.here += other.here
        self.alone_here += other.alone_here
        self.there += other.there
        self.alone_there += other.alone_there
        self.first_here = _first(self.first_here, other.first_here)
        self.first_there = _first(self.first_there, other.first_there)

    def note(self, spellings: SpellingsCompared, entity: str, table: str, log: str) -> str | None:
        """How many of the log's ids the table has, where each side has some alone.

        Args:
            table, log: the files.
        """
        if self.first_here is None or self.first_there is None:
            return None
        one, other = self._examples(spellings)
        return (
            f"has {self.here - self.alone_here:,} of the log's {self.here:,} {entity} ids: {one!r} is in "
            f"{Path(table).name} alone, {other!r} in {Path(log).name} alone"
        )

    def find(
        self, findings: Findings, spellings: SpellingsCompared, entity: str, table: str, log: str
    ) -> None:
        """Find ids that are written in two ways: no key of the table is in the log, or some would meet in a
        plain spelling."""
        if self.first_here is None or self.first_there is None:
            return
        if spellings.alike:
            why = (
                f"{spellings.alike:,} of its {entity} ids differ from the log's only in how they are written"
            )
        if self.alone_there == self.there:
            why = f"none of its {self.there:,} {entity} ids is in the log"
        elif not spellings.alike:
            return
        one, other = self._examples(spellings)
        text = f"{why}: {one!r} there, {other!r} in {log}"
        findings.add("unmatched-ids", max(spellings.alike, 1), 0, lambda row: table, lambda row: text)

    def _examples(self, spellings: SpellingsCompared) -> tuple[str, str]:
        assert self.first_here is not None, "asked before"
        assert self.first_there is not None, "asked before"
        if spellings.pair is not None:
            return spellings.pair[1], spellings.pair[2]
        return self.first_there[1], self.first_here[1]


@dataclass
class SpellingsCompared:
    """Which keys that one side alone has would meet in a plain spelling."""

    alike: int = 0
    """Plain spellings that both sides have."""
    pair: tuple[int, str, str] | None = None
    """(row in the table, its key, the log's key), of the first key of the table that would meet one."""

    @classmethod
    def of(cls, here: AloneKeys, there: AloneKeys) -> SpellingsCompared:
        """Compare the spellings of a part."""
        plain_here = plain_spelling(here.keys)
        at_there = pc.index_in(plain_spelling(there.keys), value_set=plain_here)
        num_alike = len(pc.unique(at_there.drop_null()))
        if not num_alike:
            return cls()
        first = int(np.argmax(at_there.is_valid().to_numpy(zero_copy_only=False)))
        other = here.keys[at_there[first].as_py()].as_py()
        return cls(num_alike, (int(there.rows[first]), there.keys[first].as_py(), other))

    def merge(self, other: SpellingsCompared) -> None:
        """Take another part into account."""
        self.alike += other.alike
        pairs = [pair for pair in (self.pair, other.pair) if pair is not None]
        self.pair = min(pairs, default=None)


@dataclass
class NumbersAlike:
    """Keys of one column that are one number, and two ids: `5` and `00005`, `12` and `12.0`."""

    count: int = 0
    """Keys that are written in other ways than one before them."""
    pair: tuple[int, str, str] | None = None
    """(row of the second key, the first, the second)."""

    @classmethod
    def of(cls, keys: pa.Array, rows: Int64Array) -> NumbersAlike:
        """Compare the distinct keys of a part.

        Args:
            rows: in which each key is first, ascending.
        """
        if pa.types.is_integer(keys.type):
            return cls()
        are_numbers = are_written_as_numbers(keys)
        keys, rows = keys.filter(pa.array(are_numbers)), rows[are_numbers]
        plain = pd.Series(plain_spelling(keys).to_pandas())
        is_again = plain.duplicated().to_numpy()
        if not is_again.any():
            return cls()
        again = int(np.argmax(is_again))
        first = int(np.argmax((plain == plain[again]).to_numpy()))
        return cls(int(is_again.sum()), (int(rows[again]), keys[first].as_py(), keys[again].as_py()))

    def merge(self, other: NumbersAlike) -> None:
        """Take another part into account."""
        self.count += other.count
        pairs = [pair for pair in (self.pair, other.pair) if pair is not None]
        self.pair = min(pairs, default=None)

    def find(self, findings: Findings, file: str, name: str) -> None:
        """Add them to the findings.

        Args:
            file: the table.
            name: of the column.
        """
        if self.pair is None:
            return
        text = f"{name} has {self.pair[1]!r} and {self.pair[2]!r}, which are two ids"
        findings.add("ids-alike", self.count, 0, lambda row: file, lambda row: text)


def are_written_as_numbers(keys: pa.Array) -> np.ndarray:
    """[K] whether a key is a number in some spelling."""
    found: np.ndarray = pc.match_substring_regex(keys, _NUMBER).to_numpy(zero_copy_only=False)
    return found


def _alone(keys: pa.Array, rows: Int64Array, others: pa.Array) -> AloneKeys:
    is_alone = pc.invert(pc.is_in(keys, value_set=others)).to_numpy(zero_copy_only=False)
    return AloneKeys(keys.filter(pa.array(is_alone)), rows[is_alone])


def _first(one: FirstKey | None, other: FirstKey | None) -> FirstKey | None:
    return min((key for key in (one, other) if key is not None), default=None)
