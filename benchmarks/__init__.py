"""What the project claims of itself in figures, and how each of them is measured.

A benchmark is imported when it is run: most need packages that the others do not.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness import Bar, Bench


def _run(module: str, function: str, *arguments: object) -> list[Bar]:
    """Import the benchmark and run it; the last argument are the options."""
    bars: list[Bar] = getattr(importlib.import_module(f"benchmarks.{module}"), function)(*arguments)
    return bars


QUALITY_CONFIGS = (
    "beauty-sasrec",
    "beauty-sasrec-sparse",
    "beauty-sasrec-bce",
    "beauty-hstu",
    "beauty-generative",
    "beauty-light",
    "movielens-generative",
    "movielens-light",
)
"""Of `configs/`, those that are trained and evaluated whole."""

BENCHES: dict[str, Bench] = {
    "attention": partial(_run, "attention", "bench"),
    "capacity": partial(_run, "capacity", "bench"),
    "capacity-real": partial(_run, "capacity_real", "bench"),
    "ctr": partial(_run, "ctr", "bench"),
    "decode": partial(_run, "decode", "bench"),
    "dense-optimizer": partial(_run, "dense_optimizer", "bench"),
    "keyed-dropout": partial(_run, "keyed_dropout", "bench"),
    "grpc": partial(_run, "serve_grpc", "bench"),
    "graph": partial(_run, "graph", "bench"),
    "graph-fresh": partial(_run, "graph_fresh", "bench"),
    "graph-growth": partial(_run, "graph", "bench_growth"),
    "graph-quality": partial(_run, "graph_quality", "bench"),
    "health": partial(_run, "health", "bench"),
    "idle-threads": partial(_run, "idle_threads", "bench"),
    "jobs": partial(_run, "jobs", "bench"),
    "maas": partial(_run, "maas", "bench"),
    "jobs-real": partial(_run, "jobs_real", "bench"),
    "language-alignment": partial(_run, "language_alignment", "bench"),
    "language": partial(_run, "language", "bench"),
    "language-families": partial(_run, "language_families", "bench"),
    "nearline": partial(_run, "nearline", "bench"),
    "nearline-long": partial(_run, "long_history", "bench"),
    "nearline-quality": partial(_run, "long_history_quality", "bench"),
    "off-policy": partial(_run, "off_policy", "bench"),
    "online": partial(_run, "online", "bench"),
    "parallel": partial(_run, "parallel", "bench"),
    "parallel-rows": partial(_run, "parallel_rows", "bench"),
    "pipeline": partial(_run, "pipeline", "bench"),
    "quality": partial(_run, "quality_bars", "bench"),
    "quantization": partial(_run, "quantization", "bench"),
    "replay": partial(_run, "replay", "bench"),
    "rl": partial(_run, "rl", "bench"),
    "samples": partial(_run, "samples", "bench"),
    "scale-prepare": partial(_run, "scale_prepare", "bench"),
    "serve": partial(_run, "serve", "bench"),
    "serve-kill": partial(_run, "serve_kill", "bench"),
    "serve-kill-proxy": partial(_run, "serve_kill", "bench_by_proxy"),
    "serve-overhead": partial(_run, "serve_overhead", "bench"),
    "serve-overload": partial(_run, "serve_overload", "bench"),
    "serve-overload-ray": partial(_run, "serve_overload", "bench_on_ray"),
    "serve-versions": partial(_run, "serve_versions", "bench"),
    "serve-fuzz": partial(_run, "serve_fuzz", "bench"),
    "serve-services": partial(_run, "serve_services", "bench"),
    "spine": partial(_run, "spine", "bench"),
    "snapshot": partial(_run, "snapshot", "bench"),
    "scale": partial(_run, "scale", "bench"),
    "scale-catalog": partial(_run, "scale_catalog", "bench"),
    "scale-prefixes": partial(_run, "scale_prefixes", "bench"),
    "scale-rollback": partial(_run, "scale_rollback", "bench"),
    "scale-rows": partial(_run, "scale_rows", "bench"),
    "scale-tokenize": partial(_run, "scale_tokenize", "bench"),
    "scale-tree": partial(_run, "scale_tree", "bench"),
    "scale-watch": partial(_run, "scale_watch", "bench"),
    "sparse": partial(_run, "sparse", "bench"),
    "stores": partial(_run, "stores", "bench"),
    "transport": partial(_run, "transport", "bench"),
    "tiers": partial(_run, "tiers", "bench"),
    "value": partial(_run, "value", "bench"),
    "value-live": partial(_run, "value_live", "bench"),
    "value-replay": partial(_run, "value_replay", "bench"),
    "wire-quality": partial(_run, "wire_quality", "bench"),
    **{name: partial(_run, "quality", "bench", name) for name in QUALITY_CONFIGS},
}
