"""What the seeds of one method have in common: the settings that results depend on, without the seed."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

import xxhash

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.runs.run_folder import FREE_TO_CHANGE, RL_CONFIG, RunFolder
from rayrec.platform.config import read_values

_APART = ("seed", "device", *FREE_TO_CHANGE)
"""Settings in which runs of one method may differ; sections end in a dot."""
_APART_BY_REWARDS = (
    *("seed", "device", "init_from", "snapshot", "placement.", "alarms."),
    *("learner.micro_batches", "evaluation.every_steps"),
)
"""Likewise of those that a run of reinforcement learning has besides: each seed may begin with a run of
its own."""


BY_REWARDS = "by_rewards"
"""In the state of a run's folder that has no such settings of its own."""
_SEED_BITS = 32


class Method(NamedTuple):
    """Of a run."""

    settings: str
    """Hash of those that all seeds have in common."""
    seed: int

    @classmethod
    def of_run(cls, folder: RunFolder) -> Method:
        """Of the run that a folder holds, with what it was trained by rewards with, if it was."""
        method, by_rewards = cls.of(folder.config), rewards_of(folder)
        if by_rewards is None:
            return method
        # Runs from one start differ in the one seed, and those from several in the other.
        seed = (int(by_rewards["seed"]) << _SEED_BITS) + method.seed
        values = [method.settings, _kept(by_rewards, _APART_BY_REWARDS)]
        return cls(_hashed(values), seed)

    @classmethod
    def of(cls, config: RunConfig) -> Method:
        values = _kept(config.model_dump(mode="json"), _APART)
        # Each seed may begin with weights of its own.
        values["training"]["init_from"] = config.training.init_from is not None
        return cls(_hashed(values), config.seed)


def rewards_of(folder: RunFolder) -> dict[str, Any] | None:
    """What a run was trained by rewards with; of one that was quantized, what its source was trained with."""
    path = folder.path / RL_CONFIG
    if path.is_file():
        return read_values(path)
    found: dict[str, Any] | None = folder.state.get(BY_REWARDS)
    return found


def seed_in_words(seed: int) -> str:
    """Of a `Method`."""
    by_rewards, supervised = divmod(seed, 1 << _SEED_BITS)
    return f"the seed {seed}" if not by_rewards else f"the seeds {by_rewards} (rewards) and {supervised}"


def _hashed(values: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())


def _kept(values: dict[str, Any], apart: Collection[str], prefix: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in apart or f"{name}." in apart:
            continue
        kept[key] = _kept(value, apart, f"{name}.") if isinstance(value, dict) else value
    return kept
