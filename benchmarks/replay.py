"""Quality of models that go on learning while a log is replayed, for docs/benchmarks/quality.md.

    python -m benchmarks.replay SOURCES beauty-time/shuffled/generative --days 7

A row of `benchmarks.reproduction`, of a data set that is split by time, was trained on what came before a
date. From its best snapshot on, the rest of the log comes in periods of so many days: what validates and
tests in a period is ranked first, by what was learned until the day before it, and then the period is trained
on, in one pass over windows of events (`data.follow`). So a model knows of others what they did in periods
before, and of the user all that lies before the target, as everywhere. Rate and batch are the same for all
rows; what they are was found on validation users of the prefix decoder on Beauty.

Axes: U users of a split, N events of the log, K of a list.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Bar, BenchOptions
from benchmarks.processes import ProcessorTime
from benchmarks.quality_data import KEPT, Row, config_of, prepared
from benchmarks.quality_pairs import METRIC, keep_positions, ranking_details
from benchmarks.quality_replayed import FOLDER
from benchmarks.quality_rows import DATASETS, METHODS
from benchmarks.reproduction import commit_of, provenance, write_record
from rayrec.models.program.program import RankedItems
from rayrec.models.sequence.config import SequenceModelConfig
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.compare import ALL_USERS, Evaluated, compare
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.evaluation.evaluate_recommender import (
    evaluate_neighbors,
    evaluate_rankers,
)
from rayrec.pipelines.evaluation.held_out import HeldOut, model_batches
from rayrec.pipelines.evaluation.lists import CO_VISITATION_IN_TIME, MODEL
from rayrec.pipelines.evaluation.rankers import Ranker, model_rankers
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.evaluation_report import EvaluationReport
from rayrec.pipelines.metrics.positions import Positions, read_header
from rayrec.pipelines.runs.method import Method
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.arrays import Int64Array
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log, progress_bar
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.base.event_times import TIMES
from rayrec.samples.base.jagged import list_values
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import HISTORY_FILE, Split

DAY_S = 86_400
AT_ONCE = 256
"""Users that are ranked together."""
BATCH_SIZE, LEARNING_RATE = 32, 0.001
"""The best of four on validation users: recall@10 of the prefix decoder on Beauty was 0.082 with these, 0.080
with a batch of 16, 0.079 with 64 and a rate of 0.002, and 0.077 with a rate of 0.0003."""


@dataclass(frozen=True)
class Periods:
    """Equal parts of the time from a date on."""

    since: float
    """UNIX seconds; the first period begins with that day."""
    days: int

    def of(self, times: Int64Array) -> Int64Array:
        """Number of the period of each time, in UNIX seconds."""
        return (times // DAY_S - int(self.since) // DAY_S) // self.days


class ReplayedLog:
    """Rows to train on, by period: windows of a user's events, which end with events of the period.

    All events of a period are targets of its rows, but for a user's first event of all. So are earlier events
    that a window begins with: what the model knows of a user is learned again with what is new.
    """

    def __init__(self, dataset: Dataset, periods: Periods, length: int) -> None:
        """
        Args:
            length: events of a history that a model reads at most; a row has one more.
        """
        table = dataset.read(HISTORY_FILE, ["item_ids", TIMES])
        self._items_N, offsets_U1 = list_values(table["item_ids"])
        self._times_N, _ = list_values(table[TIMES])
        users_N = np.repeat(np.arange(len(offsets_U1) - 1), np.diff(offsets_U1))
        periods_N = np.where(self._times_N >= periods.since, periods.of(self._times_N), -1)
        changes_N = np.append(True, (np.diff(users_N) != 0) | (np.diff(periods_N) != 0))
        firsts_G = np.flatnonzero(changes_N)  # of groups: a user's events of one period
        stops_G = np.append(firsts_G[1:], len(users_N))
        is_new_G = periods_N[firsts_G] >= 0
        firsts_G, stops_G = firsts_G[is_new_G], stops_G[is_new_G]
        self._stops_R = np.array(
            [
                min(first + length, stop)
                for begin, stop in zip(firsts_G.tolist(), stops_G.tolist(), strict=True)
                for first in range(begin, stop, length)
            ],
            dtype=np.int64,
        )
        last_R = self._stops_R - 1
        self._starts_R = np.maximum(offsets_U1[users_N[last_R]], self._stops_R - length - 1)
        self._users_R = dataset.users["user_id"].to_numpy()[users_N[last_R]]
        self._periods_R = periods_N[last_R]

    @property
    def num_periods(self) -> int:
        return int(self._periods_R.max()) + 1

    def write(self, period: int, folder: Path) -> bool:
        """Put the rows of a period into a folder of samples; whether there are some."""
        rows = np.flatnonzero(self._periods_R == period)
        spans = list(zip(self._starts_R[rows].tolist(), self._stops_R[rows].tolist(), strict=True))
        table = pa.table(
            {
                "user_id": self._users_R[rows],
                "item_ids": [self._items_N[start:stop] for start, stop in spans],
                TIMES: [self._times_N[start:stop] for start, stop in spans],
            }
        )
        if len(rows):
            pq.write_table(table, folder / f"{period:05d}.parquet")
        return len(rows) > 0


class Answers:
    """Lists of all users of a split, each ranked when its period begins."""

    def __init__(self, recommender: Recommender, split: Split, periods: Periods, name: str) -> None:
        """
        Args:
            name: of the list, which says whether items of the history may be in it.
        """
        self._name, self._held_out = name, HeldOut(recommender.dataset, split)
        self._info = model_rankers(recommender)[name].info
        self._held_out.check()
        self._times_U = self._held_out.target_times_U
        self._periods_U = periods.of(self._times_U)
        num_users = len(self._times_U)
        self._samples = next(model_batches(recommender, self._held_out, num_users))
        self._items_UK = np.full((num_users, self._info.depth), -1)
        self._is_ranked_U = np.zeros(num_users, dtype=bool)

    def rank(self, recommender: Recommender, period: int) -> None:
        """Rank for the users whose target is in a period."""
        ranker, users = model_rankers(recommender)[self._name], np.flatnonzero(self._periods_U == period)
        for first in range(0, len(users), AT_ONCE):
            some = users[first : first + AT_ONCE]
            items_BK = ranker.recommend(self._samples.some(some), self._times_U[some]).items_BK
            self._items_UK[some, : items_BK.shape[1]] = items_BK
        self._is_ranked_U[users] = True

    def report(self, method: Method) -> EvaluationReport:
        """What the lists are worth."""
        assert self._is_ranked_U.all(), "a target lies in no period"
        done = 0

        def next_rows(samples: SampleBatch, _: Int64Array) -> RankedItems:
            nonlocal done
            done += samples.num_rows
            items_BK = self._items_UK[done - samples.num_rows : done]
            return RankedItems(items_BK, np.zeros(items_BK.shape, dtype=np.float32))

        rankers = {self._name: Ranker(next_rows, self._info)}
        held_out = self._held_out
        return evaluate_rankers(held_out.dataset, held_out.split, rankers, "replay", method=method)


def bench(options: BenchOptions) -> list[Bar]:
    """Of the prefix decoder on Beauty, in periods of a week, over the same model that learns nothing more and
    over co-visitation at the time; both by recall@10."""
    row = Row("beauty-time", "shuffled", "generative")
    bars = [
        ("replay-over-frozen", "the same model, which learns nothing more", 1.5),
        ("replay-over-neighbors", CO_VISITATION_IN_TIME, 1.0),
    ]
    if options.data is None:
        log.print("replay: RAYREC_BENCH_DATA has to name the folder of the published data sets")
        return [Bar.of(name, [], peer, target) for name, peer, target in bars]
    with tempfile.TemporaryDirectory(prefix="rayrec-bench-") as folder:
        path = Path(folder) / "record.json"
        record = measure(row, options.data, 7, commit_of(CHECKOUT), path, KEPT / "runs")
        ours = Evaluated("replay", MODEL, Positions.read(path.parent / record["positions"]))
    frozen = evaluate(KEPT / "runs" / row.record.stem, baselines=False)
    neighbors = evaluate_neighbors(Dataset.open(prepared(row, options.data)), "test")
    found = []
    for (name, peer, target), (report, listed) in zip(
        bars, [(frozen, MODEL), (neighbors, CO_VISITATION_IN_TIME)], strict=True
    ):
        assert report.ranking is not None, "it is of a recommender"
        theirs = Evaluated(peer, listed, report.ranking.positions)
        ratio = compare([theirs], [ours], METRIC).estimates[ALL_USERS].ratio
        assert ratio is not None, "each has found something"
        found.append(Bar(name, ratio.value, ratio.low, peer, target, ratio.low >= target))
    return found


def measure(
    row: Row, sources: Path, days: int, commit: str, record: Path, runs: Path, stands_beside: bool = False
) -> dict[str, Any]:
    """Replay what comes after a row's training, and judge what was ranked meanwhile; the record of it.

    Args:
        record: where it will be, for the positions beside it.
        runs: where runs of rows are kept; the row is trained where it is not there.
        stands_beside: the record will stand beside the row's, whose training it has to go on from.

    Raises:
        InputError: the row's data set is not split by time, or the row's record is of another training.
    """
    config, shown = config_of(row, sources), DATASETS[row.dataset].shown_list
    dataset = Dataset.open(config.data.path)
    since = dataset.manifest.split.valid_start
    if since is None:
        raise InputError(f"{row.name}: {row.dataset} is not split by time, so nothing comes after it")
    assert isinstance(config.model, SequenceModelConfig), "of a row of the page"
    base = runs / row.record.stem
    with progress_bar("train") as progress:
        train(
            config, base, "if_begun", on_step=lambda done, total, _: progress(done, total), cluster=in_process
        )
    recommender, periods = Recommender.load(base, "best"), Periods(since, days)
    assert recommender.method is not None, "of a run"
    assert recommender.snapshot is not None, "of a run"
    method = Method(f"{recommender.method.settings}, replayed by {days} days", row.seed)
    registry = recommender.semantic_ids
    semantic_ids = None if registry is None else registry.version
    began = {"step": recommender.committed_step + 1, "snapshot": recommender.snapshot.fingerprint}
    if stands_beside:
        check_same_training(row, recommender.snapshot.fingerprint, base)
    coming = ReplayedLog(dataset, periods, config.model.history_length)
    answers = {split: Answers(recommender, split, periods, shown) for split in ("valid", "test")}
    with tempfile.TemporaryDirectory(prefix="rayrec-quality-") as name, progress_bar("replay") as progress:
        samples, run = Path(name) / "samples", Path(name) / "run"
        samples.mkdir()
        goes_on, learning_s, num_steps = _going_on(config, base, samples), 0.0, 0
        for period in range(coming.num_periods):
            for each in answers.values():
                each.rank(recommender, period)
            if coming.write(period, samples):
                with ProcessorTime() as spent:
                    num_steps = train(goes_on, run, "if_begun", cluster=in_process).steps
                learning_s += spent.seconds
                recommender = Recommender.load(run, "last")
            progress(period + 1, coming.num_periods)
    reports = {split: each.report(method) for split, each in answers.items()}
    report = reports["test"]
    return {
        **asdict(row),
        "replay": {
            "days": days,
            "periods": coming.num_periods,
            "steps": num_steps,
            "processor_minutes": learning_s / 60,
            "batch_size": BATCH_SIZE,
            "learning_rate": LEARNING_RATE,
            "validation": reports["valid"].to_json()["results"][shown],
        },
        "results": report.to_json()["results"],
        **ranking_details(report, shown),
        **keep_positions(record, report, [shown]),
        "num_users": report.count,
        **provenance(row, commit, dataset, semantic_ids, began=began),
    }


def check_same_training(row: Row, snapshot: str, base: Path) -> None:
    """Refuse to show as what was learned on what is the difference of two trainings."""
    if not row.record.is_file():
        return
    positions = row.record.parent / json.loads(row.record.read_text())["positions"]
    if read_header(positions).snapshot_fingerprint != snapshot:
        raise InputError(
            f"{base}: is another training than the one that {row.record.name} is of; measure the row again "
            f"with --runs {base.parent}, where it is kept, and then what is learned on"
        )


def _going_on(config: RunConfig, base: Path, samples: Path) -> RunConfig:
    """The run that learns what comes, from the best snapshot of another one on."""
    settings = config.model_dump(mode="json", exclude_none=True)
    # Each call of `train` is over as soon as it has read what is there.
    settings["data"] |= {"samples": str(samples), "follow": {"every_s": 0.05, "stop_after_s": 0.05}}
    of_epochs = ("epochs", "min_steps_per_epoch", "schedule")
    training = {name: value for name, value in settings["training"].items() if name not in of_epochs}
    training["optimizer"] |= {"learning_rate": LEARNING_RATE}
    begin = {"init_from": str(base), "schedule": {"warmup_steps": 0}}
    settings["training"] = training | begin | {"batch_size": BATCH_SIZE}
    settings["evaluation"] = {"every_steps": 1_000_000, "max_users": 1}  # it is judged here
    return RunConfig.parse(settings)


def record_of(row: Row, days: int) -> Path:
    """Where a record is, or will be."""
    return row.record.parent / FOLDER / f"{row.record.stem}-{days}.json"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.replay")
    parser.add_argument("sources", type=Path, help="folder of the published data sets")
    parser.add_argument("rows", nargs="+", help="DATASET/TIES/METHOD")
    parser.add_argument("--days", type=int, default=7, help="of a period")
    parser.add_argument("--runs", type=Path, default=KEPT / "runs", help="keep runs of rows here")
    options = parser.parse_args(arguments)
    if options.days < 1:
        parser.error("--days: a period has at least one")
    rows = [Row.named(name, seed=0) for name in options.rows]
    if untrained := [row.name for row in rows if row.method not in METHODS]:
        parser.error(f"nothing of {', '.join(untrained)} is trained, so nothing goes on learning")
    commit = commit_of(CHECKOUT)
    for row in rows:
        log.print(f"{row.name}, periods of {options.days} days")
        path = record_of(row, options.days)
        record = measure(row, options.sources, options.days, commit, path, options.runs, stands_beside=True)
        write_record(path, record)


if __name__ == "__main__":
    main()
