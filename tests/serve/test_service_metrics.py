"""What Prometheus reads of a service."""

from __future__ import annotations

import re
import time

import httpx
import pytest
import ray
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from rayrec.serve.engine.batch_costs import BatchCosts
from rayrec.serve.engine.batching import Batcher
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.web.api import build_api
from rayrec.serve.web.metrics import PrometheusMeter, RayMeter
from tests.serve.fake_recommender import FakeRecommender

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def client_of(service: RecommendationService) -> TestClient:
    meter = PrometheusMeter()
    batcher = Batcher(service.recommend_all, BatchCosts({1: 1e-6}), 4, on_batch=meter.batch)
    return TestClient(build_api(service, batcher, 10.0, meters=[meter]), raise_server_exceptions=False)


def samples_of(client: TestClient) -> Samples:
    page = client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }


def requests(samples: Samples, route: str, status: int) -> float:
    return samples.get(("rayrec_requests_total", (("route", route), ("status", str(status)))), 0.0)


def test_requests_are_counted_by_route_and_status():
    client = client_of(RecommendationService(FakeRecommender(), max_k=50))
    for body in ({"user_id": "ann"}, {"user_id": "ann"}, {"k": 0}):
        client.post("/v1/recommend", json=body)
    client.head("/health/live")
    client.get("/nowhere/1")
    client.get("/nowhere/2")

    samples = samples_of(client)

    assert requests(samples, "/v1/recommend", 200) == 2
    assert requests(samples, "/v1/recommend", 422) == 1
    assert requests(samples, "/health/live", 200) == 1
    assert requests(samples, "none", 404) == 2, "paths are no labels"
    assert samples["rayrec_request_seconds_count", (("route", "/v1/recommend"),)] == 3
    assert samples["rayrec_request_seconds_sum", (("route", "/v1/recommend"),)] > 0


def test_batches_and_the_state_of_the_service_are_shown():
    client = client_of(RecommendationService(FakeRecommender(), max_k=50))
    client.post("/v1/recommend", json={"user_id": "ann"})

    samples = samples_of(client)

    assert samples["rayrec_batch_requests_count", ()] == 1
    assert samples["rayrec_batch_requests_bucket", (("le", "1.0"),)] == 1
    assert samples["rayrec_serving_model_step", ()] == 100
    assert samples["rayrec_serving_in_flight", ()] == 0


def test_failures_are_counted():
    class Broken(RecommendationService):
        def recommend_all(self, requests):
            raise ZeroDivisionError

    client = client_of(Broken(FakeRecommender(), max_k=50))
    client.post("/v1/recommend", json={"user_id": "ann"})

    assert requests(samples_of(client), "/v1/recommend", 500) == 1


def test_services_in_one_process_do_not_mix():
    first, second = (client_of(RecommendationService(FakeRecommender(), max_k=50)) for _ in range(2))
    first.post("/v1/recommend", json={"user_id": "ann"})

    assert requests(samples_of(second), "/v1/recommend", 200) == 0


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_rays_metrics_have_the_same_names_behind_its_own_prefix():
    class Replica:
        def __init__(self) -> None:
            self._meter = RayMeter("run")
            self._meter.watch(lambda: {"serving_in_flight": 3.0})
            self._of_no_batches = RayMeter("run")
            self._of_no_batches.watch(lambda: {"gateway_in_flight": 1.0})

        def answer(self) -> None:
            self._meter.request("/v1/recommend", 200, 0.01)
            self._meter.batch(2, 0.1)

    replica = ray.remote(num_cpus=0)(Replica).remote()
    ray.get(replica.answer.remote())
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    expected = {
        "ray_rayrec_requests_total",
        "ray_rayrec_request_seconds_bucket",
        "ray_rayrec_batch_requests_count",
        "ray_rayrec_batch_seconds_sum",
        "ray_rayrec_serving_in_flight",
        "ray_rayrec_gateway_in_flight",
    }
    found: set[str] = set()
    for _ in range(120):  # Ray's agent is told every few seconds
        page = httpx.get(url, trust_env=False).text
        found = set(re.findall(r"^ray_rayrec_\w+", page, re.MULTILINE))
        if expected <= found:
            break
        time.sleep(0.5)
    assert expected <= found
    ray.kill(replica)
