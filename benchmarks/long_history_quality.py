"""Does a model recommend better if it reads summaries of old events? Two data sets, half an hour of one core.

The lazy decoder of `configs/beauty-lazy.yaml` reads the newest 50 events at most, once without old ones and
once with summaries of up to 64 chunks of 25 before them; each is trained as the config says. Leave-one-out,
the whole catalog ranked, items of the history left out. Bars:

* `nearline-quality-movielens`: NDCG@10 with summaries over that without, on MovieLens 100K, where half of the
  users have more than 65 events. The lower bound is that of a paired bootstrap over users. RAYREC_BENCH_DATA
  is a folder with the source `movielens-100k`.
* `nearline-quality-rule`: recall@10 with summaries over the best that is possible without old events, on a
  log with a known rule. Every user likes one of eight kinds. Old events are signs of it; then come, four
  times, 13 events of no kind, an item that asks, and one of the 8 answers of the kind. Who knows the kind can
  reach a recall of 1, others 10 / 61. Here the models are smaller and read the newest 12 events at most,
  chunks are of 6, and what nobody can predict counts little in the loss. The model without summaries is shown
  beside.

It writes `benchmarks/quality/long-history.json` with the date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Bar, BenchOptions
from benchmarks.quality_page import RECORDS
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, target_places, user_scores
from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig, tokenize
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from rayrec.samples.reading.reader import evaluation_batches

RECORD = RECORDS / "long-history.json"
SOURCE = "movielens-100k"
RESAMPLES = 2_000
LONG: dict[str, Any] = {"chunk_events": 25, "summary_tokens": 4, "newest": 26}
"""Up to 50 events are read one by one, as without."""
RULE_LONG: dict[str, Any] = {"chunk_events": 6, "summary_tokens": 4, "newest": 7}
NUM_USERS, NUM_KINDS, OF_KIND, NUM_PLAIN = 2_000, 8, 8, 200
OLD, SIGNS, APART, NUM_ASKS = 12, 6, 13, 4
ANSWER, OTHER = "ANSWER", "OTHER"
SMALLER = [
    "training.epochs=20",
    "training.batch_size=16",
    "training.optimizer={learning_rate: 0.001, weight_decay: 0.01}",
    f"model.behavior_weights={json.dumps({OTHER: 0.1})}",
    *(
        f"model.backbone.{name}={value}"
        for name, value in (("dim", 64), ("feedforward_dim", 128), ("dropout", 0.1))
    ),
]
Scores = dict[str, np.ndarray]


def bench(options: BenchOptions) -> list[Bar]:
    bars, figures = [], dict[str, Any]()
    if options.data is not None:
        with TemporaryDirectory(prefix="rayrec-bench-") as folder:
            data = Path(folder) / "data"
            prepare(options.data / SOURCE, data, PrepareConfig(allow=frozenset({"duplicates"})))
            found = _both(data, Path(folder), LONG, 50)
        bars.append(_bar("nearline-quality-movielens", "ndcg@10", found, 1.0, figures))
    else:
        bars.append(Bar.of("nearline-quality-movielens", [], "the newest 50 events", 1.0))
    with _rule() as data, TemporaryDirectory(prefix="rayrec-bench-") as folder:
        found = _both(data, Path(folder), RULE_LONG, 12, SMALLER)
    bars.append(_rule_bar(found, figures))
    if options.data is not None:
        made = {"date": datetime.now(UTC).date().isoformat(), "long_history": LONG, "results": figures}
        RECORD.write_text(json.dumps(made, indent=2) + "\n")
    return bars


def _both(
    data: Path, folder: Path, long: dict[str, Any], max_length: int, settings: Sequence[str] = ()
) -> tuple[Scores, Scores]:
    """Each user's scores with summaries, and without."""
    tokenize(data, config=TokenizeConfig())
    summaries = ["model.backbone.max_length=50", f"model.long_history={json.dumps(long)}"]
    return (
        _scores(data, folder / "long", [*settings, *summaries]),
        _scores(data, folder / "newest", [*settings, f"model.backbone.max_length={max_length}"]),
    )


def _scores(data: Path, run: Path, settings: Sequence[str]) -> Scores:
    config = RunConfig.load(
        CHECKOUT / "configs" / "beauty-lazy.yaml",
        [
            f"data.path={data}",
            "data.redraw_ties=false",  # as what is recorded was trained, and so the softmax
            "model.softmax=codes",
            "cluster.dashboard=false",
            "pipeline.trainer_threads=1",
            *settings,
        ],
    )
    train(config, run, cluster=in_process)
    # The last: of the rule, what is validated is the item that asks, which is no part of it.
    recommender, dataset = Recommender.load(run, "last"), Dataset.open(data)
    places = []
    for samples in evaluation_batches(dataset, "test", 512):
        assert samples.targets_B is not None, "of a split"
        found = recommender.recommend_samples(samples, LIST_LENGTH, exclude_seen=True)
        places.append(target_places(found.items_BK, dataset.item_positions(samples.targets_B)))
    scores = user_scores(np.concatenate(places))
    means = ", ".join(f"{name} {score_U.mean():.4f}" for name, score_U in scores.items())
    log.print(f"{run.name}: {means}", highlight=False)
    return scores


def _bar(name: str, metric: str, found: tuple[Scores, Scores], target: float, figures: dict[str, Any]) -> Bar:
    long_U, newest_U = (scores[metric] for scores in found)
    drawn = np.random.default_rng(0).integers(len(long_U), size=(RESAMPLES, len(long_U)))
    ratios = long_U[drawn].mean(1) / newest_U[drawn].mean(1)
    value, low, high = long_U.mean() / newest_U.mean(), *np.quantile(ratios, [0.05, 0.95])
    figures[name] = {
        "summaries": {each: float(score_U.mean()) for each, score_U in found[0].items()},
        "newest": {each: float(score_U.mean()) for each, score_U in found[1].items()},
        f"ratio of {metric}": {"value": float(value), "low": float(low), "high": float(high)},
    }
    return Bar(name, float(value), float(low), "the newest 50 events", target, bool(low >= target))


def _rule_bar(found: tuple[Scores, Scores], figures: dict[str, Any]) -> Bar:
    name, metric, possible = "nearline-quality-rule", "recall@10", 10 / (NUM_KINDS * OF_KIND - NUM_ASKS + 1)
    long_U, newest_U = (scores[metric] for scores in found)
    drawn = np.random.default_rng(0).integers(len(long_U), size=(RESAMPLES, len(long_U)))
    value, low = long_U.mean() / possible, np.quantile(long_U[drawn].mean(1), 0.05) / possible
    figures[name] = {
        "summaries": float(long_U.mean()),
        "newest": float(newest_U.mean()),
        "possible": possible,
    }
    return Bar(name, float(value), float(low), "the best without old events", 1.0, bool(low >= 1.0))


@contextmanager
def _rule() -> Iterator[Path]:
    """A data set in which the item after the one that asks is of the kind that old events are of."""
    with TemporaryDirectory(prefix="rayrec-bench-") as folder:
        random = np.random.default_rng(0)
        signs, answers = np.arange(2 * NUM_KINDS * OF_KIND).reshape(2, NUM_KINDS, OF_KIND)
        asks, plain = signs.size + answers.size + np.arange(NUM_ASKS), 1_000 + np.arange(NUM_PLAIN)
        rows = []
        for user in range(NUM_USERS):
            kind = user % NUM_KINDS
            others = random.permutation(plain)  # nobody has an item twice
            items = others[:OLD]
            items[random.permutation(OLD)[:SIGNS]] = random.permutation(signs[kind])[:SIGNS]
            asked, right = random.permutation(asks), random.permutation(answers[kind])
            for number, between in enumerate(others[OLD : OLD + NUM_ASKS * APART].reshape(NUM_ASKS, APART)):
                items = np.concatenate([items, between, [asked[number], right[number]]])
            rows.append(np.stack([np.full(len(items), user), items, np.arange(len(items))]))
        users_N, items_N, times_N = np.concatenate(rows, axis=1)
        behavior_N = np.where(np.isin(items_N, answers), ANSWER, OTHER)
        (Path(folder) / "source").mkdir()
        table = pa.table(
            {"user_id": users_N, "item_id": items_N, "timestamp": times_N, "behavior": behavior_N}
        )
        pq.write_table(table, Path(folder) / "source" / "interactions.parquet")
        data = Path(folder) / "data"
        allow = frozenset({"duplicates", "short-users", "cold-items"})
        prepare(Path(folder) / "source", data, PrepareConfig(allow=allow))
        yield data
