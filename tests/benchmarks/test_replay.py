"""Models go on learning while what came after their training is replayed."""

import dataclasses
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import replay, reproduction
from benchmarks.quality_data import Row, config_of
from benchmarks.quality_rows import DATASETS
from benchmarks.replay import DAY_S, Answers, Periods, ReplayedLog, main, record_of
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.lists import MODEL
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.positions import Positions
from rayrec.pipelines.runs.method import Method
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError
from rayrec.samples.base.event_times import TIMES
from rayrec.samples.dataset.dataset import Dataset
from tests.helpers.data import write_source

ROW = Row("tiny", "shuffled", "tiny")
NUM_DAYS = 20


@pytest.fixture
def by_time(sources, monkeypatch):
    """The log over weeks: from the 14th day on, who takes an even item takes the odd one behind it next."""
    random = np.random.default_rng(0)
    events = []
    for user in range(120):
        days = np.sort(random.choice(NUM_DAYS, size=8, replace=False))
        items = random.permutation(15)[:8]
        for day, item in zip(days.tolist(), items.tolist(), strict=True):
            events.append((f"u{user}", f"i{2 * item}", day * DAY_S + 1))
            if day >= 14:
                events.append((f"u{user}", f"i{2 * item + 1}", day * DAY_S + 2))
    write_source(sources / "log", events)
    prepare = {"split": "time", "targets": "random", "clean": True}
    monkeypatch.setitem(DATASETS, "tiny", dataclasses.replace(DATASETS["tiny"], prepare=prepare))
    return sources


@pytest.mark.parametrize("length", [3, 50])
def test_every_later_event_is_a_target_in_its_own_period_whatever_a_row_has_room_for(
    by_time, tmp_path, length
):
    dataset = Dataset.open(config_of(ROW, by_time).data.path)
    since = dataset.manifest.split.valid_start
    periods = Periods(since, days=4)
    log, folder = ReplayedLog(dataset, periods, length), tmp_path / "samples"
    folder.mkdir()

    written = [log.write(period, folder) for period in range(log.num_periods)]

    files = sorted(folder.iterdir())
    assert len(files) == sum(written)
    learned: dict[int, set[int]] = {}
    for file in files:
        for row in pq.read_table(file).to_pylist():
            assert 1 < len(row["item_ids"]) <= length + 1
            assert periods.of(np.array(row[TIMES])).max() == int(file.stem)
            in_period = periods.of(np.array(row[TIMES][1:])) == int(file.stem)
            learned.setdefault(row["user_id"], set()).update(
                np.array(row["item_ids"][1:])[in_period].tolist()
            )
    keys, users = (dataset.users[name].to_pylist() for name in ("user_key", "user_id"))
    for key, user in zip(keys, users, strict=True):
        later = dataset.history_of(key)[dataset.history_times_of(key) >= since]
        assert learned.get(user, set()) == set(later.tolist())


def test_what_is_ranked_by_periods_without_learning_is_what_evaluation_ranks(by_time, tmp_path):
    config, run = config_of(ROW, by_time), tmp_path / "run"
    train(config, run, cluster=in_process)
    recommender, dataset = Recommender.load(run), Dataset.open(config.data.path)
    periods = Periods(dataset.manifest.split.valid_start, days=1)
    answers = Answers(recommender, "test", periods, MODEL)

    for period in range(NUM_DAYS):
        answers.rank(recommender, period)

    found = answers.report(Method("replayed", 0)).ranking.positions
    judged = evaluate(run, baselines=False).ranking.positions
    np.testing.assert_array_equal(found.places[MODEL], judged.places[MODEL])
    assert (found.header.users, found.header.held_out) == (judged.header.users, judged.header.held_out)


def test_a_model_that_goes_on_learning_finds_what_became_usual_meanwhile(by_time, tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "LEARNING_RATE", 0.03)
    monkeypatch.setattr(replay, "BATCH_SIZE", 4)

    main([str(by_time), ROW.name, "--days", "1", "--runs", str(tmp_path / "runs")])

    record = json.loads(record_of(ROW, 1).read_text())
    replayed = Positions.read(record_of(ROW, 1).parent / record["positions"]).places[MODEL]
    frozen = evaluate(tmp_path / "runs" / ROW.record.stem, baselines=False).ranking.positions.places[MODEL]
    assert len(replayed) == len(frozen) == record["num_users"]
    assert np.mean(replayed < 3) > 1.5 * np.mean(frozen < 3)
    assert "learning every day" in (tmp_path / "quality.md").read_text()


def test_what_is_learned_on_stands_beside_the_same_training_alone(by_time, tmp_path):
    runs = tmp_path / "runs"
    reproduction.main([str(by_time), ROW.name, "--local", "--runs", str(runs)])
    recommender = Recommender.load(runs / ROW.record.stem)
    replay.check_same_training(ROW, recommender.snapshot.fingerprint, runs / ROW.record.stem)

    with pytest.raises(InputError, match=r"another training than the one that tiny-.* is of; measure"):
        replay.check_same_training(ROW, "of another training", runs / ROW.record.stem)


def test_a_period_is_ranked_before_anything_of_it_is_learned(by_time, tmp_path, monkeypatch):
    calls = []
    rank, write, learn = Answers.rank, ReplayedLog.write, replay.train

    def told(name, call):
        def function(*arguments, **keywords):
            calls.append((name, arguments))
            return call(*arguments, **keywords)

        return function

    monkeypatch.setattr(Answers, "rank", told("rank", rank))
    monkeypatch.setattr(ReplayedLog, "write", told("write", write))
    monkeypatch.setattr(replay, "train", told("train", learn))

    main([str(by_time), ROW.name, "--days", "1", "--runs", str(tmp_path / "runs")])

    (first, _), *rest = calls
    assert first == "train"  # of what was before
    periods = iter(rest)
    for period in range(sum(name == "write" for name, _ in rest)):
        rankings = [next(periods) for _ in range(2)]
        assert [(name, arguments[2]) for name, arguments in rankings] == [("rank", period)] * 2
        name, (_, written, _) = next(periods)
        assert (name, written) == ("write", period)
        assert next(periods)[0] == "train"
    assert next(periods, None) is None
    recommenders = [arguments[1] for name, arguments in rest if name == "rank"]
    assert len({id(recommender) for recommender in recommenders}) == len(recommenders) / 2


def test_a_row_that_is_not_split_by_time_cannot_be_replayed(sources):
    with pytest.raises(InputError, match="tiny is not split by time"):
        replay.measure(ROW, sources, 7, "", record_of(ROW, 7), sources / "runs")
