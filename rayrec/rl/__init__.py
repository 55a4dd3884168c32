"""Reinforcement learning of generative recommenders: rewards, policy losses, and the loop over workers.

    from rayrec.rl import RlConfig, train_policy
    train_policy(RlConfig.load("configs/beauty-rl.yaml"), "runs/beauty-rl")

Names are imported when they are first used. Ray appears in `run` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrec.platform.lazy_names import lazy_names

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

# Lazy also so that a plug-in may import names from here while the table that imports it is being imported.
__all__, __getattr__ = lazy_names(__name__, __file__)
