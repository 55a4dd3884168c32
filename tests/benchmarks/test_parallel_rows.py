"""Bars of rows between nodes, by worked numbers."""

from __future__ import annotations

import pytest

from benchmarks import parallel_rows
from benchmarks.harness import BenchOptions
from benchmarks.row_run import VARIANTS


def test_limits_are_over_values_and_steps_over_those_of_float32(monkeypatch):
    figures = {
        ("sync", "float32"): (0.10, 1000.0),
        ("sync", "bfloat16"): (0.05, 500.0),
        ("sync", "int8_row"): (0.04, 250.0),
        ("exact_prefetch", "float32"): (0.06, 1000.0),
        ("exact_prefetch", "bfloat16"): (0.06, 500.0),
    }
    assert set(figures) == set(VARIANTS)
    found = {each: [{"step_s": s, "moved": moved}] * 5 for each, (s, moved) in figures.items()}
    monkeypatch.setattr(parallel_rows, "why_not", lambda: None)
    monkeypatch.setattr(parallel_rows, "windows", lambda num_windows, steps: found)

    bars = parallel_rows.bench(BenchOptions(pairs=5))

    assert {bar.name: bar.value for bar in bars} == pytest.approx(
        {
            "parallel-rows-bytes": 0.51 / 0.5,
            "parallel-rows-bytes-int8": 0.28 / 0.25,
            "parallel-rows-step": 2.0,
            "parallel-rows-step-int8": 2.5,
            "parallel-rows-step-ahead": 1.0,
        }
    )
    assert all(bar.ok for bar in bars)


def test_without_a_link_nothing_is_measured_and_it_says_why(monkeypatch):
    monkeypatch.setattr(parallel_rows, "why_not", lambda: "network namespaces need root")
    bars = parallel_rows.bench(BenchOptions())
    assert {bar.name: bar.target for bar in bars} == parallel_rows.TARGETS
    assert {(bar.ok, bar.peer) for bar in bars} == {(None, "network namespaces need root")}
