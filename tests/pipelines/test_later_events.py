"""Runs that are judged on what a later data set holds out, as on the next day's events."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.models.tokenizers.extend import NewItems, extend_registry
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans
from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.compare import Evaluated, Sources, compare, evaluated
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.evaluate_recommender import evaluate_recommender
from rayrec.pipelines.evaluation.held_out import HeldOut
from rayrec.pipelines.evaluation.lists import MODEL, POPULARITY
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.scorer import Scorer
from rayrec.pipelines.metrics.positions import Positions
from rayrec.pipelines.metrics.response_metrics import summarize
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.tasks.assembly import open_task
from rayrec.pipelines.tasks.features import SEMANTIC_IDS_FOLDER
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


def next_day():
    """What users did by then, two more events of each, some with items that are new, and a user who is."""
    events = random_events(NUM_USERS, NUM_ITEMS)
    met = {user: {item for other, item, _ in events if other == user} for user, _, _ in events}
    for place, (user, items) in enumerate(met.items()):
        others = [f"i{item}" for item in range(NUM_ITEMS + NEW_ITEMS) if f"i{item}" not in items]
        events += [(user, others[-1 - place % 3], 2000), (user, others[-2 - place % 5], 2001)]
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
    in_histories = recommender.dataset.item_positions(rows.history_ids_N)
    assert (in_histories < 0).any(), "there are new items in histories, too"
    assert report.results[MODEL]["recall@10"].value == pytest.approx(np.mean(np.array(places) < 10))
    assert report.results[MODEL]["recall@500"].value == pytest.approx(np.mean(is_known))
    trained, counts_I = recommender.dataset, recommender.dataset.items.train_counts_I
    popular = [trained.items.keys[place].as_py() for place in np.argsort(-counts_I, kind="stable")]
    hits = []
    for user, target in enumerate(rows.targets_B.tolist()):
        history = rows.history_ids_N[rows.offsets_B1[user] : rows.offsets_B1[user + 1]].tolist()
        met = {keys[item] for item in history}
        hits.append(keys[target] in [key for key in popular if key not in met][:10])
    assert report.results[POPULARITY]["recall@10"].value == pytest.approx(np.mean(hits))

    positions = Positions.read(run / report.positions_file)
    header, users = positions.header, positions.users
    assert (header.fingerprint, header.num_items) == (later.fingerprint, NUM_ITEMS + NEW_ITEMS)
    assert (users.train_counts_U[~np.array(is_known)] == 0).all()
    assert report.to_json()["on"] == str(later.root)
    name = f"evaluation-test-on-{later.fingerprint[:8]}"
    assert (run / f"{name}.json").is_file()
    assert report.positions_file.startswith(name)
    assert not (run / "evaluation-test.json").exists()


def warnings_of(caplog):
    return [record for record in caplog.records if record.levelname == "WARNING"]


def columns(dataset):
    return dataset.items.ids_I.tolist(), dataset.items.keys.to_pylist()


def test_a_data_set_of_its_own_is_judged_as_ever(run, caplog):
    own = run.parent / "data"
    assert evaluate(run, on=own).results == evaluate(run).results
    assert f"run: was trained on {own} itself; all users of the split are judged" in caplog.text


def test_a_sample_of_users_is_the_same_one(run, tmp_path):
    later = log_of(tmp_path, some_are_away())
    recommender = Recommender.load(run)

    sample = evaluate_recommender(recommender, "test", batch_size=4, max_users=10, on=later).ranking

    whole = evaluate_recommender(recommender, "test", on=later).ranking.positions
    first = later.evaluation_rows("test", max_rows=10).user_ids_B.tolist()
    kept = [user for user in whole.users.user_ids_U.tolist() if user in first]
    assert sample.positions.users.user_ids_U.tolist() == kept
    assert len(kept) == 10 - sample.num_left_out < 10
    assert sample.positions.places[MODEL].tolist() == whole.places[MODEL][: len(kept)].tolist()


def some_are_away():
    """The log of a day on which every third user comes back, to an item that he has met before."""
    events = random_events(NUM_USERS, NUM_ITEMS)
    first = {user: item for user, item, _ in reversed(events)}
    return [*events, *((user, first[user], 2000) for user in list(first)[::3])]


@pytest.fixture(scope="module")
def sasrec(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("sasrec"))


def test_events_that_are_no_later_are_left_out_whose_ever_they_are(sasrec, tmp_path):
    """Who did not come back is held out by an old event: others' later ones were trained on."""
    events = some_are_away()
    later = log_of(tmp_path, events)

    report = evaluate_recommender(Recommender.load(sasrec), "test", batch_size=7, on=later)

    back = {later.user_by_key(user) for user, _, time in events if time == 2000}
    positions = report.ranking.positions
    assert set(positions.users.user_ids_U.tolist()) == back
    assert report.count == len(back) == report.ranking.num_repeats
    assert report.ranking.num_left_out == later.num_evaluated("test") - len(back)
    assert report.to_json()["num_left_out"] == report.ranking.num_left_out
    assert positions.header.after == max(time for _, _, time in random_events(NUM_USERS, NUM_ITEMS))

    own = Dataset.open(sasrec.parent / "data")
    with pytest.raises(InputError, match=r"of \d+ events that the split 'test' holds out, none is later"):
        HeldOut(later, "test", after=2000).check()
    assert own.newest_time() == positions.header.after < later.newest_time() == 2000


def test_users_who_are_left_out_take_what_belongs_to_them_along(tmp_path):
    """Histories, their times and labels, and labels of targets."""
    events = some_are_away()
    labels = [("VIEW", "LIKE", "BUY")[place % 3] for place in range(len(events))]
    later = log_of(tmp_path, events, behavior=labels)
    held_out = HeldOut(later, "test", after=1500)

    batches = list(held_out.batches(7, with_times=True, labels=["behavior"]))

    rows = later.evaluation_rows("test", with_times=True, labels=["behavior"])
    kept = np.flatnonzero(later.target_times("test") > 1500)
    assert 0 < len(kept) == held_out.num_users < len(rows)
    assert [batch.num_rows for batch in batches] != [7] * len(batches)
    row = iter(kept.tolist())
    for batch in batches:
        for place in range(batch.num_rows):
            number = next(row)
            theirs = slice(*rows.offsets_B1[number : number + 2])
            ours = slice(*batch.offsets_B1[place : place + 2])
            assert batch.user_ids_B[place] == rows.user_ids_B[number]
            assert batch.targets_B[place] == rows.targets_B[number]
            assert batch.item_ids_N[ours].tolist() == rows.history_ids_N[theirs].tolist()
            assert batch.times_N[ours].tolist() == rows.times_N[theirs].tolist()
            assert batch.labels["behavior"][ours].tolist() == rows.labels["behavior"][theirs].tolist()
    assert next(row, None) is None
    assert held_out.target_times_U.tolist() == [2000] * len(kept)
    assert held_out.target_labels("behavior").tolist() == rows.target_labels["behavior"][kept].tolist()


def test_validation_events_are_judged_likewise(sasrec, tmp_path):
    events = next_day()
    later = log_of(tmp_path, [*events, *((user, "i0", 3000) for user in {user for user, _, _ in events})])

    report = evaluate_recommender(Recommender.load(sasrec), "valid", on=later)

    assert report.count == NUM_USERS + 1  # of whom the last event but one is of the next day
    assert report.ranking.num_left_out == 0


def test_without_times_nothing_is_later(sasrec, tmp_path):
    later = log_of(tmp_path, next_day())
    counts = later.manifest.counts | {"ordered_without_times": 9}
    ordered = Dataset(later.root, later.manifest.model_copy(update={"counts": counts}))
    with pytest.raises(
        InputError, match=r"data: its events have an order and no times, so nothing says which"
    ):
        evaluate_recommender(Recommender.load(sasrec), "test", on=ordered)

    without = without_history_times(later)
    with pytest.raises(InputError, match=r"the times of the histories .* are missing"):
        evaluate_recommender(Recommender.load(sasrec), "test", on=without)


def test_rows_that_a_run_has_learned_beside_its_data_set_are_named(sasrec, tmp_path, caplog):
    """As of a run that follows a log."""
    later = log_of(tmp_path, next_day())
    recommender = Recommender.load(sasrec)
    config = RunConfig.parse(
        RunFolder.open(sasrec).config.model_dump(mode="json", exclude_none=True)
        | {"data": {"path": str(sasrec.parent / "data"), "samples": str(tmp_path / "rows")}}
    )
    recommender.check_can_be_judged_on(later)
    assert not warnings_of(caplog)

    replace(open_task(RunFolder.open(sasrec).config), config=config).check_can_be_judged_on(later, "run")

    assert f"run: was trained on rows of {tmp_path / 'rows'}, and nothing says whether" in caplog.text


def test_a_grown_data_set_in_place_of_the_runs_own_does_not_say_what_it_knows(tmp_path):
    run = make_run(tmp_path, "prefix")
    grown = log_of(tmp_path / "grown", next_day())
    extended = extend_registry_for(grown, tmp_path / "data")

    with pytest.raises(InputError, match=r"^run: --data and --on both name .*leave --data out"):
        evaluate(run, data=extended, on=extended)
    before = evaluate(run)
    assert evaluate(run, data=extended).count == grown.num_evaluated("test")
    assert json.loads((run / "evaluation-test.json").read_text()) == before.to_json()
    with_new = json.loads((run / f"evaluation-test-grown-{grown.fingerprint[:8]}.json").read_text())
    assert with_new["on"] == str(extended)
    assert Positions.read(run / with_new["positions"]).header.num_items == NUM_ITEMS + NEW_ITEMS
    assert evaluate(run, on=extended).count == NUM_USERS + 1

    # What the grown catalog has answered is not taken for what the run's own answers.
    third = log_of(tmp_path / "third", [*next_day(), *((f"u{user}", "i0", 4000) for user in range(9))])
    grown_one = evaluate(run, data=extended, on=third.root)
    own = evaluated(str(run), None, Sources(on=third))
    assert (grown_one.ranking.positions.header.grown, own.header.grown) == (grown.fingerprint, None)
    assert own.header.after < grown_one.ranking.positions.header.after
    assert own.header.num_users == NUM_USERS + 1


def test_users_are_paired_by_who_they_are(sasrec, tmp_path, caplog):
    later = log_of(tmp_path / "later", next_day())
    positions = evaluate_recommender(Recommender.load(sasrec), "test", baselines=False, on=later)
    positions = positions.ranking.positions
    whole = Evaluated("one", MODEL, positions)
    num_users = positions.header.num_users

    def changed(chosen, **header):
        known = {"after": 0, "snapshot_fingerprint": "another", **header}
        return Evaluated(
            "other", MODEL, replace(positions.some(chosen), header=positions.header.model_copy(update=known))
        )

    everybody = np.ones(num_users, dtype=bool)
    found = compare([whole], [changed(np.arange(num_users) < 5, num_users=5, num_left_out=36)], "recall@10")
    assert (found.estimates["all users"].num_users, found.num_left_out) == (5, num_users - 5)
    assert found.estimates["all users"].difference.value == 0

    turned = changed(np.arange(num_users)[::-1])  # the same users in another order
    with pytest.raises(InputError, match=r"cannot be compared: they are of different users"):
        compare([whole], [turned], "recall@10")
    with pytest.raises(InputError, match=r"cannot be compared: they are of different users"):
        compare([whole], [changed(np.arange(num_users) < 5, max_users=5, users="others")], "recall@10")
    with pytest.raises(InputError, match=r"no user on whom all were judged"):
        compare(
            [changed(np.arange(num_users) < 5, after=1)], [changed(np.arange(num_users) >= 5)], "recall@10"
        )
    without = changed(everybody)
    without = replace(without, positions=replace(without.positions, users=None))
    with pytest.raises(InputError, match=r"^other: does not say which users it is of"):
        compare([whole], [without], "recall@10")
    assert not warnings_of(caplog)
    compare([whole], [changed(everybody, after=None)], "recall@10")
    assert "a run was trained on source itself" in caplog.text


def extend_registry_for(grown, data):
    registry = SemanticIdRegistry.load(data / SEMANTIC_IDS_FOLDER)
    quantizer = ResidualKMeans(2, registry.codebooks_CKD.shape[1])
    quantizer = quantizer.restore({"codebooks_LKD": registry.codebooks_CKD})
    ids_I = grown.items.ids_I
    new_ids = ids_I[~np.isin(ids_I, registry.item_ids_I)]
    new = NewItems(new_ids, torch.zeros(len(new_ids), 6))
    extend_registry(registry, quantizer, new, ids_I, grown.fingerprint).save(grown.root / SEMANTIC_IDS_FOLDER)
    return grown.root


def test_events_of_another_log_are_refused(sasrec, tmp_path):
    recommender, events = Recommender.load(sasrec), next_day()
    others = {
        "other titles": log_of(tmp_path / "titles", events, title="A film called {}"),
        "user ids of the kind 'string'": log_of(
            tmp_path / "users", [(place, *event[1:]) for place, event in enumerate(events)]
        ),
    }
    for message, later in others.items():
        with pytest.raises(InputError, match=rf"^run: .*its data set.*{message}.*judge it on a later"):
            evaluate_recommender(recommender, "test", on=later)


def test_labels_that_mean_something_else_are_refused(tmp_path):
    run = make_run(tmp_path, "lazy", labeled=True, event_labels=["behavior"])
    events = next_day()

    def labeled(name, behaviors):
        chosen = [behaviors[place % len(behaviors)] for place in range(len(events))]
        return log_of(tmp_path / name, events, behavior=chosen, scenario=["home"] * len(events))

    with pytest.raises(
        InputError, match=r"whose behavior is one of LIKE, SHARE, VIEW, and in .* BUY, LIKE.* judge it on"
    ):
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
        match=r"validated on rows until 1970-01-11T.*, and the test rows .* begin at 1970-01-10T.* --split",
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

    drawn = impressions_of(tmp_path / "drawn", (11, 12), seed=4, split="random", time=None, time_unit=None)
    assert not warnings_of(caplog)
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
