"""Settings of the HTTP service."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.platform.cluster import ClusterConfig
from rayrec.serve.config.connections import ConnectionsConfig
from rayrec.serve.config.models import INHERITED, BesideConfig, ModelSettings
from rayrec.serve.config.scaling import ScalingConfig
from rayrec.serve.config.services import ServicesConfig
from rayrec.serve.config.tls import TlsConfig


class ServeConfig(ModelSettings):
    """Where the service listens and how it answers: its first model is the run or store that it is started
    with."""

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
    target: str | None = None
    """Of services, which one this is; it is in the log of requests. None: the only one."""
    models: tuple[BesideConfig, ...] = ()
    """Beside the first one, in the same processes; each answers by its name."""
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
        own = min(self.admission.service.concurrency or most, most)
        return own + sum(each.max_in_flight for each in self.beside.values())

    @property
    def beside(self) -> dict[str, ServeConfig]:
        """Settings of the models beside the first one, by name: as of a service of each alone.

        Raises:
            InputError: a model's settings do not fit together, or not to the service's.
        """
        alone = {"models", *ModelSettings.model_fields} - set(INHERITED)
        of_service = {name: getattr(self, name) for name in ServeConfig.model_fields if name not in alone}
        return {
            each.name: ServeConfig.parse(
                of_service | {name: getattr(each, name) for name in each.model_fields_set - {"run"}},
                source=f"models: {each.name}",
            )
            for each in self.models
        }

    @property
    def num_threads(self) -> int:
        """Of all models of a replica."""
        return self.threads + sum(each.threads for each in self.beside.values())

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
    def _written_folders(self) -> list[str]:
        """Which another model, whose ids stand for other items, must not write to."""
        events = self.events
        found = [each.folder for each in (self.request_log, self.warm_start) if each is not None]
        if events is not None:
            found += [] if events.log is None else [events.log.folder]
            found += [] if events.store is None or "://" in events.store else [events.store]
        return found

    @property
    def is_sticky(self) -> bool:
        """Whether a user's requests go to one replica, for any of the models."""
        return self.has_prefix_cache or any(each.has_prefix_cache for each in self.beside.values())

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
    def _models_have_all_of_their_own(self) -> Self:
        if not self.models:
            return self
        names = [self.name, *(each.name for each in self.models)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"models: two of them are called {twice[0]!r}; give each a name of its own")
        if self.services is not None:
            raise ValueError(
                "models: deployments of --services are those of one model; leave out --models, or --services"
            )
        if self.is_scaled:
            raise ValueError(
                "models: replicas are added and taken away by the load of one model; leave out --models, or "
                "--min-replicas and --max-replicas"
            )
        for each in self.models:
            if self.admission.allocate is not None and "admission" not in each.model_fields_set:
                raise ValueError(
                    f"models: {each.name} would have the service's admission, and curves of allocate are of "
                    "one model; give it an admission of its own"
                )
        settings: list[ServeConfig] = [self, *self.beside.values()]
        written = [folder for each in settings for folder in each._written_folders]
        places = [_place_of(folder) for folder in written]
        if shared := [name for name, at in zip(written, places, strict=True) if places.count(at) > 1]:
            raise ValueError(f"models: two of them write to {shared[0]!r}; give each a folder of its own")
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


def _place_of(folder: str) -> str:
    """The same of one folder, however it is written: `logs`, `logs/` and `./logs` are one."""
    return folder.rstrip("/") if "://" in folder else os.path.abspath(folder)
