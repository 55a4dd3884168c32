"""A program for each kind of ranking model, and for the impressions of `tests.models.keras.impressions`."""

from __future__ import annotations

import dataclasses

import torch

from rayrec.models.base.compute import PLAIN, ComputeSettings
from rayrec.models.ctr.config import (
    DcnV2Config,
    DeepFmConfig,
    DinConfig,
    DlrmConfig,
    ImpressionModelConfig,
    MmoeConfig,
)
from rayrec.models.ctr.program import CtrProgram, CtrProgramSpec
from rayrec.models.program.program import ProgramPlacement, SumOverTrainers
from rayrec.platform.devices import device_named
from tests.models.keras.impressions import CPU, DIM, SCHEMA, SETTINGS

RANKING: dict[str, ImpressionModelConfig] = {
    "dlrm": DlrmConfig(name="dlrm", dim=DIM, bottom_dims=(8,), hidden_dims=(16, 8)),
    "deepfm": DeepFmConfig(name="deepfm", dim=DIM - 1, hidden_dims=(8,)),
    "dcn_v2": DcnV2Config(
        name="dcn_v2", dim=DIM, hidden_dims=(8,), rank=2, structure="parallel", dropout=0.1
    ),
    "din": DinConfig(name="din", dim=DIM, attention={"history": "item"}, hidden_dims=(8,)),
    "din with prelu": DinConfig(
        name="din", dim=DIM, attention={"history": "item"}, hidden_dims=(8,), activation="prelu"
    ),
    "mmoe": MmoeConfig(name="mmoe", dim=DIM, hidden_dims=(8, 4), dropout=0.1),
}


def ranking_program(
    name: str,
    device: torch.device = CPU,
    compute: ComputeSettings = PLAIN,
    sum_over_trainers: SumOverTrainers | None = None,
) -> CtrProgram:
    settings = dataclasses.replace(SETTINGS, fused=device_named(device.type).fused_optimizer)
    placement = ProgramPlacement(device, seed=5, sum_over_trainers=sum_over_trainers, compute=compute)
    return CtrProgramSpec(RANKING[name], SCHEMA, settings).build(placement)
