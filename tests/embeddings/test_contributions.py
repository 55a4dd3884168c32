"""Steps that come in two parts. That all modes stay exact with them: `test_exactness`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.embeddings.config import EvictionConfig, TableConfig
from rayrec.embeddings.shard.contributions import Contribution, Part, StepContributions, UpdateTag, summed
from rayrec.embeddings.shard.shard import EmbeddingShard
from tests.embeddings.sparse_runs import ids
from tests.helpers.examples import examples

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


def updates_of(num_trainers: int, seed: int) -> list[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Overlapping ids, and gradients whose sum depends on its order; some trainers have none."""
    rng = np.random.default_rng(seed)
    updates = []
    for _ in range(num_trainers):
        ids_M = rng.choice(40, size=rng.integers(0, 25), replace=False)
        grads_MD = (rng.standard_normal((len(ids_M), 4)) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
        updates.append({"items": (ids_M, grads_MD)} if len(ids_M) else {})
    return updates


def by_id(sums: dict[str, tuple[np.ndarray, np.ndarray]]) -> list[tuple[int, bytes]]:
    ids_R, sums_RD = sums.get("items", (np.empty(0, np.int64), np.empty((0, 4), np.float32)))
    return sorted(zip(ids_R.tolist(), (sum_D.tobytes() for sum_D in sums_RD), strict=True))


def split(update, is_head) -> tuple[dict, dict]:
    if not update:
        return {}, {}
    ids_M, grads_MD = update["items"]
    at_M = is_head[ids_M]
    return {"items": (ids_M[at_M], grads_MD[at_M])}, {"items": (ids_M[~at_M], grads_MD[~at_M])}


@examples(200)
@given(
    num_trainers=st.integers(1, 6), seed=st.integers(0, 10_000), some_whole=st.booleans(), order=st.randoms()
)
def test_whatever_comes_first_the_sum_is_that_of_the_ranks_in_their_order(
    num_trainers, seed, some_whole, order
):
    updates = updates_of(num_trainers, seed)
    rng = np.random.default_rng(seed + 1)
    is_head, is_whole = rng.random(40) < 0.4, some_whole & (rng.random(num_trainers) < 0.5)
    calls = []
    for rank, update_of in enumerate(updates):
        if is_whole[rank]:
            calls.append((UpdateTag(0, 0, rank), Contribution(update_of, {}, {})))
        else:
            first, then = split(update_of, is_head)
            announced = {name: ids_M for name, (ids_M, _) in then.items()}
            calls.append((head(rank=rank), Contribution(first, {}, announced)))
            calls.append((rest(rank=rank), Contribution(then, {}, {})))
    order.shuffle(calls)
    expected, applied = by_id(summed(updates)), []
    found = StepContributions(num_trainers)
    for number, (tag, contribution) in enumerate(calls):
        found.add(tag, contribution)
        assert (not found.missing()) == (number == len(calls) - 1)
        if found.missing() and found.has_all_heads() and not found.is_begun:
            assert set(found.ids_of_all().get("items", [])) == {id_ for id_, _ in expected}
            applied = by_id(found.heads())
            found.begin()

    assert sorted(applied + by_id(found.left())) == expected
    assert found.num_waiting == 0


@pytest.mark.parametrize("parts", ["whole", "heads"])
def test_of_64_trainers_that_come_in_order_no_gradient_waits(parts):
    """Of those that come in the opposite order, all but one do."""
    updates = updates_of(64, seed=1)
    most = {}
    for ranks in (range(64), range(63, -1, -1)):
        found, held = StepContributions(64), []
        for rank in ranks:
            if parts == "whole":
                found.add(UpdateTag(0, 0, rank), Contribution(updates[rank], {}, {}))
            else:
                first, then = split(updates[rank], np.arange(40) < 10)
                found.add(head(rank=rank), Contribution(first, {}, {}))
                found.add(rest(rank=rank), Contribution(then, {}, {}))
            held.append(found.num_waiting)
        most[ranks.step] = max(held)
        assert by_id(found.left()) == by_id(summed(updates))
    assert most == {1: 0, -1: 63 * (1 if parts == "whole" else 2)}
