"""Programs of the builders in `tests.models.keras.networks`; tests that use them need TensorFlow."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest

from rayrec.models.base.dense_optimizer import DenseOptimizerSettings
from rayrec.models.keras.config import KerasModelConfig
from rayrec.models.keras.program import KerasProgram, KerasProgramSpec
from rayrec.models.program.program import SumOverTrainers
from rayrec.platform.impression_schema import ImpressionSchema
from tests.models.keras.impressions import DIM, PLACEMENT, SCHEMA, SETTINGS, batch, table_rows

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'rayrec[tensorflow]'",
)


def config(builder: str, **arguments: Any) -> KerasModelConfig:
    """
    Args:
        builder: a function of `tests.models.keras.networks`.
    """
    return KerasModelConfig(
        name="keras", builder=f"tests.models.keras.networks:{builder}", arguments=arguments, dim=DIM
    )


def program(
    builder: str = "mlp",
    schema: ImpressionSchema = SCHEMA,
    settings: DenseOptimizerSettings = SETTINGS,
    sum_over_trainers: SumOverTrainers | None = None,
    **arguments: Any,
) -> KerasProgram:
    placement = dataclasses.replace(PLACEMENT, sum_over_trainers=sum_over_trainers)
    return KerasProgramSpec(config(builder, **arguments), schema, settings).build(placement)


def train(trained: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        features = batch(step=step)
        losses.append(trained.backward(features, table_rows(features)).loss_sum)
        trained.update()
    return losses


def as_bytes(state: dict[str, Any]) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in state.items()}
