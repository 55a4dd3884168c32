"""Language models as deployments of Ray Serve: a gateway, and for each embedded model replicas that scale.

    HTTP ─► gateway: names, limits, shares, shadow, log ─┬─► model.NAME × n, each with an engine of its own
                                                         └─► other services

Ray adds and takes away replicas by how many requests each has (`replicas` of a model), starts those again
that died or whose engine has stopped, and chooses the less busy of two for each request. What a replica
refuses comes back as a value: exceptions would come wrapped in Ray's own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from rayrec.platform.devices import ray_claim
from rayrec.serve.admission.limits import RefusedError, ServiceLimitError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.batching import DeadlineError
from rayrec.serve.events.request_log import REQUEST_ID
from rayrec.serve.language.api import build_language_api
from rayrec.serve.language.config import EmbeddedModel, ModelsConfig, RemoteModel
from rayrec.serve.language.forwarding import ForwardedCall
from rayrec.serve.language.measures import EngineMeasures
from rayrec.serve.language.remote import CHECK_EVERY_S, RemoteService
from rayrec.serve.language.request_log import ChatLog
from rayrec.serve.language.served import Call, Kind, ServedModel, Values
from rayrec.serve.on_ray.application import QUIET, SPARE_REQUESTS
from rayrec.serve.on_ray.language_metrics import RayLanguageMetrics
from rayrec.serve.web.bearer_token import require_token
from rayrec.serve.web.browsers import keep_pages_out
from rayrec.serve.web.guards import WithoutHeader
from rayrec.serve.web.metrics import RayMeter
from rayrec.serve.wire.errors import RequestError

GATEWAY = "gateway"
GATEWAY_CPUS = 0.5
CHECK_S = 2.0


@dataclass(frozen=True)
class Refusal:
    """An error of a request, as it travels."""

    message: str
    status: int | None
    """None: there was no room, or no time."""
    param: str | None = None
    code: str | None = None
    wait_s: float | None = None

    @classmethod
    def of(cls, error: RequestError | RefusedError | DeadlineError) -> Refusal:
        if isinstance(error, RequestError):
            return cls(str(error), error.status, error.param, error.code)
        if isinstance(error, RefusedError):
            return cls(error.why, None, wait_s=error.wait_s)
        return cls(str(error), None)

    def raised(self) -> RequestError | ServiceLimitError | DeadlineError:
        """The same error, at whom it is to be told."""
        if self.status is not None:
            return RequestError(self.message, self.status, self.param, self.code)
        if self.wait_s is not None:
            return ServiceLimitError(self.message, self.wait_s)
        return DeadlineError(self.message)


_REFUSALS = (RequestError, RefusedError, DeadlineError)


class ModelReplica:
    """A shell around an embedded model."""

    def __init__(self, settings: EmbeddedModel, working_directory: str) -> None:
        os.chdir(working_directory)
        from rayrec.serve.language.embedded import EmbeddedService
        from rayrec.serve.language.loading import load_model

        self._service = EmbeddedService(load_model(settings))
        self._service.model.engine.start()
        RayLanguageMetrics({settings.name: self._service.measures}, {})

    async def whole(self, kind: Kind, body: Mapping[str, Any], left_s: float) -> dict[str, Any] | Refusal:
        """`Call.whole`, with the seconds that are left."""
        try:
            return await self._call(kind, body).whole(time.monotonic() + left_s)
        except _REFUSALS as error:
            return Refusal.of(error)

    async def values(
        self, kind: Kind, body: Mapping[str, Any], left_s: float
    ) -> AsyncGenerator[dict[str, Any] | Refusal, None]:
        """`Call.stream`; an empty value first, when it has begun."""
        try:
            values = await self._call(kind, body).stream(time.monotonic() + left_s)
            try:
                yield {}
                async for value in values:
                    yield value
            finally:
                await values.aclose()
        except _REFUSALS as error:
            yield Refusal.of(error)

    def _call(self, kind: Kind, body: Mapping[str, Any]) -> Call:
        call = self._service.read(kind, body)
        call.check_room()
        return call

    def check_health(self) -> None:
        """Asked by Ray Serve, which starts a replica again that fails."""
        if not self._service.model.engine.is_alive:
            raise RuntimeError(f"the engine of {self._service.settings.name} has stopped")

    async def __del__(self) -> None:
        """Called by Ray Serve before it ends a replica."""
        if hasattr(self, "_service"):  # also of one that could not be made
            await self._service.stop()


class HandleService:
    """Implements `ServedModel` over replicas."""

    is_here = False

    def __init__(self, settings: EmbeddedModel, handle: DeploymentHandle) -> None:
        self._settings = settings
        self._whole = handle.options(method_name="whole")
        self._values = handle.options(method_name="values", stream=True)
        self.measures = EngineMeasures()
        self._num_running = 0
        self._checked_at = -float("inf")
        self._unready: str | None = None
        self.measures.watch(lambda: 0.0, lambda: self._num_running, lambda: 0)

    @property
    def settings(self) -> EmbeddedModel:
        return self._settings

    async def start(self) -> None:
        """Replicas start by themselves."""

    async def stop(self) -> None:
        """And end so."""

    async def why_not(self) -> str | None:
        # Who asks needs no token, and Ray's controller answers for the whole cluster.
        if time.monotonic() - self._checked_at > CHECK_EVERY_S:
            self._checked_at = time.monotonic()
            self._unready = await self._asked_why_not()
        return self._unready

    async def _asked_why_not(self) -> str | None:
        status = await asyncio.to_thread(serve.status)
        for application in status.applications.values():
            found = application.deployments.get(deployment_name(self._settings))
            if found is not None and not any(
                count for state, count in found.replica_states.items() if state == "RUNNING"
            ):
                return f"no replica of {self._settings.name} runs now"
        return None

    def read(self, kind: Kind, body: Mapping[str, Any]) -> Call:
        return ForwardedCall(self, kind, {**body, "model": self._settings.name})

    async def whole(self, kind: Kind, body: Mapping[str, Any], expires_at: float) -> dict[str, Any]:
        left_s = expires_at - time.monotonic()
        self._num_running += 1
        response = self._whole.remote(kind, body, left_s)
        try:
            async with asyncio.timeout(max(left_s, 0) + CHECK_S):  # the replica says it first, and better
                found = await response
        except BaseException as error:
            response.cancel()
            raise self._unanswered(error) from error
        finally:
            self._num_running -= 1
        if isinstance(found, Refusal):
            raise found.raised()
        usage = found.get("usage") or {}
        self.measures.count_tokens(
            int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        )
        whole: dict[str, Any] = found
        return whole

    async def values(self, kind: Kind, body: Mapping[str, Any], expires_at: float) -> Values:
        last_at, is_first = time.monotonic(), True
        self._num_running += 1
        # Of a handle that streams, as Ray's types do not say.
        response = cast(
            "DeploymentResponseGenerator[Any]", self._values.remote(kind, body, expires_at - last_at)
        )
        is_ended = False
        iterator = aiter(response)
        try:
            while True:
                # Around each value: a request may wait for a replica, or a replica hang, at any of them.
                async with asyncio.timeout(max(expires_at - time.monotonic(), 0) + CHECK_S):
                    value = await anext(iterator, None)
                if value is None:
                    break
                if isinstance(value, Refusal):
                    is_ended = True
                    raise value.raised()
                if value.get("choices"):
                    now = time.monotonic()
                    if is_first:
                        self.measures.count_first(now - last_at, 0)
                    else:
                        self.measures.count_next(now - last_at)
                    last_at, is_first = now, False
                yield value
            is_ended = True
        except (RayError, RayServeException, TimeoutError) as error:
            raise self._unanswered(error) from error
        finally:
            self._num_running -= 1
            if not is_ended:
                self.measures.count_left()
                response.cancel()  # the replica's generator ends there, and its slot is free

    def _unanswered(self, error: BaseException) -> BaseException:
        if isinstance(error, TimeoutError):
            return DeadlineError(f"{self._settings.name} has not answered in time")
        if isinstance(error, BackPressureError):
            return ServiceLimitError(f"too many requests wait for a replica of {self._settings.name}", 1.0)
        if isinstance(error, (RayError, RayServeException)):
            return RequestError(f"a replica of {self._settings.name} went away while it answered", 503)
        return error


class LanguageGatewayReplica:
    """A shell around `build_language_api`."""

    def __init__(
        self,
        models: ModelsConfig,
        config: ServeConfig,
        handles: Mapping[str, DeploymentHandle],
        working_directory: str,
    ) -> None:
        os.chdir(working_directory)
        served: list[ServedModel] = []
        for model in models.models:
            if isinstance(model, EmbeddedModel):
                served.append(HandleService(model, handles[model.name]))
            elif isinstance(model, RemoteModel):
                served.append(RemoteService(model))
        log = None if models.request_log is None else ChatLog(models.request_log)
        self._api = build_language_api(served, models.shared_names, log, [RayMeter("language")])
        others = [model for model in served if isinstance(model, RemoteService)]
        RayLanguageMetrics({other.settings.name: other.measures for other in others}, self._api.state.shared)
        require_token(self._api, config.token_sha256)
        keep_pages_out(self._api, config)
        self._api.add_middleware(WithoutHeader, name=REQUEST_ID)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve after the constructor."""
        return self._api


def deployment_name(model: EmbeddedModel) -> str:
    return f"model.{model.name}"


def build_language_application(models: ModelsConfig, config: ServeConfig) -> serve.Application:
    """What `ray.serve.run` takes; nothing is loaded until then."""
    here = os.getcwd()
    handles = {
        model.name: serve.deployment(
            name=deployment_name(model),
            max_ongoing_requests=model.concurrency + model.max_waiting + SPARE_REQUESTS,
            # That wait for a replica: as many as one takes.
            max_queued_requests=model.concurrency + model.max_waiting + SPARE_REQUESTS,
            ray_actor_options=replica_claim(model),
            health_check_period_s=CHECK_S,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=5,
            # What cannot be loaded cannot be loaded a second time either.
            max_constructor_retry_count=1,
            logging_config=QUIET,
            **model.replicas.of_ray,
        )(ModelReplica).bind(model, here)
        for model in models.embedded
    }
    gateway = serve.deployment(
        name=GATEWAY,
        max_ongoing_requests=config.max_in_flight,
        ray_actor_options={"num_cpus": GATEWAY_CPUS},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=5,
        max_constructor_retry_count=1,
        logging_config=QUIET,
    )(serve.ingress()(LanguageGatewayReplica))
    return gateway.bind(models, config, handles, here)


def replica_claim(model: EmbeddedModel) -> dict[str, Any]:
    """What each replica asks of Ray."""
    return {"num_cpus": model.replicas.cpus, **ray_claim(model.device)}


def cpus_of(models: Sequence[EmbeddedModel]) -> float:
    """Of all replicas, to begin with."""
    return GATEWAY_CPUS + sum(model.replicas.replicas * model.replicas.cpus for model in models)
