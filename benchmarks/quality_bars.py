"""Bars of the figures of README's table, from the positions of users that were kept with its rows.

A row takes up to 40 minutes of a processor, so it is a measurement of its own, whose dated record is in
benchmarks/quality (`make quality ROW=beauty/shuffled/METHOD` measures it again). This bench resamples users
and seeds of these records. Recall@10 on Amazon Beauty, leave-one-out, ties shuffled:

* `quality-METHOD`: over that of co-visitation, which needs no training, in pairs.
* `quality-wanted-best`, `quality-wanted-codes`: of the best row, and of the best without a vector of an item
  or of a whole ID, over the figures that were wanted.
* `quality-best-over-sasrec`: of the best row, in pairs.
* `quality-servers-METHOD`: rows on parameter servers over the same model without; the upper end of the 95 %
  interval, which is at least 1 where these users show no loss.
* `quality-wanted-sports`: of the best row of Amazon Sports over the figure that was wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness import Bar, BenchOptions
from benchmarks.quality_page import README_METHODS, lines_of
from benchmarks.quality_pairs import METRIC, Line
from benchmarks.quality_rows import BASELINE
from rayrec.pipelines.evaluation.compare import ALL_USERS, compare
from rayrec.pipelines.evaluation.lists import CO_VISITATION
from rayrec.pipelines.metrics.estimate import Estimate

BEAUTY, SPORTS = ("beauty", "shuffled"), ("sports", "shuffled")
CODES = (
    *("light", "light-sasrec", "light-sasrec-ids", "lazy-text", "lazy-sasrec", "tiger"),
    *("codes", "codes-sasrec", "codes-alone", "causal-lm"),
)
"""Methods without a vector of an item or of a whole ID."""
ON_SERVERS = {
    "sasrec-servers": "sasrec",
    "generative-servers": "generative",
    "hybrid-servers": "hybrid",
    "hybrid-servers-sasrec": "hybrid-sasrec",
}
WANTED = {"best": 0.105, "codes": 0.085, "sports": 0.065}


def bench(options: BenchOptions) -> list[Bar]:
    """All that the records have; what was not measured has no value."""
    beauty, sports = lines_of(*BEAUTY), lines_of(*SPORTS)
    best, best_of_codes = _best(beauty, tuple(README_METHODS)), _best(beauty, CODES)
    bars = [_against(f"quality-{method}", beauty, CO_VISITATION, method) for method in README_METHODS]
    bars += [_wanted("best", beauty, best), _wanted("codes", beauty, best_of_codes)]
    bars.append(_against("quality-best-over-sasrec", beauty, BASELINE, best))
    for method, dense in ON_SERVERS.items():
        name = f"quality-servers-{method.replace('-servers', '')}"
        ratio = _ratio(beauty, dense, method)
        bars.append(Bar.of(name, [], dense, 1.0) if ratio is None else Bar.once(name, ratio.high, dense, 1.0))
    return [*bars, _wanted("sports", sports, _best(sports, tuple(sports)))]


def _best(lines: Mapping[str, Line], methods: Sequence[str]) -> str | None:
    return max((each for each in methods if each in lines), key=lambda each: lines[each].mean, default=None)


def _wanted(what: str, lines: Mapping[str, Line], method: str | None) -> Bar:
    name, peer = f"quality-wanted-{what}", f"{METRIC} {WANTED[what]}"
    return (
        Bar.of(name, [], peer, 1.0)
        if method is None
        else Bar.once(name, lines[method].mean / WANTED[what], peer, 1.0)
    )


def _against(name: str, lines: Mapping[str, Line], there: str, here: str | None) -> Bar:
    ratio = _ratio(lines, there, here)
    if ratio is None:
        return Bar.of(name, [], there, 1.0)
    return Bar(name, ratio.value, ratio.low, there, 1.0, ratio.low >= 1.0)


def _ratio(lines: Mapping[str, Line], there: str, here: str | None) -> Estimate | None:
    """Of a row over another; None where one of them has no positions."""
    if here is None or there not in lines or here not in lines:
        return None
    return compare(lines[there].seeds, lines[here].seeds, METRIC).estimates[ALL_USERS].ratio
