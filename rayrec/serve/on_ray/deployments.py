"""The service as deployments of Ray Serve that scale alone.

    HTTP ─► gateway ─► sparse ─► dense        of the main target
                 │      └─────► features     users' events, read
                 ├──► sparse.NAME ─► dense.NAME ...    of the others
                 └──► features               events that are posted

Thin shells: what they hold knows nothing of Ray. A batch goes from the sparse to the dense part when that one
is free for it: the batcher's thread waits for the answer.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from rayrec.pipelines.inference.item_ranker import ItemRanker
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform import mps
from rayrec.platform.devices import HOST, claimed_resources, device_named, ray_claim
from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import absolute
from rayrec.samples.stores.recent import UserEvents
from rayrec.serve.app.loading import device_of, load_api
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.config.services import MAIN, DenseConfig, ReplicasConfig, ServicesConfig
from rayrec.serve.engine.pointer import PointerFollower
from rayrec.serve.events.request_log import REQUEST_ID
from rayrec.serve.on_ray.application import QUIET, SPARE_REQUESTS
from rayrec.serve.on_ray.callees import Callee, callee_of, metrics_of
from rayrec.serve.on_ray.dense import DensePart, DenseThreads, RemoteRanker
from rayrec.serve.on_ray.features import FeaturesPart, RemoteState
from rayrec.serve.on_ray.gang import Gang
from rayrec.serve.on_ray.gateway import Gateway, build_gateway
from rayrec.serve.on_ray.handle_calls import HandleCalls, unanswered_by
from rayrec.serve.on_ray.http_messages import (
    HttpAnswer,
    HttpRequest,
    SendHttp,
    answered_by,
    lifespan_of,
)
from rayrec.serve.on_ray.ranks import START_S
from rayrec.serve.on_ray.ray_ingress import by_message, of_session, sticky_routing
from rayrec.serve.on_ray.replica_socket import LocalReplica
from rayrec.serve.web.bearer_token import require_token
from rayrec.serve.web.browsers import keep_pages_out
from rayrec.serve.web.guards import WithoutHeader
from rayrec.serve.web.metrics import RayMeter

GATEWAY, FEATURES, SPARSE, DENSE = "gateway", "features", "sparse", "dense"


class GatewayReplica:
    """A shell around `Gateway`."""

    def __init__(
        self,
        run: str,
        config: ServeConfig,
        targets: dict[str, DeploymentHandle],
        features: DeploymentHandle | None,
    ) -> None:
        assert config.services is not None, "as these deployments are of it"
        local_calls = config.services.local_calls
        by_user = config.has_prefix_cache
        callees = {} if by_user else {name: callee_of(each, local_calls) for name, each in targets.items()}
        users = None if features is None else callee_of(features, local_calls)
        senders = {name: _sender(callee) for name, callee in callees.items()}
        if by_user:
            senders = {name: _sender_by_user(by_message(handle)) for name, handle in targets.items()}
        # Limits are here, of all targets together; what targets do under load is theirs.
        gateway = Gateway(
            config.services,
            config.admission,
            senders,
            None if users is None else _sender(users),
            config.timeout_s + 1,  # the target refuses what it cannot answer in time, and says why
        )
        meter = RayMeter(Path(run).name)
        meter.watch(lambda: metrics_of([*callees.values(), *([] if users is None else [users])]))
        self._api = build_gateway(gateway, [meter])
        require_token(self._api, config.token_sha256)
        keep_pages_out(self._api, config)
        self._api.add_middleware(WithoutHeader, name=REQUEST_ID)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve after the constructor."""
        return self._api


class FeaturesReplica(LocalReplica):
    """A shell around `FeaturesPart`."""

    def __init__(self, run: str, config: ServeConfig, working_directory: str) -> None:
        os.chdir(working_directory)
        self._part = FeaturesPart.open(run, config)
        self._api = self._part.api([RayMeter(Path(run).name)])

    async def http(self, request: HttpRequest) -> HttpAnswer:
        return await answered_by(self._api, request)

    async def histories(self, user_ids: Sequence[int]) -> list[UserEvents]:
        # A store may wait for its disk or its network, and nobody else shall.
        return await asyncio.to_thread(self._part.histories, user_ids)

    async def behaviors(self) -> tuple[str, ...] | None:
        return self._part.behaviors

    def __del__(self) -> None:
        """Called by Ray Serve before it ends a replica."""
        self.close_socket()
        if hasattr(self, "_part"):  # also of one that could not be made
            self._part.close()


class SparseReplica(LocalReplica):
    """A shell around `load_api`, whose network and users' events are elsewhere."""

    def __init__(
        self,
        run: str,
        config: ServeConfig,
        working_directory: str,
        dense: DeploymentHandle,
        features: DeploymentHandle | None,
    ) -> None:
        os.chdir(working_directory)
        self._calls = HandleCalls()
        call, timeout_s = self._calls.call, config.timeout_s
        assert config.services is not None, "as these deployments are of it"
        is_compiled = config.services.dense.fused_communication
        # What comes here is of some users where their contexts are kept, which are then at one network.
        session = None if not config.has_prefix_cache else uuid.uuid4().hex
        local_calls = config.services.local_calls
        network = self._calls.callee(lambda: callee_of(dense, local_calls, session))
        callees = [network]
        # It starts at the same time, and loads a network first.
        beam_width: int = call(network, "beam_width", timeout_s=START_S)

        def ranker_of(model: TrainedModel) -> ItemRanker:
            # A version is warmed up before it answers anybody, and may then wait for a compiler.
            waits_s = START_S if is_compiled else timeout_s

            def ask(packed: bytes) -> bytes:
                nonlocal waits_s
                with unanswered_by("the dense part"):
                    ranked: bytes = call(network, "recommend", packed, timeout_s=waits_s)
                waits_s = timeout_s
                return ranked

            return RemoteRanker(ask, model.version, beam_width)

        state = None
        if features is not None:
            assert config.events is not None, "as there are features"
            users = self._calls.callee(lambda: callee_of(features, local_calls))
            callees.append(users)

            def histories(user_ids: Sequence[int]) -> list[UserEvents]:
                found: list[UserEvents] = call(users, "histories", list(user_ids), timeout_s=timeout_s)
                return found

            behaviors = call(users, "behaviors", timeout_s=timeout_s)
            state = RemoteState(histories, behaviors, config.events.pause_s)
        meter = RayMeter(Path(run).name)
        meter.watch(lambda: metrics_of(callees))
        self._api = load_api(run, settings_of_sparse(config), meter, ranker_of, state)
        self._lifespan: AsyncExitStack | None = None

    async def http(self, request: HttpRequest) -> HttpAnswer:
        if self._lifespan is None:
            self._lifespan = AsyncExitStack()
            await self._lifespan.enter_async_context(lifespan_of(self._api))
        return await answered_by(self._api, request)

    async def __del__(self) -> None:
        """Called by Ray Serve before it ends a replica."""
        self.close_socket()
        lifespan: AsyncExitStack | None = getattr(self, "_lifespan", None)  # also of one that was not made
        if lifespan is not None:
            await lifespan.aclose()


class DenseReplica(LocalReplica):
    """A shell around `DensePart`."""

    def __init__(self, run: str, config: ServeConfig, working_directory: str) -> None:
        os.chdir(working_directory)
        assert config.services is not None, "as these deployments are of it"
        if config.services.dense.mps is not None:
            mps.start_daemon()
        streams = config.services.dense.streams
        self._gang: Gang | None = None
        self._part: DensePart | Gang
        if config.services.dense.tensor_parallel > 1:
            self._part = self._gang = Gang(run, config, working_directory)
        else:
            self._part = DensePart.open(run, config, streams)
        self._meter = RayMeter(Path(run).name)
        self._meter.watch(self._part.metrics)
        self._threads = DenseThreads(self._part, streams)
        self._follower: PointerFollower | None = None
        if VersionStore.is_there(run):  # a version is here before it is asked for, and stays while it answers
            self._follower = PointerFollower(VersionStore(run), self._part.hold)
            self._follower.start(config.follow_every_s)

    async def recommend(self, packed: bytes) -> bytes:
        return await self._threads.recommend(packed)

    async def beam_width(self) -> int:
        return self._part.beam_width()

    async def ranks(self) -> tuple[int, ...]:
        """Processes that compute with this one."""
        return () if self._gang is None else self._gang.pids

    def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises three times."""
        if self._gang is not None:
            self._gang.check()

    def __del__(self) -> None:
        """Called by Ray Serve before it ends a replica."""
        self.close_socket()
        follower: PointerFollower | None = getattr(self, "_follower", None)
        if follower is not None:
            follower.stop()
        gang: Gang | None = getattr(self, "_gang", None)
        if gang is not None:
            gang.close()


def settings_of_sparse(config: ServeConfig) -> ServeConfig:
    """Of one replica of a sparse part, which is a service but for what is elsewhere."""
    services, neighbors = config.services, config.neighbors
    assert services is not None, "as these deployments are of it"
    if neighbors is not None:
        neighbors = neighbors.model_copy(update={"store": config.followed_store})
    return config.model_copy(
        update={
            "events": None,
            "neighbors": neighbors,
            "services": None,
            "admission": AdmissionConfig(degrade=config.admission.degrade),
            # As many would have named lists of their own, where no folder has those of all.
            "num_replicas": services.sparse.most * (1 + len(services.targets)),
        }
    )


def build_services(run: str | Path, config: ServeConfig) -> serve.Application:
    """What `ray.serve.run` takes; nothing is loaded until then."""
    services = config.services
    assert services is not None, "the caller looks"
    here = os.getcwd()  # runs' configs may name their data relative to it
    location = absolute(str(run))
    features = None
    if config.events is not None:
        features = _deployed(FEATURES, FeaturesReplica, config, services.features).bind(
            location, config, here
        )
    targets = {}
    for name, (of_target, settings) in targets_of(location, config, services).items():
        suffix = "" if name == MAIN else f".{name}"
        claim = _dense_claim(of_target, settings)
        deployed = _deployed(DENSE + suffix, DenseReplica, settings, services.dense, claim, by_user=True)
        if services.dense.tensor_parallel > 1:
            deployed = deployed.options(**_options_of_gang(services.dense, claim))
        dense = deployed.bind(
            of_target, settings.model_copy(update={"threads": services.dense.threads}), here
        )
        sparse = _deployed(SPARSE + suffix, SparseReplica, settings, services.sparse, by_user=True)
        targets[name] = sparse.bind(of_target, settings, here, dense, features)
    in_front = config.model_copy(update={"max_waiting": config.max_in_flight})
    gateway = _deployed(GATEWAY, serve.ingress()(GatewayReplica), in_front, services.gateway)
    return gateway.bind(location, config, targets, features)


def targets_of(run: str, config: ServeConfig, services: ServicesConfig) -> dict[str, tuple[str, ServeConfig]]:
    """Where the model of each target is, and the settings of what serves it."""
    targets = {MAIN: (run, config)}
    for name, target in services.targets.items():
        own = {"snapshot": target.snapshot, "data": target.data, "ranking": None}
        targets[name] = absolute(target.run), config.model_copy(update=own)

    def named(name: str, settings: ServeConfig) -> ServeConfig:
        # A shadow's answer is shown to no user, but readers of the log would take it for one that was.
        log = None if services.answers_nobody(name) else settings.request_log
        return settings.model_copy(update={"target": name, "request_log": log})

    return {name: (of_target, named(name, settings)) for name, (of_target, settings) in targets.items()}


def replicas_of(config: ServeConfig) -> dict[str, ReplicasConfig]:
    """Settings of the replicas of each deployment, by its name."""
    services = config.services
    assert services is not None, "the caller looks"
    found: dict[str, ReplicasConfig] = {GATEWAY: services.gateway}
    if config.events is not None:
        found[FEATURES] = services.features
    for name in (MAIN, *services.targets):
        suffix = "" if name == MAIN else f".{name}"
        found |= {SPARSE + suffix: services.sparse, DENSE + suffix: services.dense}
    return found


def resources_of(run: str | Path, config: ServeConfig) -> list[tuple[dict[str, Any], int]]:
    """What actors ask of Ray and how many of them, for those that claim an accelerator."""
    services = config.services
    assert services is not None, "the caller looks"
    return [
        (
            {"num_cpus": services.dense.cpus, **_dense_claim(of_target, settings)},
            services.dense.processes,
        )
        for of_target, settings in targets_of(absolute(str(run)), config, services).values()
    ]


def _dense_claim(run: str, config: ServeConfig) -> dict[str, Any]:
    """Options of an actor with the network on its device.

    Raises:
        InputError: the device cannot be shared.
    """
    assert config.services is not None, "as these deployments are of it"
    kind, sharing = device_of(run, config), config.services.dense.mps
    if config.services.dense.fused_communication and not device_named(kind).has_symmetric_memory:
        raise InputError(
            f"dense.fused_communication: torch has no memory that several devices of the kind {kind} have in "
            "common; leave it out, or choose another device with --device"
        )
    if sharing is None:
        return ray_claim(kind)
    if not device_named(kind).has_mps:
        raise InputError(
            f"dense.mps: {kind} is not shared by NVIDIA's Multi-Process Service; leave it out, or choose "
            "another device with --device"
        )
    variables = {"env_vars": mps.environment(sharing.share)}
    return {**ray_claim(kind, sharing.share), "runtime_env": variables}


def _options_of_gang(dense: DenseConfig, claim: dict[str, Any]) -> dict[str, Any]:
    """Of the deployment of replicas that are several ranks each.

    Args:
        claim: of each rank.
    """
    bundle = {HOST.ray_resource: dense.cpus, **claimed_resources(claim)}
    return {
        "placement_group_bundles": [bundle] * dense.tensor_parallel,
        # Within a layer, ranks wait for each other: what connects nodes is too slow for that.
        "placement_group_strategy": "STRICT_PACK",
        "health_check_period_s": 1,
    }


def _deployed(
    name: str,
    replica: Any,
    config: ServeConfig,
    replicas: ReplicasConfig,
    claim: dict[str, Any] | None = None,
    by_user: bool = False,
) -> serve.Deployment:
    """The deployment of one kind of replica.

    Args:
        claim: of an accelerator.
        by_user: whether it keeps what it has read of users.
    """
    return serve.deployment(
        name=name,
        num_replicas=replicas.replicas,
        **(sticky_routing() if by_user and config.has_prefix_cache else {}),
        max_ongoing_requests=config.max_waiting + SPARE_REQUESTS,
        ray_actor_options={"num_cpus": replicas.cpus, **(claim or {})},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=5,
        # What cannot be loaded cannot be loaded a second time either.
        max_constructor_retry_count=1,
        logging_config=QUIET,
    )(replica)


def _sender(callee: Callee) -> SendHttp:
    async def send(request: HttpRequest) -> HttpAnswer:
        # Whether a second one may be asked is known to the gateway.
        answer: HttpAnswer = await callee.call("http", request, repeatable=False)
        return answer

    return send


def _sender_by_user(handle: DeploymentHandle) -> SendHttp:
    """A user's requests come to the same replica."""

    async def send(request: HttpRequest) -> HttpAnswer:
        asked = handle if (user := request.user) is None else of_session(handle, user)
        answer: HttpAnswer = await asked.http.remote(request)
        return answer

    return send
