"""Settings of the algorithms, by their names in a config."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rayrec.platform.config import Config
from rayrec.rl.objectives import CodeMean

_Clip = Annotated[float, Field(gt=0, lt=1)]


class ReinforceSettings(Config):
    name: Literal["reinforce"]
    max_ratio: Annotated[float, Field(ge=1)] = 2.0
    """Most weight of a draw of an older policy."""


class GrpoSettings(Config):
    name: Literal["grpo"]
    clip_low: _Clip = 0.2
    clip_high: _Clip = 0.2
    scale: bool = True
    """Divide advantages by the group's standard deviation; without, it is Dr. GRPO."""
    mean: CodeMean = "candidate"


class GspoSettings(Config):
    name: Literal["gspo"]
    # Those of the paper, 3e-4 and 4e-4, are for thousands of tokens, whose mean moves little; IDs have three.
    clip_low: _Clip = 0.1
    clip_high: _Clip = 0.1


class SapoSettings(Config):
    name: Literal["sapo", "sa_gcpo"]
    tau_positive: Annotated[float, Field(gt=0)] = 1.0
    tau_negative: Annotated[float, Field(gt=0)] = 1.05


class EcpoSettings(Config):
    name: Literal["ecpo"]
    clip: _Clip = 0.2
    delta: Annotated[float, Field(ge=0)] = 0.1


class GbpoSettings(Config):
    name: Literal["gbpo"]


class PreferenceSettings(Config):
    name: Literal["dpo", "s_dpo"]
    beta: Annotated[float, Field(gt=0)] = 0.1


AlgorithmSettings = Annotated[
    ReinforceSettings
    | GrpoSettings
    | GspoSettings
    | SapoSettings
    | EcpoSettings
    | GbpoSettings
    | PreferenceSettings,
    Field(discriminator="name"),
]
