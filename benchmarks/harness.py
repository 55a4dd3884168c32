"""Bars: ratios measured within one run, with a confidence bound.

The rates of one machine vary from hour to hour by more than the difference that is measured. So ours and the
peer's are measured in turns, A B A B ..., and only the ratios of neighbors count: a bar has their median and
a lower bound of it.
"""

from __future__ import annotations

import difflib
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rayrec.platform.errors import InputError

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Bar:
    """One measured ratio, and whether it reaches what the project claims."""

    name: str
    value: float | None
    """Median of the ratios; None if it could not be measured."""
    low: float | None
    """Lower 95 % confidence bound of that median; None if there are too few ratios."""
    peer: str
    """What ours is compared with."""
    target: float
    ok: bool | None
    """Whether `low`, or the value of a single measurement, reaches the target; None without either."""

    @classmethod
    def of(cls, name: str, ratios: Sequence[float], peer: str, target: float) -> Bar:
        low = lower_bound(ratios)
        value = statistics.median(ratios) if ratios else None
        return cls(name, value, low, peer, target, None if low is None else low >= target)

    @classmethod
    def once(cls, name: str, ratio: float, peer: str, target: float) -> Bar:
        """The bar of one long measurement: the value itself has to reach the target."""
        return cls(name, ratio, None, peer, target, ratio >= target)


@dataclass(frozen=True)
class BenchOptions:
    """Sizes of a benchmark."""

    data: Path | None = None
    """Prepared data set to measure on, if one is needed; None makes a synthetic one."""
    pairs: int = 9
    """Number of A B pairs."""
    steps: int = 30
    """Steps of one measurement, where it counts steps."""
    rows: int | None = None
    """Rows of the table or index, where there is one; None means the size that the claim is about."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> BenchOptions:
        """Read `RAYREC_BENCH_DATA`, `_PAIRS`, `_STEPS` and `_ROWS`.

        Raises:
            InputError: a value is not a number, or less than 1.
        """
        data = environment.get("RAYREC_BENCH_DATA")
        return cls(
            data=Path(data) if data else None,
            pairs=_positive(environment, "RAYREC_BENCH_PAIRS", cls.pairs),
            steps=_positive(environment, "RAYREC_BENCH_STEPS", cls.steps),
            rows=_positive(environment, "RAYREC_BENCH_ROWS", 1)
            if environment.get("RAYREC_BENCH_ROWS")
            else None,
        )


Bench = Callable[[BenchOptions], list[Bar]]


def lower_bound(ratios: Sequence[float]) -> float | None:
    """Lower 95 % confidence bound of the median, without assumptions about the distribution.

    That is the k-th smallest ratio with the largest k for which at least k of n fall below the true
    median with a probability of 95 %; how many do is binomial(n, 1/2). The smallest of 5 to 7, the
    second smallest of 8 to 10. None for fewer than 5: not even the smallest is a bound then.

    Source: David & Nagaraja, Order Statistics, 3rd ed., section 7.1.
    """
    n, k, below = len(ratios), 0, 0.0
    while (below := below + math.comb(n, k) / 2**n) <= 1 - CONFIDENCE:
        k += 1
    return sorted(ratios)[k - 1] if k else None


def interleaved(
    ours: Callable[[], float],
    peer: Callable[[], float],
    repeats: int,
    on_pair: Callable[[float, float], None] | None = None,
) -> list[float]:
    """Measure A B A B ...; returns the ratio of each pair.

    Args:
        ours, peer: measure a rate, the higher the better.
        on_pair: called with each pair of rates.
    """
    ratios = []
    for _ in range(repeats):
        a, b = ours(), peer()
        ratios.append(a / b)
        if on_pair is not None:
            on_pair(a, b)
    return ratios


def run_bench(name: str, out: Console, options: BenchOptions | None = None) -> dict[str, Any]:
    """Run a benchmark and print its bars; without a name, list the benchmarks.

    Args:
        options: if None, read from the environment.

    Returns:
        What `rayrec bench --json` prints: `{"bench": NAME, "bars": [...]}`.

    Raises:
        InputError: an unknown name, or options that it cannot be run with.
    """
    from benchmarks import BENCHES  # which imports this module

    if not name:
        out.print(f"Benchmarks: {', '.join(BENCHES)}")
        return {"benches": list(BENCHES)}
    if name not in BENCHES:
        close = difflib.get_close_matches(name, BENCHES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(BENCHES)}"
        raise InputError(f"there is no benchmark {name!r}; {hint}")
    bars = BENCHES[name](options or BenchOptions.from_environment(os.environ))
    out.print(_table(name, bars))
    return {"bench": name, "bars": [asdict(bar) for bar in bars]}


def _table(name: str, bars: Sequence[Bar]) -> Table:
    table = Table(title=name, title_justify="left")
    table.add_column("bar", no_wrap=True)
    table.add_column("measured against")
    for heading in ("median", "95 % low", "target"):
        table.add_column(heading, justify="right")
    table.add_column("")
    marks = {True: "[green]ok[/green]", False: "[red]missed[/red]", None: "[yellow]not measured[/yellow]"}
    for bar in bars:
        table.add_row(
            bar.name, bar.peer, _figure(bar.value), _figure(bar.low), _figure(bar.target), marks[bar.ok]
        )
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _positive(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{name}: expected a whole number from 1, found {text!r}")
    return int(text)
