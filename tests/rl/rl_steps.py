"""Single steps of reinforcement learning in this process."""

from pathlib import Path

from rayrec.actors.in_process import InProcessCalls, InProcessHost
from rayrec.rl.config import RlConfig
from rayrec.rl.controller import SingleController
from rayrec.rl.policy import Policy
from rayrec.rl.prompts import PromptStream
from rayrec.rl.training import PolicyTraining


def config_of(run: Path, **changes) -> RlConfig:
    """As `configs/beauty-rl.yaml`, in small."""
    values = {
        "init_from": str(run),
        "snapshot": "last",
        "steps": 2,
        "algorithm": {"name": "sa_gcpo"},
        "prompts": {"split": "valid", "users_per_step": 16, "held_out_share": 0.2},
        "rollout": {"group_size": 4, "chunk_users": 5},
        "rewards": {"parts": [{"kind": "hit"}, {"kind": "rank_position"}]},
        "learner": {"learning_rate": 0.01, "warmup_steps": 0, "updates_per_batch": 2},
    }
    return RlConfig.parse(values | changes)


def training_of(config: RlConfig) -> PolicyTraining:
    policy = Policy.load(config)
    controller = SingleController(config, policy.task.config.device, InProcessHost("run"), InProcessCalls())
    return PolicyTraining(config, controller, PromptStream(policy.task.dataset, config.prompts, config.seed))
