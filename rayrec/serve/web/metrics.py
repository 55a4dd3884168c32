"""What a service does, in metrics for Prometheus.

    name                          labels          what
    rayrec_requests_total         route, status   requests that were answered, errors included
    rayrec_request_seconds        route           s, from the first byte to the last
    rayrec_batch_requests                         requests that were computed together
    rayrec_batch_seconds                          s of computing them
    rayrec_batcher_work                           s of computing that come per s, in batches of the best size
    rayrec_batcher_queue_wait_seconds             mean time that requests of late waited for their batch
    rayrec_batcher_full_batches                   share of the batches of late that took as many as pay
    rayrec_batcher_backlog_seconds                s of computing that wait now
    rayrec_serving_in_flight                        requests that were admitted and have no answer yet
    rayrec_serving_load                           now, 1 is full; 0 without steps under load
    rayrec_serving_degrade_steps                  in force
    rayrec_serving_callers                        of which something is remembered
    rayrec_serving_refused_total                  requests so far that were too many
    rayrec_serving_answers_kept                   for the step that gives them again
    rayrec_serving_answers_model_total            answers with items of the model
    rayrec_serving_answers_merged_total           with items of the model and neighbors
    rayrec_serving_answers_neighbors_total        with neighbors
    rayrec_serving_answers_popular_total          with popular items
    rayrec_serving_answers_nearline_total         that were computed before the request
    rayrec_serving_answers_empty_total            without any item
    rayrec_serving_answers_without_items_total    in which the model named no item for a history that it read
    rayrec_serving_model_step                     training steps in the weights
    rayrec_canary_version                         that answers a share of the users; 0: none
    rayrec_canary_share                           of the users
    rayrec_canary_requests                        of it, and `rayrec_canary_baseline_requests`
    rayrec_canary_errors                          of them, and `rayrec_canary_baseline_errors`
    rayrec_canary_p95_seconds                     of answers, and `rayrec_canary_baseline_p95_seconds`
    rayrec_canaries_returned_total                that were taken back for what was counted
    rayrec_allocation_price                       of a second of the device, in value; 0: nobody gets less
    rayrec_allocation_load                        device seconds that the chosen actions take, per second
    rayrec_allocation_budget                      of that load
    rayrec_allocation_value_asked_total           value of the requests so far
    rayrec_allocation_value_served_total          of it, what the chosen actions find
    rayrec_allocation_actions_NAME_total          requests that got an action
    rayrec_allocation_decisions_REASON_total      by full, price, floor, explore, bad_value, no_curve
    rayrec_allocation_clock_jumps_total           times that the clock went back
    rayrec_warm_start_users                       answered before the replica was ready, with `--warm-start`
    rayrec_warm_start_seconds                     that it took
    rayrec_prefix_cache_histories                 histories whose context is kept, with `--prefix-cache-mib`
    rayrec_prefix_cache_bytes                     of them
    rayrec_prefix_cache_events_read_total         so far, by the network
    rayrec_prefix_cache_events_reused_total       so far, instead of being read again
    rayrec_prefix_cache_TIER_histories            of host and disk, where there are such tiers
    rayrec_prefix_cache_TIER_bytes                of them
    rayrec_prefix_cache_TIER_events_reused_total  so far, by where they were: device, host or disk
    rayrec_graph_edges                            of the graph of neighbors, with `--neighbors`
    rayrec_graph_lag_seconds                      since it last had all of its store
    rayrec_graph_events_total                     that it took in from there
    rayrec_graph_errors_total                     readings of the store that failed
    rayrec_graph_rebuilt_total                    times that it fell behind and read all of the store
    rayrec_nearline_KIND_hits_total               products that were used, with `--nearline`
    rayrec_nearline_KIND_missing_total            that were not there
    rayrec_nearline_KIND_stale_total              of other events than the history of the request has
    rayrec_nearline_KIND_old_total                older than they may be
    rayrec_nearline_KIND_short_total              with fewer items than an answer has places
    rayrec_nearline_KIND_age_seconds              of the last one that was used
    rayrec_nearline_unusable_REASON_total         that could not be read: down, corrupt, foreign
    rayrec_nearline_coverage                      share of the active users whom workers have done
    rayrec_nearline_user_seconds                  that a worker takes for a user
    rayrec_nearline_users_total                   that workers brought up to date
    rayrec_nearline_waiting_users                 with events that no product has seen
    rayrec_local_calls_total                      of other deployments, over sockets of the node
    rayrec_local_calls_around_total               by Ray Serve's handles, where sockets are in use
    rayrec_local_calls_refused_total              of these, by a replica that was full or ended
    rayrec_local_calls_lost_total                 over sockets, whose replica was gone before it answered
    rayrec_local_calls_replicas                   of the node, that are called over sockets
    rayrec_dense_versions                         networks that a dense part holds
    rayrec_dense_ranks                            processes that a replica of the dense part consists of

One process shows them at /metrics. Of replicas of Ray Serve, a proxy would ask any one: theirs go to Ray's
own metrics, which say whose they are, with names that begin with `ray_`. Where there are several models, all
of these have a label `model`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayrec.platform.metrics import NO_TAGS, RayMetrics
from rayrec.serve.admission.control import AdmissionStatus

logger = logging.getLogger(__name__)

PUBLISH_EVERY_S = 1.0
"""What Ray's metrics are told of metrics that are watched."""
REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCH_REQUESTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""Upper bounds of what is counted together."""

ReadMetrics = Callable[[], Mapping[str, float]]


class Meter(Protocol):
    """Takes down what happens; safe to call from several threads."""

    def request(self, route: str, status: int, seconds: float) -> None:
        """A request was answered.

        Args:
            route: as the application has it, so that there are few of them.
        """

    def batch(self, num_requests: int, seconds: float) -> None:
        """Requests were computed together."""

    def watch(self, metrics: ReadMetrics) -> None:
        """From now on, show these as well, by name without `rayrec_`."""


class PrometheusMeter:
    """In a registry of its own: services in one process do not mix."""

    def __init__(self, model: str | None = None) -> None:
        """
        Args:
            model: whose metrics they are, which a label says; None: of the only one.
        """
        self.beside: Sequence[PrometheusMeter] = ()
        """Of the service's other models, which the page shows, too."""
        self._labels = {} if model is None else {"model": model}
        self._registry = CollectorRegistry()
        own = self._registry
        self._requests = Counter("rayrec_requests", "Requests answered", ("route", "status"), registry=own)
        self._request_s = Histogram(
            "rayrec_request_seconds", "Time to answer", ("route",), buckets=REQUEST_SECONDS, registry=own
        )
        self._batch_requests = Histogram(
            "rayrec_batch_requests", "Requests computed together", buckets=BATCH_REQUESTS, registry=own
        )
        self._batch_s = Histogram(
            "rayrec_batch_seconds", "Time to compute a batch", buckets=REQUEST_SECONDS, registry=own
        )

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._request_s.labels(route).observe(seconds)

    def batch(self, num_requests: int, seconds: float) -> None:
        self._batch_requests.observe(num_requests)
        self._batch_s.observe(seconds)

    def watch(self, metrics: ReadMetrics) -> None:
        self._registry.register(_Gauges(metrics))

    def page(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(_Labeled([(each._labels, each._registry) for each in (self, *self.beside)]))


class _Labeled(Collector):
    """Metrics of several registries, each with labels of its own; those of one name are one metric."""

    def __init__(self, registries: Sequence[tuple[Mapping[str, str], CollectorRegistry]]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for labels, registry in self._registries:
            for metric in registry.collect():
                whole = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                whole.samples += [each._replace(labels={**labels, **each.labels}) for each in metric.samples]
        yield from found.values()


class _Gauges(Collector):
    """Metrics that are read when they are asked for: a name that ends in `_total` is a counter's."""

    def __init__(self, metrics: ReadMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        for name, value in self._metrics().items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield kind(f"rayrec_{name}", name.replace("_", " "), value=value)


class RayMeter:
    """Through Ray's metrics agent, where the dashboard finds them."""

    def __init__(self, run: str, replica: Mapping[str, str] = NO_TAGS, model: str | None = None) -> None:
        """
        Args:
            replica: tags of gauges, by which those of one replica are told from another's.
            model: its name, where there are several.
        """
        from ray.util import metrics

        self._tags = {"run": run} | ({} if model is None else {"model": model})
        keys = tuple(self._tags)
        self._requests = metrics.Counter("rayrec_requests", "Requests answered", (*keys, "route", "status"))
        self._request_s = metrics.Histogram(
            "rayrec_request_seconds", "Time to answer", list(REQUEST_SECONDS), (*keys, "route")
        )
        self._batch_requests = metrics.Histogram(
            "rayrec_batch_requests", "Requests computed together", list(BATCH_REQUESTS), keys
        )
        self._batch_s = metrics.Histogram(
            "rayrec_batch_seconds", "Time to compute a batch", list(REQUEST_SECONDS), keys
        )
        self._gauges = RayMetrics({**self._tags, **replica})
        self._publishing = Publishing()

    def request(self, route: str, status: int, seconds: float) -> None:
        self._requests.inc(1, self._tags | {"route": route, "status": str(status)})
        self._request_s.observe(seconds, self._tags | {"route": route})

    def batch(self, num_requests: int, seconds: float) -> None:
        self._batch_requests.observe(num_requests, self._tags)
        self._batch_s.observe(seconds, self._tags)

    def watch(self, metrics: ReadMetrics) -> None:
        self._publishing.add(lambda: self._gauges.publish(metrics()))


class Publishing:
    """Has metrics published every so often, as long as the process lives, whether requests come or not."""

    def __init__(self) -> None:
        self._publishers: list[Callable[[], None]] = []

    def add(self, publish: Callable[[], None]) -> None:
        """From now on, call this as well."""
        self._publishers.append(publish)
        if len(self._publishers) == 1:
            threading.Thread(target=self._run, name="metrics", daemon=True).start()

    def _run(self) -> None:
        while True:
            for publish in list(self._publishers):
                try:
                    publish()
                except Exception:  # of a part that ends; the others are shown all the same
                    logger.debug("metrics are not shown", exc_info=True)
            time.sleep(PUBLISH_EVERY_S)


def serving_metrics(status: AdmissionStatus, model_step: int) -> dict[str, float]:
    """What a meter watches."""
    return {
        "serving_in_flight": status.in_flight,
        "serving_load": status.load,
        "serving_degrade_steps": len(status.steps),
        "serving_callers": status.callers,
        "serving_refused_total": status.refused + status.refused_callers,
        "serving_answers_kept": status.cached,
        "serving_model_step": model_step,
    }


def metrics_router(meter: PrometheusMeter) -> APIRouter:
    router = APIRouter(tags=["Metrics"])

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> PlainTextResponse:
        """Metrics for Prometheus."""
        return PlainTextResponse(meter.page(), media_type=CONTENT_TYPE_LATEST)

    return router


class RequestMeter:
    """ASGI middleware that measures every request; outside of everything that answers."""

    def __init__(self, app: ASGIApp, meters: Sequence[Meter]) -> None:
        self._app, self._meters = app, meters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            # The router leaves its route there; paths that nobody serves would be labels without end.
            route = getattr(scope.get("route"), "path", "none")
            seconds = time.perf_counter() - began
            for meter in self._meters:
                meter.request(route, status, seconds)
