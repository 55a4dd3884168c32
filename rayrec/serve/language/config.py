"""`models.yaml`: which language models are served, by which engine, and within which limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rayrec.platform.config import Config
from rayrec.platform.devices import device_named
from rayrec.serve.config.admission import CallersConfig, LimitConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,95}")


class _ServedModel(Config):
    """What all engines have."""

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
        if not _NAME.fullmatch(value):
            raise ValueError(f"name: expected letters, digits and ._:-, got {value!r}")
        return value


class EmbeddedModel(_ServedModel):
    """Computed in the process that serves, by continuous batching of transformers."""

    engine: Literal["embedded"]
    folder: str | None = None
    """Of Hugging Face's layout, with the tokenizer; never a name of a hub. Code in it is never run."""
    run: str | None = None
    """Folder of a language run instead, whose best snapshot is exported before the service starts."""
    device: str = "cpu"
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
    embeddings: bool = True
    """Whether `/v1/embeddings` answers, by the mean of the last hidden states."""

    @model_validator(mode="after")
    def _there_is_one_model(self) -> Self:
        if (self.folder is None) == (self.run is None):
            raise ValueError(f"{self.name}: give a folder or a run, and not both")
        if self.prefill_tokens < self.concurrency:
            raise ValueError(
                f"{self.name}: prefill_tokens is {self.prefill_tokens} and concurrency {self.concurrency}; each "
                "answer needs one of these tokens at every step"
            )
        return self

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, value: str) -> str:
        return device_named(value).kind

    def resolved(self, beside: Path) -> Self:
        return self.model_copy(
            update={
                name: None if (value := getattr(self, name)) is None else str((beside / value).resolve())
                for name in ("folder", "run", "semantic_ids")
            }
        )


class RemoteModel(_ServedModel):
    """Any service that speaks OpenAI's API; what it says passes through as it comes."""

    engine: Literal["remote"]
    url: str
    """Up to and with `/v1`."""
    model: str | None = None
    """What the model is called there; None: the same."""
    token_file: str | None = None
    """File with the token that is sent there; a caller's own is not."""
    connect_timeout_s: float = Field(5.0, gt=0)

    @field_validator("url")
    @classmethod
    def _url_is_one(cls, value: str) -> str:
        if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", value):
            raise ValueError(f"url: expected http://HOST:PORT/v1 or https, got {value!r}")
        return value.rstrip("/")

    def resolved(self, beside: Path) -> Self:
        token = None if self.token_file is None else str((beside / self.token_file).resolve())
        return self.model_copy(update={"token_file": token})


class RayLlmModel(_ServedModel):
    """vLLM behind `ray.serve.llm`, in an environment of its own, started on a cluster that has it."""

    engine: Literal["ray_llm"]
    folder: str
    py_executable: str
    """Python of the environment that has vLLM, as nodes of the cluster find it."""
    accelerator: Literal["cpu", "gpu", "npu"] = "gpu"
    """With npu, a deployment with Ray's resource NPU runs `vllm serve` and passes bytes through, since
    `ray.serve.llm` knows no NPUs."""
    accelerator_type: str | None = None
    """Such as H100, where a cluster has several."""
    num_devices: int = Field(1, ge=1)
    """Of each replica, by tensor parallelism."""
    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    context_length: int = Field(8192, gt=1)
    concurrency: int = Field(64, ge=1)
    """Answers that each replica computes together."""
    prefix_routing: bool = False
    """Whether requests with equal beginnings go to the same replica."""
    prefill_replicas: int = Field(0, ge=0)
    """Replicas that read prompts alone, and hand keys and values over to those that write; 0: all do both."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More settings of vLLM."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"{self.name}: min_replicas is more than max_replicas")
        if self.accelerator == "npu" and (self.prefill_replicas or self.prefix_routing):
            raise ValueError(
                f"{self.name}: prefill_replicas and prefix_routing are of ray.serve.llm, which knows no NPUs"
            )
        own = {"max_model_len", "max_num_seqs", "tensor_parallel_size", "enable_prefix_caching"}
        if taken := sorted(own & set(self.engine_kwargs)):
            raise ValueError(f"{self.name}: engine_kwargs: {taken[0]!r} follows from other settings; leave it out")
        return self

    def resolved(self, beside: Path) -> Self:
        return self.model_copy(update={"folder": str((beside / self.folder).resolve())})


ServedModel = Annotated[EmbeddedModel | RemoteModel | RayLlmModel, Field(discriminator="engine")]


class ModelsConfig(Config):
    """`models.yaml`."""

    models: tuple[ServedModel, ...] = Field(min_length=1)
    memory_gib: float | None = Field(None, gt=0)
    """Memory that models on the CPU may take together; None: that of the machine or container."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [model.name for model in self.models]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"models: the name {twice[0]!r} stands twice; callers ask by it")
        return self

    @classmethod
    def read(cls, path: str | Path) -> ModelsConfig:
        """Read a file; paths in it are beside it.

        Raises:
            InputError: it cannot be read, or settings do not fit.
        """
        config = cls.load(path)
        beside = Path(path).resolve().parent
        return config.model_copy(update={"models": tuple(model.resolved(beside) for model in config.models)})

    @property
    def embedded(self) -> list[EmbeddedModel]:
        return [model for model in self.models if isinstance(model, EmbeddedModel)]
