"""Settings of the controller that says how many replicas a service has."""

from __future__ import annotations

from pydantic import Field

from rayrec.platform.config import Config


class ScalingConfig(Config):
    """When replicas are added, and when they are taken away."""

    requests_per_replica: float = Field(4.0, gt=0)
    """Requests in flight, above which replicas are added. With `--services`, each deployment has its own."""
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
