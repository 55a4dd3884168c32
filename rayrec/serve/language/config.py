"""`models.yaml`: which language models are served, and within which limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rayrec.platform.config import Config
from rayrec.platform.devices import HOST, device_named
from rayrec.serve.config.admission import CallersConfig, LimitConfig
from rayrec.serve.config.events import RequestLogConfig
from rayrec.serve.config.services import ReplicasConfig, RoutingConfig, ShadowTargetConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,95}")


def _checked_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"name: expected letters, digits and ._:-, got {value!r}")
    return value


class ModelLimits(Config):
    """A model, and what callers may ask of it."""

    name: str
    """What callers ask for."""
    service: LimitConfig = LimitConfig()
    """Requests to this model of all callers together; more are refused with status 503."""
    callers: CallersConfig = CallersConfig()
    """Of each caller; more are refused with status 429."""
    timeout_s: float = Field(120.0, gt=0)
    """In which an answer has to be whole; one that is not is ended there, and its slot is free."""

    @field_validator("name")
    @classmethod
    def _can_be_in_a_path(cls, value: str) -> str:
        return _checked_name(value)

    def resolved(self, beside: Path) -> Self:
        """With paths beside a folder."""
        return self


class EmbeddedModel(ModelLimits):
    """Computed in the process that serves, by continuous batching of transformers."""

    engine: Literal["embedded"] = "embedded"
    folder: str | None = None
    """Of Hugging Face's layout, with the tokenizer; never a name of a hub. Code in it is never run."""
    run: str | None = None
    """Folder of a language run instead, whose best snapshot is exported before the service starts."""
    device: str = HOST.kind
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    context_length: int = Field(2048, gt=1)
    """Tokens of a request and its answer together."""
    concurrency: int = Field(8, ge=1)
    """Answers that are computed together; each has memory for a whole context."""
    max_waiting: int = Field(64, ge=0)
    """Requests that wait for one of these; more are refused with status 503."""
    max_tokens: int = Field(256, ge=1)
    """Of an answer, where the request does not say."""
    page_tokens: int = Field(32, ge=4)
    """Tokens whose keys and values are kept together; prefixes are shared in units of these."""
    prefill_tokens: int = Field(512, ge=16)
    """Read at once of prompts, so that answers that are being written wait no longer than that takes."""
    prefix_cache_tokens: int = Field(4096, ge=0)
    """Memory for what finished requests have read, on top of that of requests; 0: no prefix is shared."""
    grammar: Literal["xgrammar", "llguidance"] = "xgrammar"
    """Which package holds answers to schemas and expressions."""
    semantic_ids: str | None = None
    """Folder that `rayrec tokenize` wrote, of the items whose codes the tokenizer knows: answers can be held
    to items then."""
    date: str | None = None
    """ISO date that stands for today in the chat template; None: it must do without."""
    replicas: ReplicasConfig = ReplicasConfig()
    """Processes that answer, with `rayrec maas up --cluster`."""
    embeddings: bool = True
    """Whether `/v1/embeddings` answers, by the mean of the last hidden states."""

    @model_validator(mode="after")
    def _there_is_one_model(self) -> Self:
        if (self.folder is None) == (self.run is None):
            raise ValueError(f"{self.name}: give a folder or a run, and not both")
        if self.prefill_tokens < self.concurrency:
            raise ValueError(
                f"{self.name}: prefill_tokens is {self.prefill_tokens} and concurrency {self.concurrency}; "
                "each "
                "answer needs one of these tokens at every step"
            )
        return self

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, value: str) -> str:
        return device_named(value).kind

    def resolved(self, beside: Path) -> Self:
        return self.model_copy(update=_resolved(self, beside, ("folder", "run", "semantic_ids")))


class RemoteModel(ModelLimits):
    """Answered by another service that speaks OpenAI's API, such as vLLM, vllm-ascend, SGLang or xLLM."""

    engine: Literal["remote"]
    url: str
    """Of its API, such as `http://host:8000/v1`."""
    model: str | None = None
    """Its name there; None: the same."""
    token_file: str | None = None
    """File with the token that it wants,"""
    token_variable: str | None = None
    """or the environment variable that has it."""
    ca_file: str | None = None
    """Certificate of the authority that signed its own; None: those that the system trusts."""
    connect_timeout_s: float = Field(5.0, gt=0)
    """In which a connection has to be there."""
    silence_s: float = Field(60.0, gt=0)
    """Longest time without a byte of an answer that has not ended, the one before the first among them."""
    max_connections: int = Field(256, ge=1)
    """To it at once; more requests than that wait for one."""

    @field_validator("url")
    @classmethod
    def _url_is_one(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"url: expected something like http://host:8000/v1, got {value!r}")
        if parts.username is not None or parts.password is not None:
            raise ValueError("url: a password does not belong into it; set token_file or token_variable")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _there_is_one_token(self) -> Self:
        if self.token_file is not None and self.token_variable is not None:
            raise ValueError(f"{self.name}: give token_file or token_variable, and not both")
        return self

    def resolved(self, beside: Path) -> Self:
        return self.model_copy(update=_resolved(self, beside, ("token_file", "ca_file")))

    @property
    def name_there(self) -> str:
        return self.model or self.name


class RayLlmModel(ModelLimits):
    """Computed by vLLM in a Ray cluster whose environment has it, as an application of `ray.serve.llm`."""

    engine: Literal["ray_llm"]
    folder: str
    """Of the model, as the nodes of the cluster have it."""
    accelerator: str = "gpu"
    """`gpu`, or the kind of the host, where vLLM computes on processors."""
    accelerator_type: str | None = None
    """Ray's name of the device, such as `H100`; None: any."""
    tensor: int = Field(1, ge=1)
    """Devices that share each layer."""
    pipeline: int = Field(1, ge=1)
    """Groups of devices that each have some of the layers."""
    context_length: int | None = Field(None, gt=1)
    """Tokens of a request and its answer together; None: those of the model."""
    prefix_caching: bool = True
    """Whether requests share what was read of the same beginning."""
    replicas: ReplicasConfig = ReplicasConfig()
    """That answer; with `prefill`, those that write."""
    prefill: ReplicasConfig | None = None
    """Replicas that read prompts, and hand keys and values over to those that write; None: one does both."""
    kv_connector: str = "NixlConnector"
    """What hands them over."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More settings of vLLM, by its names."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's, of the application, such as `py_executable` or `env_vars`."""

    @field_validator("accelerator")
    @classmethod
    def _accelerator_is_known(cls, value: str) -> str:
        if value not in ("gpu", HOST.kind):
            raise ValueError(f"accelerator: expected gpu or {HOST.kind}, got {value!r}")
        return value

    @model_validator(mode="after")
    def _settings_are_said_once(self) -> Self:
        own = {"tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "enable_prefix_caching"}
        if twice := sorted(own & self.engine_kwargs.keys()):
            raise ValueError(f"{self.name}: engine_kwargs.{twice[0]} has a setting of its own; use that")
        if self.accelerator == HOST.kind and self.accelerator_type is not None:
            raise ValueError(f"{self.name}: accelerator_type is of devices, and accelerator is {HOST.kind}")
        return self


class RayClusterConfig(Config):
    """The cluster in which models of the engine `ray_llm` are deployed."""

    dashboard: str = "http://127.0.0.1:8265"
    """URL of its dashboard, which takes applications."""
    serve: str | None = None
    """URL at which its Ray Serve answers; None: the dashboard's host, and the port that Ray Serve says."""
    start_timeout_s: float = Field(1800.0, gt=0)
    """In which all replicas have to run: large models take many minutes to load."""


ServedConfig = Annotated[EmbeddedModel | RemoteModel | RayLlmModel, Field(discriminator="engine")]


class SharedNameConfig(Config):
    """A name that callers ask for, and several models answer to."""

    name: str
    """That callers ask for; none of a model."""
    routing: RoutingConfig
    """Which model answers whom: by `X-User-Id`, the request's `user`, or the caller; weights are by name."""
    shadow: ShadowTargetConfig | None = None
    """A model that gets a copy of a share of the requests; its answers are compared, and shown to nobody."""

    @field_validator("name")
    @classmethod
    def _can_be_in_a_path(cls, value: str) -> str:
        return _checked_name(value)


class ChatLogConfig(RequestLogConfig):
    """What of requests and answers is taken down; rows that find no room are dropped and counted."""

    texts: bool = False
    """Whether requests and answers themselves are taken down, which users may have written secrets into."""


class ModelsConfig(Config):
    """`models.yaml`."""

    models: tuple[ServedConfig, ...] = Field(min_length=1)
    shared_names: tuple[SharedNameConfig, ...] = ()
    request_log: ChatLogConfig | None = None
    ray: RayClusterConfig = RayClusterConfig()
    memory_gib: float | None = Field(None, gt=0)
    """Memory that models on the CPU may take together; None: that of the machine or container."""

    @field_validator("models", mode="before")
    @classmethod
    def _embedded_unless_said(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        return [{"engine": "embedded", **each} if isinstance(each, Mapping) else each for each in value]

    @property
    def embedded(self) -> tuple[EmbeddedModel, ...]:
        return tuple(model for model in self.models if isinstance(model, EmbeddedModel))

    @property
    def ray_llm(self) -> tuple[RayLlmModel, ...]:
        return tuple(model for model in self.models if isinstance(model, RayLlmModel))

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [each.name for each in (*self.models, *self.shared_names)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"models: the name {twice[0]!r} stands twice; callers ask by it")
        return self

    @model_validator(mode="after")
    def _shared_names_have_models(self) -> Self:
        there = {model.name for model in self.models}
        for shared in self.shared_names:
            asked = set(shared.routing.weights) | ({shared.shadow.target} if shared.shadow else set())
            if unknown := asked - there:
                raise ValueError(f"shared_names: {shared.name} asks {min(unknown)!r}, which is no model here")
        return self

    @classmethod
    def read(cls, path: str | Path) -> ModelsConfig:
        """Read a file; paths in it are beside it.

        Raises:
            InputError: it cannot be read, or settings do not fit.
        """
        config = cls.load(path)
        beside = Path(path).resolve().parent
        update: dict[str, Any] = {"models": tuple(model.resolved(beside) for model in config.models)}
        log = config.request_log
        if log is not None and "://" not in log.folder:
            update["request_log"] = log.model_copy(update=_resolved(log, beside, ("folder",)))
        return config.model_copy(update=update)


def _resolved(config: Config, beside: Path, names: tuple[str, ...]) -> dict[str, str | None]:
    """Paths of settings, which are beside their file."""
    return {
        name: None if (value := getattr(config, name)) is None else str((beside / value).resolve())
        for name in names
    }
