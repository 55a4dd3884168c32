"""Applications of `ray.serve.llm` as data: the only file that knows its names.

Nothing of it is imported, since that needs vLLM or SGLang, whose requirements do not fit beside ours. What is
written here goes to a cluster that has them, and a test checks it against the classes themselves there.

    model of models.yaml ─► {name, route_prefix, import_path, args, runtime_env} ─► Ray Serve's REST API
"""

from __future__ import annotations

from typing import Any

from rayrec.serve.config.services import ReplicasConfig
from rayrec.serve.language.config import RayLlmModel, RemoteModel

APP = "ray.serve.llm:build_openai_app"
PREFILL_DECODE_APP = "ray.serve.llm:build_pd_openai_app"


def application_name(model: RayLlmModel) -> str:
    """Of the model's application in the cluster."""
    return f"rayrec-{model.name}"


def application(model: RayLlmModel) -> dict[str, Any]:
    """An application of a Serve config file, for one model."""
    args: dict[str, Any]
    if model.prefill is None:
        path, args = APP, {"llm_configs": [_llm_config(model, model.replicas)]}
    else:
        path = PREFILL_DECODE_APP
        args = {
            "prefill_config": _llm_config(model, model.prefill),
            "decode_config": _llm_config(model, model.replicas),
        }
    found = {
        "name": application_name(model),
        "route_prefix": f"/{application_name(model)}",
        "import_path": path,
        "args": args,
    }
    return found | ({"runtime_env": model.runtime_env} if model.runtime_env else {})


def remote_model(model: RayLlmModel, serve_url: str) -> RemoteModel:
    """What asks the application, once it runs."""
    limits = {name: getattr(model, name) for name in ("name", "service", "callers", "timeout_s")}
    url = f"{serve_url.rstrip('/')}/{application_name(model)}/v1"
    # Its proxy says nothing before the first token, which waits for a slot.
    return RemoteModel(engine="remote", url=url, silence_s=model.timeout_s, **limits)


def _llm_config(model: RayLlmModel, replicas: ReplicasConfig) -> dict[str, Any]:
    engine: dict[str, Any] = {
        "tensor_parallel_size": model.tensor,
        "pipeline_parallel_size": model.pipeline,
        "enable_prefix_caching": model.prefix_caching,
        **model.engine_kwargs,
    }
    if model.context_length is not None:
        engine["max_model_len"] = model.context_length
    if model.prefill is not None:
        engine.setdefault("kv_transfer_config", {"kv_connector": model.kv_connector, "kv_role": "kv_both"})
    found: dict[str, Any] = {
        "model_loading_config": {"model_id": model.name, "model_source": model.folder},
        "accelerator_config": {"kind": model.accelerator},
        "engine_kwargs": engine,
        "deployment_config": replicas.of_ray,
    }
    if model.accelerator_type is not None:
        found["accelerator_type"] = model.accelerator_type
    if model.runtime_env:
        found["runtime_env"] = model.runtime_env
    return found
