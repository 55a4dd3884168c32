"""What a run of reinforcement learning is made of; `rayrec rl CONFIG` reads it from YAML."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rayrec.platform.config import Config
from rayrec.platform.remote_files import absolute
from rayrec.rl.rewards.config import RewardsConfig
from rayrec.rl.settings import AlgorithmSettings, GspoSettings

_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0, lt=1)]
_Count = Annotated[int, Field(ge=1)]


class PromptsConfig(Config):
    """Whom rollouts are for."""

    split: Literal["train", "valid"] = "train"
    """`valid`: what supervised training did not learn from, so that rewards are not those of a policy that
    knows the answers by heart. The best snapshot is then chosen on other users, those that are held out."""
    event: Literal["last", "any"] = "any"
    """Of training rows: which event is the logged target."""
    users_per_step: _Count = 256
    """Rows that are read for a batch; fewer are asked for, where some of their users are held out."""
    held_out_share: _Share = 0.2
    """Of all users, by a hash of their ids: never asked for."""

    @model_validator(mode="after")
    def _something_is_left_to_judge_by(self) -> PromptsConfig:
        if self.split == "valid" and self.held_out_share == 0:
            raise ValueError(
                "rl.prompts.held_out_share must be above 0 with split: valid: the users that validate are "
                "learned from, so nobody would be left to choose the best snapshot by"
            )
        return self


class RolloutConfig(Config):
    """How candidates are drawn."""

    group_size: Annotated[int, Field(ge=2)] = 16
    """Candidates of a user: their rewards are compared with each other."""
    draw: Literal["sample", "stochastic_beam", "beam"] = "sample"
    """`sample` draws each for itself; `stochastic_beam` draws distinct ones, which the loss weighs by how
    likely they were to be among so many (Kool et al., 2019); `beam` takes the likeliest, which is biased: no
    probability of having been drawn belongs to them."""
    temperature: _Positive = 1.0
    """Of rollouts and of the ratios that the learner computes: one policy."""
    exclude_seen: bool = True
    """Items of the history have no probability."""
    chunk_users: _Count = 64
    """Users whose candidates are drawn at once. Noise belongs to a chunk, so who draws does not matter."""


class LearnerConfig(Config):
    """How the policy follows."""

    learning_rate: _Positive = 1e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: _Positive | None = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Of the optimizer."""
    updates_per_batch: _Count = 1
    """Optimizer steps that are taken for a batch, each by an equal share of its users. With one, and rollouts
    of the learner's own weights, every ratio is 1, and what an algorithm clips or softens never happens."""
    micro_batches: _Count = 1
    """Parts of an update that are computed one after the other; their gradients are added."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.0
    """Of the KL divergence to the supervised policy."""
    anchor_weight: Annotated[float, Field(ge=0)] = 0.0
    """Of the negative log-probability of the logged target, at temperature 1."""
    reward_weight: Annotated[float, Field(ge=0)] = 1.0
    """Of the algorithm's objective; 0 leaves the other two, which is what rewards have to beat."""

    @model_validator(mode="after")
    def _something_is_learned(self) -> LearnerConfig:
        if not (self.reward_weight or self.kl_weight or self.anchor_weight):
            raise ValueError(
                "learner.reward_weight, kl_weight and anchor_weight are all 0: nothing would be learned"
            )
        return self


class AlarmConfig(Config):
    """When a policy has collapsed: the run stops, and what was good is kept."""

    max_kl: _Positive = 3.0
    """Nats of a whole candidate, to the supervised policy."""
    min_entropy_share: _Share = 0.2
    """Of the entropy at the beginning."""


class PlacementConfig(Config):
    """Which processes do what."""

    kind: Literal["colocated", "disaggregated", "async"] = "colocated"
    learners: _Count = 1
    """Data-parallel; with `colocated`, these processes draw, too."""
    rollouts: _Count = 1
    max_policy_lag: Literal[0, 1] = 0
    """`disaggregated`: steps that the policy which draws may trail the learner."""
    max_staleness: Annotated[int, Field(ge=1)] = 4
    """`async`: optimizer steps that a batch may be old at the last of its updates. Batches are begun as early
    as they may be, so this is how old they are: take no more than keeps everybody busy."""
    sync_every: _Count = 1
    """`async`: steps after which rollouts get new weights."""
    threads: _Count = 1
    """Of each process that computes."""
    cpus: _Positive = 1.0
    """That each process takes of Ray's."""

    @property
    def syncs_every(self) -> int:
        return self.sync_every if self.kind == "async" else 1


class RlEvaluationConfig(Config):
    """How a policy is judged."""

    every_steps: _Count = 50
    metric: Literal["reward", "recall@1", "recall@10", "recall@50", "ndcg@10", "ndcg@50"] = "ndcg@10"
    """By which the best snapshot is chosen: on the users that validate, of which only those held out where
    prompts are of these. `reward` is that of lists drawn at `rollout.temperature`, and no other."""
    max_users: _Count | None = None
    """That validate while it is trained."""
    list_size: _Count = 10
    """Distinct items of the lists that are drawn and rewarded."""
    temperatures: tuple[_Positive, ...] = (0.25, 0.5, 0.7, 0.85, 1.0, 1.2)
    """For lists of either policy: what has to be beaten is the supervised one at the best of them. Codes are
    sharpened one by one, so lists at a low temperature are not those of the likeliest items."""
    batch_size: _Count = 512


class RlConfig(Config):
    """One run."""

    seed: int = 0
    init_from: str
    """Run of the supervised policy; it is also the reference."""
    snapshot: str = "best"
    device: str | None = None
    """None: that of the supervised run."""
    steps: _Count = 200
    """Batches that are drawn, rewarded and learned from."""
    algorithm: AlgorithmSettings = Field(default_factory=lambda: GspoSettings(name="gspo"))
    prompts: PromptsConfig = PromptsConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig
    learner: LearnerConfig = LearnerConfig()
    alarms: AlarmConfig = AlarmConfig()
    placement: PlacementConfig = PlacementConfig()
    evaluation: RlEvaluationConfig = RlEvaluationConfig()

    @model_validator(mode="after")
    def _stale_weights_are_renewed_in_time(self) -> RlConfig:
        placement, updates = self.placement, self.learner.updates_per_batch
        if placement.kind == "async" and placement.sync_every * updates > placement.max_staleness:
            raise ValueError(
                f"rl.placement.max_staleness is {placement.max_staleness}, and weights are sent every "
                f"{placement.sync_every * updates} optimizer steps (placement.sync_every x "
                "learner.updates_per_batch): rollouts would wait for weights that come later than they may "
                "be used; raise max_staleness, or lower the others"
            )
        return self

    @property
    def max_staleness(self) -> int:
        """Optimizer steps that a batch may be old at the last of its updates."""
        placement, updates = self.placement, self.learner.updates_per_batch
        if placement.kind == "async":
            return placement.max_staleness
        lag = placement.max_policy_lag if placement.kind == "disaggregated" else 0
        return (lag + 1) * updates - 1

    def with_absolute_paths(self) -> RlConfig:
        """The same run, to be understood from any working directory."""
        parts = tuple(part.with_absolute_paths() for part in self.rewards.parts)
        rewards = self.rewards.model_copy(update={"parts": parts})
        return self.model_copy(update={"init_from": absolute(self.init_from), "rewards": rewards})
