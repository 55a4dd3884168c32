"""What the seeds of one method have in common: the settings that results depend on, without the seed."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import xxhash

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import FREE_TO_CHANGE

_APART = ("seed", "device", *FREE_TO_CHANGE)
"""Settings in which runs of one method may differ; sections end in a dot."""


class Method(NamedTuple):
    """Of a run."""

    settings: str
    """Hash of those that all seeds have in common."""
    seed: int

    @classmethod
    def of(cls, config: RunConfig) -> Method:
        values = _kept(config.model_dump(mode="json"), "")
        # Each seed may begin with weights of its own.
        values["training"]["init_from"] = config.training.init_from is not None
        return cls(xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode()), config.seed)


def _kept(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in _APART or f"{name}." in _APART:
            continue
        kept[key] = _kept(value, f"{name}.") if isinstance(value, dict) else value
    return kept
