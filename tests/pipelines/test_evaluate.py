import json

import numpy as np
import pytest

from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.evaluate_recommender import evaluate_neighbors, evaluate_recommender
from rayrec.pipelines.evaluation.lists import (
    CO_VISITATION,
    CO_VISITATION_UNMASKED,
    MODEL,
    MODEL_UNMASKED,
    POPULARITY,
    POPULARITY_UNMASKED,
    SWING,
    SWING_UNMASKED,
)
from rayrec.pipelines.evaluation.rankers import Popularity
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, metric_names, target_places, user_scores
from rayrec.pipelines.tasks.next_item import check_split
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import write_source
from tests.helpers.runs import NUM_USERS, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"))


def test_every_user_is_ranked_over_all_items_as_single_requests_would_be(run):
    recommender = Recommender.load(run)
    dataset = recommender.dataset

    report = evaluate_recommender(recommender, "test", batch_size=7)

    rows = dataset.evaluation_rows("test")
    assert report.count == len(rows)
    for name, exclude_seen in ((MODEL, True), (MODEL_UNMASKED, False)):
        recalls, gains = [], []
        for user in range(len(rows)):
            history = rows.history_ids_N[rows.offsets_B1[user] : rows.offsets_B1[user + 1]]
            target = int(dataset.item_positions(rows.targets_B[user : user + 1])[0])
            key = dataset.items.keys[target].as_py()
            (answers,) = recommender.recommend([Query(history)], LIST_LENGTH, exclude_seen)
            keys = [answer.item_key for answer in answers]
            place = keys.index(key) if key in keys else None
            recalls.append(place is not None and place < 10)
            gains.append(1 / np.log2(2 + place) if place is not None and place < 10 else 0.0)
        assert report.results[name]["recall@10"].value == pytest.approx(np.mean(recalls))
        assert report.results[name]["ndcg@10"].value == pytest.approx(np.mean(gains))


def test_a_sample_is_the_first_users_and_no_others_are_read(run, monkeypatch):
    recommender = Recommender.load(run)
    dataset = recommender.dataset
    places, asked = {}, recommender.recommend_samples

    def recommend(samples, *args, **options):
        found = asked(samples, *args, **options)
        if options["exclude_seen"]:
            targets_B = dataset.item_positions(samples.targets_B)
            users = zip(samples.user_ids_B.tolist(), target_places(found.items_BK, targets_B), strict=True)
            places.update(users)
        return found

    monkeypatch.setattr(recommender, "recommend_samples", recommend)
    whole = evaluate_recommender(recommender, "test", batch_size=7)
    of_all = dict(places)
    places.clear()
    monkeypatch.setattr(Dataset, "evaluation_rows", None)
    sample = evaluate_recommender(recommender, "test", batch_size=4, max_users=10)

    assert (sample.count, whole.count) == (10, len(of_all))
    assert places == dict(list(of_all.items())[:10])
    recalls = [place < 10 for place in places.values()]
    assert sample.results[MODEL]["recall@10"].value == pytest.approx(np.mean(recalls))
    width = {
        report.count: report.results[MODEL]["recall@10"].high - report.results[MODEL]["recall@10"].low
        for report in (sample, whole)
    }
    assert width[10] > width[len(of_all)]
    assert evaluate_recommender(recommender, "test", max_users=10_000).count == len(of_all)


def test_the_report_names_everything_and_is_written_beside_the_run(run):
    seen = []

    report = evaluate(run, "valid", batch_size=16, on_batch=lambda done, total: seen.append((done, total)))

    neighbors = [CO_VISITATION, CO_VISITATION_UNMASKED, SWING, SWING_UNMASKED]
    baselines = [POPULARITY, POPULARITY_UNMASKED, *neighbors]
    assert list(report.results) == [MODEL, MODEL_UNMASKED, *baselines]
    for metrics in report.results.values():
        assert set(metrics) == set(metric_names(500))  # of 30 items, any list is whole
        for estimate in metrics.values():
            assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert report.snapshot_step == 3  # 40 users in batches of 16
    assert seen[-1] == (report.count, report.count)
    assert report.count <= NUM_USERS
    written = json.loads((run / "evaluation-valid.json").read_text())
    assert written == report.to_json()
    assert written["results"][MODEL]["ndcg@10"]["value"] == report.results[MODEL]["ndcg@10"].value


def test_a_sample_does_not_take_the_place_of_all(run):
    whole = evaluate(run, "valid")
    sample = evaluate(run, "valid", max_users=5)

    assert sample.count == 5 < whole.count
    assert json.loads((run / "evaluation-valid.json").read_text()) == whole.to_json()
    assert json.loads((run / "evaluation-valid-first-5.json").read_text()) == sample.to_json()


def test_targets_in_a_history_are_counted_and_behaviors_are_slices(tmp_path):
    """Of every fourth user, the last event is with the item of the first."""
    events, behaviors = [], []
    for user in range(12):
        items = [user % 5, 5 + user % 3, 8 + user % 2, user % 5 if user % 4 == 0 else 10]
        events += [(f"u{user}", f"i{item}", 100 * place) for place, item in enumerate(items)]
        behaviors += ["VIEW", "VIEW", "VIEW", "LIKE" if user < 3 else "VIEW"]
    source = write_source(tmp_path / "source", events, behavior=behaviors)
    prepare(source, tmp_path / "data", PrepareConfig(allow=frozenset({"short-users", "cold-items"})))

    report = evaluate_neighbors(Dataset.open(tmp_path / "data"), "test")

    found = report.to_json()
    assert (found["num_users"], found["num_repeats"]) == (12, 3)
    assert found["lists"][POPULARITY]["seen_items"] == "left out"
    assert found["lists"][POPULARITY_UNMASKED]["seen_items"] == "kept"
    recalls = [found["results"][name]["recall@500"]["value"] for name in (POPULARITY, POPULARITY_UNMASKED)]
    assert recalls == [0.75, 1.0]  # of a catalog of eleven items, every item is in a list
    users = {name: each["num_users"] for name, each in found["slices"].items()}
    assert (users["behavior LIKE"], users["behavior VIEW"]) == (3, 9)
    assert users["history of 1 to 4"] == 12
    assert users["unseen items"] == 9  # nobody had item 10 before
    assert report.ranking is not None
    assert report.ranking.positions.header.behaviors == Dataset.open(tmp_path / "data").manifest.behaviors


def test_masking_seen_items_never_hurts_users_who_see_nothing_twice(run):
    report = evaluate_recommender(Recommender.load(run), "test")

    pairs = (MODEL, MODEL_UNMASKED), (POPULARITY, POPULARITY_UNMASKED), (SWING, SWING_UNMASKED)
    for masked, unmasked in (*pairs, (CO_VISITATION, CO_VISITATION_UNMASKED)):
        for metric, estimate in report.results[masked].items():
            assert estimate.value >= report.results[unmasked][metric].value


def test_a_split_that_does_not_exist_is_refused(run):
    with pytest.raises(InputError, match="there is no split 'train'"):
        evaluate(run, "train")  # type: ignore[arg-type]


def test_a_split_without_users_is_refused(tmp_path):
    """Split by time, nobody may have an event in the time of a split."""
    events = [(f"u{user}", f"i{(user + place) % 5}", place) for user in range(9) for place in range(4)]
    source = write_source(tmp_path / "source", [*events, ("u0", "i4", 100)])
    prepare(source, tmp_path / "data", PrepareConfig(split="time", valid_start=50, test_start=90))

    with pytest.raises(InputError, match="no user has an item to predict in the split 'valid'"):
        check_split(Dataset.open(tmp_path / "data"), "valid")


def test_popularity_ranks_by_training_events_without_what_was_seen():
    popularity = Popularity(np.array([5, 9, 0, 7]))

    ranked = popularity.recommend(np.array([[1, -1], [3, 0], [-1, -1]]))

    assert ranked.items_BK.tolist() == [[3, 0, 2, -1], [1, 2, -1, -1], [1, 3, 0, 2]]
    assert ranked.scores_BK.tolist() == [[7, 5, 0, -np.inf], [9, 0, -np.inf, -np.inf], [9, 7, 5, 0]]


def test_popularity_lists_stay_full_however_much_was_seen():
    """The most popular items are the ones that were seen."""
    counts_I = np.arange(200)[::-1]
    seen_BE = np.array([np.arange(120), np.full(120, -1)])

    items_BK = Popularity(counts_I).recommend(seen_BE).items_BK

    assert items_BK.shape == (2, LIST_LENGTH)
    assert items_BK[0].tolist() == list(range(120, 170))
    assert items_BK[1].tolist() == list(range(50))


def test_popularity_of_a_small_catalog_counts_misses_as_misses():
    ranked = Popularity(np.array([3, 2, 1])).recommend(np.array([[2]]))

    places_U = target_places(ranked.items_BK, np.array([2]))

    assert user_scores(places_U)["recall@50"].tolist() == [0.0]
