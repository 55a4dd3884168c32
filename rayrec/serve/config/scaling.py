"""Settings of the controller that says how many replicas a service has."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rayrec.platform.config import Config


class BatcherTargets(Config):
    """What one replica is for, by its batcher's own load; replicas are added where any is passed."""

    work: float = Field(0.7, gt=0, le=1)
    """Seconds of computing that come per second, in batches of the size that pays most; at 1 it is full."""
    queue_wait_s: float = Field(0.1, gt=0)
    """Mean time that requests wait until their batch begins; of a message, its first row."""
    full_batches: float = Field(0.5, gt=0, le=1)
    """Share of the batches that take as many requests as pay and leave others waiting."""
    backlog_s: float = Field(0.5, gt=0)
    """Seconds of computing that wait at once."""


class ScalingConfig(Config):
    """When replicas are added, and when they are taken away."""

    batcher: BatcherTargets | None = None
    """What a replica is for, by its batcher's own signal; None: the defaults, unless one of the next two is
    given instead."""
    requests_per_replica: float | None = Field(None, gt=0)
    """Requests in flight, above which replicas are added, whatever the batcher says. With `--services`, each
    deployment has its own."""
    worth_of_replica_s: float | None = Field(None, gt=0)
    """What a second of a replica has to earn, in the unit of the requests' values (`--admission` with
    `allocate`): replicas are added while a further device second would earn more. None: by requests in
    flight."""
    dead_band: float = Field(0.1, ge=0, lt=1)
    """Share of the load around what the replicas are for, in which nothing is changed."""
    average_s: float = Field(15.0, ge=0)
    """Time over which the load is averaged."""
    lower_after_s: float = Field(300.0, gt=0)
    """Replicas are taken away when the highest load of so long a time would do with fewer."""
    raise_again_s: float = Field(60.0, ge=0)
    """Time that new replicas have to come up, before more are added for the same load."""
    tick_s: float = Field(1.0, gt=0)
    """A maximum that is lowered by the queue is noticed so fast."""
    look_s: float = Field(5.0, gt=0)
    """Between two readings of the load. Ray exports it every 10 s, unless RAY_metrics_report_interval_ms says
    otherwise where the cluster is started."""

    @property
    def targets(self) -> BatcherTargets | None:
        """None: replicas are scaled by something else than the batcher's signal."""
        if self.requests_per_replica is not None or self.worth_of_replica_s is not None:
            return None
        return self.batcher or BatcherTargets()

    @model_validator(mode="after")
    def _one_signal_decides(self) -> Self:
        given = [
            name
            for name in ("batcher", "requests_per_replica", "worth_of_replica_s")
            if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ValueError(
                f"scaling: {' and '.join(given)} would each ask for other numbers of replicas; keep one of "
                "them"
            )
        return self
