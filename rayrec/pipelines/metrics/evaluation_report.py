"""What an evaluation says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rayrec.pipelines.metrics.beyond_accuracy import ListMetrics
from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.positions import Positions
from rayrec.pipelines.metrics.ranking_metrics import metrics_beyond
from rayrec.pipelines.metrics.slices import SliceReport
from rayrec.samples.dataset.manifest import Split

OnBatch = Callable[[int, int], None]
"""Called with (users or impressions done, those of the split)."""


@dataclass(frozen=True)
class RankingDetails:
    """Of recommenders, what is behind the metrics of all users."""

    positions: Positions
    lists: Mapping[str, ListMetrics]
    slices: Mapping[str, SliceReport]
    empty_slices: Sequence[str]
    """Slices without users, which are left out."""
    num_repeats: int
    """Users whose target is in their history: lists without seen items cannot have it."""
    num_left_out: int = 0
    """Users of a later data set whose target is no later than the run's own data."""

    def to_json(self) -> dict[str, Any]:
        infos = self.positions.header.lists
        return {
            "num_repeats": self.num_repeats,
            **({"num_left_out": self.num_left_out} if self.num_left_out else {}),
            "lists": {
                name: {
                    **infos[name].model_dump(mode="json"),
                    **metrics.to_json(),
                    "not_available": list(metrics_beyond(infos[name].depth)),
                }
                for name, metrics in self.lists.items()
            },
            "slices": {name: each.to_json() for name, each in self.slices.items()},
            "empty_slices": list(self.empty_slices),
        }


@dataclass(frozen=True)
class EvaluationReport:
    """Figures by what was judged."""

    run: str
    split: Split
    snapshot_step: int
    count: int
    """Users, impressions, or records."""
    results: dict[str, dict[str, Estimate]]
    """`model`, `model, seen items kept`, `popularity`, ... to metric to estimate."""
    unit: Literal["users", "impressions", "records"] = "users"
    ranker: str | None = None
    """The run that ranks in `model + ranker`."""
    on: str | None = None
    """The later data set whose events these are, where they are not of the run's own."""
    not_whole: Mapping[str, int] = field(default_factory=dict)
    """Of records: how many were cut or left out, most because the model reads no more tokens, by which."""

    num_judged: Mapping[str, int] = field(default_factory=dict)
    """Of records: how many are behind each figure."""
    ranking: RankingDetails | None = None
    """Of recommenders."""
    positions_file: str | None = None
    """Beside the report, where positions are written."""

    def to_json(self) -> dict[str, Any]:
        results = {
            name: {metric: estimate._asdict() for metric, estimate in metrics.items()}
            for name, metrics in self.results.items()
        }
        return {
            "run": self.run,
            "split": self.split,
            "snapshot_step": self.snapshot_step,
            f"num_{self.unit}": self.count,
            **({} if self.ranker is None else {"ranker": self.ranker}),
            **({} if self.on is None else {"on": self.on}),
            **({"not_whole": dict(self.not_whole)} if self.not_whole else {}),
            **({"num_judged": dict(self.num_judged)} if self.num_judged else {}),
            "results": results,
            **({} if self.ranking is None else self.ranking.to_json()),
            **({} if self.positions_file is None else {"positions": self.positions_file}),
        }
