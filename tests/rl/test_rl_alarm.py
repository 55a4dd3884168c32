"""A policy that collapses, and what is kept of it."""

from types import SimpleNamespace

import pytest

from rayrec.rl.config import AlarmConfig, RlConfig
from rayrec.rl.run import _Run
from rayrec.rl.training import Alarm, CollapsedError, StepReport


class Recorded(_Run):
    """Writes down what would have been logged and validated."""

    def __init__(self, config: RlConfig) -> None:
        self._config = config
        self.logged: list[int] = []
        self.validated: list[int] = []

    def _log(self, report):
        self.logged.append(report.step)

    def _validate(self, training, controller):
        self.validated.append(len(training.alarm.state))


def report(step: int, **metrics: float) -> StepReport:
    return StepReport(step, {"kl": 0.1, "entropy": 5.0, **metrics}, (), 0.0)


def test_a_policy_that_collapsed_is_logged_and_not_kept():
    """It may have the highest reward of all: that is what collapses look like."""
    config = RlConfig.parse(
        {
            "init_from": "run",
            "steps": 2,
            "rewards": {"parts": [{"kind": "hit"}]},
            "evaluation": {"every_steps": 1},
        }
    )
    run = Recorded(config)
    reports = [report(1), report(2, kl=99.0)]
    training = SimpleNamespace(steps=lambda: iter(reports), alarm=Alarm(AlarmConfig()), is_snapshot_due=True)
    with pytest.raises(CollapsedError, match="step 2: the KL divergence"):
        run._take_steps(training, None)
    assert run.logged == [1, 2]
    # And what is kept of step 1 knows its entropy.
    assert run.validated == [1]
