"""Runs that are judged on what a later data set holds out, as on the next day's events."""

from __future__ import annotations

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.evaluate_recommender import evaluate_recommender
from rayrec.pipelines.evaluation.held_out import HeldOut
from rayrec.pipelines.evaluation.lists import CO_VISITATION, MODEL, POPULARITY
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.scorer import Scorer
from rayrec.pipelines.metrics.positions import Positions
from rayrec.pipelines.metrics.response_metrics import summarize
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.impressions.config import ImpressionsConfig
from rayrec.samples.impressions.dataset import ImpressionDataset
from rayrec.samples.impressions.prepare import prepare_impressions
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import random_events, without_history_times, write_source
from tests.helpers.impressions import ctr_config
from tests.helpers.runs import NUM_ITEMS, NUM_USERS, make_run, trained

NEW_ITEMS = 3


@pytest.fixture(scope="module", params=["sasrec", "prefix"])
def run(request, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp(request.param), request.param)


def log_of(folder, events, title="Title of {}", **labels):
    """A data set of such events, with the items of `make_run` and some that came later."""
    keys = [f"i{item}" for item in range(NUM_ITEMS + NEW_ITEMS)]
    items = {"item_id": keys, "title": [title.format(key) for key in keys]}
    source = write_source(folder / "source", events, items=items, **labels)
    config = PrepareConfig(num_partitions=3, allow=frozenset({"short-users", "cold-items"}))
    prepare(source, folder / "data", config)
    return Dataset.open(folder / "data")


def next_day(num_users=NUM_USERS):
    """What users did by then, one more event of each, some with items that are new, and a user who is."""
    events = random_events(num_users, NUM_ITEMS)
    met = {user: {item for other, item, _ in events if other == user} for user, _, _ in events}
    for place, (user, items) in enumerate(met.items()):
        others = [f"i{item}" for item in range(NUM_ITEMS + NEW_ITEMS) if f"i{item}" not in items]
        events.append((user, others[-1 - place % 5], 2000 + place))
    return [*events, *(("new", f"i{item}", 2000 + item) for item in range(4))]


def test_the_next_day_is_answered_from_the_catalog_that_was_trained(run, tmp_path):
    later = log_of(tmp_path, next_day())
    recommender = Recommender.load(run)

    report = evaluate(run, on=later.root)

    rows, keys = later.evaluation_rows("test"), dict(zip(*columns(later), strict=True))
    places, is_known = [], []
    for user, target in enumerate(rows.targets_B.tolist()):
        history = rows.history_ids_N[rows.offsets_B1[user] : rows.offsets_B1[user + 1]]
        (answers,) = recommender.recommend([Query(history, int(rows.user_ids_B[user]))], NUM_ITEMS)
        found = [answer.item_key for answer in answers]
        places.append(found.index(keys[target]) if keys[target] in found else 1000)
        is_known.append(recommender.dataset.position_by_key(keys[target]) is not None)
    assert report.count == len(rows) == NUM_USERS + 1
    assert 0 < np.sum(is_known) < len(rows)
    assert report.results[MODEL]["recall@10"].value == pytest.approx(np.mean(np.array(places) < 10))
    assert report.results[MODEL]["recall@500"].value == pytest.approx(np.mean(is_known))
    for baseline in (POPULARITY, CO_VISITATION):
        assert 0 < report.results[baseline]["recall@10"].value < 1

    positions = Positions.read(run / report.positions_file)
    header, users = positions.header, positions.users
    assert (header.fingerprint, header.num_items) == (later.fingerprint, NUM_ITEMS + NEW_ITEMS)
    assert (users.train_counts_U[~np.array(is_known)] == 0).all()
    assert report.to_json()["on"] == str(later.root)
    name = f"evaluation-test-on-{later.fingerprint[:8]}"
    assert (run / f"{name}.json").is_file()
    assert report.positions_file.startswith(name)
    assert not (run / "evaluation-test.json").exists()


def columns(dataset):
    return dataset.items.ids_I.tolist(), dataset.items.keys.to_pylist()


def test_a_data_set_of_its_own_is_judged_as_ever(run):
    own = run.parent / "data"
    assert evaluate(run, on=own).results == evaluate(run).results


def test_a_sample_of_users_is_the_same_one(run, tmp_path):
    later = log_of(tmp_path, next_day())
    recommender = Recommender.load(run)

    sample = evaluate_recommender(recommender, "test", batch_size=4, max_users=10, on=later)

    assert sample.count == 10
    whole = evaluate_recommender(recommender, "test", on=later).ranking.positions
    found = sample.ranking.positions
    assert found.users.user_ids_U.tolist() == whole.users.user_ids_U[:10].tolist()
    assert found.places[MODEL].tolist() == whole.places[MODEL][:10].tolist()


@pytest.fixture(scope="module")
def sasrec(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("sasrec"))


def test_users_whose_target_was_trained_on_are_left_out(sasrec, tmp_path):
    """Of half of the users, the log ends three events earlier."""
    learned, events = Dataset.open(sasrec.parent / "data"), next_day()
    by_user = {user: [each for each in events if each[0] == user] for user, _, _ in events}
    is_cut = {user: user != "new" and int(user[1:]) % 2 for user in by_user}
    later = log_of(
        tmp_path, [each for user, mine in by_user.items() for each in mine[: -3 * is_cut[user] or None]]
    )

    report = evaluate_recommender(Recommender.load(sasrec), "test", on=later)

    keys, times = dict(zip(*columns(learned), strict=True)), {each[:2]: each[2] for each in events}
    trained = [(user, keys[item]) for user, item in pairs_of(*learned.train_events())]
    user_keys = dict(zip(*(later.users[name].to_pylist() for name in ("user_id", "user_key")), strict=True))
    rows, kept = later.evaluation_rows("test"), []
    for user, target in pairs_of(rows.user_ids_B, rows.targets_B):
        key = user_keys[user]
        asked = (key, dict(zip(*columns(later), strict=True))[target])
        newest = max([times[key, item] for other, item in trained if user_keys.get(other) == key], default=0)
        if newest < times[asked] or (newest == times[asked] and (user, asked[1]) not in trained):
            kept.append(user)
    assert report.ranking.positions.users.user_ids_U.tolist() == kept
    assert report.ranking.num_left_out == len(rows) - len(kept) > 3
    assert {user for user, key in user_keys.items() if not is_cut[key]} <= set(kept)
    assert report.to_json()["num_left_out"] == report.ranking.num_left_out


def pairs_of(*columns):
    return list(zip(*(each.tolist() for each in columns), strict=True))


@pytest.mark.parametrize("has_times", [True, False])
def test_an_item_that_is_met_again_is_told_from_the_event_that_was_trained_on(has_times, tmp_path):
    """By its time; without times it might be the same event."""
    log = [(user, f"i{item}", 100 * item) for user in ("a", "b") for item in range(4)]
    learned = log_of(tmp_path / "learned", log)
    later = log_of(tmp_path / "later", [*log, ("a", "i0", 2000), ("b", "i5", 2000)])
    if not has_times:
        learned = without_history_times(learned)

    held_out = HeldOut(later, "test", learned=learned)

    known = [later.user_by_key(user) for user in (("a", "b") if has_times else ("b",))]
    assert held_out.num_left_out == 2 - len(known)
    (batch,) = held_out.batches(8)
    assert sorted(batch.user_ids_B.tolist()) == sorted(known)
    assert held_out.target_times_U.tolist() == [2000] * len(known)


def test_of_events_at_one_time_the_trained_one_alone_is_known(tmp_path):
    """Times are often days."""
    log = [("a", "i0", 100), ("a", "i1", 200), ("a", "i2", 300), ("a", "i3", 400)]
    learned = log_of(tmp_path / "learned", log)  # of which i0 and i1 are trained on
    same_day = log_of(tmp_path / "same", [("a", "i0", 100), ("a", "i4", 200), ("a", "i5", 200)])
    trained_on = log_of(tmp_path / "trained", [("a", "i2", 50), ("a", "i3", 60), ("a", "i1", 200)])
    older = log_of(tmp_path / "older", [("a", "i2", 50), ("a", "i3", 60), ("a", "i4", 150)])

    left_out = [HeldOut(each, "test", learned=learned).num_left_out for each in (same_day, trained_on, older)]

    assert left_out == [0, 1, 1]
    with pytest.raises(InputError, match=r"of all 1 users of the split 'test' the target or later events"):
        HeldOut(older, "test", learned=learned).check()


def test_events_of_another_log_are_refused(sasrec, tmp_path):
    recommender, events = Recommender.load(sasrec), next_day()
    others = {
        "other titles": log_of(tmp_path / "titles", events, title="A film called {}"),
        "of ids that are": log_of(
            tmp_path / "users", [(place, *event[1:]) for place, event in enumerate(events)]
        ),
    }
    for message, later in others.items():
        with pytest.raises(InputError, match=rf"^run: is .*{message}.*judge it on a later data set"):
            evaluate_recommender(recommender, "test", on=later)


def test_labels_that_mean_something_else_are_refused(tmp_path):
    run = make_run(tmp_path, "lazy", labeled=True, event_labels=["behavior"])
    events = next_day()

    def labeled(name, behaviors):
        chosen = [behaviors[place % len(behaviors)] for place in range(len(events))]
        return log_of(tmp_path / name, events, behavior=chosen, scenario=["home"] * len(events))

    with pytest.raises(InputError, match=r"whose behavior is one of LIKE, SHARE, VIEW, and in .* BUY, LIKE"):
        evaluate(run, on=labeled("other", ["LIKE", "BUY", "VIEW"]).root)
    with pytest.raises(InputError, match=r"its events have no behavior, which the model needs"):
        evaluate(run, on=log_of(tmp_path / "without", events).root)
    assert evaluate(run, on=labeled("same", ["LIKE", "SHARE", "VIEW"]).root).count == NUM_USERS + 1


def test_a_ranking_stage_stays_with_its_own_events(sasrec, tmp_path):
    with pytest.raises(InputError, match=r"leave it or --on out"):
        evaluate(sasrec, on=tmp_path, ranking=RankingConfig(run=str(sasrec)))


def impressions_of(folder, days, seed, **settings):
    """Even items are clicked on; a thousand impressions, evenly over such days."""
    random = np.random.default_rng(seed)
    items_R = random.integers(20, size=1000)
    columns = {
        "click": ((items_R % 2 == 0) ^ (random.random(1000) < 0.1)).astype(np.int64),
        "price": random.random(1000),
        "user": random.integers(12, size=1000),
        "item": items_R,
        "at": np.linspace(86_400 * days[0], 86_400 * days[1] - 1, 1000).astype(np.int64),
    }
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "source.parquet")
    given = {
        "layout": "table",
        "labels": ["click"],
        "numbers": ["price"],
        "ids": {"user": "user", "item": "item"},
        "group": "user",
        "time": "at",
        "time_unit": "s",
    }
    prepare_impressions(folder / "source.parquet", folder / "data", ImpressionsConfig.parse(given | settings))
    return ImpressionDataset.open(folder / "data")


@pytest.fixture(scope="module")
def ranking_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranking")
    dataset = impressions_of(folder / "monday", (10, 11), seed=0)
    return trained(ctr_config(dataset, training={"batch_size": 4}), folder / "run")


def test_a_ranking_model_is_judged_on_the_impressions_of_the_next_day(ranking_run, tmp_path):
    tuesday = impressions_of(tmp_path / "tuesday", (11, 12), seed=1)

    report = evaluate(ranking_run, on=tuesday.root)

    scorer = Scorer.load(ranking_run)
    table = tuesday.split_table("test", [*scorer.features.scored_columns.names, "click"]).combine_chunks()
    (rows,) = table.drop_columns("click").to_batches()
    predicted_R = scorer.score(RowBatch(np.arange(len(table)), rows))[:, 0]
    expected = summarize(table["click"].to_numpy().astype(np.float32), predicted_R, None)
    assert report.count == len(table)
    assert report.results["model"]["auc"].value == pytest.approx(expected["auc"].value)
    assert expected["auc"].value > 0.7
    constant = report.results["rate of training"]["log_loss"].value
    rate = scorer.task.dataset.manifest
    rate = rate.positives["click"]["train"] / rate.known["click"]["train"]
    clicks_R = table["click"].to_numpy()
    assert constant == pytest.approx(-np.mean(np.log(np.where(clicks_R == 1, rate, 1 - rate))))
    assert (ranking_run / f"evaluation-test-on-{tuesday.fingerprint[:8]}.json").is_file()


def test_impressions_that_may_have_been_trained_on_are_refused_or_named(ranking_run, tmp_path, caplog):
    sunday = impressions_of(tmp_path / "sunday", (9, 10), seed=2)
    with pytest.raises(
        InputError,
        match=r"trained on rows until 1970-01-11T.*, and the test rows .* begin at 1970-01-10T.* --split",
    ):
        evaluate(ranking_run, on=sunday.root)
    both_days = impressions_of(
        tmp_path / "both",
        (10, 12),
        seed=3,
        split="time",
        valid_start="1970-01-12",
        test_start="1970-01-12T12:00:00",
    )
    assert evaluate(ranking_run, "valid", on=both_days.root).count == 250

    drawn = impressions_of(tmp_path / "drawn", (11, 12), seed=4, split="random")
    assert not caplog.records
    assert evaluate(ranking_run, on=drawn.root).count
    assert "nothing says whether the model was trained on rows" in caplog.text


def test_impressions_of_other_columns_are_refused(ranking_run, tmp_path):
    other = impressions_of(tmp_path / "other", (11, 12), seed=5, numbers=[])

    with pytest.raises(InputError, match=r"^run: was trained on the numbers price, and .* has none: "):
        evaluate(ranking_run, on=other.root)


def test_what_is_no_data_set_of_the_kind_is_refused(ranking_run, sasrec, tmp_path):
    shutil.copytree(sasrec.parent / "data", tmp_path / "data")
    with pytest.raises(InputError, match=r"data: .*impressions"):
        evaluate(ranking_run, on=tmp_path / "data")
    with pytest.raises(InputError, match=r"gone: no such data set"):
        evaluate(sasrec, on=tmp_path / "gone")
