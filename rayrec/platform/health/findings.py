"""What a check found: a verdict with its reason, in a form that is stored, counted and compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["ok", "suspect", "bad", "unknown"]
Action = Literal["none", "avoid", "leave"]
"""What is to be done with the node: nothing; no new attempt there; leave it now."""

SEVERITY: dict[Verdict, int] = {"ok": 0, "unknown": 1, "suspect": 2, "bad": 3}
ACTIONS: dict[Action, int] = {"none": 0, "avoid": 1, "leave": 2}
AS_NUMBER: dict[Verdict, int] = {"ok": 0, "suspect": 1, "bad": 2, "unknown": -1}
"""As Prometheus has them."""
USUAL_ACTION: dict[Verdict, Action] = {"ok": "none", "unknown": "none", "suspect": "avoid", "bad": "leave"}


@dataclass(frozen=True)
class Finding:
    """One check of one thing."""

    code: str
    """Stable name, in kebab case."""
    subject: str
    """What was checked: `node`, `cuda 3 (0000:9b:00)`, `disk /tmp`."""
    verdict: Verdict
    value: float | str | None = None
    limit: float | str | None = None
    """What the value would have to keep to; None where it is a word."""
    action: Action = "none"
    detail: str = ""
    """One sentence for people."""
    time_s: float | None = None
    """When it last happened, by the node's clock, UNIX seconds; None: now, or at a time that is unknown."""

    @classmethod
    def of(
        cls,
        code: str,
        subject: str,
        verdict: Verdict,
        value: float | str | None = None,
        limit: float | str | None = None,
        detail: str = "",
    ) -> Finding:
        """With the action that the verdict usually has."""
        return cls(code, subject, verdict, value, limit, USUAL_ACTION[verdict], detail)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """One line: what, where, how much of what is allowed."""
        measured = "" if self.value is None else f": {_shown(self.value)}"
        limit = "" if self.limit is None else f" (limit {_shown(self.limit)})"
        return f"{self.code} of {self.subject}{measured}{limit}" + (f"; {self.detail}" if self.detail else "")


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict of all: bad before suspect before unknown before ok; unknown where there is none."""
    return max((finding.verdict for finding in findings), key=SEVERITY.__getitem__, default="unknown")


def strongest_action(findings: Iterable[Finding]) -> Action:
    return max((finding.action for finding in findings), key=ACTIONS.__getitem__, default="none")


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
