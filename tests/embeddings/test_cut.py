"""A table as a step left it, read while later steps commit: held to a dictionary, and to a whole snapshot.

Where the writer is when something changes is for the test to say: it takes the next part when it wants to.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.embeddings import cut as cut_module
from rayrec.embeddings import snapshot
from rayrec.embeddings.config import (
    AdamConfig,
    AdmissionConfig,
    EvictionConfig,
    RowwiseAdagradConfig,
    TableConfig,
)
from rayrec.embeddings.contributions import UpdateTag
from rayrec.embeddings.routing import ShardMap
from rayrec.embeddings.shard import EmbeddingShard
from rayrec.embeddings.table import TableRows
from tests.embeddings.dictionary_oracle import DictionaryTable

PLAIN = TableConfig(name="items", dim=3, seed=1, optimizer=RowwiseAdagradConfig())
RULED = TableConfig(
    name="items",
    dim=3,
    seed=1,
    optimizer=AdamConfig(),
    weight_dtype="bfloat16",
    admission=AdmissionConfig(min_sightings=2, forget_after_steps=3, every_steps=2),
    eviction=EvictionConfig(max_age_steps=2, every_steps=2, remember_steps=3),
)
CONFIGS = {"plain": PLAIN, "ruled": RULED}
IDS = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, size=60)


@pytest.fixture(autouse=True, scope="module")
def parts_of_a_few_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_module, "_PART_BYTES", 200)
        patch.setattr(cut_module, "_SCANNED_SLOTS", 100)
        patch.setattr(cut_module, "_LEAST_LISTED", 16)
        patch.setattr(cut_module, "_SLOTS_PER_LISTED_ID", 2**20)
        patch.setattr(cut_module, "_KEPT_IDS", 4)
        patch.setattr(snapshot, "_ROWS_PER_GROUP", 16)
        patch.setattr(snapshot, "_ROWS_PER_PART", 8)
        yield


@st.composite
def batches(draw, most_steps: int = 12) -> list[list[int]]:
    """Which of the ids every step names."""
    num_steps = draw(st.integers(1, most_steps))
    return [sorted(draw(st.sets(st.integers(0, len(IDS) - 1), max_size=40))) for _ in range(num_steps)]


class Run:
    """Shards that commit given batches, and a dictionary of what they mean."""

    def __init__(self, config: TableConfig, num_shards: int, steps: list[list[int]]) -> None:
        self.config = config
        self.shard_map = ShardMap(num_shards)
        self.shards = [EmbeddingShard([config], shard, 1) for shard in range(num_shards)]
        self.oracle = DictionaryTable(config)
        self._steps = steps
        self.step = -1

    @property
    def is_over(self) -> bool:
        return self.step + 1 == len(self._steps)

    def commit(self) -> None:
        self.step += 1
        ids_M = IDS[self._steps[self.step]]
        random = np.random.default_rng(self.step)
        grads_MD = random.standard_normal((len(ids_M), self.config.dim)).astype(np.float32)
        for shard, at in zip(self.shards, self.shard_map.split(ids_M), strict=True):
            shard.apply(UpdateTag(shard.incarnation, self.step, 0), {"items": (ids_M[at], grads_MD[at])})
        self.oracle.commit(self.step, {int(i): grad_D for i, grad_D in zip(ids_M, grads_MD, strict=True)})

    def commit_until(self, step: int) -> None:
        while self.step < step:
            self.commit()

    def expected(self) -> dict:
        return {
            "rows": self.oracle.everything(),
            "sighted": dict(self.oracle.sightings),
            "evicted": {
                i: step
                for i, step in self.oracle.evicted.items()
                if i not in self.oracle.rows and self._is_remembered(step)
            },
        }

    def _is_remembered(self, step: int) -> bool:
        """Tombstones that are too old go when the next eviction is due."""
        eviction = self.config.eviction
        assert eviction is not None
        last_due = (self.step + 1) // eviction.every_steps * eviction.every_steps - 1
        return last_due - step <= eviction.remember_steps


def contents(parts: list[TableRows]) -> dict:
    """What parts hold, as `Run.expected` has it; every id once."""
    found: dict = {"rows": {}, "sighted": {}, "evicted": {}}
    for rows in parts:
        columns = (rows.ids_M.tolist(), rows.weights_MD, rows.state_MS, rows.steps_M, rows.counts_M)
        for i, weights_D, state_S, step, count in zip(*columns, strict=True):
            assert i not in found["rows"]
            found["rows"][i] = (weights_D.tobytes(), state_S.tobytes(), step, count)
        counted = zip(rows.sighted.counts_K.tolist(), rows.sighted.steps_K.tolist(), strict=True)
        found["sighted"] |= dict(zip(rows.sighted.ids_K.tolist(), counted, strict=True))
        found["evicted"] |= dict(zip(rows.evicted.ids_V.tolist(), rows.evicted.steps_V.tolist(), strict=True))
    return found


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=150, deadline=None)
@given(
    steps=batches(), num_shards=st.integers(1, 2), at=st.integers(-1, 11), pauses=st.lists(st.integers(0, 4))
)
def test_a_cut_is_what_the_step_left_however_many_steps_commit_meanwhile(name, steps, num_shards, at, pauses):
    check_cut(Run(CONFIGS[name], num_shards, steps), at, pauses)


def check_cut(run: Run, at: int, pauses: list[int]) -> None:
    """
    Args:
        pauses: parts that are read between two steps.
    """
    at = min(at, len(run._steps) - 1)
    run.commit_until(at)
    for shard in run.shards:
        shard.freeze(at)
    expected = run.expected()
    readings = [shard.export_cut("items", at) for shard in run.shards]
    parts: list[TableRows] = []
    for num_parts in pauses:
        if not run.is_over:
            run.commit()
        for _ in range(num_parts):
            parts += [part for part in (next(reading, None) for reading in readings) if part is not None]
    for reading in readings:
        parts += reading
    assert contents(parts) == expected
    for number, shard in enumerate(run.shards):
        shard.release(at)
        assert shard._tables["items"]._cut is None, number
    while not run.is_over:
        run.commit()
    assert contents([shard.export("items") for shard in run.shards])["rows"] == run.oracle.everything()
