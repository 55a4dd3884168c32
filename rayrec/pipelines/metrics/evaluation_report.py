"""What an evaluation says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.samples.dataset.manifest import Split

OnBatch = Callable[[int, int], None]
"""Called with (users or impressions done, those of the split)."""


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
    not_whole: Mapping[str, int] = field(default_factory=dict)
    """Of records: how many were cut or left out, most because the model reads no more tokens, by which."""

    num_judged: Mapping[str, int] = field(default_factory=dict)
    """Of records: how many are behind each figure."""

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
            **({"not_whole": dict(self.not_whole)} if self.not_whole else {}),
            **({"num_judged": dict(self.num_judged)} if self.num_judged else {}),
            "results": results,
        }
