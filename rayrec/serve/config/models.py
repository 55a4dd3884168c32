"""Settings of one model of a service, and of models beside the first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.platform.config import Config
from rayrec.platform.devices import device_named
from rayrec.serve.config.admission import AdmissionConfig
from rayrec.serve.config.compile import CompileConfig
from rayrec.serve.config.events import EventsConfig, RequestLogConfig
from rayrec.serve.config.nearline import NearlineReadConfig
from rayrec.serve.config.neighbors import NeighborsConfig
from rayrec.serve.config.warm_start import WarmStartConfig

MODEL_NAME = "recommend"
"""Of a service's first model, unless it is named."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
OF_THE_SERVICE = (
    *("host", "port", "grpc_port", "tls", "token_sha256", "allowed_hosts", "page", "connections"),
    *("num_replicas", "min_replicas", "max_replicas", "scaling", "single_process", "services", "target"),
    *("models", "cluster"),
)
"""Settings of `ServeConfig` that are not of one of its models."""
_TAKEN = ("stats",)
"""Below `/v2/models`, where names of models are as well."""


class ModelSettings(Config):
    """What one model is, and how it answers."""

    RENAMED: ClassVar[Mapping[str, str]] = {"access": "admission", "keep_contexts_mib": "prefix_cache_mib"}

    name: str = MODEL_NAME
    """By which clients of the Open Inference Protocol and of OpenAI's API ask for it."""
    threads: int = Field(1, ge=1)
    """Threads of each replica's model, and the CPUs Ray reserves for it; more help large models only."""
    max_k: int = Field(1000, ge=1)
    """Most items a request may ask for."""
    max_waiting: int = Field(64, ge=1)
    """Requests a replica holds, those it computes included; it refuses more with status 503. Each counts as
    one, whatever it asks for: what takes longer is refused by its deadline (`timeout_s`)."""
    max_batch: int = Field(32, ge=1)
    """Most requests that a replica computes together; how many pay is measured when it starts."""
    timeout_s: float = Field(10.0, gt=0)
    """A request that a replica could not answer in this time is refused with status 503, not computed."""
    snapshot: str = "best"
    """Of the run: `best`, `last`, `previous`, or the name of one."""
    follow_every_s: float = Field(1.0, gt=0)
    """Published versions are looked for so often."""
    device: str | None = None
    """Device to compute on; None takes that of the run."""
    data: str | None = None
    """Where the run's data set lies now, if it was moved; or a later one, see `TrainedModel.load`."""
    ranking: RankingConfig | None = None
    """A ranking stage after the model."""
    admission: AdmissionConfig = AdmissionConfig()
    """Which requests are admitted, and what degrades under load before any is refused."""
    prefix_cache_mib: float | None = Field(None, ge=0)
    """Prefix-cache size in MiB for returning users (0 = off). Each network keeps what it has read of their
    histories, and requests with the header `X-User-Id` go to the replica that has their prefix."""
    prefix_cache_host_mib: float = Field(0.0, ge=0)
    """What has no room in it is kept in the host's memory, up to so much (0 = not)."""
    prefix_cache_disk_mib: float = Field(0.0, ge=0)
    """Then in files, up to so much, which go with the network (0 = not). Sizes are of each network: a process
    that holds several versions has as many caches."""
    prefix_cache_folder: str | None = None
    """Where those files are; None: the folder of temporary files."""
    compile: CompileConfig | None = None
    """Batches that are ranked by compiled programs; None: all are ranked eagerly."""
    events: EventsConfig | None = None
    """Where events go that are posted; None refuses them."""
    neighbors: NeighborsConfig | None = None
    """Items that others met beside those of a history: candidates of the ranking stage, and answers where the
    model has none."""
    nearline: NearlineReadConfig | None = None
    """What was computed of users before they ask; None: everything is computed for each request."""
    lists: str | None = None
    """Folder of named lists of items that filters of requests refer to, which replicas share; None: a single
    process keeps them until it ends."""
    warm_start: WarmStartConfig | None = None
    """What a replica leaves to the one that takes its place; None: nothing."""
    request_log: RequestLogConfig | None = None
    """Where requests and answers are logged; None: nowhere."""

    @field_validator("name")
    @classmethod
    def _name_is_part_of_a_path(cls, value: str) -> str:
        if not _NAME.fullmatch(value) or value in _TAKEN:
            why = f"{value!r} is a path of the service itself" if value in _TAKEN else f"got {value!r}"
            raise ValueError(
                "name: a model's name is 1 to 64 letters, digits, dots, dashes and underscores, and begins "
                f"with a letter or digit; {why}"
            )
        return value

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, value: str | None) -> str | None:
        return None if value is None else device_named(value).kind  # which refuses other names


class BesideConfig(ModelSettings):
    """A model beside the first one. What is not given of `INHERITED` is as of the first."""

    name: str = Field()
    run: str
    """Folder of a run, or folder or URL of published versions, which are followed."""

    @model_validator(mode="before")
    @classmethod
    def _settings_are_of_a_model(cls, values: Any) -> Any:
        if isinstance(values, dict) and (wrong := [name for name in OF_THE_SERVICE if name in values]):
            of = f" of {values['name']!r}" if "name" in values else ""
            raise ValueError(
                f"models: {wrong[0]}{of} is of the whole service, and not of one of its models; give it to "
                "the service"
            )
        return values


INHERITED = (
    "threads",
    "max_k",
    "max_waiting",
    "max_batch",
    "timeout_s",
    "follow_every_s",
    "device",
    "admission",
)
"""Settings that do not depend on a model's data."""


class ModelsFile(Config):
    """What `rayrec serve --models` reads."""

    name: str = MODEL_NAME
    """Of the run or store that the command names."""
    models: tuple[BesideConfig, ...] = Field(min_length=1)
    """Beside it."""
