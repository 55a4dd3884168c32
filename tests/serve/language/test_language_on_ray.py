"""Language models as deployments of Ray Serve: they answer as in one process, and come back."""

import asyncio
import json
import time
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("transformers", reason="the embedded engine is that of transformers")
from ray import serve
from ray.serve.exceptions import BackPressureError

from rayrec.platform.errors import InputError
from rayrec.serve.admission.limits import ServiceLimitError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.batching import DeadlineError
from rayrec.serve.language.config import ModelsConfig
from rayrec.serve.language.memory import plan_memory
from rayrec.serve.launch.language import serving_models
from rayrec.serve.on_ray import language as on_ray
from rayrec.serve.on_ray.language import HandleService, Refusal, build_language_application, replica_claim
from rayrec.serve.on_ray.serving import APPLICATION
from rayrec.serve.wire.errors import RequestError

HELLO = {"model": "answers", "messages": [{"role": "user", "content": "You?"}], "max_tokens": 8, "seed": 1}


def models_of(folder, **replicas):
    model = {"name": "tiny", "folder": str(folder), "context_length": 256, "concurrency": 2}
    routing = {"experiment": "x", "weights": {"tiny": 1}}
    values = {
        "models": [model | {"replicas": {"cpus": 0.2, **replicas}}],
        "shared_names": [{"name": "answers", "routing": routing}],
    }
    return ModelsConfig.parse(values)


def deployments():
    return serve.status().applications[APPLICATION].deployments


def check_metrics_of_ray():
    """Check that Ray shows what the dashboard asks for, with its labels."""
    import ray

    (node,) = [node for node in ray.nodes() if node["Alive"]]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    expected = {
        ("first_token_seconds_bucket", 'model="tiny"'),
        ("next_token_seconds_bucket", 'model="tiny"'),
        ("answer_tokens_total", 'model="tiny"'),
        ("prompt_tokens_total", 'model="tiny"'),
        ("pages_used", 'model="tiny"'),
        ("running", 'model="tiny"'),
        ("waiting", 'model="tiny"'),
        ("routed_total", 'name="answers"'),
    }
    missing = expected
    for _ in range(120):  # Ray's agent is told every few seconds
        page = httpx.get(url, trust_env=False).text.splitlines()
        lines = [line.removeprefix("ray_rayrec_language_") for line in page if "ray_rayrec_language_" in line]
        missing = {
            (name, label)
            for name, label in expected
            if not any(line.startswith(f"{name}{{") and label in line for line in lines)
        }
        if not missing:
            return
        time.sleep(0.5)
    raise AssertionError(missing)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_replicas_answer_as_one_process_does_and_start_again_when_they_die(folder, free_port):
    import ray

    config = ServeConfig.parse({"port": free_port})
    models = models_of(folder, replicas=1, max_replicas=2)
    with serving_models(models, config) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert set(deployments()) == {"gateway", "model.tiny"}
        whole = http.post("/v1/chat/completions", json=HELLO)
        text = whole.json()["choices"][0]["message"]["content"]
        with http.stream("POST", "/v1/chat/completions", json=HELLO | {"stream": True}) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        chunks = [json.loads(line) for line in lines]
        refused = http.post("/v1/chat/completions", json=HELLO | {"temperature": 9})
        triton = http.post("/v2/models/tiny/generate", json={"text_input": "You", "parameters": {"seed": 2}})
        check_metrics_of_ray()

        (name,) = [
            found["name"]
            for found in ray.util.list_named_actors(all_namespaces=True)
            if "model.tiny" in found["name"]
        ]
        ray.kill(ray.get_actor(name, namespace="serve"))
        ends_at, again = time.monotonic() + 120, None
        while time.monotonic() < ends_at:
            again = http.post("/v1/chat/completions", json=HELLO)
            if again.status_code == 200:
                break
            assert again.status_code == 503
            time.sleep(0.5)

    assert whole.headers["x-target"] == "tiny"
    assert whole.json()["model"] == "answers"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text
    assert refused.status_code == 400
    assert "temperature" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "temperature"
    assert triton.json()["text_output"]
    assert again.json()["choices"][0]["message"]["content"] == text
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_what_a_replica_refuses_is_told_as_it_was_meant():
    for error in (
        RequestError("no", 404, "model", "model_not_found"),
        ServiceLimitError("9 answers wait", 2.0),
        DeadlineError("too late"),
    ):
        told = Refusal.of(error).raised()
        assert type(told) is type(error)
        assert str(told) == str(error)
    assert Refusal.of(RequestError("no", 404, "model", "x")).raised().code == "x"


class Handle:
    """Of replicas that say some values, and then nothing more."""

    def __init__(self, values=(), error=None):
        self.values_said, self.error, self.is_cancelled = list(values), error, False
        self.values = self

    def options(self, **options):
        return self

    def remote(self, *arguments):
        return self

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.values_said:
            return self.values_said.pop(0)
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()

    def cancel(self):
        self.is_cancelled = True


def service_of(handle, monkeypatch):
    monkeypatch.setattr(on_ray, "CHECK_S", 0.01)
    (model,) = ModelsConfig.parse({"models": [{"name": "tiny", "folder": "nowhere"}]}).models
    return HandleService(model, handle)


@pytest.mark.parametrize("values", [[], [{}, {"choices": [{"index": 0}]}]])
def test_a_stream_that_stops_ends_with_its_time(values, monkeypatch):
    handle = Handle(values)
    service = service_of(handle, monkeypatch)

    async def use():
        call = service.read("chat", HELLO | {"stream": True})
        return [value async for value in await call.stream(time.monotonic() + 0.05)]

    with pytest.raises(DeadlineError, match="has not answered in time"):
        asyncio.run(asyncio.wait_for(use(), 20))
    assert handle.is_cancelled
    assert service.measures.numbers()["running"] == 0


def test_a_handle_whose_queue_is_full_has_no_room(monkeypatch):
    error = BackPressureError(num_queued_requests=9, max_queued_requests=9)
    service = service_of(Handle(error=error), monkeypatch)

    async def use():
        await service.read("chat", HELLO | {"stream": True}).stream(time.monotonic() + 20)

    with pytest.raises(ServiceLimitError, match="wait for a replica"):
        asyncio.run(use())


def test_ray_is_asked_for_replicas_now_and_then_whoever_probes(monkeypatch):
    service, asked = service_of(Handle(), monkeypatch), []

    def status():
        asked.append(1)
        deployment = SimpleNamespace(replica_states={"STARTING": 1})
        return SimpleNamespace(applications={"x": SimpleNamespace(deployments={"model.tiny": deployment})})

    monkeypatch.setattr(on_ray.serve, "status", status)

    async def use():
        return [await service.why_not() for _ in range(3)]

    assert asyncio.run(use()) == ["no replica of tiny runs now"] * 3
    assert len(asked) == 1


def test_replicas_are_scaled_by_ray_and_claim_their_device(folder):
    models = models_of(folder, replicas=1, max_replicas=3, requests_per_replica=5)
    application = build_language_application(models, ServeConfig())
    (of_gateway,) = [application._bound_deployment]
    (bound,) = of_gateway.init_args[2].values()
    scaling = bound._bound_deployment._deployment_config.autoscaling_config

    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 3, 5)
    (model,) = models.models
    assert replica_claim(model) == {"num_cpus": 0.2}
    assert replica_claim(model.model_copy(update={"device": "npu"})) == {
        "num_cpus": 0.2,
        "resources": {"NPU": 1},
    }
    assert replica_claim(model.model_copy(update={"device": "cuda"}))["num_gpus"] == 1


def test_memory_is_planned_for_all_replicas(folder):
    models = models_of(folder, replicas=1, max_replicas=40)
    alone, plan = plan_memory(models), plan_memory(models, by_replica=True)

    assert plan.total == plan.process + 40 * alone.models[0].total
    assert plan.process == pytest.approx(41 * alone.process, rel=0.2)
    with pytest.raises(InputError, match="the models on the CPU, with Python and libraries, need"):
        plan_memory(models.model_copy(update={"memory_gib": 2.0}), by_replica=True).check()


def test_a_run_is_not_exported_for_replicas_that_would_not_find_it(tmp_path, monkeypatch):
    import rayrec.platform.cluster

    monkeypatch.setattr(rayrec.platform.cluster, "starts_cluster", lambda config: False)
    models = ModelsConfig.parse({"models": [{"name": "tiny", "run": str(tmp_path)}]})
    with pytest.raises(InputError, match="find no run"), serving_models(models, ServeConfig()):
        raise AssertionError("it started")
