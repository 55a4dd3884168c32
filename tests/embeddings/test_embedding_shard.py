import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rayrec.embeddings.base.distinct_ids import sum_by_id
from rayrec.embeddings.base.threads import ROWS_PER_THREAD
from rayrec.embeddings.config import RowwiseAdagradConfig, SgdConfig, TableConfig
from rayrec.embeddings.shard.contributions import UpdateTag
from rayrec.embeddings.shard.shard import EmbeddingShard

# With this accumulator a step moves a row by its gradient, to within 1e-6: lr / sqrt(1e12) = 1.
PLAIN = RowwiseAdagradConfig(lr=1e6, initial_accumulator=1e12)
TABLES = (
    TableConfig(name="items", dim=2, init_scale=0, optimizer=PLAIN),
    TableConfig(name="users", dim=1, init_scale=0, optimizer=PLAIN, seed=1),
)


def make_shard(num_trainers: int = 1, incarnation: int = 0, wait_timeout_s: float = 10) -> EmbeddingShard:
    return EmbeddingShard(TABLES, 0, num_trainers, incarnation, wait_timeout_s)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def items(*pairs: tuple[int, float]) -> dict:
    """An update of `items` whose gradient of every element is the given number."""
    grads = [[value, value] for _, value in pairs]
    return {"items": (ids(*(i for i, _ in pairs)), np.array(grads, dtype=np.float32).reshape(-1, 2))}


def item_values(shard: EmbeddingShard, *values: int) -> list[float]:
    return shard.lookup({"items": ids(*values)})["items"][:, 0].round(4).tolist()


def test_a_step_commits_when_the_last_source_has_sent_it():
    shard = make_shard(num_trainers=2)
    assert shard.apply(UpdateTag(0, 0, 1), items((5, 1.0), (6, 2.0))) == -1
    assert item_values(shard, 5, 6) == [0, 0]
    assert shard.apply(UpdateTag(0, 0, 0), items((6, 3.0))) == 0
    assert item_values(shard, 5, 6) == [-1, -5]
    assert shard.committed_step == 0


def test_an_empty_step_commits_too():
    shard = make_shard(num_trainers=2)
    shard.apply(UpdateTag(0, 0, 0), {})
    assert shard.apply(UpdateTag(0, 0, 1), {}) == 0
    assert shard.stats().num_rows == {"items": 0, "users": 0}


def test_sums_are_in_source_order_whatever_order_they_arrive_in():
    # 1e8 + 1 - 1e8 is 0 in float32 in this order and 1 in another.
    parts = [items((7, 1e8)), items((7, 1.0)), items((7, -1e8))]
    assert sum_by_id([part["items"] for part in parts])[1].tolist() == [[0, 0]]
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        shard = make_shard(num_trainers=3)
        for rank in order:
            shard.apply(UpdateTag(0, 0, rank), parts[rank])
        assert item_values(shard, 7) == [0]


def test_all_tables_of_a_request_are_answered_in_the_order_of_the_ids():
    shard = make_shard()
    shard.apply(UpdateTag(0, 0, 0), items((1, 1.0), (2, 2.0)) | {"users": (ids(1), np.float32([[9]]))})
    reply = shard.lookup({"items": ids(2, 3, 1), "users": ids(1)}, after_step=0)
    assert reply["items"][:, 0].round(4).tolist() == [-2, 0, -1]
    assert reply["users"].round(4).tolist() == [[-9]]


def test_a_repeated_contribution_changes_nothing():
    shard = make_shard(num_trainers=2)
    for tag in (UpdateTag(0, 0, 0), UpdateTag(0, 0, 0), UpdateTag(0, 0, 1), UpdateTag(0, 0, 1)):
        committed = shard.apply(tag, items((5, 1.0)))
    assert committed == 0
    assert item_values(shard, 5) == [-2]


def test_another_incarnation_is_refused_and_does_no_harm():
    shard = make_shard(incarnation=3)
    for incarnation in (2, 4):
        with pytest.raises(ValueError, match=f"incarnation 3 and refuses.*incarnation {incarnation}"):
            shard.apply(UpdateTag(incarnation, 0, 0), items((5, 1.0)))
    assert shard.apply(UpdateTag(3, 0, 0), items((5, 2.0))) == 0
    assert item_values(shard, 5) == [-2]


def test_a_source_may_be_one_step_ahead_but_no_more():
    shard = make_shard(num_trainers=2)
    shard.apply(UpdateTag(0, 0, 0), items((5, 1.0)))
    shard.apply(UpdateTag(0, 1, 0), items((5, 2.0)))
    with pytest.raises(ValueError, match="step 2 from trainer 0 leaves a gap after step -1"):
        shard.apply(UpdateTag(0, 2, 0), items((5, 4.0)))
    assert shard.apply(UpdateTag(0, 1, 1), {}) == -1
    assert shard.apply(UpdateTag(0, 0, 1), {}) == 1, "both steps are complete now"
    assert item_values(shard, 5) == [-3]
    assert shard.apply(UpdateTag(0, 2, 0), items((5, 4.0))) == 1, "the refused one can come again"


def test_a_source_out_of_range_is_refused():
    with pytest.raises(ValueError, match="trainers 0 to 1, got an update from trainer 2"):
        make_shard(num_trainers=2).apply(UpdateTag(0, 0, 2), {})


def test_a_lookup_waits_for_the_step_it_names():
    shard = make_shard()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(shard.lookup, {"items": ids(5)}, 1)
        shard.apply(UpdateTag(0, 0, 0), items((5, 1.0)))
        assert item_values(shard, 5) == [-1]
        shard.apply(UpdateTag(0, 1, 0), items((5, 1.0)))
        assert reply.result(10)["items"][:, 0].round(4).tolist() == [-2]


def test_a_step_that_never_comes_is_a_timeout_that_names_the_missing_trainer():
    shard = make_shard(num_trainers=2, wait_timeout_s=0.01)
    shard.apply(UpdateTag(0, 0, 0), {})
    with pytest.raises(TimeoutError, match=r"last committed step is -1.*step 0 came from trainers \[1\]"):
        shard.lookup({"items": ids(5)}, after_step=0)


def nan_update() -> dict:
    return {"users": (ids(3), np.float32([[1]]))} | items((5, 1.0), (8, np.nan))


def test_a_gradient_that_is_not_finite_refuses_the_whole_step():
    shard = make_shard(num_trainers=2)
    shard.apply(UpdateTag(0, 0, 0), items((5, 1.0)))
    with pytest.raises(ValueError, match=r"step 0 because of trainer 1: table 'items'.*id 8 is nan"):
        shard.apply(UpdateTag(0, 0, 1), nan_update())
    assert shard.committed_step == -1
    assert shard.stats().num_rows == {"items": 0, "users": 0}
    assert item_values(shard, 5) == [0], "what is committed can still be read"


def test_an_infinite_sum_of_finite_gradients_is_refused():
    shard = make_shard(num_trainers=2)
    shard.apply(UpdateTag(0, 0, 0), items((5, 3e38)))
    with pytest.raises(ValueError, match="id 5 is inf"):
        shard.apply(UpdateTag(0, 0, 1), items((5, 3e38)))
    assert shard.stats().num_rows["items"] == 0


def shard_that_tells_of_waiting() -> tuple[EmbeddingShard, threading.Event]:
    waiting = threading.Event()

    class Telling(threading.Condition):
        def wait(self, timeout=None):
            waiting.set()
            return super().wait(timeout)

    shard = EmbeddingShard(TABLES, 0, num_trainers=2, wait_timeout_s=10)
    shard._lock.changed = Telling()
    return shard, waiting


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (nan_update(), "id 8 is nan"),
        ({"films": (ids(1), np.float32([[1]]))}, "no embedding table 'films'; tables: items, users"),
        ({"items": (ids(1), np.float32([[1]]))}, r"shape \(1, 2\)"),
    ],
)
def test_a_refused_update_wakes_the_lookups_that_wait_for_it(update, message):
    shard, waiting = shard_that_tells_of_waiting()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(shard.lookup, {"items": ids(5)}, 0)
        assert waiting.wait(10)
        with pytest.raises(ValueError, match=message):
            shard.apply(UpdateTag(0, 0, 0), update)
        with pytest.raises(ValueError, match=message):
            reply.result(5)
    with pytest.raises(ValueError, match=message):  # the other trainer hears of it as well
        shard.apply(UpdateTag(0, 0, 1), {})


def test_a_new_incarnation_starts_clean_and_wakes_old_waiters():
    shard, waiting = shard_that_tells_of_waiting()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(shard.lookup, {"items": ids(5)}, 0)
        assert waiting.wait(10)
        shard.apply(UpdateTag(0, 0, 0), items((5, 1.0)))
        shard.begin(committed_step=41, incarnation=1)
        with pytest.raises(RuntimeError, match="incarnation 1 began"):
            reply.result(5)
    assert shard.apply(UpdateTag(1, 42, 0), items((5, 4.0))) == 41
    assert shard.apply(UpdateTag(1, 42, 1), {}) == 42
    assert item_values(shard, 5) == [-4], "the contribution of the old incarnation is gone"
    with pytest.raises(ValueError, match="cannot return to 0"):
        shard.begin(0, 0)


def test_a_restored_shard_holds_what_was_exported():
    shard, other = make_shard(), make_shard()
    shard.apply(UpdateTag(0, 0, 0), items((5, 1.0)))
    other.apply(UpdateTag(0, 0, 0), items((6, 1.0)))
    other.restore({name: [shard.export(name)] for name in ("items", "users")})
    other.begin(0, 1)
    assert item_values(other, 5, 6) == [-1, 0]
    assert other.apply(UpdateTag(1, 1, 0), items((5, 1.0))) == 1
    with pytest.raises(ValueError, match=r"holds tables.*items.*users"):
        other.restore({"items": [shard.export("items")]})


def test_stats_say_what_is_held_and_where_time_went():
    ticks = iter(range(100))
    shard = EmbeddingShard(TABLES, 0, 1, clock=lambda: float(next(ticks)))
    shard.apply(UpdateTag(0, 0, 0), items((5, 1.0), (6, 1.0)))
    shard.lookup({"items": ids(5, 6, 7)}, after_step=0)
    stats = shard.stats()
    assert stats.num_rows == {"items": 2, "users": 0}
    assert (stats.update_s, stats.lookup_s, stats.busy_s) == (1.0, 1.0, 2.0)
    assert stats.num_bytes > 0


def test_tags_and_refusals_cross_processes():
    tag = UpdateTag(0, 1, 2)
    assert pickle.loads(pickle.dumps(tag)) == tag
    with pytest.raises(ValueError, match="id 8 is nan") as caught:
        make_shard().apply(UpdateTag(0, 0, 0), nan_update())
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_rows_that_a_cache_brings_back_twice_count_once():
    shard = EmbeddingShard([TableConfig(name="items", dim=2, optimizer=SgdConfig(lr=1.0))], 0, 1)
    ids_M = np.array([7], dtype=np.int64)

    def train(step: int) -> None:
        shard.apply(UpdateTag(0, step, 0), {"items": (ids_M, np.ones((1, 2), np.float32))})

    train(0)
    records_MW, present_M = shard.fetch({"items": ids_M}, after_step=0)["items"]
    assert present_M.tolist() == [True]
    changed_MW = records_MW.copy()
    changed_MW[:, :2] = np.array([[5, 6]], np.float32).view(np.int32)
    for _ in range(2):
        shard.write_back(0, 0, {"items": (ids_M, changed_MW)})
        assert shard.lookup({"items": ids_M})["items"].tolist() == [[5, 6]]
    train(1)
    assert shard.write_back(0, 0, {"items": (ids_M, changed_MW)}) == 1  # a step too late
    assert shard.lookup({"items": ids_M})["items"].tolist() == [[4, 5]]
    with pytest.raises(ValueError, match=r"incarnation 0 and refuses rows .* incarnation 3"):
        shard.write_back(3, 1, {"items": (ids_M, changed_MW)})


def rows_of(shard: EmbeddingShard) -> dict[str, list]:
    exported = {name: shard.export(name) for name in ("items", "users")}
    return {name: [rows.ids_M.tolist(), rows.weights_MD.tobytes()] for name, rows in exported.items()}


def trained_shard(num_trainers: int = 1) -> tuple[EmbeddingShard, dict[str, np.ndarray]]:
    """Items 5 and 6 and user 5 have rows; and records of nothing but zeros for them."""
    shard = make_shard(num_trainers)
    shard.apply(UpdateTag(0, 0, 0), items((5, 1.0), (6, 2.0)) | {"users": (ids(5), np.float32([[3]]))})
    for rank in range(1, num_trainers):
        shard.apply(UpdateTag(0, 0, rank), {})
    fetched = shard.fetch({"items": ids(5, 6), "users": ids(5)})
    return shard, {name: np.zeros_like(records_MW) for name, (records_MW, _) in fetched.items()}


BAD_KEPT = {
    "an id without a row": (lambda zeros: {"items": (ids(9), zeros["items"][:1])}, "id 9 has no row"),
    "too wide": (lambda zeros: {"items": (ids(5), np.zeros((1, 40), np.int32))}, r"shape \(1, \d\)"),
    "too narrow": (lambda zeros: {"items": (ids(5), zeros["items"][:1, 1:])}, r"shape \(1, \d\)"),
    "fewer records than ids": (lambda zeros: {"items": (ids(5, 6), zeros["items"][:1])}, r"shape \(2, \d\)"),
    "another dtype": (
        lambda zeros: {"items": (ids(5), zeros["items"][:1].astype(np.int64))},
        "must be int32",
    ),
    "other ids": (lambda zeros: {"items": (np.int32([5]), zeros["items"][:1])}, "one-dimensional int64"),
    "an id twice": (lambda zeros: {"items": (ids(6, 6), zeros["items"])}, "id 6 comes twice"),
    "another table": (lambda zeros: {"films": (ids(5), zeros["items"][:1])}, "no embedding table 'films'"),
}


@pytest.mark.parametrize("name", BAD_KEPT)
def test_records_that_cannot_come_back_are_refused_before_any_row_changes(name):
    make_bad, message = BAD_KEPT[name]
    shard, zeros = trained_shard()
    before = rows_of(shard)
    dirty = {"users": (ids(5), zeros["users"])} | make_bad(zeros)

    with pytest.raises(ValueError, match=rf"shard 0 refuses .*step 0.*{message}"):
        shard.write_back(0, 0, dirty)
    assert rows_of(shard) == before
    with pytest.raises(ValueError, match=rf"shard 0 refuses step 1.*{message}"):
        shard.apply(UpdateTag(0, 1, 0), items((5, 1.0)), dirty)
    assert rows_of(shard) == before
    assert shard.committed_step == 0


def test_records_of_an_id_that_somebody_else_changes_too_are_refused():
    shard, zeros = trained_shard(num_trainers=2)
    before = rows_of(shard)
    shard.apply(UpdateTag(0, 1, 0), items((7, 1.0), (5, 1.0)))
    with pytest.raises(ValueError, match="shard 0 refuses step 1: table 'items': id 5 comes twice"):
        shard.apply(UpdateTag(0, 1, 1), {}, {"items": (ids(5), zeros["items"][:1])})
    assert rows_of(shard) == before


def test_two_tables_with_one_name_are_refused():
    with pytest.raises(ValueError, match="two tables are named 'items'"):
        EmbeddingShard([TableConfig(name="items", dim=2), TableConfig(name="items", dim=3)], 0, 1)


def test_calls_on_several_threads_answer_with_the_same_rows_also_after_a_restore():
    table = TableConfig(name="items", dim=8)
    ids_M = np.arange(3 * ROWS_PER_THREAD)
    one, several = (EmbeddingShard((table,), 0, 1, num_threads=num_threads) for num_threads in (1, 3))
    grads_MD = np.random.default_rng(0).standard_normal((len(ids_M), 8), dtype=np.float32)
    for shard in (one, several):
        shard.apply(UpdateTag(0, 0, 0), {"items": (ids_M, grads_MD)})
        shard.restore({"items": [shard.export("items")]})
        shard.begin(0, 1)
        shard.apply(UpdateTag(1, 1, 0), {"items": (ids_M, grads_MD)})

    rows_MD, same_MD = (shard.lookup({"items": ids_M})["items"] for shard in (one, several))
    assert rows_MD.tobytes() == same_MD.tobytes()
