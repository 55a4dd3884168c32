"""What refuses a step: a contribution when it comes, all of them together, and memory.

All checks come before the first row changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from rayrec.embeddings.shard.contributions import Contribution, DirtyRows, Part, SparseUpdate, UpdateTag
from rayrec.embeddings.table.table import EmbeddingTable
from rayrec.platform.memory import human_size

Tables = Mapping[str, EmbeddingTable]


class StepChecks:
    """Raises ValueError with the shard and who has sent what it refuses.

    Args:
        shard: its number.
        num_trainers: that send a contribution to every step.
        called_by: what they are called.
    """

    def __init__(self, shard: int, num_trainers: int, called_by: str) -> None:
        self._shard = shard
        self._num_trainers = num_trainers
        self._called_by = called_by

    def order(self, tag: UpdateTag, incarnation: int, committed_step: int, steps_ahead: int) -> None:
        """Check that a contribution is of this incarnation, of a known trainer, and not too far ahead."""
        if tag.incarnation != incarnation:
            raise ValueError(
                f"shard {self._shard} is in incarnation {incarnation} and refuses the update of "
                f"step {tag.step} from {self._called_by} {tag.rank} of incarnation {tag.incarnation}"
            )
        if not 0 <= tag.rank < self._num_trainers:
            raise ValueError(
                f"shard {self._shard} expects {self._called_by}s 0 to {self._num_trainers - 1}, got an "
                f"update from {self._called_by} {tag.rank}"
            )
        if tag.step > committed_step + 1 + steps_ahead:
            raise ValueError(
                f"shard {self._shard}: the update of step {tag.step} from {self._called_by} {tag.rank} "
                f"leaves a gap after step {committed_step}, the last committed one; an update was lost"
            )

    def contribution(self, tables: Tables, tag: UpdateTag, contribution: Contribution) -> None:
        """Check shapes, types and numbers of one trainer's part."""
        with self._refusing(f"step {tag.step} because of {self._called_by} {tag.rank}"):
            for name, (ids_M, grads_MD) in contribution.update.items():
                # Not that the ids are distinct, which would cost a tenth of an apply: that is asserted there.
                table_named(tables, name).check_update(ids_M, grads_MD)
            for name, (ids_K, records_KW) in contribution.dirty.items():
                table_named(tables, name).check_records(ids_K, records_KW)
            if tag.part is Part.HEAD:
                for name in contribution.update:
                    config = tables[name].config
                    if config.disk is not None or config.evicts_at(tag.step):
                        raise ValueError(f"table {name!r} takes no heads of steps: it evicts, or has a disk")

    def dirty(self, tables: Tables, step: int, dirty: Sequence[DirtyRows], update: SparseUpdate) -> None:
        """What can be said of checked records only when everything that the step changes is there."""
        for rank, records in enumerate(dirty):
            with self._refusing(f"step {step} because of {self._called_by} {rank}"):
                for name, (ids_K, _) in records.items():
                    tables[name].check_have_rows(ids_K)
        with self._refusing(f"step {step}"):
            for name, table in tables.items():
                parts = [records[name][0] for records in dirty if name in records]
                if parts:
                    parts += [update[name][0]] if name in update else []
                    table.check_distinct(np.concatenate(parts))

    def written_back(self, tables: Tables, after_step: int, dirty: DirtyRows) -> None:
        """Check records that a trainer brings back between two steps."""
        with self._refusing(f"records that a trainer brings back after step {after_step}"):
            for name, (ids_K, records_KW) in dirty.items():
                table = table_named(tables, name)
                table.check_records(ids_K, records_KW)
                table.check_distinct(ids_K)
                table.check_have_rows(ids_K)

    def sums(self, tables: Tables, update: SparseUpdate) -> None:
        """Check gradients that were added up."""
        # One trainer's contribution was checked when it came; finite numbers can have an infinite sum.
        if self._num_trainers > 1:
            for name, (ids_M, grads_MD) in update.items():
                tables[name].check_update(ids_M, grads_MD)

    def beyond_memory(
        self, step: int, tables: Tables, num_more: Mapping[str, int], limit: int
    ) -> MemoryError:
        """For a step whose new rows the limit has no room for."""
        fullest = max(num_more, key=lambda name: tables[name].bytes_after(num_more[name]))
        table = tables[fullest]
        return MemoryError(
            f"shard {self._shard} refuses step {step}: its tables would need "
            f"{human_size(bytes_after(tables, num_more))} and may take {human_size(limit)}; table "
            f"{fullest!r} has {table.num_rows:,} rows ({human_size(table.num_bytes)}) and "
            f"{num_more[fullest]:,} more were to come; no row has changed. Raise sparse.server_memory, use "
            "more servers, or let rows be evicted"
        )

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ValueError(f"shard {self._shard} refuses {what}: {error}") from error


def table_named(tables: Tables, name: str) -> EmbeddingTable:
    """Raises ValueError where there is none."""
    if name not in tables:
        raise ValueError(f"there is no embedding table {name!r}; tables: {', '.join(tables)}")
    return tables[name]


def bytes_after(tables: Tables, num_more: Mapping[str, int]) -> int:
    """What the tables hold when so many more ids have rows, and what an eviction may take beside them."""
    held = sum(tables[name].bytes_after(more) for name, more in num_more.items())
    return held + max((tables[name].evicting_bytes(more) for name, more in num_more.items()), default=0)
