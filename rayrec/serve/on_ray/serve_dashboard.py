"""Ray Serve from outside, over HTTP: what is deployed, what it is asked, and how many replicas it is to have.

    dashboard   GET  /api/serve/applications/     replicas and their nodes
                POST /api/v1/applications/A/deployments/D/scale    needs `external_scaler_enabled`
                GET  /api/prometheus/sd           where nodes export their metrics
    nodes       GET  /metrics                     requests in flight and batchers' load by replica, price of a
                                                  device second

The process may be one that is connected to Ray or not; where the cluster has a token, it has to have it, too,
as Ray's own commands do (RAY_AUTH_MODE=token, with RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token).
"""

from __future__ import annotations

import json
import math
import statistics
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from prometheus_client.parser import text_string_to_metric_families

from rayrec.serve.engine.batch_load import BatcherLoad
from rayrec.serve.on_ray.scaling import Deployed, Load, ServeDownError, ServeRefusedError

ANSWER_S = 5.0
IN_FLIGHT = "ray_serve_replica_processing_queries"
PRICE = "ray_rayrec_allocation_price"
BATCHER: Mapping[str, str] = {
    "work": "ray_rayrec_batcher_work",
    "queue_wait_s": "ray_rayrec_batcher_queue_wait_seconds",
    "full_batches": "ray_rayrec_batcher_full_batches",
    "backlog_s": "ray_rayrec_batcher_backlog_seconds",
}
"""Metric of each part of a `BatcherLoad`."""

REPLICA_TAG = "serve_replica"
"""Of gauges, with Ray Serve's id of the replica; of the name that Serve has for it, Ray may make its own."""

Fetch = Callable[[str, str, Mapping[str, Any] | None], str]
"""(method, URL, values for a body) to what is answered."""


def fetch_text(
    method: str, url: str, values: Mapping[str, Any] | None = None, answer_s: float = ANSWER_S
) -> str:
    """The body of an answer.

    Args:
        answer_s: in which it has to come.

    Raises:
        ServeDownError: there is none, or it is an error's; a `ServeRefusedError` where it blames the request.
    """
    # Ray has no public function for its token.
    from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

    headers = {"Content-Type": "application/json", **get_auth_headers_if_auth_enabled({})}
    body = None if values is None else json.dumps(values).encode()
    try:
        request = urllib.request.Request(url, body, headers, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=answer_s
        ) as answer:
            return str(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace").strip()
        hint = "; set RAY_AUTH_MODE=token, as the cluster wants its token" if error.code == 401 else ""
        kind = ServeRefusedError if _blames_request(error.code) else ServeDownError
        raise kind(f"{url}: status {error.code}, {said or error.reason}{hint}") from error
    except OSError as error:
        raise ServeDownError(f"{url}: {error}") from error
    except ValueError as error:
        raise ServeRefusedError(f"{url}: no URL ({error})") from error


def _blames_request(status: int) -> bool:
    return 400 <= status < 500 and status not in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)


class ServeDashboard:
    """Implements `ServeClient`."""

    def __init__(self, url: Callable[[], str], fetch: Fetch = fetch_text) -> None:
        """
        Args:
            url: of the dashboard, such as `http://127.0.0.1:8265`; a new head may have another one.
        """
        self._url, self._fetch = url, fetch

    def deployments(self, application: str) -> dict[str, Deployed]:
        found = self._json("/api/serve/applications/").get("applications", {}).get(application, {})
        return {name: _deployed(each) for name, each in found.get("deployments", {}).items()}

    def scale(self, application: str, deployment: str, replicas: int) -> None:
        path = f"/api/v1/applications/{quote(application, '')}/deployments/{quote(deployment, '')}/scale"
        self._fetch("POST", self._url() + path, {"target_num_replicas": replicas})

    def loads(self, application: str, deployments: Mapping[str, Deployed]) -> dict[str, Load]:
        nodes = {node for each in deployments.values() for node in each.nodes}
        in_flight: dict[tuple[str, str], float] = {}
        prices: list[float] = []
        batchers: dict[str, dict[str, float]] = {}
        for target in self._targets(nodes):
            try:
                text = self._fetch("GET", f"http://{target}/metrics", None)
            except ServeDownError:
                continue  # the others are a part of the truth, and `is_complete` says so
            for labels, value in samples(text, IN_FLIGHT):
                if labels.get("application") == application:
                    in_flight[labels.get("deployment", ""), labels.get("replica", "")] = value
            prices += [value for _, value in samples(text, PRICE)]
            for part, name in BATCHER.items():
                for labels, value in samples(text, name):
                    batchers.setdefault(labels.get(REPLICA_TAG, ""), {})[part] = value
        price = statistics.fmean(prices) if prices else None
        loads = {}
        for name, each in deployments.items():
            known = [in_flight[name, replica] for replica in each.running if (name, replica) in in_flight]
            is_complete = len(known) == len(each.running) > 0
            told = [batchers.get(replica, {}) for replica in each.running]
            loads[name] = Load(
                sum(known) if known else None,
                is_complete,
                price,
                tuple(BatcherLoad(**parts) for parts in told if len(parts) == len(BATCHER)),
                len(each.running),
            )
        return loads

    def _targets(self, nodes: set[str]) -> list[str]:
        """Where these nodes export their metrics, as `host:port`."""
        listed = self._json("/api/prometheus/sd")
        targets = {str(target) for each in listed for target in each.get("targets", ())}
        return sorted(target for target in targets if target.rpartition(":")[0].strip("[]") in nodes)

    def _json(self, path: str) -> Any:
        text = self._fetch("GET", self._url() + path, None)
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServeDownError(f"{self._url()}{path}: no JSON in the answer ({error})") from error


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Labels and values of one gauge in Prometheus's text format; those that are not finite are left out."""
    # The page of a node has thousands of lines, and few of them are read.
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    found = []
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        found += [(dict(each.labels), float(each.value)) for each in family.samples]
    return [(labels, value) for labels, value in found if math.isfinite(value)]


def _deployed(details: Mapping[str, Any]) -> Deployed:
    replicas = details.get("replicas", ())
    return Deployed(
        int(details["target_num_replicas"]),
        tuple(str(each.get("node_ip")) for each in replicas),
        tuple(str(each["replica_id"]) for each in replicas if each.get("state") == "RUNNING"),
        tuple(str(each["node_id"]) for each in replicas if each.get("node_id")),
    )
