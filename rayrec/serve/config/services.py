"""Settings of a service that is several deployments, each with replicas of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rayrec.platform.config import Config

MAIN = "main"
"""Name of the target that the service was started with."""


class ReplicasConfig(Config):
    """How much there is of a deployment."""

    replicas: int = Field(1, ge=1)
    """To begin with."""
    min_replicas: int | None = Field(None, ge=1)
    """Replicas are taken away down to so many; None: down to `replicas`."""
    max_replicas: int | None = Field(None, ge=1)
    """Replicas are added under load, up to so many, and taken away again; None: none are added."""
    requests_per_replica: float = Field(4.0, gt=0)
    """Requests in flight, above which replicas are added."""
    cpus: float = Field(1.0, gt=0)
    """That Ray reserves for each."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"max_replicas: {self.max_replicas} are fewer than the {self.replicas} to begin with"
            )
        if self.min_replicas is not None and self.min_replicas > self.replicas:
            raise ValueError(
                f"min_replicas: {self.min_replicas} are more than the {self.replicas} to begin with"
            )
        return self

    @property
    def least(self) -> int:
        return self.min_replicas or self.replicas

    @property
    def most(self) -> int:
        return self.max_replicas or self.replicas

    @property
    def of_ray(self) -> dict[str, Any]:
        """Options of a deployment that Ray Serve itself scales."""
        if self.least == self.most:
            return {"num_replicas": self.replicas}
        return {
            "autoscaling_config": {
                "min_replicas": self.least,
                "initial_replicas": self.replicas,
                "max_replicas": self.most,
                "target_ongoing_requests": self.requests_per_replica,
            }
        }


class MpsConfig(Config):
    """Of processes that share a GPU."""

    share: float = Field(0.5, gt=0, le=1)
    """Of a GPU, that each replica claims of Ray, and of its multiprocessors, that it may use at once."""


class DenseConfig(ReplicasConfig):
    """Of the deployment that holds dense weights."""

    threads: int = Field(1, ge=1)
    """Of each replica's network, for each batch."""
    streams: int = Field(1, ge=1)
    """Batches that a replica computes at a time, of as many sparse replicas: each has a thread, and on an
    accelerator a stream and buffers of its own."""
    mps: MpsConfig | None = None
    """Several replicas on a GPU of NVIDIA's, by its Multi-Process Service; None: each has one of its own."""
    tensor_parallel: int = Field(1, ge=1)
    """Ranks of each replica: processes of one node, each with a device of its own, that compute every layer
    of the network together. `cpus` and `threads` are of each rank."""
    fused_communication: bool = False
    """Let torch compile the ranks' layers, with their sums in the graphs, and fuse what it can of these
    (async tensor parallelism, in memory that GPUs have in common). Devices without such memory are
    refused."""

    @property
    def processes(self) -> int:
        """Of all replicas, to begin with."""
        return self.replicas * self.tensor_parallel

    @model_validator(mode="after")
    def _ranks_go_through_batches_in_one_order(self) -> Self:
        if self.tensor_parallel == 1:
            if self.fused_communication:
                raise ValueError(
                    "dense.fused_communication is of ranks that sum what they compute, and "
                    "dense.tensor_parallel is 1; leave it out, or take more ranks"
                )
            return self
        if self.streams > 1:
            raise ValueError(
                f"dense.tensor_parallel is {self.tensor_parallel} and dense.streams {self.streams}: ranks go "
                "through batches in one order; let streams be 1, and have more replicas"
            )
        if self.mps is not None:
            raise ValueError(
                f"dense.tensor_parallel is {self.tensor_parallel}, whose ranks have a device each, and "
                "dense.mps shares one; leave one of the two out"
            )
        return self


class RoutingConfig(Config):
    """Which of several targets (applications, versions) answers."""

    experiment: str = Field(min_length=1)
    """Salt of the users' hashes: two experiments divide users independently, one divides them alike wherever
    it runs."""
    weights: dict[str, Annotated[float, Field(ge=0)]]
    """By name of a target; shares are weights over their sum. A weight of 0 gets nobody."""
    by: Literal["user", "random"] = "user"
    """Whether a user stays with a target, or every request is routed at random."""
    seed: int = 0
    """Of what is drawn."""

    @field_validator("weights")
    @classmethod
    def _somebody_answers(cls, value: dict[str, float]) -> dict[str, float]:
        if not sum(value.values()) > 0:
            raise ValueError(
                f"routing.weights: none of {value} is above 0, so nobody would answer; raise one"
            )
        return value


class ShadowConfig(Config):
    """A target that is asked along with the one that answers."""

    share: float = Field(ge=0, le=1)
    """Of the requests, drawn at random."""
    max_in_flight: int = Field(8, ge=1)
    """Requests at the shadow at once; those beyond are dropped."""
    timeout_s: float = Field(10.0, gt=0)
    """A request that the shadow has not answered by then has failed, and releases its slot."""
    seed: int = 0
    """Of what is drawn."""


class TargetConfig(Config):
    """Another model along with the main one."""

    run: str
    """Folder of a run, or folder or URL of published versions, which are followed."""
    snapshot: str = "best"
    """Of a run: `best`, `last`, `previous`, or the name of one."""
    data: str | None = None
    """Where the run's data set lies now, if it was moved; or a later one, see `TrainedModel.load`."""


class ShadowTargetConfig(ShadowConfig):
    """Which target is the shadow."""

    target: str


class ServicesConfig(Config):
    """Gateway, features and inference as deployments of Ray Serve that scale alone."""

    RENAMED: ClassVar[Mapping[str, str]] = {"access": "gateway"}

    gateway: ReplicasConfig = ReplicasConfig()
    """Limits, routing, shadow."""
    features: ReplicasConfig = ReplicasConfig()
    """Users' events."""
    sparse: ReplicasConfig = ReplicasConfig()
    """Of each target: catalog, feature operations, tables, ranking stage."""
    dense: DenseConfig = DenseConfig()
    """Of each target: the network."""
    targets: dict[str, TargetConfig] = Field(default_factory=dict)
    """Along with `main`, by name."""
    routing: RoutingConfig | None = None
    """Which target answers; None: `main` does."""
    shadow: ShadowTargetConfig | None = None
    local_calls: bool = True
    """Whether replicas of one node call each other by Unix domain sockets, not by Ray Serve's handles."""

    @property
    def weights(self) -> dict[str, float]:
        """Shares of the targets that answer, those with 0 among them."""
        return {MAIN: 1.0} if self.routing is None else self.routing.weights

    def answers_nobody(self, target: str) -> bool:
        """Whether nobody is shown what a target answers, as a shadow's."""
        return not self.weights.get(target, 0.0) > 0

    @model_validator(mode="after")
    def _targets_are_used(self) -> Self:
        if MAIN in self.targets:
            raise ValueError(f"targets: {MAIN!r} is what the service is started with; choose another name")
        weights = self.weights
        if unknown := set(weights) - {MAIN, *self.targets}:
            raise ValueError(f"routing.weights: there is no target {min(unknown)!r}")
        if self.shadow is not None and self.shadow.target not in {MAIN, *self.targets}:
            raise ValueError(f"shadow.target: there is no target {self.shadow.target!r}")
        asked = {name for name, weight in weights.items() if weight > 0}
        asked |= set() if self.shadow is None else {self.shadow.target}
        if idle := set(self.targets) - asked:
            raise ValueError(
                f"targets: nobody would ask {min(idle)!r}; give it a weight, or make it the shadow"
            )
        return self

    @property
    def num_asked(self) -> int:
        """Targets that answer somebody."""
        return sum(weight > 0 for weight in self.weights.values())

    @property
    def cpus(self) -> float:
        """Of all replicas, to begin with."""
        of_targets = self.sparse.replicas * self.sparse.cpus + self.dense.processes * self.dense.cpus
        return (
            self.gateway.replicas * self.gateway.cpus
            + self.features.replicas * self.features.cpus
            + (1 + len(self.targets)) * of_targets
        )
