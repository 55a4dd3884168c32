"""A shard is read while it applies a step: whole rows, each as before the step or after it."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import pytest

from rayrec.embeddings.config import (
    DiskConfig,
    EvictionConfig,
    IdAdmissionConfig,
    RowwiseAdagradConfig,
    TableConfig,
)
from rayrec.embeddings.shard import shard as shard_module
from rayrec.embeddings.shard.contributions import SparseUpdate, UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard

# With this accumulator a step moves a row by its gradient, to within 1e-6: lr / sqrt(1e12) = 1.
PLAIN = RowwiseAdagradConfig(lr=1e6, initial_accumulator=1e12)
ITEMS = TableConfig(name="items", dim=2, init_scale=0, optimizer=PLAIN)
IDS_M = np.array([1, 2, 3, 4])
UPDATE = {"items": (IDS_M, np.full((4, 2), -1, np.float32))}
FIRST = UpdateTag(incarnation=0, step=0, rank=0)
WAIT_S = 20.0
NOT_YET_S = 0.05


class HalfApplied:
    """A shard that stays in the middle of a step, which adds 1 to ids 1 to 4, until it is told to go on."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        pool: ThreadPoolExecutor,
        shard: EmbeddingShard | None = None,
        last_tag: UpdateTag = FIRST,
        last_update: SparseUpdate = UPDATE,
    ) -> None:
        """Send the last contribution of the step, of a new shard unless one is given."""
        monkeypatch.setattr(shard_module, "_LENT_EVERY", 4)  # two rows of two numbers
        self.shard = shard or EmbeddingShard((ITEMS,), 0, num_trainers=1)
        self._slow_reader = object()  # one that has asked and takes its time
        self.shard._lock._readers.add(self._slow_reader)
        self.applied: Future[int] = pool.submit(self.shard.apply, last_tag, last_update)
        deadline = time.monotonic() + WAIT_S
        while not self.shard._lock._lent:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def go_on(self) -> None:
        self.shard._lock._readers.discard(self._slow_reader)

    def values(self, after_step: int | None = None) -> list[float]:
        return self.shard.lookup({"items": IDS_M}, after_step)["items"][:, 0].round(4).tolist()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.mark.parametrize("after_step", [None, -1])
def test_reads_that_need_no_later_step_are_let_in_between_two_rows(monkeypatch, pool, after_step):
    half = HalfApplied(monkeypatch, pool)
    try:
        assert pool.submit(half.values, after_step).result(WAIT_S) == [1, 1, 0, 0]
        _, present_M = half.shard.fetch({"items": IDS_M}, after_step)["items"]
        assert present_M.tolist() == [True, True, False, False]
        with pytest.raises(ValueError, match="there is no embedding table 'nobody'"):
            half.shard.lookup({"nobody": IDS_M})
        assert not half.applied.done()
    finally:
        half.go_on()
    assert half.applied.result(WAIT_S) == 0
    assert half.values() == [1, 1, 1, 1]


def test_no_read_is_let_into_a_step_that_evicts(monkeypatch, pool):
    """It could find a row that the step has changed and gives up in the end."""
    monkeypatch.setattr(shard_module, "_LENT_EVERY", 4)
    eviction = EvictionConfig(max_age_steps=5, every_steps=2)
    shard = EmbeddingShard((ITEMS.model_copy(update={"eviction": eviction}),), 0, num_trainers=1)
    shard.apply(FIRST, UPDATE)
    shard._lock._readers.add(object())  # one that waits, and would for ever once it is let in
    assert pool.submit(shard.apply, UpdateTag(0, 1, 0), UPDATE).result(WAIT_S) == 1


def test_everything_else_finds_whole_steps(monkeypatch, pool):
    half = HalfApplied(monkeypatch, pool)
    shard = half.shard
    calls = {
        "step": pool.submit(half.values, 0),
        "waiting": pool.submit(half.values, 1),
        "evicted": pool.submit(shard.evicted, -1, -1),
        "export": pool.submit(lambda: len(shard.export("items").ids_M)),
        "stats": pool.submit(lambda: shard.stats().num_rows["items"]),
        "write_back": pool.submit(shard.write_back, 0, 0, {}),
        "again": pool.submit(shard.apply, FIRST, UPDATE),
        "next": pool.submit(shard.apply, UpdateTag(0, 1, 0), {}),
    }
    done, _ = wait(calls.values(), timeout=NOT_YET_S)
    half.go_on()

    assert not done
    found = {name: call.result(WAIT_S) for name, call in calls.items()}
    assert found.pop("write_back") in (0, 1)  # whether the next step was before or after it
    assert found.pop("again") in (0, 1)
    assert found == {
        "step": [1, 1, 1, 1],
        "waiting": [1, 1, 1, 1],
        "evicted": {},
        "export": 4,
        "stats": 4,
        "next": 1,
    }


def test_who_waited_for_the_step_before_does_not_wait_for_the_next(monkeypatch, pool):
    """Of two sources one is a step ahead, so that one call commits two steps, the second of them slowly."""
    shard = EmbeddingShard((ITEMS,), 0, num_trainers=2)
    named = pool.submit(lambda: shard.lookup({"items": IDS_M}, after_step=0)["items"][:, 0].round().tolist())
    for step, source, update in ((1, 1, {}), (0, 0, {}), (1, 0, UPDATE)):
        shard.apply(UpdateTag(0, step, source), update)
    half = HalfApplied(monkeypatch, pool, shard, UpdateTag(0, 0, rank=1), {})
    try:
        values = half.values()  # which wakes threads that wait for a change
        assert (values, shard.committed_step) == ([1, 1, 0, 0], 0)
        assert named.result(WAIT_S) == [1, 1, 0, 0]
        assert not half.applied.done()
    finally:
        half.go_on()
    assert half.applied.result(WAIT_S) == 1


def test_who_waits_for_a_later_step_is_not_waited_for(monkeypatch, pool):
    """Nor is a read that a new incarnation set back before it had the lock."""
    shard = EmbeddingShard((ITEMS,), 0, num_trainers=1)
    shard.begin(7, 0)
    with shard._lock.changed:  # so that the read has seen step 7, and has not got the lock yet
        waiting = pool.submit(shard.lookup, {"items": IDS_M}, 7)
        deadline = time.monotonic() + WAIT_S
        while not shard._lock._readers:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        shard.begin(6, 0)
    half = HalfApplied(monkeypatch, pool, shard, UpdateTag(0, 7, 0))
    half.go_on()

    assert half.applied.result(WAIT_S) == 7
    assert waiting.result(WAIT_S)["items"][:, 0].round(4).tolist() == [1, 1, 1, 1]


def test_a_new_incarnation_begins_behind_the_step(monkeypatch, pool):
    half = HalfApplied(monkeypatch, pool)
    begun = pool.submit(half.shard.begin, 7, 1)
    done, _ = wait([begun], timeout=NOT_YET_S)
    half.go_on()

    assert not done
    begun.result(WAIT_S)
    half.applied.result(WAIT_S)
    assert (half.shard.committed_step, half.shard.incarnation) == (7, 1)


@pytest.mark.parametrize("names_step", [False, True])
def test_rows_are_never_torn_nor_older_than_asked_for(monkeypatch, names_step):
    """Every step adds 1 to all numbers of all rows, so a row of two values is a torn one."""
    dim, num_steps = 8192, 400
    monkeypatch.setattr(shard_module, "_LENT_EVERY", 2 * dim)
    shard = EmbeddingShard((ITEMS.model_copy(update={"dim": dim}),), 0, num_trainers=1)
    grads_4D = np.full((4, dim), -1, np.float32)
    started = threading.Barrier(2)

    def read() -> None:
        started.wait(WAIT_S)
        while shard.committed_step < num_steps - 1:
            num_done = shard.committed_step + 1
            reply = shard.lookup({"items": IDS_M}, num_done - 1 if names_step else None)
            found_43 = reply["items"][:, [0, dim // 2, dim - 1]].round()
            assert (found_43 >= num_done).all()
            assert (found_43 == found_43[:, :1]).all()
            assert np.ptp(found_43) <= 1

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        started.wait(WAIT_S)
        for step in range(num_steps):
            shard.apply(UpdateTag(0, step, 0), {"items": (IDS_M, grads_4D)})
        reader.result(WAIT_S)


def test_rows_do_not_depend_on_how_often_reads_are_let_in(monkeypatch):
    config = ITEMS.model_copy(
        update={
            "admission": IdAdmissionConfig(min_sightings=2),
            "eviction": EvictionConfig(max_age_steps=3, every_steps=2),
        }
    )
    exported = []
    for lent_every in (2, 6, 2**19):
        monkeypatch.setattr(shard_module, "_LENT_EVERY", lent_every)
        shard, random = EmbeddingShard((config,), 0, num_trainers=1), np.random.default_rng(0)
        for step in range(12):
            ids_M = random.choice(12, size=5, replace=False)
            grads_MD = random.normal(size=(5, 2)).astype(np.float32)
            shard.apply(UpdateTag(0, step, 0), {"items": (ids_M, grads_MD)})
        rows = shard.export("items")
        exported.append((rows.ids_M.tolist(), rows.weights_MD.tobytes(), rows.steps_M.tolist()))

    assert exported[0] == exported[1] == exported[2]
    assert exported[0][0]


def test_a_table_on_disk_keeps_the_room_that_the_step_reserved(monkeypatch, tmp_path):
    """A read could take it, and a step that is half applied cannot be refused any more."""
    monkeypatch.setattr(shard_module, "_LENT_EVERY", 4)
    disk = DiskConfig(folder=str(tmp_path), memory="64 MiB")
    shard = EmbeddingShard(
        (ITEMS, ITEMS.model_copy(update={"name": "cold", "disk": disk})), 0, num_trainers=1
    )
    shard._lock._readers.add(object())  # would wait for ever

    assert shard.apply(FIRST, UPDATE) == 0
