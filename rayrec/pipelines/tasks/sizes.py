"""Sizes of a model and of batches that are chosen by the data, where the config asks for it and gives none.

The rules give the sizes of the recipes that were measured on MovieLens 100K, Deskdrop and Amazon Beauty.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from rayrec.pipelines.config.run import RunConfig
from rayrec.samples.dataset.manifest import Manifest

logger = logging.getLogger(__name__)

STEPS_PER_EPOCH = 30
"""A step needs gradients of some rows, an epoch needs steps: as many as come nearest with a power of two of
rows, of which there are 16 at least and 256 at most."""
_LENGTHS = (50, 100, 200)
_WIDTHS = ((5_000, 64), (1_000_000, 128))
"""Up to so many items, the width."""
_WIDEST = 256


def with_sizes(config: RunConfig) -> RunConfig:
    """The config with the sizes that it lets the data choose (`fit_to_data`); what it gives stays.

    Raises:
        InputError: there is no data set.
    """
    if not config.fit_to_data:
        return config
    counts = Manifest.read(Path(config.data.path)).counts
    rows, items, events = (max(counts[name], 1) for name in ("train_rows", "items", "train_events"))
    batch = min(2 ** max(round(math.log2(rows / STEPS_PER_EPOCH)), 4), 256)
    mean = events / rows
    length = next((length for length in _LENGTHS if length >= 0.9 * mean), _LENGTHS[-1])
    width = next((width for most, width in _WIDTHS if items <= most), _WIDEST)
    of_model: dict[str, tuple[Any, str]] = {
        "max_length": (length, f"for {mean:.1f} training events a user"),
        "dim": (width, f"for {items:,} items"),
        "feedforward_dim": (max(2 * width, 256), f"for dim {width}"),
    }
    why = f"for {math.ceil(rows / batch):,} steps an epoch with {rows:,} users"
    of_training: dict[str, tuple[Any, str]] = {"batch_size": (batch, why)}
    backbone, said = _filled(getattr(config.model, "backbone"), of_model)  # noqa: B009 - checked by the config
    training, of_batches = _filled(config.training, of_training)
    chosen = [*said, *of_batches]
    logger.info("sizes by the data: %s", ", ".join(chosen) if chosen else "all are given")
    model = config.model.model_copy(update={"backbone": backbone})
    return config.model_copy(update={"model": model, "training": training})


def _filled(settings: Any, values: dict[str, tuple[Any, str]]) -> tuple[Any, list[str]]:
    """Settings with values for those that they have and that were not given, and the choices in words."""
    open_ = {
        name: value
        for name, value in values.items()
        if name in type(settings).model_fields and name not in settings.model_fields_set
    }
    filled = settings.model_copy(update={name: value for name, (value, _) in open_.items()})
    return filled, [f"{name} {value} {why}" for name, (value, why) in open_.items()]
