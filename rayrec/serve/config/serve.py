"""Settings of the HTTP service."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.platform.cluster import ClusterConfig
from rayrec.platform.config import Config
from rayrec.platform.devices import device_named
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.compile import CompileConfig
from rayrec.serve.config.connections import ConnectionsConfig
from rayrec.serve.config.events import EventsConfig, RequestLogConfig
from rayrec.serve.config.nearline import NearlineReadConfig
from rayrec.serve.config.neighbors import NeighborsConfig
from rayrec.serve.config.scaling import ScalingConfig
from rayrec.serve.config.services import ServicesConfig
from rayrec.serve.config.tls import TlsConfig
from rayrec.serve.config.warm_start import WarmStartConfig


class ServeConfig(Config):
    """Where the service listens and how it answers."""

    RENAMED: ClassVar[Mapping[str, str]] = {"access": "admission", "keep_contexts_mib": "prefix_cache_mib"}

    host: str = "127.0.0.1"
    """Address to listen on; by default nothing outside this machine reaches the service."""
    port: int = Field(8000, ge=1, le=65_535)
    grpc_port: int | None = Field(None, ge=1, le=65_535)
    """Where the Open Inference Protocol is spoken over gRPC, on the same host; None: over HTTP alone."""
    num_replicas: int = Field(1, ge=1)
    """Processes that answer, each with the whole model; to begin with."""
    min_replicas: int | None = Field(None, ge=1)
    """Replicas are taken away down to so many, where load is low or a queue needs the room; None: one, if
    there is `max_replicas`, else `num_replicas`."""
    max_replicas: int | None = Field(None, ge=1)
    """Replicas are added under load, up to so many; None: none are added."""
    scaling: ScalingConfig = ScalingConfig()
    """When replicas are added and taken away."""
    single_process: bool = False
    """Answer in the process that starts the service, without Ray."""
    threads: int = Field(1, ge=1)
    """Threads of each replica's model, and the CPUs Ray reserves for it; more help large models only."""
    max_k: int = Field(1000, ge=1)
    """Most items a request may ask for."""
    max_waiting: int = Field(64, ge=1)
    """Requests a replica holds, those it computes included; it refuses more with status 503. Each counts as
    one, whatever it asks for: what takes longer is refused by its deadline (`timeout_s`)."""
    max_batch: int = Field(32, ge=1)
    """Most requests that a replica computes together; how many pay is measured when it starts."""
    timeout_s: float = Field(10.0, gt=0)
    """A request that a replica could not answer in this time is refused with status 503, not computed."""
    snapshot: str = "best"
    """Of the run: `best`, `last`, `previous`, or the name of one."""
    follow_every_s: float = Field(1.0, gt=0)
    """Published versions are looked for so often."""
    device: str | None = None
    """Device to compute on; None takes that of the run."""
    data: str | None = None
    """Where the run's data set lies now, if it was moved."""
    ranking: RankingConfig | None = None
    """A ranking stage after the model."""
    tls: TlsConfig | None = None
    """Certificate to speak HTTPS with; None: HTTP."""
    token_sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """Of the token that callers have to send, see `bearer_token.py`; None: none."""
    allowed_hosts: tuple[str, ...] = ()
    """Names besides those of this machine that requests may come with where no other machine reaches the
    service (a proxy in front of it), and whose pages may send requests."""
    page: bool | None = None
    """Whether users' histories and the state of the service can be looked at, at `/`; None: only where no
    other machine reaches it."""
    connections: ConnectionsConfig = ConnectionsConfig()
    """How many there may be, and how long clients may take."""
    admission: AdmissionConfig = AdmissionConfig()
    """Which requests are admitted, and what degrades under load before any is refused."""
    prefix_cache_mib: float | None = Field(None, ge=0)
    """Prefix-cache size in MiB for returning users (0 = off). Each network keeps what it has read of their
    histories, and requests with the header `X-User-Id` go to the replica that has their prefix."""
    prefix_cache_host_mib: float = Field(0.0, ge=0)
    """What has no room in it is kept in the host's memory, up to so much (0 = not)."""
    prefix_cache_disk_mib: float = Field(0.0, ge=0)
    """Then in files, up to so much, which go with the network (0 = not). Sizes are of each network: a process
    that holds several versions has as many caches."""
    prefix_cache_folder: str | None = None
    """Where those files are; None: the folder of temporary files."""
    compile: CompileConfig | None = None
    """Batches that are ranked by compiled programs; None: all are ranked eagerly."""
    events: EventsConfig | None = None
    """Where events go that are posted; None refuses them."""
    neighbors: NeighborsConfig | None = None
    """Items that others met beside those of a history: candidates of the ranking stage, and answers where the
    model has none."""
    nearline: NearlineReadConfig | None = None
    """What was computed of users before they ask; None: everything is computed for each request."""
    lists: str | None = None
    """Folder of named lists of items that filters of requests refer to, which replicas share; None: a single
    process keeps them until it ends."""
    warm_start: WarmStartConfig | None = None
    """What a replica leaves to the one that takes its place; None: nothing."""
    request_log: RequestLogConfig | None = None
    """Where requests and answers are logged; None: nowhere."""
    target: str | None = None
    """Of services, which one this is; it is in the log of requests. None: the only one."""
    services: ServicesConfig | None = None
    """Gateway, features and inference as deployments of their own; None: replicas that do it all."""
    cluster: ClusterConfig = ClusterConfig()

    @property
    def is_scaled(self) -> bool:
        """Whether the number of any replicas changes."""
        if self.services is None:
            return self.least_replicas < self.most_replicas
        services = self.services
        each = (services.gateway, services.features, services.sparse, services.dense)
        return any(replicas.least < replicas.most for replicas in each)

    @property
    def least_replicas(self) -> int:
        return self.min_replicas or (self.num_replicas if self.max_replicas is None else 1)

    @property
    def most_replicas(self) -> int:
        return self.max_replicas or self.num_replicas

    @property
    def max_in_flight(self) -> int:
        """Requests to compute something that each replica which HTTP comes to has at once: its own, or, of
        services, what sparse parts hold, divided among the replicas in front of them."""
        most = self.max_waiting
        if self.services is not None:
            held = self.max_waiting * self.services.sparse.most * self.services.num_asked
            most = -(-held // self.services.gateway.replicas)
        return min(self.admission.service.concurrency or most, most)

    @property
    def followed_store(self) -> str | None:
        """Whose events the graph of neighbors takes in."""
        if self.neighbors is None:
            return None
        if self.neighbors.store is None and self.events is not None:
            return self.events.store
        return self.neighbors.store

    @property
    def has_prefix_cache(self) -> bool:
        return bool(self.prefix_cache_mib)

    @property
    def context_sizes(self) -> CacheSizes | None:
        """Of the prefix cache; None: there is none."""
        if not self.prefix_cache_mib:
            return None
        return CacheSizes(
            device=int(self.prefix_cache_mib * 2**20),
            host=int(self.prefix_cache_host_mib * 2**20),
            disk=int(self.prefix_cache_disk_mib * 2**20),
            folder=None if self.prefix_cache_folder is None else Path(self.prefix_cache_folder),
        )

    @property
    def shows_page(self) -> bool:
        return self.is_loopback if self.page is None else self.page

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine reaches the service."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return self.host == "localhost"

    @model_validator(mode="after")
    def _protocols_have_ports_of_their_own(self) -> Self:
        if self.grpc_port == self.port:
            raise ValueError(
                f"grpc_port: {self.port} is the port of HTTP; gRPC needs one of its own (--grpc-port)"
            )
        if self.grpc_port is not None and self.services is not None:
            raise ValueError(
                "grpc_port: the gateway of --services forwards messages of HTTP; leave out --grpc-port, or "
                "--services"
            )
        return self

    @model_validator(mode="after")
    def _bounds_of_replicas_are_in_order(self) -> Self:
        if not self.least_replicas <= self.num_replicas <= self.most_replicas:
            raise ValueError(
                f"replicas: it begins with {self.num_replicas} and has {self.least_replicas} to "
                f"{self.most_replicas}; let min_replicas be no more, and max_replicas no fewer than it "
                "begins with"
            )
        if self.least_replicas == self.most_replicas:
            return self
        if self.single_process:
            raise ValueError(
                "replicas are several processes; leave out --single-process, or --min-replicas and "
                "--max-replicas"
            )
        if self.services is not None:
            raise ValueError(
                "min_replicas, max_replicas: of what? With --services, its file says it of each deployment"
            )
        return self

    @model_validator(mode="after")
    def _replicas_share_a_state(self) -> Self:
        num_states = self.most_replicas if self.services is None else self.services.features.most
        if self.events is not None and self.events.store is None and num_states > 1:
            raise ValueError(
                f"events.store is missing: {num_states} replicas would each know other events of a "
                "user; name an event store"
            )
        return self

    @model_validator(mode="after")
    def _a_followed_store_has_both_sides(self) -> Self:
        events, followed = self.events, self.followed_store
        if events is not None and not events.by_item and followed is not None and followed == events.store:
            raise ValueError(
                "events.by_item is missing: neighbors follow a store with both sides; set it to true"
            )
        return self

    @model_validator(mode="after")
    def _answers_from_before_come_from_somewhere(self) -> Self:
        allocate, steps = self.admission.allocate, self.admission.degrade.steps
        if allocate is None or self.nearline is not None or any(step.do == "cached_answer" for step in steps):
            return self
        if near := [action.name for action in allocate.actions if action.near_line]:
            raise ValueError(
                f"allocate.actions: {near[0]!r} has near_line, and nothing is computed before requests: give "
                "--nearline, or the step cached_answer, or leave near_line out"
            )
        return self

    @model_validator(mode="after")
    def _contexts_are_kept_by_one_thread(self) -> Self:
        if not self.has_prefix_cache:
            if self.prefix_cache_host_mib or self.prefix_cache_disk_mib:
                raise ValueError(
                    "prefix_cache_host_mib and prefix_cache_disk_mib take what has no room in the prefix "
                    "cache; give its size, too (--prefix-cache-mib)"
                )
            return self
        if self.compile is not None:
            raise ValueError(
                "compiled programs read whole histories; leave out --compile, or --prefix-cache-mib"
            )
        if self.services is not None and self.services.dense.streams > 1:
            raise ValueError(
                f"dense.streams: {self.services.dense.streams} threads would read what another one is still "
                "writing; with --prefix-cache-mib, let it be 1, and have more replicas"
            )
        return self

    @model_validator(mode="after")
    def _ranks_keep_the_same_contexts(self) -> Self:
        ranks = 1 if self.services is None else self.services.dense.tensor_parallel
        if ranks > 1 and self.prefix_cache_disk_mib:
            raise ValueError(
                f"prefix_cache_disk_mib: dense.tensor_parallel is {ranks}, and a rank whose disk is full "
                "would keep other histories than the rest and read more of a batch than they do; leave out "
                "--prefix-cache-disk-mib, or let tensor_parallel be 1"
            )
        return self

    @model_validator(mode="after")
    def _services_are_alone(self) -> Self:
        if self.services is None:
            return self
        if self.single_process:
            raise ValueError("services are several processes; leave out --single-process, or --services")
        if self.num_replicas > 1:
            raise ValueError(
                f"replicas: {self.num_replicas} of what? With --services, its file says it of each deployment"
            )
        if self.compile is not None:
            raise ValueError("--compile is for models that are whole in one process; leave out --services")
        return self

    @model_validator(mode="after")
    def _worth_is_compared_with_a_price(self) -> Self:
        if self.scaling.worth_of_replica_s is not None and self.admission.allocate is None:
            raise ValueError(
                "scaling.worth_of_replica_s: no second has a price; give --admission with allocate, or "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _whole_replicas_are_warmed(self) -> Self:
        if self.services is not None and self.warm_start is not None:
            raise ValueError(
                "warm_start: of services, what is kept of users is in another deployment than the one that "
                "answers them; leave out --warm-start, or --services"
            )
        return self

    @model_validator(mode="after")
    def _batchers_are_of_whole_replicas(self) -> Self:
        if self.services is not None and self.scaling.batcher is not None:
            raise ValueError(
                "scaling.batcher: of services, a batch waits for another deployment, so each is scaled by "
                "its requests in flight; leave it out, and give requests_per_replica in --services"
            )
        return self

    @model_validator(mode="after")
    def _replicas_are_scaled_through_the_dashboard(self) -> Self:
        if self.is_scaled and not self.cluster.dashboard:
            raise ValueError(
                "max_replicas: replicas are scaled through Ray's dashboard; let cluster.dashboard be true"
            )
        return self

    @model_validator(mode="after")
    def _products_are_read_by_one_process(self) -> Self:
        if self.nearline is not None and self.services is not None:
            raise ValueError("near-line products are read where the whole model is; leave out --services")
        return self

    @model_validator(mode="after")
    def _shadows_are_not_logged(self) -> Self:
        services = self.services
        if services is None or services.shadow is None or self.request_log is None:
            return self
        if not services.answers_nobody(name := services.shadow.target):
            raise ValueError(
                f"shadow.target: {name!r} has a weight too, so the log of requests would have what was shown "
                "and what was not; name another one, give it the weight 0, or leave out --request-log"
            )
        return self

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, value: str | None) -> str | None:
        return None if value is None else device_named(value).kind  # which refuses other names
