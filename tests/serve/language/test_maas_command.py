"""`rayrec maas`: what does not fit is said in a sentence before anything starts; what fits answers."""

import gc
import json
import socket
import threading
import time
from contextlib import nullcontext

import httpx
import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="the embedded engine is that of transformers")

from rayrec.cli import app
from rayrec.platform.errors import InputError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.language import memory
from rayrec.serve.language.config import ModelsConfig
from rayrec.serve.language.memory import MemoryPlan, ModelPlan, page_plan, plan_memory, plan_model
from rayrec.serve.launch import language
from rayrec.serve.launch.language import serve_models, serving_models


def write(path, folder, memory_gib=None, **more):
    values = {
        "models": [{"name": "tiny", "folder": str(folder), "context_length": 256, "concurrency": 2} | more]
    }
    path.write_text(yaml.safe_dump(values | ({} if memory_gib is None else {"memory_gib": memory_gib})))
    return path


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_plan_counts_weights_and_keys_and_values(folder, tmp_path):
    (model,) = ModelsConfig.read(write(tmp_path / "models.yaml", folder)).models
    plan = plan_model(model)
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert plan.weights == sum(parameter.nbytes for parameter in network.parameters())
    assert plan.token == 2 * 2 * 2 * 8 * 4  # keys and values, 2 layers, 2 heads of 8, 4 bytes
    assert plan.pages == (page_plan(model).num_pages + 2) * model.page_tokens * plan.token


def test_a_context_longer_than_the_network_knows_is_refused_before_weights_are_read(folder, tmp_path):
    (model,) = ModelsConfig.read(write(tmp_path / "models.yaml", folder)).models
    known = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    with pytest.raises(InputError, match=rf"context_length is {known + 1} and .* {known} positions"):
        plan_model(model.model_copy(update={"context_length": known + 1}))


def test_what_the_engine_takes_is_what_was_planned(model):
    manager = model.engine._manager
    while manager.batch_processor is None:  # made by its thread
        time.sleep(0.01)
    cache = manager.batch_processor.cache

    assert cache.cache_tensor.nbytes == plan_model(model.settings).pages


def test_a_plan_is_printed_as_json(folder, tmp_path):
    path = write(tmp_path / "models.yaml", folder)
    done = CliRunner().invoke(app, ["maas", "plan", str(path), "--json"])
    answer = json.loads(done.stdout.splitlines()[-1])

    assert done.exit_code == 0
    assert answer["models"]["tiny"] == plan_memory(ModelsConfig.read(path)).models[0].total


def test_models_of_one_device_have_to_fit_on_it_together(monkeypatch):
    monkeypatch.setattr(memory, "device_memory_bytes", lambda kind: None if kind == "cpu" else 80)
    first, second = (ModelPlan(name, "cuda", 50, 1, 0, 0) for name in ("first", "second"))

    MemoryPlan((first,), process=9, limit=1).check()  # which bounds those on the CPU
    with pytest.raises(InputError, match="first and second need 100 B and cuda has 80 B"):
        MemoryPlan((first, second), process=9, limit=1).check()
    MemoryPlan((first, second), process=9, limit=1, shares_devices=False).check()
    with pytest.raises(InputError, match="large needs 90 B and cuda has 80 B"):
        MemoryPlan((ModelPlan("large", "cuda", 90, 1, 0, 0),), 9, 1, shares_devices=False).check()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"folder": "nowhere"}, "no folder with a config.json"),
        ({"memory_gib": 0.01}, "lower its context_length or concurrency"),
        ({"context_length": 5000}, "positions"),
        ({"context": 5}, "context"),
        ({"run": "somewhere"}, "a folder or a run"),
        ({"engine": "magic"}, "engine"),
        ({"device": "tpu9"}, "tpu9"),
        ({"name": "a/b"}, "name: expected letters"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(folder, tmp_path, settings, said):
    path = write(tmp_path / "models.yaml", settings.pop("folder", folder), **settings)
    config = ServeConfig.parse({"single_process": True, "port": free_port()})

    with pytest.raises(InputError, match=said), serving_models(ModelsConfig.read(path), config):
        raise AssertionError("it started")


def test_a_port_that_is_in_use_is_said(folder, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path = write(tmp_path / "models.yaml", folder)
        done = CliRunner().invoke(app, ["maas", "up", str(path), "--port", str(taken.getsockname()[1])])

    assert done.exit_code == 1
    assert "is in use" in done.stderr


def test_models_answer_those_who_have_the_token(folder, tmp_path):
    import hashlib

    token = "a-token-of-twenty-characters"
    digest = hashlib.sha256(token.encode()).hexdigest()
    config = ServeConfig.parse({"single_process": True, "port": free_port(), "token_sha256": digest})
    limits = {"service": {"rate": 0.001, "burst": 1}}
    read = ModelsConfig.read(write(tmp_path / "models.yaml", folder, **limits))
    body = {"model": "tiny", "prompt": "Paris", "max_tokens": 3}
    with serving_models(read, config) as url:
        post = f"{url}/v1/completions"
        refused = httpx.post(post, json=body)
        answered = httpx.post(post, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=60)
        limited = httpx.post(post, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=60)

    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert answered.json()["choices"][0]["finish_reason"] in ("stop", "length")
    assert limited.status_code == 503
    assert int(limited.headers["retry-after"]) > 1


@pytest.mark.slow
def test_garbage_is_not_looked_for_in_models_when_the_service_ends(folder, tmp_path, monkeypatch):
    gc.unfreeze()  # other tests leave services as they are
    stopped = threading.Event()
    stopped.set()
    monkeypatch.setattr(language, "serving_models", lambda models, config: nullcontext("http://here"))
    monkeypatch.setattr(language, "stop_signal", lambda: nullcontext(stopped))
    try:
        serve_models(ModelsConfig.read(write(tmp_path / "models.yaml", folder)), ServeConfig())
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
