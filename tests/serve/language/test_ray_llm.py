"""Applications of ray.serve.llm as data: what is in them, how they come into a cluster, and out of it again.

With RAYREC_VLLM_PYTHON, an interpreter that has vLLM and Ray, they are checked against the classes there.
With RAYREC_VLLM_DASHBOARD, the URL of a cluster of it, and RAYREC_VLLM_MODEL, the folder of an instruct
model, that model is deployed on a CPU and asked; RAYREC_VLLM_SERVE says where its Ray Serve is to listen.
"""

import json
import os
import subprocess

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.platform.errors import InputError, MachineError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.language.config import ModelsConfig
from rayrec.serve.language.ray_llm import application, remote_model
from rayrec.serve.launch.language import serving_models
from rayrec.serve.on_ray.declared import DeclaredApplications
from rayrec.serve.on_ray.scaling import ServeDownError, ServeRefusedError

VLLM = os.environ.get("RAYREC_VLLM_PYTHON")
PREFILL = {
    "prefill": {"replicas": 2},
    "replicas": {"replicas": 1, "max_replicas": 4},
    "tensor": 2,
    "accelerator_type": "H100",
}
CPU = {"accelerator": "cpu", "context_length": 512, "engine_kwargs": {"dtype": "float32"}}


def model(**more):
    values = {"name": "chat", "engine": "ray_llm", "folder": "/models/chat", **more}
    (made,) = ModelsConfig.parse({"models": [values]}).models
    return made


class Dashboard:
    """Ray's, as far as applications go."""

    def __init__(self, states=("DEPLOYING", "RUNNING"), declared=(), programs=()):
        self.states, self.puts, self.polls = list(states), [], 0
        self.num_failing, self.capacity = 0, None
        self.declared = list(declared)
        self.programs = {name: {"status": "RUNNING", "route_prefix": "/p"} for name in programs}

    def __call__(self, method, url, values):
        assert url == "http://head:8265/api/serve/applications/"
        if self.num_failing and self.puts:
            self.num_failing -= 1
            raise ServeDownError(f"{url}: connection refused")
        if method == "PUT":
            self.puts.append(values)
            self.declared = values["applications"]
            return ""
        state = self.states[min(self.polls, len(self.states) - 1)] if self.puts else "RUNNING"
        self.polls += bool(self.puts)
        found = {
            one["name"]: {
                "status": state,
                "route_prefix": one["route_prefix"],
                "deployed_app_config": one,
                "message": "",
                "deployments": {"LLM": {"message": "Traceback\n  RuntimeError: no such file"}},
            }
            for one in self.declared
        }
        http = {"host": "0.0.0.0", "port": 8123}
        return json.dumps(
            {
                "applications": found | self.programs,
                "http_options": http,
                "proxy_location": None,
                "target_capacity": self.capacity,
            }
        )


def cluster(dashboard, **more):
    times = iter(range(1000))
    return DeclaredApplications(
        "http://head:8265/", fetch=dashboard, sleep=lambda s: None, clock=lambda: next(times), **more
    )


def test_one_model_is_one_application_whose_settings_are_those_of_vllm():
    found = application(model(**CPU, runtime_env={"py_executable": "/vllm/bin/python"}))
    (config,) = found["args"]["llm_configs"]

    assert found["import_path"] == "ray.serve.llm:build_openai_app"
    assert found["route_prefix"] == "/rayrec-chat"
    assert found["runtime_env"] == {"py_executable": "/vllm/bin/python"}
    assert config["accelerator_config"] == {"kind": "cpu"}
    assert config["engine_kwargs"] == {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enable_prefix_caching": True,
        "dtype": "float32",
        "max_model_len": 512,
    }
    assert config["deployment_config"] == {"num_replicas": 1}


def test_prefill_and_decode_are_two_deployments_that_scale_alone():
    found = application(model(**PREFILL))
    prefill, decode = found["args"]["prefill_config"], found["args"]["decode_config"]

    assert found["import_path"] == "ray.serve.llm:build_pd_openai_app"
    assert prefill["deployment_config"] == {"num_replicas": 2}
    assert decode["deployment_config"]["autoscaling_config"]["max_replicas"] == 4
    for config in (prefill, decode):
        assert config["engine_kwargs"]["kv_transfer_config"]["kv_role"] == "kv_both"
        assert config["accelerator_type"] == "H100"


@pytest.mark.skipif(VLLM is None, reason="RAYREC_VLLM_PYTHON names no interpreter that has vLLM")
@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_classes_of_ray_take_what_is_written(tmp_path):
    # All in one process, whose imports take a minute.
    given = [application(model(**one)) for one in ({}, CPU, PREFILL, {"replicas": {"max_replicas": 3}})]
    program = """
import json, sys
from ray.serve.llm import LLMConfig
from ray.llm._internal.serve.core.ingress.builder import LLMServingArgs
from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs
from ray.serve.schema import ServeDeploySchema
for application in json.loads(sys.stdin.read()):
    ServeDeploySchema.model_validate({"applications": [application]})
    args = application["args"]
    if "prefill_config" in args:
        taken = PDServingArgs.model_validate(args)
        written, configs = [*args.values()], [taken.prefill_config, taken.decode_config]
    else:
        written, configs = args["llm_configs"], LLMServingArgs.model_validate(args).llm_configs
    for values, config in zip(written, configs, strict=True):
        # Arguments are of a class that the public one is made of.
        assert isinstance(LLMConfig.model_validate(values), type(config)), type(config)
        assert config.model_id == "chat", config
        assert config.accelerator_config.kind == values["accelerator_config"]["kind"], config
        assert config.engine_kwargs.items() >= values["engine_kwargs"].items(), config
    print("taken")
"""
    done = subprocess.run(
        [str(VLLM), "-c", program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=900,
        cwd=tmp_path,  # not beside the package, which is not that environment's
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.stdout.split().count("taken") == len(given), done.stderr[-2000:]


@pytest.mark.skipif(
    not {"RAYREC_VLLM_DASHBOARD", "RAYREC_VLLM_MODEL"} <= set(os.environ),
    reason="RAYREC_VLLM_DASHBOARD and RAYREC_VLLM_MODEL name no cluster with vLLM and no model",
)
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_vllm_answers_behind_the_gateway_and_is_gone_behind_it(free_port):
    schema = {"type": "object", "properties": {"tool": {"enum": ["order", "refund"]}}, "required": ["tool"]}
    engine = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4}
    values = {
        "models": [
            {
                "name": "chat",
                "engine": "ray_llm",
                "folder": os.environ["RAYREC_VLLM_MODEL"],
                "accelerator": "cpu",
                "context_length": 512,
                "engine_kwargs": engine,
                "timeout_s": 600,
            }
        ],
        "ray": {
            "dashboard": os.environ["RAYREC_VLLM_DASHBOARD"],
            "serve": os.environ.get("RAYREC_VLLM_SERVE"),
        },
    }
    config = ServeConfig.parse({"single_process": True, "port": free_port})
    asked = {"model": "chat", "messages": [{"role": "user", "content": "I want my money back."}]}
    asked |= {"max_tokens": 24, "temperature": 0}
    wanted = {"type": "json_schema", "json_schema": {"name": "tool", "schema": schema}}
    with serving_models(ModelsConfig.parse(values), config) as url, httpx.Client(timeout=600) as http:
        path = f"{url}/v1/chat/completions"
        text = http.post(path, json=asked).json()["choices"][0]["message"]["content"]
        held = http.post(path, json=asked | {"response_format": wanted}).json()
        with http.stream("POST", path, json=asked | {"stream": True}) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        pieces = [choice["delta"].get("content") for line in lines for choice in json.loads(line)["choices"]]
        refused = http.post(path, json=asked | {"temperature": -1})

    assert "".join(filter(None, pieces)) == text
    assert json.loads(held["choices"][0]["message"]["content"])["tool"] in ("order", "refund")
    assert held["model"] == "chat"
    assert refused.status_code == 400
    details = DeclaredApplications(os.environ["RAYREC_VLLM_DASHBOARD"])._details()
    # Ray Serve removes behind its answer.
    assert details["applications"].get("rayrec-chat", {"status": "DELETING"})["status"] == "DELETING"


def test_applications_of_others_stay_when_ours_come_and_go():
    other = {"name": "other", "route_prefix": "/other", "import_path": "a:b"}
    dashboard = Dashboard(declared=[other], programs=["shop"])
    with cluster(dashboard).deployed([application(model())], 60):
        assert [one["name"] for one in dashboard.puts[-1]["applications"]] == ["other", "rayrec-chat"]
        assert dashboard.puts[-1]["http_options"] == {"host": "0.0.0.0", "port": 8123}
        assert cluster(dashboard).serve_url() == "http://head:8123"
    assert dashboard.puts[-1]["applications"] == [other]


@pytest.mark.parametrize(
    ("states", "kind", "said"),
    [
        (["DEPLOYING", "DEPLOY_FAILED"], InputError, "could not be started.*no such file"),
        (["DEPLOYING"], MachineError, "does not run"),
    ],
)
def test_what_does_not_start_is_said_and_removed(states, kind, said):
    dashboard = Dashboard(states)
    with pytest.raises(kind, match=said) as error, cluster(dashboard).deployed([application(model())], 9):
        raise AssertionError("it started")
    assert type(error.value) is kind
    assert dashboard.puts[-1]["applications"] == []


def test_a_dashboard_that_is_away_for_a_moment_is_asked_again():
    dashboard = Dashboard()
    dashboard.num_failing = 3
    with cluster(dashboard).deployed([application(model())], 60):
        dashboard.num_failing = 3
    assert not dashboard.declared


def test_what_cannot_be_removed_is_told(caplog):
    dashboard = Dashboard()
    with cluster(dashboard).deployed([application(model())], 60):
        dashboard.num_failing = 10_000
    assert "are left in the cluster" in caplog.text


def test_the_capacity_that_a_cluster_is_held_to_stays():
    dashboard = Dashboard()
    dashboard.capacity = 50.0
    with cluster(dashboard).deployed([application(model())], 60):
        pass
    assert [put["target_capacity"] for put in dashboard.puts] == [50.0, 50.0]


@pytest.mark.parametrize("single_process", [True, False])
def test_other_services_are_asked_before_anything_is_deployed(single_process, monkeypatch, free_port):
    def deployed(*arguments):
        raise AssertionError("it was deployed")

    monkeypatch.setattr(DeclaredApplications, "deployed", deployed)
    remote = {"name": "far", "engine": "remote", "url": "http://127.0.0.1:9/v1"}
    ray_llm = {"name": "chat", "engine": "ray_llm", "folder": "/models/chat"}
    config = ServeConfig.parse({"single_process": single_process, "port": free_port})
    with (
        pytest.raises(InputError, match=r"far: .*cannot be reached"),
        serving_models(ModelsConfig.parse({"models": [ray_llm, remote]}), config),
    ):
        raise AssertionError("it started")


def test_a_token_of_the_environment_is_not_for_a_cluster_that_is_joined(monkeypatch):
    monkeypatch.setattr("rayrec.platform.cluster.starts_cluster", lambda config: False)
    monkeypatch.setenv("FAR_TOKEN", "a-token")
    remote = {
        "name": "far",
        "engine": "remote",
        "url": "http://127.0.0.1:9/v1",
        "token_variable": "FAR_TOKEN",
    }
    with (
        pytest.raises(InputError, match="does not have this command's FAR_TOKEN"),
        serving_models(ModelsConfig.parse({"models": [remote]}), ServeConfig()),
    ):
        raise AssertionError("it started")


def test_a_name_that_is_taken_is_not_replaced():
    dashboard = Dashboard(declared=[application(model())])
    with (
        pytest.raises(MachineError, match="'rayrec-chat' already"),
        cluster(dashboard).deployed([application(model())], 9),
    ):
        raise AssertionError("it started")
    assert not dashboard.puts


def test_one_that_is_being_removed_is_waited_for():
    left = {"status": "DELETING", "route_prefix": "/rayrec-chat"}
    dashboard = Dashboard()
    dashboard.programs["rayrec-chat"] = left
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            del dashboard.programs["rayrec-chat"]

    times = iter(range(1000))
    starting = DeclaredApplications(
        "http://head:8265", fetch=dashboard, sleep=sleep, clock=lambda: next(times)
    )
    with starting.deployed([application(model())], 60):
        assert len(waits) >= 3
    dashboard.programs["rayrec-chat"] = left
    with (
        pytest.raises(MachineError, match="'rayrec-chat' already"),
        cluster(dashboard).deployed([application(model())], 60),
    ):
        raise AssertionError("it started beside one that never goes")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("<html>", InputError),
        ("[]", InputError),
        (ServeDownError("connection refused"), MachineError),
        (ServeRefusedError("status 401"), InputError),
    ],
)
def test_a_cluster_that_does_not_answer_is_said(answer, kind):
    def fetch(method, url, values):
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(kind, match=r"no dashboard of Ray|does not take applications") as error:
        cluster(fetch).serve_url()
    assert type(error.value) is kind


def test_the_gateway_asks_the_application_within_the_limits_of_the_model():
    asked = remote_model(model(timeout_s=300, callers={"rate": 1}), "http://head:8123/")

    assert asked.url == "http://head:8123/rayrec-chat/v1"
    assert (asked.name_there, asked.silence_s, asked.timeout_s) == ("chat", 300, 300)
    assert asked.callers.rate == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine_kwargs": {"max_model_len": 5}}, "has a setting of its own"),
        ({"accelerator": "npu"}, "accelerator"),
        ({"accelerator": "cpu", "accelerator_type": "H100"}, "accelerator is cpu"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, said):
    with pytest.raises(InputError, match=said):
        model(**settings)


def test_the_config_is_written_for_those_who_deploy_it_themselves(tmp_path):
    path, out = tmp_path / "models.yaml", tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"models": [{"name": "chat", "engine": "ray_llm", "folder": "/m"}]}))
    done = CliRunner().invoke(app, ["maas", "applications", str(path), str(out), "--json"])

    assert done.exit_code == 0
    (found,) = yaml.safe_load(out.read_text())["applications"]
    assert found["name"] == "rayrec-chat"
