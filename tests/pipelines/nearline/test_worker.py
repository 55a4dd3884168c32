"""A worker that follows events: what it makes is of these events and this version, whatever happens."""

from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.user_histories import with_events
from rayrec.pipelines.nearline.config import NearlineConfig
from rayrec.pipelines.nearline.kinds import kinds_of, summaries_of
from rayrec.pipelines.nearline.product_store import ProductStore
from rayrec.pipelines.nearline.products import ProductKey, events_hash, stands_for
from rayrec.pipelines.nearline.source import Arrivals, UserEventsSource
from rayrec.pipelines.nearline.worker import NearlineWorker, coverage
from rayrec.platform.errors import InputError, UnavailableError
from rayrec.samples.graph import graph_of_dataset
from rayrec.samples.stores import EventBatch, StoreManifest, open_store
from rayrec.samples.stores.feed import START, FeedGoneError
from rayrec.samples.stores.recent import UserEvents
from rayrec.samples.stores.store import append_sides
from tests.helpers.examples import examples
from tests.helpers.runs import BACKBONE, NUM_ITEMS, NUM_USERS, make_run
from tests.pipelines.nearline.test_products import Values

LONG = {"chunk_events": 4, "summary_tokens": 2, "newest": 3, "max_chunks": 8}
NONE = np.zeros(0, np.int64)


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> list[Recommender]:
    """Of the same data, with other weights."""
    backbone = {key: value for key, value in BACKBONE.items() if key != "max_length"}
    folder = tmp_path_factory.mktemp("runs")
    run = make_run(folder, "lazy", backbone=backbone, long_history=LONG, snapshots_after=(0,))
    return [Recommender.load(run, which) for which in ("last", "previous")]


@pytest.fixture(scope="module")
def recommender(versions):
    return versions[0]


class Killed(BaseException):
    """The process ended here."""


class KilledValues(Values):
    """Ends the process at a write: before it, or when it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.kills: list[tuple[int, bool]] = []

    def write_many(self, changes):
        is_killed, after = False, False
        if self.kills:
            left, after = self.kills[0]
            is_killed = left == 0
            if is_killed:
                self.kills.pop(0)
            else:
                self.kills[0] = (left - 1, after)
        if is_killed and not after:
            raise Killed
        super().write_many(changes)
        if is_killed:
            raise Killed


class Log:
    """Events in memory, with a feed of which only the newest entries are kept."""

    def __init__(self, recommender, kept: int = 1000) -> None:
        self.dataset, self.kept = recommender.dataset, kept
        self.entries: list[tuple[int, int, int]] = []
        self.error: Exception | None = None

    def add(self, user: int, item: int, time_s: int) -> None:
        self.entries.append((user, item, time_s))

    def position(self) -> str:
        return str(len(self.entries)) if self.entries else START

    def after(self, position):
        if self.error is not None:
            raise self.error
        at = int(position or 0)
        if at < len(self.entries) - self.kept:
            raise FeedGoneError(position)
        new = self.entries[at : at + 3]
        users, times = [user for user, _, _ in new], [time for _, _, time in new]
        return Arrivals(
            np.array(users, np.int64), np.array(times, float), str(at + len(new)) if new else position
        )

    def all_users(self):
        newest: dict[int, float] = {}
        for user, _, time_s in self.entries:
            newest[user] = max(newest.get(user, 0.0), time_s)
        yield np.array(list(newest), np.int64), np.array(list(newest.values()))

    def queries(self, recommender, users):
        queries = []
        for user in users:
            mine = sorted({(time_s, item) for one, item, time_s in self.entries if one == user})
            times, items = (np.array([each[column] for each in mine], np.int64) for column in (0, 1))
            events = UserEvents(1_000_000 * times, items, np.full(len(items), -1))
            queries.append(with_events(recommender, None, None, events, ()) if len(mine) else Query(NONE))
        return [str(user) for user in users], queries


def worker_of(recommender, log, values, now, part=0, num_parts=1, **config):
    settings = NearlineConfig.parse({"products": ["summaries", "candidates"], "candidates": 5} | config)
    store = ProductStore(values)
    kinds = kinds_of(settings, recommender)
    return NearlineWorker(recommender, kinds, log, store, settings, part, num_parts, lambda: now[0])


def products_of(recommender, log, values, kinds=("summaries", "candidates")):
    """What there is of each user, and the query that it should be of."""
    users = sorted({user for user, _, _ in log.entries})
    _, queries = log.queries(recommender, users)
    store = ProductStore(values)
    return {
        (kind, user): (store.get_many([ProductKey(kind, recommender.identity, user)])[0], query)
        for kind in kinds
        for user, query in zip(users, queries, strict=True)
    }


def test_users_are_due_after_enough_events_or_enough_time_the_active_first(recommender):
    ids, log, values, now = recommender.dataset.items.ids_I, Log(recommender), Values(), [100.0]
    worker = worker_of(recommender, log, values, now, debounce_events=3, debounce_s=10, batch_users=1)
    assert worker.step() == 0
    for time_s in (1, 2, 3):
        log.add(7, ids[time_s], time_s)
    log.add(8, ids[0], 50)
    assert worker.step() == 1  # user 7
    assert products_of(recommender, log, values)["candidates", 8][0] is None
    now[0] = 109.0
    assert worker.step() == 0
    log.add(9, ids[1], 60)
    now[0] = 125.0
    assert worker.step() == 1  # the one with an event of late
    found = products_of(recommender, log, values)
    assert found["candidates", 9][0] is not None or found["candidates", 8][0] is not None
    worker.finish()
    for product, query in products_of(recommender, log, values).values():
        assert product is not None
        assert stands_for(recommender, product, query)


def test_candidates_are_the_whole_catalog_in_the_order_of_an_exhaustive_search(recommender):
    ids, log, values = recommender.dataset.items.ids_I, Log(recommender), Values()
    for time_s in range(9):
        log.add(7, ids[time_s], time_s)
    worker_of(recommender, log, values, [0.0], candidates=1000).finish()

    product, query = products_of(recommender, log, values)["candidates", 7]
    (expected,) = recommender.answer([query], NUM_ITEMS, exclude_seen=False)
    keys = recommender.dataset.items.keys.to_pylist()
    positions = recommender.dataset.item_positions(product.arrays["items"])
    assert [keys[position] for position in positions] == [item.item_key for item in expected.items]
    assert len(positions) == NUM_ITEMS
    scores = [item.score for item in expected.items]
    np.testing.assert_allclose(product.arrays["scores"], scores, atol=1e-3)
    assert np.exp(product.arrays["scores"]).sum() == pytest.approx(1.0, abs=1e-5)


def test_answers_with_summaries_of_a_product_are_those_without(recommender):
    ids, log, values = recommender.dataset.items.ids_I, Log(recommender), Values()
    for time_s in range(25):
        log.add(7, ids[time_s % NUM_ITEMS], time_s)
    worker_of(recommender, log, values, [0.0], products=["summaries"]).finish()

    product, query = products_of(recommender, log, values)["summaries", 7]
    known = replace(query, summaries=summaries_of(product))
    assert len(known.summaries.hashes_F) == 5
    with_products, without = recommender.answer([known, query], NUM_ITEMS)
    assert [item.item_key for item in with_products.items] == [item.item_key for item in without.items]
    np.testing.assert_allclose(
        [item.score for item in with_products.items], [item.score for item in without.items], atol=1e-3
    )


def test_it_does_not_matter_which_worker_makes_a_product(recommender):
    """Summaries have the same bits; scores of candidates are alike but for the last bits."""
    ids, log, random = recommender.dataset.items.ids_I, Log(recommender), np.random.default_rng(0)
    for time_s in range(120):
        log.add(int(random.integers(12)), int(random.choice(ids)), time_s)
    alone, several = Values(), Values()
    worker_of(recommender, log, alone, [0.0]).finish()
    for part in range(3):
        worker_of(recommender, log, several, [0.0], part, 3, batch_users=2).finish()

    made, expected = products_of(recommender, log, several), products_of(recommender, log, alone)
    assert len(made) == 24
    for (kind, user), (product, _) in made.items():
        other = expected[kind, user][0]
        assert product.events_hash == other.events_hash
        if kind == "summaries":
            np.testing.assert_array_equal(product.arrays["vectors"], other.arrays["vectors"])
        else:
            np.testing.assert_allclose(product.arrays["scores"], other.arrays["scores"], atol=1e-5)


def test_a_store_that_is_down_loses_nothing(recommender):
    ids, log, values, now = recommender.dataset.items.ids_I, Log(recommender), Values(), [0.0]
    worker = worker_of(recommender, log, values, now, debounce_s=0)
    worker.step()
    log.add(7, ids[3], 1)
    log.error = UnavailableError("log", 1, "gone")
    waits = iter([False, True])
    worker.run(lambda seconds: next(waits))
    assert worker.num_errors == 2
    log.error = None
    assert worker.step() == 1
    assert products_of(recommender, log, values)["candidates", 7][0] is not None


def test_workers_that_divide_the_users_as_before_others_did_say_what_they_cover(recommender):
    """Two of them, then one, then two: their notes were gone and their positions were not, so that versions
    waited for products which were there."""
    log, values, now = Log(recommender), Values(), [100.0]
    for user in range(20):
        log.add(user, recommender.dataset.items.ids_I[user % 5], user)
    for num_parts in (2, 1, 2):
        for part in range(num_parts):
            worker_of(recommender, log, values, now, part, num_parts).finish()
        assert ProductStore(values).coverage(recommender.identity) == 1.0


def test_coverage_is_the_share_of_active_users_with_products_of_all_kinds(versions):
    ids, log, values = versions[0].dataset.items.ids_I, Log(versions[0]), Values()
    for user in range(4):
        log.add(user, ids[user], 100 * user)
    config = NearlineConfig(products=("candidates",), candidates=5, active_s=250)
    worker = worker_of(versions[0], log, values, [300.0], products=["candidates"], active_s=250)
    worker.finish()

    def covered(recommender):
        kinds = kinds_of(config, recommender)
        return coverage(recommender, kinds, log, ProductStore(values), config.active_s, lambda: 300.0)

    assert covered(versions[0]) == worker.coverage() == (3, 3)
    assert covered(versions[1]) == (3, 0)
    log.add(3, ids[9], 301)
    assert covered(versions[0]) == (3, 2)


def test_products_need_what_they_are_computed_with(recommender, tmp_path):
    with pytest.raises(InputError, match="no graph is named"):
        kinds_of(NearlineConfig(products=("neighbors",)), recommender)
    with pytest.raises(InputError, match="no function makes them"):
        kinds_of(NearlineConfig(products=("instructions",)), recommender)
    plain = Recommender.load(make_run(tmp_path, "sasrec"))
    with pytest.raises(InputError, match="reads no summaries"):
        kinds_of(NearlineConfig(products=("summaries",)), plain)


def test_neighbors_are_those_of_the_graph(recommender):
    log, values = Log(recommender), Values()
    log.add(7, recommender.dataset.items.ids_I[3], 5)
    config = NearlineConfig(products=("neighbors",), candidates=4)
    neighbors = NeighborRecommender(recommender.dataset)
    kinds = kinds_of(config, recommender, neighbors=neighbors)
    NearlineWorker(recommender, kinds, log, ProductStore(values), config).finish()

    product, query = products_of(recommender, log, values, ["neighbors"])["neighbors", 7]
    (expected,) = neighbors.answer([query], 4, exclude_seen=False)
    positions = recommender.dataset.item_positions(product.arrays["items"])
    keys = recommender.dataset.items.keys.to_pylist()
    assert [keys[place] for place in positions] == [item.item_key for item in expected.items]


def scenario_a(keys, queries):
    return [{"scenario": "a"} for _ in keys]


def scenario_b(keys, queries):
    return [{"scenario": "b"} if key == "7" else None for key in keys]


def always(scenario):
    def function(keys, queries):
        return [{"scenario": scenario} for _ in keys]

    return function


always_c, always_d = always("c"), always("d")
partly_c = partial(lambda scenario, keys, queries: [{"scenario": scenario} for _ in keys], "c")


def test_candidates_of_other_settings_are_made_again_though_no_event_came(recommender):
    ids, log, values = recommender.dataset.items.ids_I, Log(recommender), Values()
    for user in range(4):
        log.add(user, ids[user], user)

    def worker(keep, search=None):
        found = worker_of(
            recommender, log, values, [0.0], products=["candidates"], candidates=keep, search=search
        )
        found.finish()
        return found

    assert worker(5).num_computed == 4
    assert worker(5).num_computed == 0
    assert worker(6).num_computed == 4
    sizes = [
        len(each.arrays["items"])
        for each, _ in products_of(recommender, log, values, ["candidates"]).values()
    ]
    assert sizes == [6] * 4
    assert worker(6, search=7).num_computed == 4
    # As many as there are, however many are asked for.
    assert worker(NUM_ITEMS).num_computed == 4
    assert worker(NUM_ITEMS + 1, search=NUM_ITEMS + 1).num_computed == 0
    assert worker(5).num_computed == 4


def test_a_worker_that_ended_early_is_not_waited_for_by_one_with_other_settings(recommender):
    ids, log, values = recommender.dataset.items.ids_I, Log(recommender), Values()
    for user in range(4):
        log.add(user, ids[user], user)
    worker_of(recommender, log, values, [0.0], candidates=5, batch_users=2).step()
    assert ProductStore(values).coverage(recommender.identity) == 0.5
    worker = worker_of(recommender, log, values, [0.0], candidates=6)
    assert worker.coverage() == (4, 0)
    worker.finish()
    assert worker.coverage() == (4, 4)
    assert ProductStore(values).coverage(recommender.identity) == 1.0


def test_a_part_that_begins_with_other_settings_leaves_the_notes_of_other_parts(recommender):
    """As a worker does that is started again after its graph has grown, while the others go on."""
    log, values = Log(recommender), Values()
    for user in range(20):
        log.add(user, recommender.dataset.items.ids_I[user % 5], user)
    for part, keep in ((0, 5), (1, 5), (1, 6)):
        worker_of(recommender, log, values, [0.0], part, 2, candidates=keep).finish()
        names = list(values.names_after(b"position:"))
        assert len(names) == 3 * (part + 1)
        assert ProductStore(values).coverage(recommender.identity) == part

    again = worker_of(recommender, log, values, [0.0], 0, 2, candidates=5)
    again.finish()
    assert (again.num_computed, again.num_valid) == (0, 0)  # it goes on from its position


def test_neighbors_of_another_graph_and_instructions_of_another_function_are_made_again(
    recommender, monkeypatch
):
    ids, log, values = recommender.dataset.items.ids_I, Log(recommender), Values()
    for user in (7, 8):
        log.add(user, ids[3], 5)
    monkeypatch.setattr(recommender, "instruction_of", lambda names: {"scenario": ord(names["scenario"])})

    def made(graph, function):
        config = NearlineConfig(
            products=("neighbors", "instructions"), candidates=4, function=f"{__name__}:{function}"
        )
        kinds = kinds_of(config, recommender, neighbors=NeighborRecommender(recommender.dataset, graph))
        worker = NearlineWorker(recommender, kinds, log, ProductStore(values), config)
        worker.finish()
        found = products_of(recommender, log, values, ["neighbors", "instructions"])
        instructions = {user: found["instructions", user][0] for user in (7, 8)}
        scenarios = {
            user: None if product is None else chr(product.arrays["scenario"][0])
            for user, product in instructions.items()
        }
        return worker.num_computed, found["neighbors", 7][0].arrays["scores"].tolist(), scenarios

    graph, other = graph_of_dataset(recommender.dataset), graph_of_dataset(recommender.dataset)
    for place in range(30):  # of the item beside another one
        other.append(np.full(2, 10**6 + place), ids[[3, 0]], np.full(2, 2_000_000_000))
    computed, near, scenarios = made(graph, "scenario_a")
    assert (computed, scenarios) == (4, {7: "a", 8: "a"})
    assert made(graph, "scenario_a")[0] == 0
    computed, near_other, _ = made(other, "scenario_a")
    assert computed == 2
    assert near_other != near
    computed, _, scenarios = made(other, "scenario_b")
    assert (computed, scenarios) == (2, {7: "b", 8: None})  # what the other one said of user 8 is gone
    # Made by one function, and an object that is called: what the setting says tells them apart.
    for function, scenario in (("always_c", "c"), ("always_d", "d"), ("partly_c", "c")):
        computed, _, scenarios = made(other, function)
        assert (computed, scenarios) == (2, {7: scenario, 8: scenario})


def test_an_event_store_is_followed_by_its_feed_and_histories_are_whole(recommender, tmp_path):
    dataset = recommender.dataset
    manifest = StoreManifest(name="data", id_kinds=dataset.manifest.id_kinds)
    by_user = open_store(tmp_path / "store", create=manifest)
    by_item = open_store(tmp_path / "store", create=manifest.model_copy(update={"by": "item"}), by="item")

    def append(user, items, first_time):
        times = np.arange(first_time, first_time + len(items))
        batch = EventBatch(np.full(len(items), user), times, np.array(items))
        append_sides([(by_user, [batch]), (by_item, [batch.reversed()])])

    known, values = int(dataset.users["user_id"][0].as_py()), Values()
    append(known, dataset.items.ids_I[:3], 2_000_000_000)
    append(10**9, np.resize(dataset.items.ids_I, 700), 1_000)
    events = UserEventsSource(recommender, by_user)
    config = NearlineConfig(products=("summaries",), debounce_s=0)
    worker = NearlineWorker(recommender, kinds_of(config, recommender), events, ProductStore(values), config)
    worker.finish()
    keys, (of_known, of_unknown) = events.queries(recommender, [known, 10**9])
    assert keys[0] == dataset.users["user_key"][0].as_py()
    assert len(of_known.history_ids) == len(dataset.history_of(keys[0])) + 3
    assert len(of_unknown.history_ids) == 700
    assert worker.num_computed == NUM_USERS + 1

    append(10**9, dataset.items.ids_I[:1], 5_000)
    assert worker.step() == 1
    assert worker.num_computed == NUM_USERS + 2
    (product,) = ProductStore(values).get_many([ProductKey("summaries", recommender.identity, 10**9)])
    _, (query,) = events.queries(recommender, [10**9])
    assert product.events_hash == events_hash(recommender, query)
    by_user.close()
    by_item.close()


EVENTS = st.tuples(st.integers(0, 4), st.integers(0, NUM_ITEMS - 1), st.integers(0, 60))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("events"), st.lists(EVENTS, min_size=1, max_size=8)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("kill"), st.tuples(st.integers(0, 3), st.booleans())),
        st.tuples(st.just("version"), st.integers(0, 1)),
    ),
    min_size=3,
    max_size=14,
)


@given(STEPS, st.sampled_from([2, 1000]))
@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_product_is_of_other_events_or_of_another_version(versions, steps, kept):
    """With late events (times come in any order), versions, kills at any write, and a feed that forgets."""
    values, now, version = KilledValues(), [0.0], 0
    log = Log(versions[0], kept)
    worker = worker_of(versions[0], log, values, now, debounce_events=2, debounce_s=3, batch_users=2)

    def again():
        return worker_of(versions[version], log, values, now, debounce_events=2, debounce_s=3, batch_users=2)

    def worked(work):
        try:
            work()
        except Killed:
            return False
        return True

    for what, how in steps:
        if what == "events":
            for user, item, time_s in how:
                log.add(user, int(versions[0].dataset.items.ids_I[item]), time_s)
        elif what == "step":
            for _ in range(how):
                now[0] += 1.0
                if not worked(worker.step):
                    worker = again()
        elif what == "kill":
            values.kills.append(how)
        else:
            version = how
            worker = again()
        check_all(versions, log, values)
    values.kills.clear()
    worker = again()
    worker.finish()
    for product, query in products_of(versions[version], log, values).values():
        assert product is not None
        assert stands_for(versions[version], product, query)


def check_all(versions, log, values):
    """A product that stands for the events of now is what would be computed of them now."""
    for recommender in versions:
        for (kind, _), (product, query) in products_of(recommender, log, values).items():
            if product is None or not stands_for(recommender, product, query):
                continue
            if kind == "summaries":
                (expected,) = recommender.summarize([query])
                np.testing.assert_array_equal(product.arrays["hashes"], expected.hashes_F)
                np.testing.assert_allclose(product.arrays["vectors"], expected.vectors_FKD, atol=1e-5)
            else:
                expected = recommender.rank_catalog([query], 5)
                np.testing.assert_allclose(product.arrays["scores"], expected.scores_BK[0], atol=1e-3)


@given(st.integers(0, 6), st.booleans())
@examples(14)
def test_a_kill_at_any_write_loses_nothing_and_repeats_one_batch(versions, number, is_after):
    recommender, log, values, now = versions[0], Log(versions[0]), KilledValues(), [0.0]
    for place in range(24):
        log.add(place % 8, int(recommender.dataset.items.ids_I[place]), place)
    values.kills.append((number, is_after))
    first = worker_of(recommender, log, values, now, batch_users=2)
    with suppress(Killed):
        first.finish()
    computed = first.num_computed
    second = worker_of(recommender, log, values, now, batch_users=2)
    second.finish()
    assert 16 <= computed + second.num_computed <= 16 + 2 * 2  # two kinds of two users
    for product, query in products_of(recommender, log, values).values():
        assert product is not None
        assert stands_for(recommender, product, query)
