"""What became of a trial, as JSON has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How a trial ended."""

    state: State
    value: float | None = None
    """Of the metric: of a complete trial at its best snapshot, of a pruned one at its last validation."""
    validations: tuple[float | None, ...] = ()
    """The metric of every validation, in order; None where it is no number."""
    reason: str | None = None
    """Why it is not complete."""
    steps: int | None = None
    best_step: int | None = None
    minutes: float = 0.0
    """That it took, its start and its validations included; of one that was cut short, since it went on."""
    cpu_minutes: float | None = None
    """The same of all processors; None where its actors are processes of their own."""
    same_as: int | None = None
    """Number of an earlier trial of the same settings, whose outcome this is."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "validations": list(self.validations)}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Outcome:
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        return cls(**{**known, "validations": tuple(known["validations"])})
