"""What a user who returns costs, where what was read of the history is kept.

The untrained networks of `rl`: a language model shaped as Qwen3, which reads three codes of each of up to 50
events, and the prefix decoder of `configs/beauty-generative.yaml`, which reads one vector of each. Every user
was there before their last event, and returns with it; `rank`, one thread, beam 20, one user at a time. Both
sides rank for the same users, one after the other; before anything is timed, scores are compared, to 1e-3.

* `serve-contexts-lm`, `serve-contexts-prefix`: users per second with kept contexts, against reading whole
  histories anew, for the users of the data set as they are.
* `serve-contexts-lm-long`: of the language model, for histories of 49 events and one more.

Lines for comparison: there is no target. `RAYREC_BENCH_DATA` names a prepared data set with semantic IDs;
without one, it is synthetic, of the size of Amazon Beauty. `RAYREC_BENCH_STEPS` users make a window.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.data_sets import beauty_sized
from benchmarks.harness import Bar, BenchOptions, interleaved
from benchmarks.untrained import LANGUAGE_MODEL, untrained_run
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.recommender import Query, Recommender
from rayrec.platform.arrays import Int64Array
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.console import log

K = 10
LONG = 50
TOLERANCE = 1e-3
MAX_BYTES = 1 << 31
PEER = "whole histories, read anew"

Histories = Callable[[], list[Int64Array]]
"""Of so many users that were not there yet, their last event included."""


def bench(options: BenchOptions) -> list[Bar]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with beauty_sized(options.data) as data, tempfile.TemporaryDirectory(prefix="rayrec-") as folder:
            return _bars(data, Path(folder), options)
    finally:
        torch.set_num_threads(before)


def _bars(data: Path, folder: Path, options: BenchOptions) -> list[Bar]:
    prefix = RunConfig.load(CHECKOUT / "configs" / "beauty-generative.yaml").model.model_dump(mode="json")
    language_model = LANGUAGE_MODEL | {"beam_width": 20}
    runs = {
        "lm": untrained_run(folder / "language-model", data, language_model),
        "prefix": untrained_run(folder / "prefix-decoder", data, prefix | {"beam_width": 20}),
    }
    bars = []
    for name, run in runs.items():
        keeping, plain = Recommender.load(run, "last"), Recommender.load(run, "last")
        keeping.keep_contexts(MAX_BYTES)
        asked = {"": _stored(keeping, options.steps)}
        if name == "lm":
            asked["-long"] = _long(keeping, options.steps)
        for suffix, histories in asked.items():
            bars.append(_compared(f"serve-contexts-{name}{suffix}", keeping, plain, histories, options))
    return bars


def _compared(
    name: str, keeping: Recommender, plain: Recommender, histories: Histories, options: BenchOptions
) -> Bar:
    returning: list[list[Int64Array]] = []

    def kept_rate() -> float:
        returning.append(histories())
        for history in returning[-1]:
            _answers(keeping, [history[:-1]])
        return _rate(keeping, returning[-1])

    def show(ours: float, theirs: float) -> None:
        log.print(f"{name}: {ours:.1f} users a second, peer {theirs:.1f}, ratio {ours / theirs:.2f}")

    _check_same_scores(keeping, plain, histories()[:8])
    interleaved(kept_rate, lambda: _rate(plain, returning[-1]), repeats=1)  # thrown away
    ratios = interleaved(kept_rate, lambda: _rate(plain, returning[-1]), options.pairs, show)
    return Bar.of(name, ratios, PEER, 1.0)


def _rate(recommender: Recommender, histories: Sequence[Int64Array]) -> float:
    begun = time.perf_counter()
    for history in histories:
        _answers(recommender, [history])
    return len(histories) / (time.perf_counter() - begun)


def _answers(recommender: Recommender, histories: Sequence[Int64Array]) -> list[list[float]]:
    found = recommender.recommend([Query(history) for history in histories], K)
    return [[item.score for item in items] for items in found]


def _check_same_scores(keeping: Recommender, plain: Recommender, histories: Sequence[Int64Array]) -> None:
    """With contexts that were kept a moment ago."""
    _answers(keeping, [history[:-1] for history in histories])
    worst = np.abs(np.array(_answers(keeping, histories)) - np.array(_answers(plain, histories))).max()
    assert worst <= TOLERANCE, f"scores of the two sides differ by {worst}"


def _stored(recommender: Recommender, num_users: int) -> Histories:
    """The users of the data set in an order of their own, each once as far as there are enough."""
    dataset = recommender.dataset
    keys = dataset.users["user_key"].to_pylist()
    order = np.random.default_rng(0).permutation(len(keys))
    place = 0

    def next_ones() -> list[Int64Array]:
        nonlocal place
        found = []
        while len(found) < num_users:
            history_ids = dataset.history_of(keys[order[place % len(order)]])
            place += 1
            # A window that moves is read anew, which is not what is measured.
            if history_ids is not None and 2 <= len(history_ids) <= LONG:
                found.append(history_ids)
        return found

    return next_ones


def _long(recommender: Recommender, num_users: int) -> Histories:
    ids_I, random = recommender.dataset.items.ids_I, np.random.default_rng(1)
    return lambda: [random.choice(ids_I, LONG, replace=False) for _ in range(num_users)]
