"""Every way through the sparse engine gives the rows of a dictionary that is changed one row at a time.

Bit for bit: weights, optimizer state, last step and count, who has been seen how often, who was evicted
when; for all modes, numbers of shards and trainers, cache sizes, with calls that come late, in another
order, twice, or only when they are sent again, and with reads between any two rows of an update.
"""

from collections import Counter
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.lookup.bounded_stale import BoundedStale
from rayrec.embeddings.lookup.shared_row_write_back import SharedRowWriteBack
from rayrec.embeddings.shard import shard as shard_module
from tests.embeddings.dictionary_runs import (
    MANY,
    MODES,
    SPREAD,
    TABLES,
    Run,
    check_run,
    check_tables,
    commit,
    dictionaries,
    runs,
    threaded,
)
from tests.embeddings.sparse_runs import (
    AdversarialTransport,
    Ids,
    ids,
    make_shards,
    run,
    without_exchange,
)
from tests.helpers.examples import cases, examples, share_of


@pytest.fixture(scope="module", autouse=True)
def reads_between_any_two_rows():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(shard_module, "_LENT_EVERY", 1)
        yield


for name in ("bounded_stale(0)", "cache of 3", "cache of 100", "device cache of 3"):
    MODES[f"{name} in a thread"] = threaded(MODES[name])


FAST = (
    "sync",
    "exact_prefetch",
    "shared-row write-back in a thread",
    "bounded_stale(0)",
    "cache of 1",
    "device cache of 3",
    "device cache of 100",
)
"""Each mode and what it is like at its narrowest; between them caches that hold little and everything."""


@pytest.mark.parametrize("mode", cases(MODES, FAST))
@examples(60)
@given(
    run_=runs(),
    num_shards=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    drain_every=st.sampled_from([2, 3, 1000]),
    ahead=st.sampled_from(["never", "before rows", "behind rows"]),
    has_room=st.booleans(),
)
def test_every_mode_gives_the_rows_of_a_dictionary(
    mode, run_, num_shards, seed, drain_every, ahead, has_room
):
    check_run(MODES[mode], run_, num_shards, seed, drain_every, ahead, has_room=has_room)


@st.composite
def runs_that_share(draw) -> Run:
    """Of one trainer, whose batches have most ids in common with the one before."""
    tables = (draw(TABLES).model_copy(update={"name": "table0"}),)
    pool = draw(st.sampled_from([MANY[:8], SPREAD[:8]]))
    some = st.lists(st.sampled_from(pool), min_size=3, max_size=8, unique=True)
    batches = [ids(*draw(some)) for _ in range(draw(st.integers(4, 9)))]
    return Run(tables, [[{"table0": Ids(ids_M, ids_M)} for ids_M in batches]])


class Watched(SharedRowWriteBack):
    """Counts the rows that took the ways of the mode, over all examples."""

    seen: ClassVar[Counter[str]] = Counter()

    def update(self, step, lookups, grads) -> None:
        held = {name: mine.held[0] for name, mine in self._batches[step].tables.items()}
        following = self._batches.get(step + 1)
        for name, ids_K in held.items():
            shared = np.isin(ids_K, [] if following is None else following.tables[name].ids_M)
            if self._tables[name].evicts_at(step):
                self.seen["went before an eviction"] += len(ids_K)
            else:
                self.seen["stayed"] += int(shared.sum())
                self.seen["left"] += int((~shared).sum())
        super().update(step, lookups, grads)

    def drain(self) -> None:
        following = self._batches.get(self._last_step + 1)
        if following is not None:
            self.seen["drained"] += sum(len(mine.held[0]) for mine in following.tables.values())
        super().drain()


def test_rows_that_are_held_are_those_of_a_dictionary():
    """As above, where much is held."""

    @examples(200)
    @given(
        run_=runs_that_share(),
        num_shards=st.integers(1, 3),
        seed=st.integers(0, 10_000),
        drain_every=st.sampled_from([2, 3, 1000]),
        ahead=st.sampled_from(["before rows", "behind rows"]),
        is_threaded=st.booleans(),
    )
    def holds(run_, num_shards, seed, drain_every, ahead, is_threaded):
        mode = without_exchange(Watched)
        check_run(
            threaded(mode) if is_threaded else mode,
            run_,
            num_shards,
            seed,
            drain_every,
            ahead,
            over_drains=True,
        )

    Watched.seen.clear()
    holds()
    least = min(Watched.seen[way] for way in ("stayed", "left", "drained", "went before an eviction"))
    assert least > share_of(50)


@examples(60)
@given(
    run_=runs(), num_shards=st.integers(1, 3), seed=st.integers(0, 10_000), max_staleness=st.integers(1, 3)
)
def test_bounded_staleness_is_bounded_and_loses_nothing(run_, num_shards, seed, max_staleness):
    num_trainers = len(run_.batches_by_source)
    shards = make_shards(run_.tables, num_shards, num_trainers, max_staleness)
    transport = AdversarialTransport(shards, seed, repeated=0.3, lost=0.2)
    stale = without_exchange(partial(BoundedStale, max_staleness=max_staleness))
    found = run(stale, run_.tables, transport, num_shards, run_.batches_by_source)
    transport.finish()

    # The dictionary is given the gradients that stale rows led to: all of them count, each once.
    tables = dictionaries(run_)
    history: list[dict[str, dict[int, bytes]]] = []
    every_id = {
        name: {
            i for batches in run_.batches_by_source for batch in batches for i in batch[name].ids_M.tolist()
        }
        for name in tables
    }
    for step in range(run_.num_steps):
        history.append(
            {name: {i: table.lookup(i).tobytes() for i in every_id[name]} for name, table in tables.items()}
        )
        for source, (seen, _) in enumerate(found):
            for name, rows_MD in seen[step].items():
                named = run_.batches_by_source[source][step][name].ids_M.tolist()
                for i, row_D in zip(named, rows_MD, strict=True):
                    fresh_enough = history[max(0, step - max_staleness) : step + 1]
                    assert row_D.tobytes() in {state[name][i] for state in fresh_enough}
        commit(tables, run_, step, [sent[step] for _, sent in found])
    check_tables(shards, run_, tables)
