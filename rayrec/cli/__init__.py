"""The `rayrec` command: arguments in, one call into the package, a table or a JSON line out."""

# Which register their commands, in this order.
from rayrec.cli import cursors, data, impressions, runs, recommending, text, semantic_ids  # isort: skip
from rayrec.cli import (
    ab,
    canaries,
    comparison,
    maas,
    nearline,
    off_policy,
    online,
    planning,
    quantization,
    rl,
    serving,
    stores,
    tuning,
    value,
    versions,
)  # isort: skip

from rayrec.cli import agreement, queues, jobs, manifests, nodes, cluster_metrics, health, tools  # isort: skip
from rayrec.cli.app import app

__all__ = [
    "ab",
    "agreement",
    "app",
    "canaries",
    "cluster_metrics",
    "comparison",
    "cursors",
    "data",
    "health",
    "impressions",
    "jobs",
    "maas",
    "main",
    "manifests",
    "nearline",
    "nodes",
    "off_policy",
    "online",
    "planning",
    "quantization",
    "queues",
    "recommending",
    "rl",
    "runs",
    "semantic_ids",
    "serving",
    "stores",
    "text",
    "tools",
    "tuning",
    "value",
    "versions",
]


def main() -> None:
    """Entry point of the `rayrec` command."""
    app()
