"""Keys that are texts, compared by their plain spelling wherever their own partitions are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayrec.samples.prepare.distributed.keys import HERE, NUMBER, THERE
from rayrec.samples.prepare.distributed.spill import read_partitions
from rayrec.samples.prepare.key_comparison import AloneKeys, NumbersAlike, SpellingsCompared


@dataclass
class SpellingsFound:
    """What the spellings of some keys tell; of all partitions, it is merged."""

    compared: SpellingsCompared = field(default_factory=SpellingsCompared)
    numbers: NumbersAlike = field(default_factory=NumbersAlike)

    def merge(self, other: SpellingsFound) -> None:
        """Take other partitions into account."""
        self.compared.merge(other.compared)
        self.numbers.merge(other.numbers)


def compare_spellings(paths: Sequence[Path], partitions: tuple[int, int]) -> SpellingsFound:
    """Compare the keys whose plain spelling is in the partitions from the first to before the second.

    Args:
        paths: of the files with keys of all partitions.
    """
    tables = list(read_partitions(paths, *partitions))
    if not tables:
        return SpellingsFound()
    table = pa.concat_tables(tables)
    table = table.take(np.argsort(table["row"].to_numpy(), kind="stable")).combine_chunks()
    keys, rows, what = table["key"].chunk(0), table["row"].to_numpy(), table["what"].to_numpy()
    here, there, numbers = (
        AloneKeys(keys.filter(pa.array(what == one)), rows[what == one]) for one in (HERE, THERE, NUMBER)
    )
    return SpellingsFound(SpellingsCompared.of(here, there), NumbersAlike.of(numbers.keys, numbers.rows))
