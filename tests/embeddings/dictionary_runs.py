"""Runs of every way through the sparse engine, and what a dictionary holds after them."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from hypothesis import strategies as st

from rayrec.embeddings.config import EvictionConfig, IdAdmissionConfig, TableConfig
from rayrec.embeddings.lookup.bounded_stale import BoundedStale
from rayrec.embeddings.lookup.cache.cached_lookups import CachedLookups
from rayrec.embeddings.lookup.cache.device_cache import device_caches
from rayrec.embeddings.lookup.cache.row_cache import MakeCache, RowCache
from rayrec.embeddings.lookup.exact_prefetch import ExactPrefetch
from rayrec.embeddings.lookup.lookups import SyncLookups
from rayrec.embeddings.lookup.shared_row_write_back import SharedRowWriteBack
from rayrec.embeddings.lookup.threaded_lookups import ThreadedLookups
from tests.embeddings.admission_runs import IDS, OPTIMIZERS
from tests.embeddings.dictionary_oracle import DictionaryTable
from tests.embeddings.sparse_runs import (
    AdversarialTransport,
    Ids,
    Seen,
    all_rows,
    gradient_of,
    ids,
    make_shards,
    run,
    without_exchange,
)

MANY = IDS[:25].tolist()
"""They share three virtual buckets, so that capacity evicts; and are owned by few trainers and shards."""


SPREAD = [*range(12), -1, -(2**63), 2**63 - 1]


TABLES = st.builds(
    TableConfig,
    name=st.just("?"),
    dim=st.integers(1, 3),
    seed=st.integers(0, 3),
    weight_dtype=st.sampled_from(["float32", "float32", "bfloat16", "float16"]),
    optimizer=st.sampled_from(OPTIMIZERS),
    admission=st.builds(
        IdAdmissionConfig,
        min_sightings=st.sampled_from([1, 1, 2, 3]),
        forget_after_steps=st.none() | st.integers(1, 3),
        every_steps=st.integers(1, 3),
    ),
    eviction=st.none()
    | st.builds(
        EvictionConfig,
        max_age_steps=st.integers(1, 4),
        max_rows_per_bucket=st.none() | st.integers(1, 3),
        keep=st.sampled_from(["recent", "frequent"]),
        every_steps=st.integers(1, 4),
    ),
)


@dataclass
class Run:
    tables: tuple[TableConfig, ...]
    batches_by_source: list[list[dict[str, Ids]]]

    @property
    def num_steps(self) -> int:
        return len(self.batches_by_source[0])


@st.composite
def runs(draw, most_trainers: int = 3) -> Run:
    tables = tuple(
        draw(TABLES).model_copy(update={"name": f"table{n}"}) for n in range(draw(st.integers(1, 2)))
    )
    pool = draw(st.sampled_from([MANY, SPREAD]))
    some = st.lists(st.sampled_from(pool), max_size=8, unique=True)
    num_trainers = draw(st.integers(1, most_trainers))
    batches_by_source: list[list[dict[str, Ids]]] = [[] for _ in range(num_trainers)]
    for _ in range(draw(st.integers(1, 9))):
        read = {table.name: [draw(some) for _ in range(num_trainers)] for table in tables}
        for source in range(num_trainers):
            batches_by_source[source].append(
                {
                    name: Ids(ids(*by_source[source]), ids(*sorted(set().union(*by_source))))
                    for name, by_source in read.items()
                }
            )
    return Run(tables, batches_by_source)


def dictionaries(run_: Run) -> dict[str, DictionaryTable]:
    return {table.name: DictionaryTable(table) for table in run_.tables}


def commit(
    tables: dict[str, DictionaryTable], run_: Run, step: int, grads_by_source: list[dict], group_size: int = 1
) -> None:
    """Add up gradients in the order of the sources, group by group, then change row after row."""
    for name, table in tables.items():
        by_source = [
            dict(zip(run_.batches_by_source[source][step][name].ids_M.tolist(), grads[name], strict=True))
            for source, grads in enumerate(grads_by_source)
        ]
        groups = [by_source[first : first + group_size] for first in range(0, len(by_source), group_size)]
        table.commit(step, added_up([added_up(group) for group in groups]))


def added_up(parts: list[dict[int, np.ndarray]]) -> dict[int, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    summed: dict[int, np.ndarray] = {}
    for grads in parts:
        for i, grad_D in grads.items():
            summed[i] = summed.get(i, np.zeros_like(grad_D)) + grad_D
    return summed


def trained_dictionaries(run_: Run, group_size: int = 1) -> tuple[dict[str, DictionaryTable], list[Seen]]:
    """The tables after the run, and the rows that every source and step saw."""
    tables = dictionaries(run_)
    seen: list[Seen] = [[] for _ in run_.batches_by_source]
    for step in range(run_.num_steps):
        for source, batches in enumerate(run_.batches_by_source):
            seen[source].append(
                {
                    name: np.array([tables[name].lookup(i) for i in batch.ids_M.tolist()], np.float32)
                    for name, batch in batches[step].items()
                }
            )
        grads = [
            {name: gradient_of(rows, source, step) for name, rows in seen[source][step].items()}
            for source in range(len(seen))
        ]
        commit(tables, run_, step, grads, group_size)
    return tables, seen


def check_tables(shards, run_: Run, expected: dict[str, DictionaryTable]) -> None:
    assert [shard.committed_step for shard in shards] == [run_.num_steps - 1] * len(shards)
    held = all_rows(shards, run_.tables)
    for name, table in expected.items():
        assert held[name] == table.everything()
        exports = [shard.export(name) for shard in shards]
        counted = {
            int(i): (int(count), int(step))
            for rows in exports
            for i, count, step in zip(
                rows.sighted.ids_K, rows.sighted.counts_K, rows.sighted.steps_K, strict=True
            )
        }
        assert counted == table.sightings
        gone = {int(i) for shard in shards for i in shard.evicted(-1).get(name, ())}
        assert gone == table.evicted.keys() - table.rows.keys()


def threaded(make_mode):
    return lambda *arguments: ThreadedLookups(make_mode(*arguments))


def cached(cache_rows: int, make_cache: MakeCache = RowCache):
    return lambda link, exchange: CachedLookups(
        link,
        cache_rows=cache_rows,
        exchange=exchange if exchange.num_trainers > 1 else None,
        make_cache=make_cache,
    )


def alone_or(mode_of_one, mode_of_several):
    return lambda link, exchange: (mode_of_one if exchange.num_trainers == 1 else mode_of_several)(link)


MODES = {
    "sync": without_exchange(SyncLookups),
    "exact_prefetch": without_exchange(ExactPrefetch),
    "exact_prefetch in a thread": threaded(without_exchange(ExactPrefetch)),
    "shared-row write-back": alone_or(SharedRowWriteBack, ExactPrefetch),
    "shared-row write-back in a thread": threaded(alone_or(SharedRowWriteBack, ExactPrefetch)),
    "bounded_stale(0)": without_exchange(partial(BoundedStale, max_staleness=0)),
    **{f"cache of {rows}": cached(rows) for rows in (0, 1, 3, 6, 100)},
    # torch's CPU stands for the accelerator: what it computes is the same, wherever it does.
    **{f"device cache of {rows}": cached(rows, device_caches(torch.device("cpu"))) for rows in (0, 3, 100)},
}


def check_run(
    make_mode, run_: Run, num_shards, seed, drain_every, ahead, over_drains=False, has_room=True
) -> None:
    """Args:
    has_room: whether servers take gradients before their turn in the sum of a step.
    """
    expected, expected_rows = trained_dictionaries(run_)
    num_trainers = len(run_.batches_by_source)

    buffer = {} if has_room else {"step_buffer": 0}
    shards = make_shards(run_.tables, num_shards, num_trainers, **buffer)
    transport = AdversarialTransport(shards, seed, repeated=0.3, lost=0.2)
    found = run(
        make_mode,
        run_.tables,
        transport,
        num_shards,
        run_.batches_by_source,
        drain_every,
        ahead,
        over_drains,
        None if has_room else 0,
    )
    transport.finish()

    for source, (seen, _) in enumerate(found):
        for step, rows in enumerate(seen):
            for name, expected_MD in expected_rows[source][step].items():
                assert rows[name].tobytes() == expected_MD.tobytes(), (source, step, name)
    check_tables(shards, run_, expected)
