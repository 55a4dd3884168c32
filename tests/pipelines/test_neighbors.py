"""Recommending by neighbors, held to brute force on a small data set."""

from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate_recommender import evaluate_neighbors
from rayrec.pipelines.evaluation.lists import (
    CO_VISITATION,
    CO_VISITATION_IN_TIME,
    CO_VISITATION_UNMASKED,
    POPULARITY,
    POPULARITY_UNMASKED,
    REPEATS,
    SWING,
    SWING_UNMASKED,
)
from rayrec.pipelines.evaluation.rankers import newest_first
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.base.event_times import TIMES
from rayrec.samples.base.jagged import list_values
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import HISTORY_FILE
from rayrec.samples.graph import ANY_TIME, graph_of_dataset
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import small_dataset, without_history_times
from tests.helpers.runs import MODELS
from tests.samples.graph.brute_force import Event, co_visits


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return small_dataset(tmp_path_factory.mktemp("neighbors"))


def events_of(dataset: Dataset, *names: str) -> list[Event]:
    found = []
    for name in names:
        table = pq.read_table(dataset.root / name)
        users = table["user_id"] if "user_id" in table.column_names else dataset.users["user_id"]
        items_N, offsets_R1 = list_values(table["item_ids"])
        times_N, _ = list_values(table[TIMES])
        users_N = np.repeat(users.to_numpy(), np.diff(offsets_R1))
        found += map(Event, users_N.tolist(), items_N.tolist(), times_N.tolist())
    return found


def expected_recall(dataset: Dataset, events: list[Event], in_time: bool, k: int = 10) -> float:
    rows, hits = dataset.evaluation_rows("test"), []
    times_B = dataset.target_times("test").tolist() if in_time else [ANY_TIME] * len(rows)
    for row, before in enumerate(times_B):
        history = rows.history_ids_N[rows.offsets_B1[row] : rows.offsets_B1[row + 1]].tolist()
        scores = co_visits(events, history, before, last=20, decay=0.8, window=5, most=200)
        target = int(rows.targets_B[row])
        unseen = sorted((score for item, score in scores.items() if item not in history), reverse=True)
        hits.append(target in scores and scores[target] >= unseen[min(k, len(unseen)) - 1])
    return float(np.mean(hits))


def test_neighbors_are_judged_with_training_events_and_with_what_was_known_at_the_time(dataset):
    report = evaluate_neighbors(dataset, "test", batch_size=7)

    neighbors = [CO_VISITATION, CO_VISITATION_UNMASKED, SWING, SWING_UNMASKED, CO_VISITATION_IN_TIME]
    assert list(report.results) == [*neighbors, POPULARITY, POPULARITY_UNMASKED, REPEATS]
    training, everything = events_of(dataset, *dataset.train_files), events_of(dataset, HISTORY_FILE)
    assert len(training) < len(everything)
    for name, events, in_time in (
        (CO_VISITATION, training, False),
        (CO_VISITATION_IN_TIME, everything, True),
    ):
        found = report.results[name]["recall@10"].value
        # Equal scores are put in an order that a hash gives.
        assert found == pytest.approx(expected_recall(dataset, events, in_time), abs=0.08)
    assert all(0 <= metrics["recall@10"].value <= 1 for metrics in report.results.values())


def test_items_of_the_history_are_judged_newest_first(dataset):
    rows = dataset.evaluation_rows("test")
    histories = [rows.history_ids_N[low:high].tolist() for low, high in pairwise(rows.offsets_B1)]
    newest = [list(dict.fromkeys(reversed(history)))[:5] for history in histories]

    report = evaluate_neighbors(dataset, "test", batch_size=7)

    hits = [target in items for target, items in zip(rows.targets_B.tolist(), newest, strict=True)]
    assert report.results[REPEATS]["recall@5"].value == pytest.approx(np.mean(hits))


def test_an_item_that_is_met_again_stands_where_it_was_met_last():
    items_BE = np.array([[4, 2, 4, 0, -1], [3, -1, 3, 3, 7], [-1, -1, -1, -1, -1]])

    found = newest_first(items_BE, 3)

    assert found.items_BK.tolist() == [[0, 4, 2], [7, 3, -1], [-1, -1, -1]]
    assert found.scores_BK.tolist() == [[0, -1, -2], [0, -1, -np.inf], [-np.inf] * 3]
    assert newest_first(items_BE, 7).items_BK[0].tolist() == [0, 4, 2, -1, -1, -1, -1]
    assert newest_first(items_BE[:, :0], 2).items_BK.tolist() == [[-1, -1]] * 3


def test_what_users_are_judged_by_does_not_depend_on_the_size_of_batches(dataset):
    small, large = (evaluate_neighbors(dataset, "test", batch_size=size).ranking for size in (7, 512))

    assert small is not None
    assert large is not None
    assert small.positions.header == large.positions.header


def test_a_target_and_what_comes_after_it_do_not_change_what_was_known_at_its_time(dataset):
    graph = graph_of_dataset(dataset, "all")
    rows, times_B = dataset.evaluation_rows("test"), dataset.target_times("test")
    history = rows.history_ids_N[: rows.offsets_B1[1]]
    asked = Query(history)
    before = {event for event in events_of(dataset, HISTORY_FILE) if event.time < times_B[0]}
    known = NeighborRecommender(dataset, graph_of_dataset(dataset, "all"))
    only_before = NeighborRecommender(dataset)
    only_before.graph = type(graph)(graph.config)
    only_before.graph.append(*(np.array([event[n] for event in before]) for n in range(3)))

    (later,) = only_before.answer([asked], 10)
    samples = next(iter(_samples(dataset)))
    in_time = known.recommend_samples(samples, 10, times_B=times_B[: samples.num_rows])

    keys = [dataset.items.keys[int(item)].as_py() for item in in_time.items_BK[0] if item >= 0]
    assert keys == [item.item_key for item in later.items]


def _samples(dataset):
    from rayrec.samples.reading.reader import evaluation_batches

    return evaluation_batches(dataset, "test", 5)


def test_answers_keep_to_what_may_be_shown_and_leave_out_what_was_seen(dataset):
    recommender = NeighborRecommender(dataset)
    user = dataset.users["user_key"][0].as_py()
    query = recommender.query_of_user(user)
    assert query is not None
    for method in ("co_visitation", "swing"):
        (free,) = recommender.answer([query], 8, method)
        assert free.items
        seen = {dataset.items.keys[int(p)].as_py() for p in dataset.item_positions(query.history_ids)}
        assert not seen & {item.item_key for item in free.items}
        allowed_I = np.zeros(len(dataset.items), np.bool_)
        third = dataset.position_by_key(free.items[2].item_key)
        allowed_I[third] = True

        kept = recommender.answer([Query(query.history_ids, allowed_I=allowed_I), query], 8, method)

        assert [item.item_key for item in kept[0].items] == [free.items[2].item_key]
        assert [item.item_key for item in kept[1].items] == [item.item_key for item in free.items]
    assert recommender.query_of_user("nobody") is None
    (nothing,) = recommender.answer([Query(np.zeros(0, np.int64))], 5)
    assert nothing.items == []


def test_without_times_the_order_of_histories_stands_for_them(tmp_path):
    dataset = without_history_times(small_dataset(tmp_path))

    report = evaluate_neighbors(dataset, "test")

    assert CO_VISITATION in report.results
    assert CO_VISITATION_IN_TIME not in report.results


def test_an_order_of_events_is_no_time_to_compare_users_by(tmp_path):
    lines = [
        " ".join(map(str, [user, *(1 + (user + step) % 9 for step in range(6))])) for user in range(1, 9)
    ]
    (tmp_path / "Shop.txt").write_text("\n".join(lines))
    prepare(tmp_path / "Shop.txt", tmp_path / "data", PrepareConfig())
    dataset = Dataset.open(tmp_path / "data")

    report = evaluate_neighbors(dataset, "test")

    assert dataset.has_times()
    assert dataset.has_order_alone()
    assert REPEATS in report.results
    assert CO_VISITATION_IN_TIME not in report.results
    for model, num_notes in (("sasrec", 0), ("hstu", 1)):
        config = RunConfig.parse({"data": {"path": str(dataset.root)}, "model": MODELS[model]})
        notes = assemble(config).task.notes()
        assert len(notes) == num_notes
        assert all("an order of events alone" in note for note in notes)
