"""Models go on learning while what came after their training is replayed."""

import dataclasses
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks import replay
from benchmarks.quality_rows import DATASETS
from benchmarks.replay import DAY_S, Answers, Periods, ReplayedLog, main, record_of
from benchmarks.reproduction import Row, config_of
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.lists import MODEL
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.positions import Positions
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


def test_every_later_event_ends_a_row_or_lies_in_one_of_its_own_period(by_time, tmp_path):
    dataset = Dataset.open(config_of(ROW, by_time).data.path)
    since = dataset.manifest.split.valid_start
    periods = Periods(since, days=2)
    log, folder = ReplayedLog(dataset, periods, max_length=50), tmp_path / "samples"
    folder.mkdir()

    written = [log.write(period, folder) for period in range(log.num_periods)]

    learned: dict[int, list[int]] = {}
    files = sorted(folder.iterdir())
    assert len(files) == sum(written)
    for file in files:
        for row in pq.read_table(file).to_pylist():
            assert periods.of(np.array(row[TIMES])).max() == int(file.stem)
            met = learned.setdefault(row["user_id"], [])
            assert (
                met == row["item_ids"][: len(met)] or not met
            )  # rows of a user go on where the last one ended
            learned[row["user_id"]] = row["item_ids"]
    for key, user in zip(
        dataset.users["user_key"].to_pylist(), dataset.users["user_id"].to_pylist(), strict=True
    ):
        times = dataset.history_times_of(key)
        if times.max() >= since:
            assert learned[user] == dataset.history_of(key).tolist()
        else:
            assert user not in learned


def test_what_is_ranked_by_periods_without_learning_is_what_evaluation_ranks(by_time, tmp_path):
    config, run = config_of(ROW, by_time), tmp_path / "run"
    train(config, run, cluster=in_process)
    recommender, dataset = Recommender.load(run), Dataset.open(config.data.path)
    periods = Periods(dataset.manifest.split.valid_start, days=1)
    answers = Answers(dataset, "test", periods, recommender, MODEL)

    for period in range(NUM_DAYS):
        answers.rank(recommender, period)

    found = answers.report("replayed").ranking.positions
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


def test_a_row_that_is_not_split_by_time_cannot_be_replayed(sources):
    with pytest.raises(InputError, match="tiny is not split by time"):
        replay.measure(ROW, sources, 7, "", record_of(ROW, 7), sources / "runs")
