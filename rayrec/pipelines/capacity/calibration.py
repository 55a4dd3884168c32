"""Costs of a machine with their spread, fitted to measured windows, and the file that keeps them.

windows ─► processor time of every role ─► costs ─► time of steps ─► what a trainer waits for
                                             └► again without each configuration: how far costs may be off
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from rayrec.pipelines.capacity.cluster_spec import ClusterSpec
from rayrec.pipelines.capacity.costs import Costs, Measured, fit_costs
from rayrec.pipelines.capacity.step_model import StepPlan, step_plan
from rayrec.pipelines.capacity.windows import StepTimes
from rayrec.pipelines.capacity.workload import TableWork, Workload
from rayrec.platform.errors import InputError
from rayrec.platform.files import written_whole
from rayrec.platform.memory import machine_bytes
from rayrec.platform.processors import num_processors

FORMAT = 1
SHIPPED = Path(__file__).parent / "calibration.json"
"""Measured by the project; of a user's own machine, `rayrec calibrate` writes one."""


ROBUST = 1.4826
"""Standard deviation of normal errors over the median of their sizes."""
PARTS_WEIGHT = 0.3
"""Of a step's dense and exposed part against the whole, where waits are fitted."""


class _Wait(NamedTuple):
    """A cost that shows in the time of steps alone."""

    name: str
    start: float
    """What it is taken for where windows say nothing else."""
    most: float
    weight: float = 0.05
    """Of a difference from that, as a share of the most, against the logarithm of a step's error."""


_WAITS = (
    _Wait("step_latency", 4e-3, 0.1),
    _Wait("near_latency", 1e-3, 0.1),
    _Wait("far_latency", 3e-3, 0.1),
    _Wait("reduce_latency", 2e-3, 0.1),
    # On few cores little hides, since others compute meanwhile; the start is that of cores of their own.
    _Wait("hidden_exact", 0.5, 1.0, 0.5),
    _Wait("hidden_stale", 0.66, 1.0, 0.5),
)


@dataclass(frozen=True)
class Calibration:
    """Costs, and how well they describe what they were fitted to."""

    costs: Costs
    without_one: tuple[Costs, ...]
    """Fitted without each of the configurations: how much they depend on any of them."""
    residual: float
    """Standard deviation of the logarithm of measured over predicted steps, each by the fit without it; by
    their median, since a fit without the only window of a kind knows nothing of that kind."""
    machine: str
    cores: float
    measured_on: str
    """Date."""
    burn_in: Mapping[str, Any] = field(default_factory=dict)
    windows: tuple[Measured, ...] = ()
    """What it was fitted to."""

    def plan(self, work: Workload, cluster: ClusterSpec) -> StepPlan:
        return step_plan(work, cluster, self.costs)

    def step_range(self, work: Workload, cluster: ClusterSpec) -> tuple[float, float]:
        """Seconds between which a step most likely is: two standard deviations of what windows of the
        calibration were off, and of the fits without one of them."""
        middle = self.plan(work, cluster).seconds
        others = [step_plan(work, cluster, costs).seconds for costs in self.without_one]
        logs = [np.log(each / middle) for each in others if each > 0]
        of_fit = ROBUST * float(np.median(np.abs(logs))) if logs else 0.0
        sigma = float(np.hypot(of_fit, self.residual))
        return middle * float(np.exp(-2 * sigma)), middle * float(np.exp(2 * sigma))

    def save(self, path: str | Path) -> None:
        """Write it as JSON; whole, or not at all."""
        with written_whole(Path(path)) as unfinished:
            unfinished.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT} | asdict(self)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what `save` has written.

        Raises:
            InputError: there is no such file, or it is no calibration.
        """
        path = Path(path)
        try:
            found = json.loads(path.read_text())
            return cls.from_dict(found)
        except OSError as error:
            raise InputError(
                f"{path}: there is no calibration ({error.strerror}); write one with rayrec calibrate"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: is no calibration of this version ({error}); write one with rayrec calibrate"
            ) from None

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Calibration:
        """
        Raises:
            ValueError, KeyError, TypeError: it is no calibration.
        """
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}, expected {FORMAT}")
        return cls(
            costs=Costs(**found["costs"]),
            without_one=tuple(Costs(**costs) for costs in found["without_one"]),
            residual=float(found["residual"]),
            machine=str(found["machine"]),
            cores=float(found["cores"]),
            measured_on=str(found["measured_on"]),
            burn_in=found["burn_in"],
            windows=tuple(measured_from(each) for each in found["windows"]),
        )


def measured_from(found: Mapping[str, Any]) -> Measured:
    """From what `asdict` made of it."""
    work = dict(found["workload"])
    work["tables"] = tuple(TableWork(**table) for table in work["tables"])
    return Measured(
        Workload(**work),
        StepTimes(**found["times"]),
        found.get("spread", 0.0),
        found.get("label", ""),
        found.get("settings", {}),
    )


def this_machine(cores: float | None = None) -> ClusterSpec:
    """One node without accelerators or network, as windows are measured on."""
    cores = float(num_processors()) if cores is None else cores
    measured = "measured: this machine"
    return ClusterSpec.parse(
        {
            "about": "the machine that windows were measured on",
            "trainers": {
                "count": f"1 nodes, {measured}",
                "cores": f"{cores:g} cores, {measured}",
                "memory": f"{machine_bytes()} B, {measured}",
                "price": "0 USD/h, assumed",
            },
            "storage": {"write": "1 GB/s, assumed", "read": "1 GB/s, assumed"},
            "failures": {
                "trainer_node_mtbf": "1 years, assumed",
                "detect": "30 s, assumed",
                "restart": "60 s, assumed",
                "repair": "1 h, assumed",
                "spares": "0 nodes, assumed",
            },
            "noise": {
                "steps": "10 %, assumed",
                "slow_cards": "0 %, assumed",
                "slowdown": "1 times, assumed",
            },
            "core_speed": f"1 times, {measured}",
        }
    )


def fit(measured: Sequence[Measured], cores: float) -> Costs:
    """Costs of all roles, then what trainers wait for.

    Args:
        measured: configurations of one machine.
        cores: that it has.
    """
    return fit_waits(fit_costs(measured), measured, cores)


def machine_of(measured: Measured, cores: float) -> ClusterSpec:
    """The machine as a window found it: with the cores that others have left, where that is known."""
    return this_machine(measured.times.free_cores or cores)


def fit_waits(costs: Costs, measured: Sequence[Measured], cores: float) -> Costs:
    """Latencies and hidden shares with which predicted steps come nearest to measured ones.

    A wait that no configuration shows (no trainer of another mode, say) stays at its first guess.
    """
    shown = [wait for wait in _WAITS if any(_shows(wait.name, each.workload) for each in measured)]
    if not shown:
        return costs
    machines = [machine_of(each, cores) for each in measured]

    def with_waits(values: Sequence[float]) -> Costs:
        known = {wait.name: wait.start for wait in _WAITS}
        return replace(costs, **(known | dict(zip((w.name for w in shown), map(float, values), strict=True))))

    def errors(values: Sequence[float]) -> list[float]:
        tried = with_waits(values)
        found = [
            wait.weight * (value - wait.start) / wait.most for value, wait in zip(values, shown, strict=True)
        ]
        for each, machine in zip(measured, machines, strict=True):
            plan = step_plan(each.workload, machine, tried)
            found.append(_log_error(plan.seconds, each.times.step_s))
            found.append(PARTS_WEIGHT * _log_error(plan.stages["dense"], each.times.dense_s))
            if each.workload.num_servers:
                found.append(PARTS_WEIGHT * _log_error(plan.exposed, each.times.exchange_s))
        return found

    found = least_squares(
        errors,
        [wait.start for wait in shown],
        bounds=([0.0] * len(shown), [wait.most for wait in shown]),
        x_scale=[wait.most / 10 for wait in shown],
        loss="soft_l1",
        f_scale=0.2,
        diff_step=1e-3,
    )
    return with_waits(found.x)


def _log_error(predicted: float, measured: float) -> float:
    """Of both with a millisecond more, below which neither is known."""
    return float(np.log((predicted + 1e-3) / (measured + 1e-3)))


def _shows(wait: str, work: Workload) -> bool:
    return {
        "step_latency": True,
        "near_latency": bool(work.num_servers) and work.is_near,
        "far_latency": bool(work.num_servers) and not work.is_near,
        "reduce_latency": work.num_trainers > 1,
        "hidden_exact": bool(work.num_servers) and work.mode == "exact_prefetch",
        "hidden_stale": bool(work.num_servers) and work.mode == "bounded_stale",
    }[wait]


def calibrated(
    measured: Sequence[Measured],
    cores: float,
    machine: str,
    measured_on: str,
    burn_in: Mapping[str, Any] | None = None,
) -> Calibration:
    """Fit a machine's costs, with their spread.

    Raises:
        InputError: there are too few configurations.
    """
    if len(measured) < 3:
        raise InputError(
            f"a calibration needs windows of 3 configurations or more, and there are {len(measured)}"
        )
    costs = fit(measured, cores)
    without = [fit([other for other in measured if other is not each], cores) for each in measured]
    logs = [
        np.log(each.times.step_s / step_plan(each.workload, machine_of(each, cores), others).seconds)
        for each, others in zip(measured, without, strict=True)
    ]
    return Calibration(
        costs,
        tuple(without),
        ROBUST * float(np.median(np.abs(logs))),
        machine,
        cores,
        measured_on,
        burn_in or {},
        tuple(measured),
    )


def fastest(windows: Sequence[StepTimes]) -> StepTimes:
    """The window of the shortest steps: other work on the machine can only make steps longer."""
    return min(windows, key=lambda window: window.step_s)


def spread_of(windows: Sequence[StepTimes]) -> float:
    """Half of the range of steps, over their median."""
    steps = [window.step_s for window in windows]
    return (max(steps) - min(steps)) / 2 / statistics.median(steps)
