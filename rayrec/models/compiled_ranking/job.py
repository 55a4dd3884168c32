"""What a program is compiled from, as files for another process, and the key of what comes of it."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rayrec
from rayrec.models.compiled_ranking.buckets import Bucket
from rayrec.models.compiled_ranking.inputs import Signature
from rayrec.models.registry import MODELS
from rayrec.models.sequence.catalog import Catalog
from rayrec.models.sequence.config import SequenceModelConfig
from rayrec.platform.devices import HOST, device_of, hardware_name
from rayrec.platform.item_bags import ItemBags

JOB_FILE, CATALOG_FILE = "job.json", "catalog.npz"
_ARRAYS = ("codes_IL", "known_I", "negative_log_q_I")
_CONTENT = "content."
"""Before the names of the arrays of `Catalog.content`."""


@dataclass(frozen=True, eq=False)
class RankingModel:
    """All of a model but its weights."""

    settings: Mapping[str, Any]
    """The `model` section of a run's config, as JSON has it."""
    catalog: Catalog

    @cached_property
    def config(self) -> SequenceModelConfig:
        """The settings; which backend computes attention follows from the padded shapes."""
        config = MODELS[self.settings["name"]].model_validate(dict(self.settings)).for_inference()
        assert isinstance(config, SequenceModelConfig), "other models rank what is shown to them"
        return config

    @property
    def max_length(self) -> int:
        """Events of a history that it reads."""
        return self.config.history_length

    @property
    def instruction_parts(self) -> tuple[str, ...]:
        return self.config.instruction_parts

    @cached_property
    def fingerprint(self) -> str:
        """Equal for versions of a model that one program can rank for."""
        described = {
            "settings": self.config.model_dump(mode="json"),
            "num_items": self.catalog.num_items,
            "level_sizes": list(self.catalog.level_sizes),
            "labels": {str(label): list(names) for label, names in self.catalog.labels.items()},
        }
        digest = hashlib.sha256(_canonical(described))
        for name, array in _arrays_of(self.catalog).items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Job:
    """One program to be compiled."""

    model: RankingModel
    signature: Signature
    bucket: Bucket
    device: str = HOST.kind
    threads: int = 1
    """Of the process that will run it: generated loops are divided among as many."""

    @cached_property
    def key(self) -> str:
        """Name of what is compiled: other for everything that could make it another program."""
        depends = {
            "model": self.model.fingerprint,
            "signature": self.signature.to_json(),
            "bucket": asdict(self.bucket),
            "threads": self.threads,
            "environment": environment(self.device),
        }
        return hashlib.sha256(_canonical(depends)).hexdigest()[:32]

    def save(self, folder: Path) -> None:
        catalog = self.model.catalog
        arrays: dict[str, Any] = _arrays_of(catalog)
        np.savez(folder / CATALOG_FILE, **arrays)
        values = {
            "settings": self.model.config.model_dump(mode="json"),
            "num_items": catalog.num_items,
            "level_sizes": list(catalog.level_sizes),
            "labels": {str(label): list(names) for label, names in catalog.labels.items()},
            "signature": self.signature.to_json(),
            "bucket": asdict(self.bucket),
            "device": self.device,
            "threads": self.threads,
        }
        (folder / JOB_FILE).write_text(json.dumps(values))

    @classmethod
    def load(cls, folder: Path) -> Job:
        values = json.loads((folder / JOB_FILE).read_text())
        with np.load(folder / CATALOG_FILE) as arrays:
            of_content = [name for name in arrays.files if name.startswith(_CONTENT)]
            content = {name.removeprefix(_CONTENT): arrays[name] for name in of_content}
            catalog = Catalog(
                values["num_items"],
                level_sizes=tuple(values["level_sizes"]),
                labels={label: tuple(names) for label, names in values["labels"].items()},
                content=ItemBags(**content) if content else None,
                **{name: arrays[name] for name in _ARRAYS if name in arrays.files},
            )
        return cls(
            RankingModel(values["settings"], catalog),
            Signature.from_json(values["signature"]),
            Bucket(**values["bucket"]),
            values["device"],
            values["threads"],
        )


def _arrays_of(catalog: Catalog) -> dict[str, np.ndarray]:
    arrays = {name: getattr(catalog, name) for name in _ARRAYS if getattr(catalog, name) is not None}
    if catalog.content is not None:
        arrays |= {_CONTENT + name: array for name, array in vars(catalog.content).items()}
    return arrays


@cache
def environment(device: str) -> dict[str, str]:
    """What compiled code depends on besides the model: sources, torch, processor."""
    named = torch.device(device)
    processor = f"{platform.machine()} {_processor_features()}"
    described = {
        "torch": torch.__version__,
        "sources": _sources(),
        # Generated code is for this very processor, and would be an illegal instruction to a lesser one.
        "processor": hashlib.sha256(processor.encode()).hexdigest()[:16],
        "device": named.type,
    }
    if device_of(named).has_own_memory:
        described["hardware"] = hardware_name(named)
    else:
        described["capability"] = torch.backends.cpu.get_cpu_capability()
    return described


def _processor_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    of_features = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return " ".join(sorted(of_features[0].split(":", 1)[1].split())) if of_features else platform.processor()


def _sources() -> str:
    """Of everything that a program may be traced from."""
    digest, package = hashlib.sha256(), Path(rayrec.__file__).parent
    for path in sorted([*package.glob("models/**/*.py"), *package.glob("platform/*.py")]):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _canonical(values: Any) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
