"""Steps that come in two parts. That all modes stay exact with them: `test_exactness`."""

import numpy as np
import pytest

from rayrec.embeddings.config import EvictionConfig, TableConfig
from rayrec.embeddings.shard.contributions import Part, UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard
from tests.embeddings.sparse_runs import ids

TABLE = TableConfig(name="items", dim=4, seed=3)


def shard(num_trainers: int = 1, **further) -> EmbeddingShard:
    return EmbeddingShard((TABLE,), 0, num_trainers, wait_timeout_s=0.05, **further)


def update(*values: int, gradient: float = 1.0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {"items": (ids(*values), np.full((len(values), 4), gradient, dtype=np.float32))}


def head(step: int = 0, rank: int = 0) -> UpdateTag:
    return UpdateTag(0, step, rank, Part.HEAD)


def rest(step: int = 0, rank: int = 0) -> UpdateTag:
    return UpdateTag(0, step, rank, Part.REST)


def rows(served: EmbeddingShard, *values: int) -> bytes:
    return served.lookup({"items": ids(*values)})["items"].tobytes()


def after_whole_steps(*updates, num_trainers: int = 1) -> EmbeddingShard:
    """What the shards of these tests are compared with; one update per source and step."""
    whole = shard(num_trainers)
    for number, contribution in enumerate(updates):
        whole.apply(UpdateTag(0, number // num_trainers, number % num_trainers), contribution)
    return whole


def test_rows_of_a_head_have_the_step_before_it_is_committed():
    whole, served = after_whole_steps(update(1, 2, 3)), shard()
    found = served.apply_head(head(), update(1), {"items": ids(2, 3)}, {"items": ids(1)})
    assert found["items"].tobytes() == rows(whole, 1)
    assert served.committed_step == -1
    assert rows(served, 2, 3) == rows(shard(), 2, 3)

    assert served.apply(rest(), update(2, 3)) == 0
    assert rows(served, 1, 2, 3) == rows(whole, 1, 2, 3)


def test_parts_may_come_in_any_order_and_twice():
    whole, served = after_whole_steps(update(1, 2), update(1)), shard()
    assert served.apply(rest(), update(2)) == -1
    served.take_head(head(), update(1), {"items": ids(2)})
    assert served.committed_step == 0
    served.take_head(head(1), update(1), {})
    served.take_head(head(1), update(1), {})
    served.take_head(head(), update(1), {"items": ids(2)})
    assert served.apply(rest(), update(2)) == 0
    assert served.apply(rest(1), {}) == 1
    assert rows(served, 1, 2) == rows(whole, 1, 2)


def test_heads_wait_for_those_of_all_sources_and_name_who_has_sent_none():
    both = (update(1, gradient=0.1), update(1, 2, gradient=0.7))
    whole, served = after_whole_steps(*both, num_trainers=2), shard(num_trainers=2)
    with pytest.raises(TimeoutError, match=r"no complete update of step 0 came from trainers \[0, 1\]"):
        served.apply_head(head(rank=1), update(1, gradient=0.7), {"items": ids(2)}, {"items": ids(1)})
    found = served.apply_head(head(rank=0), update(1, gradient=0.1), {}, {"items": ids(1)})
    assert found["items"].tobytes() == rows(whole, 1)
    served.apply(rest(rank=1), update(2, gradient=0.7))
    assert served.apply(rest(rank=0), {}) == 0
    assert rows(served, 1, 2) == rows(whole, 1, 2)


def test_a_source_that_sends_no_head_makes_the_others_wait_for_the_step():
    both = (update(1, gradient=0.1), update(1, 2, gradient=0.7))
    whole, served = after_whole_steps(*both, num_trainers=2), shard(num_trainers=2)
    served.take_head(head(rank=1), update(1, gradient=0.7), {"items": ids(2)})
    served.apply(rest(rank=1), update(2, gradient=0.7))
    assert not served.has_heads(0)
    served.apply(UpdateTag(0, 0, 0), both[0])
    assert served.committed_step == 0
    assert rows(served, 1, 2) == rows(whole, 1, 2)


def test_a_step_that_is_whole_and_in_parts_is_refused():
    served = shard(num_trainers=2)
    served.take_head(head(), update(1), {})
    with pytest.raises(ValueError, match="trainer 0 sent step 0 whole and in parts"):
        served.apply(UpdateTag(0, 0, 0), update(1))


def test_nothing_is_saved_in_the_middle_of_a_step():
    served = shard()
    served.take_head(head(), update(1), {"items": ids(2)})
    with pytest.raises(RuntimeError, match=r"a part of step 0 and waits for the rest from trainers \[0\]"):
        served.export("items")
    served.apply(rest(), update(2))
    assert len(served.export("items").ids_M) == 2


def test_memory_for_the_rest_is_asked_for_before_a_row_changes():
    served = shard(memory_limit=shard().stats().num_bytes + 200_000)
    before = rows(served, 1)
    many = ids(*range(10, 100_000))
    with pytest.raises(MemoryError, match="no row has changed"):
        served.take_head(head(), update(1), {"items": many})
    assert rows(served, 1) == before


def test_a_refused_rest_says_that_rows_have_changed():
    served = shard()
    served.take_head(head(), update(1), {"items": ids(2)})
    with pytest.raises(ValueError, match="the gradient of id 2 is nan") as refused:
        served.apply(rest(), update(2, gradient=np.nan))
    assert "restore before going on" in "".join(refused.value.__notes__)
    with pytest.raises(RuntimeError, match="a part of step 0"):
        served.begin(-1, 1)
    served.restore({"items": [shard().export("items")]})
    served.begin(-1, 1)
    assert served.apply(UpdateTag(1, 0, 0), update(1, 2)) == 0
    assert rows(served, 1, 2) == rows(after_whole_steps(update(1, 2)), 1, 2)


def test_what_arrives_between_restoring_and_beginning_is_refused():
    served = shard()
    served.take_head(head(), update(1), {"items": ids(2)})
    served.restore({"items": [shard().export("items")]})
    with pytest.raises(RuntimeError, match="an incarnation has to begin"):
        served.apply(rest(), update(2))
    assert served.committed_step == -1
    assert rows(served, 1, 2) == rows(shard(), 1, 2)


def test_tables_that_evict_take_no_heads():
    evicting = TABLE.model_copy(update={"eviction": EvictionConfig(max_age_steps=5, every_steps=2)})
    served = EmbeddingShard((evicting,), 0, 1)
    served.apply(UpdateTag(0, 0, 0), update(1))
    with pytest.raises(ValueError, match="takes no heads"):
        served.take_head(head(1), update(1), {})
