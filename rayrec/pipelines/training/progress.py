"""What a run knows of itself: how far it is, whether it is over, and how it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from rayrec.pipelines.tasks.assembly import Assembly
from rayrec.pipelines.training.pipeline import StepResult
from rayrec.samples.features.features import READ

_REASONS = {
    "rows_without_target": "had fewer than two known items",
    "unreadable_rows": "could not be decoded",
    "unknown_items": "were of items that the data set does not have",
    "unread_events": "were older than the model's window (max_length)",
}
_OF_ROWS = ("rows_without_target", "unreadable_rows")


@dataclass(frozen=True)
class RunProgress:
    """What a run has to know of itself to go on; every snapshot has it."""

    best_value: float | None = None
    best_step: int = -1
    stale: int = 0
    """Validations since the best one."""
    loss: float | None = None
    """Of the last step."""
    training_s: float = 0.0
    read: dict[str, int] = field(default_factory=dict)
    """Rows and events that were read, where the task counts them."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Dropped work, by reason."""
    all_targets: int = 0
    """Targets of the whole run."""
    loss_sum: float = 0.0
    """Over all targets since the last validation."""
    num_targets: int = 0
    """Their number."""

    def validated(self, value: float, step: int) -> RunProgress:
        """After a validation; of equal values the first is the best."""
        since = replace(self, loss_sum=0.0, num_targets=0)
        # What is no number does not stay the best value. A further one is no improvement on it.
        best = self.best_value
        if best is None or value > best or (math.isnan(best) and not math.isnan(value)):
            return replace(since, best_value=value, best_step=step, stale=0)
        return replace(since, stale=self.stale + 1)

    def trained(self, result: StepResult, seconds: float) -> RunProgress:
        """After another step."""
        read, dropped = dict(self.read), dict(self.dropped)
        for name, count in result.counts.items():
            counts = read if name in READ else dropped
            counts[name] = counts.get(name, 0) + count
        return replace(
            self,
            loss=result.loss,
            training_s=self.training_s + seconds,
            read=read,
            dropped=dropped,
            all_targets=self.all_targets + result.num_targets,
            loss_sum=self.loss_sum + result.loss * result.num_targets,
            num_targets=self.num_targets + result.num_targets,
        )

    @property
    def dropped_shares(self) -> dict[str, float]:
        """What was dropped as a share of what was read, by reason; without what did not happen."""
        shares = {}
        for reason, count in self.dropped.items():
            of = self.read.get("rows" if reason in _OF_ROWS else "events", 0)
            if count and of:
                shares[reason] = count / of
        return shares

    def described_drops(self) -> str:
        """The shares in words."""
        parts = []
        for reason, share in self.dropped_shares.items():
            name = "rows" if reason in _OF_ROWS else "events"
            parts.append(f"{share:.1%} of {self.read[name]:,} {name} {_REASONS.get(reason, reason)}")
        return ", ".join(parts) or "nothing"

    @property
    def mean_loss(self) -> float:
        """Per target, since the last validation."""
        return self.loss_sum / max(self.num_targets, 1)


@dataclass(frozen=True)
class TrainingResult:
    """How a run ended."""

    run: str
    steps: int
    epochs: float
    final_loss: float
    """Loss of the last step; equal for equal seeds in mode `sync`."""
    best_metric: str
    best_value: float
    best_step: int
    training_s: float
    """Seconds spent in the training steps of the whole run, validation and start-up left out.

    Of a run that was resumed, steps that were lost after a snapshot and trained again count once.
    """
    steps_per_s: float
    dropped: dict[str, float]
    """Shares of rows or events that were read and not trained on, by reason."""
    described_drops: str
    """The same in words."""
    stages: dict[str, float]
    """Where the time of the actors went since they were last started."""


def is_over(assembly: Assembly, step: int, progress: RunProgress) -> bool:
    """Whether nothing is left to train before this step."""
    patience, total_steps = assembly.config.evaluation.patience, assembly.total_steps
    is_at_end = total_steps is not None and step >= total_steps
    return is_at_end or (patience is not None and progress.stale >= patience)
