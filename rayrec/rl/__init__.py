"""Reinforcement learning of generative recommenders: rewards, policy losses, and the loop over workers.

    from rayrec.rl import RlConfig, train_policy
    train_policy(RlConfig.load("configs/beauty-rl.yaml"), "runs/beauty-rl")

Names are imported when they are first used. Ray appears in `rayrec.actors.rl_worker` and `run` alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "RlConfig": "rayrec.rl.config",
    "RlResult": "rayrec.rl.run",
    "StepReport": "rayrec.rl.training",
    "train_policy": "rayrec.rl.run",
    "CandidateLists": "rayrec.rl.rewards.base",
    "Reward": "rayrec.rl.rewards.base",
    "RewardContext": "rayrec.rl.rewards.base",
    "RewardError": "rayrec.rl.rewards.base",
    "RewardSettings": "rayrec.rl.rewards.base",
    "RewardsConfig": "rayrec.rl.rewards.config",
    "build_rewards": "rayrec.rl.rewards.config",
    "LossInputs": "rayrec.rl.losses.base",
    "Objective": "rayrec.rl.losses.base",
    "PolicyLoss": "rayrec.rl.losses.base",
    "centered": "rayrec.rl.losses.terms",
    "clipped": "rayrec.rl.losses.terms",
    "is_clipped": "rayrec.rl.losses.terms",
    "leave_one_out": "rayrec.rl.losses.terms",
    "sequence_ratio": "rayrec.rl.losses.terms",
    "standardized": "rayrec.rl.losses.terms",
    "sum_over_codes": "rayrec.rl.losses.terms",
}
"""Public name -> module that defines it."""

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from rayrec.rl.config import RlConfig as RlConfig
    from rayrec.rl.losses.base import LossInputs as LossInputs
    from rayrec.rl.losses.base import Objective as Objective
    from rayrec.rl.losses.base import PolicyLoss as PolicyLoss
    from rayrec.rl.losses.terms import centered as centered
    from rayrec.rl.losses.terms import clipped as clipped
    from rayrec.rl.losses.terms import is_clipped as is_clipped
    from rayrec.rl.losses.terms import leave_one_out as leave_one_out
    from rayrec.rl.losses.terms import sequence_ratio as sequence_ratio
    from rayrec.rl.losses.terms import standardized as standardized
    from rayrec.rl.losses.terms import sum_over_codes as sum_over_codes
    from rayrec.rl.rewards.base import CandidateLists as CandidateLists
    from rayrec.rl.rewards.base import Reward as Reward
    from rayrec.rl.rewards.base import RewardContext as RewardContext
    from rayrec.rl.rewards.base import RewardError as RewardError
    from rayrec.rl.rewards.base import RewardSettings as RewardSettings
    from rayrec.rl.rewards.config import RewardsConfig as RewardsConfig
    from rayrec.rl.rewards.config import build_rewards as build_rewards
    from rayrec.rl.run import RlResult as RlResult
    from rayrec.rl.run import train_policy as train_policy
    from rayrec.rl.training import StepReport as StepReport


def __getattr__(name: str) -> Any:
    # Also lets a plug-in import names from here while the table that imports the plug-in is being imported.
    if name not in _HOMES:
        raise AttributeError(f"module 'rayrec.rl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
