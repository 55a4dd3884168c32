"""Whether rewards have moved lists toward strong feedback: by what users did, not by the reward's opinion.

    python -m benchmarks.rl_deskdrop LOG SUPERVISED RUN

LOG is the Deskdrop folder, SUPERVISED a run of configs/deskdrop-generative.yaml on a data set split by time,
RUN one of configs/deskdrop-rl.yaml from it. Of the ten articles that each policy ranks first for every user
who is tested: how many strong events (like, bookmark, follow, comment) there are to a view of them, once in
the time that was trained on and once in the time that is tested, of which neither policy nor ranking model
knows. The intervals are over articles, not over users: few articles of the past have any event later.

What could be shown at all is printed last: whether what an article had in the time trained on sorts the
articles by what they have in the time tested. Where it does not, the past says little.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.console import out
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.reading.reader import evaluation_batches

STRONG = ("LIKE", "BOOKMARK", "FOLLOW", "COMMENT CREATED")
RESAMPLES = 1000
PRIOR_VIEWS = 20
"""Of an average article, which every article has besides its own."""


def shown(run: Path) -> np.ndarray:
    """[I] how often each article is among the first ten of a user that is tested."""
    recommender = Recommender.load(run)
    dataset, counts_I = recommender.dataset, np.zeros(len(recommender.dataset.items), dtype=np.int64)
    for samples in evaluation_batches(dataset, "test", 512, with_times=recommender.needs_times):
        items_BK = recommender.rank(samples, 10, exclude_seen=True).items_BK
        counts_I += np.bincount(items_BK[items_BK >= 0], minlength=len(counts_I))
    return counts_I


def events_of(log: pd.DataFrame, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """([I] strong events, [I] views) of a part of the log."""
    keys = dataset.items.keys.to_pandas()

    def count(chosen: pd.DataFrame) -> np.ndarray:
        found_I: np.ndarray = (
            chosen["contentId"].astype(str).value_counts().reindex(keys).fillna(0).to_numpy()
        )
        return found_I

    return count(log[log["eventType"].isin(STRONG)]), count(log[log["eventType"] == "VIEW"])


def ratio(counts_I: np.ndarray, strong_I: np.ndarray, views_I: np.ndarray) -> tuple[float, float, float]:
    """Strong events to a view of what is shown, with its 95 % bootstrap interval over articles."""
    random = np.random.default_rng(0)
    places_M = np.flatnonzero((counts_I > 0) & (views_I > 0))
    top_M, bottom_M = (counts_I * strong_I)[places_M], (counts_I * views_I)[places_M]
    draws = random.multinomial(len(places_M), np.full(len(places_M), 1 / len(places_M)), RESAMPLES)
    low, high = np.quantile((draws @ top_M) / (draws @ bottom_M), [0.025, 0.975])
    return float(top_M.sum() / bottom_M.sum()), float(low), float(high)


def rank_correlation(past: tuple[np.ndarray, np.ndarray], later: tuple[np.ndarray, np.ndarray]) -> float:
    """Of articles' strong events to a view, in the past (drawn to the mean of all) and later (Spearman).

    Args:
        past, later: of `events_of`.
    """
    (strong_I, views_I), (strong_later_I, views_later_I) = past, later
    both_I = (views_I > 0) & (views_later_I > 0)
    smoothed_I = (strong_I + PRIOR_VIEWS * strong_I.sum() / views_I.sum()) / (views_I + PRIOR_VIEWS)
    rates = pd.DataFrame(
        {"past": smoothed_I[both_I], "later": strong_later_I[both_I] / views_later_I[both_I]}
    ).rank()
    return float(rates["past"].corr(rates["later"]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.rl_deskdrop")
    for name in ("log", "supervised", "run"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args(arguments)
    dataset = Recommender.load(options.supervised).dataset
    log = pd.read_csv(options.log / "users_interactions.csv.gz")
    trained_until, tested_from = (dataset.target_times(split).min() for split in ("valid", "test"))
    times = {
        "trained on": log[log["timestamp"] < trained_until],
        "tested": log[log["timestamp"] >= tested_from],
    }
    counts = {"before": shown(options.supervised), "after": shown(options.run)}
    events = {name: events_of(part, dataset) for name, part in times.items()}
    for name, (strong_I, views_I) in events.items():
        for when, counts_I in counts.items():
            value, low, high = ratio(counts_I, strong_I, views_I)
            known = int(((counts_I > 0) & (views_I > 0)).sum())
            out.print(
                f"{when}, events of the time {name}: {value:.3f} strong ones to a view ({low:.3f} to "
                f"{high:.3f}), of {known:,} articles viewed then, among {int((counts_I > 0).sum()):,} shown",
                highlight=False,
            )
    past, later = events.values()
    (strong_I, views_I), both_I = later, (past[1] > 0) & (later[1] > 0)
    out.print(
        f"{int(both_I.sum()):,} articles were viewed in both times, with {int(strong_I[both_I].sum()):,} "
        f"strong events to {int(views_I[both_I].sum()):,} views in the later one; past rates sort later ones "
        f"with a rank correlation of {rank_correlation(past, later):.2f}",
        highlight=False,
    )


if __name__ == "__main__":
    main()
