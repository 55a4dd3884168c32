"""What may be claimed of a measured ratio, and how a benchmark answers."""

import importlib
import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import benchmarks
from benchmarks.harness import Bar, BenchOptions, interleaved, lower_bound, run_bench
from rayrec.platform.errors import InputError


@pytest.mark.parametrize(
    ("num_ratios", "place"),
    # Tables of the sign test: P(Bin(5) = 0) = 0.031, P(Bin(8) <= 1) = 0.035, P(Bin(20) <= 5) = 0.021.
    [(5, 1), (7, 1), (8, 2), (10, 2), (11, 3), (20, 6)],
)
def test_lower_bound_is_an_order_statistic(num_ratios: int, place: int):
    ratios = [float(rank) for rank in range(num_ratios, 0, -1)]

    assert lower_bound(ratios) == place


@pytest.mark.parametrize("num_ratios", range(5))
def test_fewer_than_five_ratios_have_no_lower_bound(num_ratios: int):
    assert lower_bound([1.0] * num_ratios) is None


@given(st.lists(st.floats(0.1, 10.0), min_size=5, max_size=40))
def test_lower_bound_is_one_of_the_ratios_and_not_above_their_median(ratios: list[float]):
    bar = Bar.of("bar", ratios, "peer", target=1.0)

    assert bar.low in ratios
    assert bar.value is not None
    assert bar.low <= bar.value
    assert bar.ok == (bar.low >= 1.0)


def test_a_good_median_with_a_bad_lower_bound_is_not_ok():
    bar = Bar.of("bar", [0.5, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9], "peer", target=0.6)

    assert (bar.value, bar.low, bar.ok) == (0.9, 0.5, False)


def test_what_could_not_be_measured_is_neither_ok_nor_missed():
    few, none = (Bar.of("bar", ratios, "peer", target=0.6) for ratios in ([0.9, 0.8], []))

    assert (few.value, few.low, few.ok) == (pytest.approx(0.85), None, None)
    assert (none.value, none.low, none.ok) == (None, None, None)


def test_ours_and_the_peer_are_measured_in_turns():
    calls: list[str] = []
    rates = {"a": iter([6.0, 8.0, 9.0]), "b": iter([2.0, 4.0, 3.0])}
    pairs: list[tuple[float, float]] = []

    def measure(side: str) -> float:
        calls.append(side)
        return next(rates[side])

    ratios = interleaved(
        lambda: measure("a"), lambda: measure("b"), 3, on_pair=lambda a, b: pairs.append((a, b))
    )

    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert ratios == [3.0, 2.0, 3.0]
    assert pairs == [(6.0, 2.0), (8.0, 4.0), (9.0, 3.0)]


def test_a_benchmark_prints_its_bars_and_answers_with_them(monkeypatch: pytest.MonkeyPatch):
    asked: list[BenchOptions] = []

    def bench(options: BenchOptions) -> list[Bar]:
        asked.append(options)
        return [
            Bar("fast", 0.75, 0.7, "plain loop", 0.6, True),
            Bar("slow", 0.5, 0.4, "plain loop", 0.6, False),
            Bar("absent", None, None, "a GPU", 2.0, None),
        ]

    monkeypatch.setitem(benchmarks.BENCHES, "example", bench)
    monkeypatch.setenv("RAYREC_BENCH_PAIRS", "11")
    text = io.StringIO()

    answer = run_bench("example", Console(file=text, width=120))

    assert [options.pairs for options in asked] == [11]
    assert json.loads(json.dumps(answer)) == {
        "bench": "example",
        "bars": [
            {"name": "fast", "value": 0.75, "low": 0.7, "peer": "plain loop", "target": 0.6, "ok": True},
            {"name": "slow", "value": 0.5, "low": 0.4, "peer": "plain loop", "target": 0.6, "ok": False},
            {"name": "absent", "value": None, "low": None, "peer": "a GPU", "target": 2.0, "ok": None},
        ],
    }
    rows = {
        line.split()[1]: line for line in text.getvalue().splitlines() if "plain" in line or "GPU" in line
    }
    assert "ok" in rows["fast"]
    assert "missed" in rows["slow"]
    assert "not measured" in rows["absent"]


def test_without_a_name_the_benchmarks_are_listed():
    text = io.StringIO()

    assert "spine" in run_bench("", Console(file=text))["benches"]
    assert "spine" in text.getvalue()


def test_every_benchmark_is_there():
    """They are imported when they are run."""
    for path in Path(benchmarks.__file__).parent.glob("*.py"):
        importlib.import_module(f"benchmarks.{path.stem}".removesuffix(".__init__"))

    for bench in benchmarks.BENCHES.values():
        module, function, *_ = bench.args
        assert callable(getattr(sys.modules[f"benchmarks.{module}"], function))


def test_an_unknown_benchmark_names_the_nearest():
    with pytest.raises(InputError, match="no benchmark 'spin'; did you mean 'spine'"):
        run_bench("spin", Console(file=io.StringIO()))


def test_options_come_from_the_environment():
    environment = {"RAYREC_BENCH_DATA": "data/beauty", "RAYREC_BENCH_STEPS": "5"}

    options = BenchOptions.from_environment(environment)

    assert options == BenchOptions(data=Path("data/beauty"), steps=5)
    with pytest.raises(InputError, match="RAYREC_BENCH_PAIRS: expected a whole number from 1, found '0'"):
        BenchOptions.from_environment({"RAYREC_BENCH_PAIRS": "0"})
