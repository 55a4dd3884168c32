"""Measure this machine with short windows of a run's own pipeline, and fit what its pieces cost.

    config ─► up to 8 variants (servers, trainers, widths, batches, modes, transports)
           ─► burn-in of the machine ─► for each variant: its actors, a warm-up, some windows ─► calibration

A cluster is started here for all variants, and nothing is kept but the calibration. Of the windows of a
variant the one with the shortest steps counts: other work on the machine can only make steps longer.
"""

from __future__ import annotations

import datetime
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rayrec.pipelines.capacity.calibration import Calibration, calibrated, fastest, spread_of
from rayrec.pipelines.capacity.costs import Measured
from rayrec.pipelines.capacity.windows import StepTimes, measure_windows
from rayrec.pipelines.capacity.workload import workload_of
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.platform.cluster import ray_cluster
from rayrec.platform.devices import HOST
from rayrec.platform.health.burn_in import burn_in, kind_of
from rayrec.platform.processors import num_processors
from rayrec.platform.ray_errors import ActorDeathError

logger = logging.getLogger(__name__)

NUM_WINDOWS, NUM_STEPS, WARM_UP = 8, 10, 8
EPOCHS = 1_000_000
"""Of a window's run, which never comes to their end."""
LEAST_BATCH = 32
TRIES, PAUSE_S = 3, 20.0


@dataclass(frozen=True)
class Variant:
    """What is different from the run's config; None: as it is there."""

    servers: int | None = None
    trainers: int | None = None
    dim: int | None = None
    batch: int | None = None
    mode: str | None = None
    transport: str | None = None
    hidden: tuple[int, ...] | None = None
    """Of ranking models: `model.hidden_dims`."""

    @property
    def label(self) -> str:
        names = ("servers", "trainers", "dim", "batch", "mode", "transport", "hidden")
        return ", ".join(f"{name} {getattr(self, name)}" for name in names if getattr(self, name) is not None)

    def of(self, config: RunConfig) -> RunConfig:
        """The config with these settings, with one thread per trainer and no end.

        Raises:
            InputError: the config does not allow one of them.
        """
        pipeline: dict[str, Any] = {"trainer_threads": 1}
        sparse: dict[str, Any] = {}
        training: dict[str, Any] = {"epochs": EPOCHS}
        model: dict[str, Any] = {}
        if self.servers is not None:
            sparse["num_servers"] = self.servers
        if self.transport is not None:
            sparse["transport"] = self.transport
        if self.trainers is not None:
            pipeline["num_trainers"] = self.trainers
        if self.mode is not None:
            pipeline["mode"] = self.mode
        if self.batch is not None:
            training["batch_size"] = self.batch
        if self.hidden is not None:
            model["hidden_dims"] = list(self.hidden)
        values = config.model_dump()
        if self.dim is not None:
            if "dim" in values["model"]:
                model["dim"] = self.dim
            elif "backbone" in values["model"]:
                values["model"]["backbone"]["dim"] = self.dim
        for section, changed in (
            ("pipeline", pipeline),
            ("sparse", sparse),
            ("training", training),
            ("model", model),
        ):
            values[section] |= changed
        if self.mode is not None and self.mode != "exact_prefetch":
            values["sparse"]["cache_rows"] = 0
        return RunConfig.parse(values, f"variant of the run with {self.label}")


def variants_of(config: RunConfig) -> list[Variant]:
    """Eight variants around a run, such that every cost shows in two of them at least."""
    batch = config.training.batch_size
    small, large = max(LEAST_BATCH, batch // 4), batch * 2
    dim = max(config.model.tables.values(), default=0) or None
    wide = None if dim is None else 4 * dim
    exact, sync, stale = "exact_prefetch", "sync", "bounded_stale"
    return [
        Variant(2, 1, dim, batch, exact, "auto"),
        Variant(1, 1, wide, batch, sync, "ray"),
        Variant(4, 1, dim, large, stale, "auto"),
        Variant(2, 2, wide, batch, exact, "ray"),
        Variant(1, 2, dim, batch, sync, "auto"),
        Variant(3, 1, wide, small, exact, "auto"),
        Variant(4, 2, dim, small, stale, "ray"),
        Variant(1, 1, wide, large, exact, "auto"),
    ]


def measure(
    config: RunConfig,
    variants: Sequence[Variant],
    on_variant: Callable[[int, int, str], None] = lambda done, total, note: None,
    num_windows: int = NUM_WINDOWS,
    num_steps: int = NUM_STEPS,
) -> Iterator[Measured]:
    """Windows of every variant on a cluster that is started here, one variant after the other.

    Args:
        on_variant: called before each, with how many are done, of how many, and what comes.

    Raises:
        InputError: a variant cannot be run on this data.
    """
    configs = [variant.of(config.with_absolute_paths()) for variant in variants]
    with ray_cluster(config.cluster, max(each.cpus_needed for each in configs)):
        for number, (variant, each) in enumerate(zip(variants, configs, strict=True)):
            on_variant(number, len(variants), variant.label)
            assembly = assemble(each, checksums=False)
            windows = _windows(f"window-{number}", assembly, num_windows, num_steps)
            times = fastest(windows)
            logger.info("%s: %.1f ms a step", variant.label, 1000 * times.step_s)
            yield Measured(
                workload_of(assembly),
                times,
                spread_of(windows),
                variant.label,
                {name: value for name, value in asdict(variant).items() if value is not None},
            )


def _windows(name: str, assembly: Assembly, num_windows: int, num_steps: int) -> list[StepTimes]:
    """Tried again if an actor dies, as it does where others take the machine's memory for a while."""
    for left in reversed(range(TRIES)):
        try:
            return measure_windows(name, assembly, num_windows, num_steps, WARM_UP)
        except ActorDeathError as error:
            if not left:
                raise
            logger.warning("measured again, since %s", str(error).partition("\n")[0])
            time.sleep(PAUSE_S)
    raise AssertionError("the last try returns or raises")


def calibrate(
    config: RunConfig,
    on_variant: Callable[[int, int, str], None] = lambda done, total, note: None,
    variants: Sequence[Variant] | None = None,
) -> Calibration:
    """Measure this machine with variants of a run, and fit its costs.

    Takes some minutes. The machine should have nothing else to do.

    Args:
        variants: None: those of `variants_of`.

    Raises:
        InputError: a variant cannot be run on this data.
    """
    with tempfile.TemporaryDirectory() as folder:
        of_machine = burn_in(folder=folder)
    if of_machine.busy is not None:
        logger.warning("this machine has other work to do (%s): costs may be too high", of_machine.busy)
    measured = list(measure(config, variants_of(config) if variants is None else variants, on_variant))
    return calibrated(
        measured,
        float(num_processors()),
        kind_of(HOST.torch),
        datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        of_machine.to_dict(),
    )
