"""What an embedded model will take of memory, before any of it is taken.

    weights            parameters x bytes of the data type
    keys and values    bytes of a token x (context x concurrency + shared prefixes + what is read at once)
    work               the largest tensors of one step: attention over all that is kept, logits
    process            what the interpreter and the libraries take already

Bytes of a token are 2 x layers x key heads x width of a head x bytes of the data type.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrec.platform.devices import device_memory_bytes, device_named
from rayrec.platform.errors import InputError
from rayrec.platform.memory import human_size, machine_bytes
from rayrec.serve.language.config import EmbeddedModel, ModelsConfig

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PagePlan:
    """How the memory for keys and values is divided."""

    num_pages: int
    margin: float
    """Share of them below which pages of finished requests are given up."""


def page_plan(model: EmbeddedModel) -> PagePlan:
    """Pages for whole contexts of all answers, for prefixes, and for one more step of reading."""
    pages = -(-(model.context_length + 1) // model.page_tokens) * model.concurrency
    pages += -(-model.prefix_cache_tokens // model.page_tokens)
    # As many are free at any time as one step can take.
    free = -(-model.prefill_tokens // model.page_tokens) + model.concurrency + 1
    return PagePlan(pages + free, free / (pages + free))


@dataclass(frozen=True)
class ModelPlan:
    """Of one model, in bytes."""

    name: str
    device: str
    weights: int
    token: int
    """Keys and values of one token."""
    pages: int
    """Of all pages."""
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.pages + self.work

    def rows(self) -> list[tuple[str, str]]:
        """For a table."""
        return [
            ("weights", human_size(self.weights)),
            ("keys and values", f"{human_size(self.pages)}, {human_size(self.token)} a token"),
            ("work of a step", human_size(self.work)),
            ("together", human_size(self.total)),
        ]


@dataclass(frozen=True)
class MemoryPlan:
    """Of all embedded models."""

    models: tuple[ModelPlan, ...]
    process: int
    limit: int
    """Of those on the CPU."""
    shares_devices: bool = True
    """Whether models of one kind of device are on the same one, as in one process; of Ray, each replica
    claims its own."""

    @property
    def total(self) -> int:
        """Of this machine's memory."""
        return self.process + sum(model.total for model in self.models if _is_on_host(model))

    def check(self) -> None:
        """Check that it fits.

        Raises:
            InputError: it does not; says what to lower.
        """
        on_host = [model for model in self.models if _is_on_host(model)]
        if on_host and self.total > self.limit:
            largest = max(on_host, key=lambda one: one.total)
            raise InputError(
                f"the models on the CPU, with Python and libraries, need {human_size(self.total)}, and "
                f"{human_size(self.limit)} may be used (memory_gib, or what the machine has): {largest.name} "
                f"takes {human_size(largest.weights)} of weights and {human_size(largest.pages)} of keys "
                "and values; "
                "lower its context_length or concurrency, or take a smaller model or data type"
            )
        for device, models in self._on_devices():
            there, needed = device_memory_bytes(device), sum(model.total for model in models)
            if there is not None and needed > there:
                names = " and ".join(model.name for model in models)
                verb = "needs" if len(models) == 1 else "need"
                raise InputError(
                    f"{names} {verb} {human_size(needed)} and {device} has {human_size(there)}; lower "
                    "context_length or concurrency"
                )

    def _on_devices(self) -> Iterator[tuple[str, list[ModelPlan]]]:
        """(kind, models) of each device that is not the host."""
        models = [model for model in self.models if not _is_on_host(model)]
        if not self.shares_devices:
            yield from ((model.device, [model]) for model in models)
            return
        for device in dict.fromkeys(model.device for model in models):
            yield device, [model for model in models if model.device == device]


def plan_memory(config: ModelsConfig, by_replica: bool = False) -> MemoryPlan:
    """Plan all embedded models; reads their config.json alone.

    Args:
        by_replica: whether each has processes of its own, as many as it may have replicas.

    Raises:
        InputError: a folder is missing, or is of no causal language model.
    """
    counts = [model.replicas.most if by_replica else 1 for model in config.embedded]
    plans = [plan_model(model) for model in config.embedded]
    limit = machine_bytes() if config.memory_gib is None else int(config.memory_gib * 2**30)
    processes = 1 + (sum(counts) if by_replica else 0)
    repeated = tuple(plan for plan, count in zip(plans, counts, strict=True) for _ in range(count))
    return MemoryPlan(repeated, resident_bytes() * processes, limit, shares_devices=not by_replica)


def plan_model(model: EmbeddedModel) -> ModelPlan:
    """Plan one model.

    Raises:
        InputError: as `plan_memory`.
    """
    source = folder_of(model)
    shape = _text_config(source, model)
    known = getattr(shape, "max_position_embeddings", None)
    if known is not None and known < model.context_length:
        raise InputError(
            f"{model.name}: context_length is {model.context_length} and the network knows {known} "
            f"positions; set it to {known} at most"
        )
    size = _BYTES[model.dtype]
    weights = _num_parameters(source, model) * size
    heads = shape.num_attention_heads
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    key_heads = getattr(shape, "num_key_value_heads", None) or heads
    token = 2 * shape.num_hidden_layers * key_heads * head_dim * size
    pages = (
        page_plan(model).num_pages + 2
    ) * model.page_tokens  # two are never used, by design of the package
    read, kept = model.prefill_tokens, pages + model.prefill_tokens
    # Keys and values of a layer, put together of their pages and then once for each query head; the mask,
    # twice.
    attention = kept * head_dim * (2 * key_heads + 2 * heads) * size + 2 * read * kept * size
    attention += read * heads * head_dim * 4 * size
    hidden = read * (3 * (getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size)) * size
    logits = model.concurrency * shape.vocab_size * (size + 4 + 4)
    work = attention + hidden + logits
    if model.embeddings:  # of one text at a time, beside the engine
        read = model.context_length
        work += read * (3 * (getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size)) * size
        work += read * head_dim * (2 * key_heads + 2 * heads) * size + read * read * size
    return ModelPlan(model.name, model.device, weights, token, pages * token, work)


def folder_of(model: EmbeddedModel) -> Path:
    """Where its config.json is or will be.

    Raises:
        InputError: it is not there.
    """
    folder = Path(model.folder or model.run or "")
    if model.folder is not None and not (folder / "config.json").is_file():
        raise InputError(
            f"{model.name}: {folder} is no folder with a config.json of transformers; nothing is downloaded "
            "from a hub: save the model there first, or name a run (run: ...); rayrec export RUN FOLDER "
            "makes such a folder, too"
        )
    if model.run is not None and not (folder / "config.yaml").is_file():
        raise InputError(f"{model.name}: {folder} is no folder of a run")
    return folder


def resident_bytes() -> int:
    """Memory that this process has now, with the libraries that an embedded model needs."""
    if importlib.util.find_spec("transformers") is not None:
        importlib.import_module("transformers.generation.continuous_batching")
        importlib.import_module("transformers.models.auto.modeling_auto")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _text_config(folder: Path, model: EmbeddedModel) -> Any:
    transformers = _package()
    if model.run is not None:
        raise InputError(f"{model.name}: a run is exported to a folder before it is planned")
    try:
        values = json.loads((folder / "config.json").read_text())
        if "auto_map" in values and values.get("model_type") is None:
            raise ValueError("it needs code of its own, which is never run")
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        ).get_text_config()
    except Exception as error:
        raise InputError(f"{model.name}: {folder}: {_said(error)}") from error


def _num_parameters(folder: Path, model: EmbeddedModel) -> int:
    import torch

    transformers = _package()
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        with torch.device("meta"):
            network = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise InputError(f"{model.name}: {folder} is no causal language model: {_said(error)}") from error
    # `parameters` names matrices that layers share once.
    network.tie_weights()
    return sum(parameter.numel() for parameter in network.parameters())


def _package() -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise InputError(
            "the engine 'embedded' needs the package transformers, which cannot be imported; install the "
            "extra with: "
            "pip install 'rayrec[language]'"
        )
    return importlib.import_module("transformers")


def _is_on_host(model: ModelPlan) -> bool:
    return not device_named(model.device).has_own_memory


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
