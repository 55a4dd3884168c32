"""Settings of a run of reinforcement learning; `rayrec rl CONFIG` reads them from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rayrec.platform.config import Config
from rayrec.platform.remote_files import absolute
from rayrec.rl.losses.config import PolicyLossConfig
from rayrec.rl.losses.policy_gradient import GspoLoss
from rayrec.rl.rewards.config import RewardsConfig

_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(ge=0, lt=1)]
_Count = Annotated[int, Field(ge=1)]


class PromptsConfig(Config):
    """Which users candidates are sampled for."""

    split: Literal["train", "valid"] = "train"
    """`valid`: events that supervised training did not learn from, so that the policy cannot have memorized
    the targets. The best snapshot is then chosen on the users that are held out."""
    event: Literal["last", "any"] = "any"
    """Which event of a training row is the logged target."""
    users_per_step: _Count = 256
    """Rows read per batch; the batch has fewer users where some of these are held out."""
    held_out_share: _Share = 0.2
    """Share of all users, by a hash of their ids, that are never trained on."""

    @model_validator(mode="after")
    def _validation_has_users(self) -> PromptsConfig:
        if self.split == "valid" and self.held_out_share == 0:
            raise ValueError(
                "rl.prompts.held_out_share must be above 0 with split: valid: the validation users are "
                "trained on, so no users would be left to choose the best snapshot on"
            )
        return self


class DynamicSamplingConfig(Config):
    """Dynamic sampling: groups whose candidates all have the same reward are left out of the batch, and
    further prompts are sampled in their place. DAPO, arXiv:2503.14476."""

    groups: _Count = 128
    """Groups with different rewards that a batch is to have. Reads of prompts are used whole, so it may have
    more."""
    max_reads: _Count = 8
    """Largest number of reads of `prompts.users_per_step` rows per batch. A batch that lacks groups after
    these is learned from as it is; where no group of it has signal, all are used for the KL and NLL terms."""


class RolloutConfig(Config):
    """How candidates are sampled."""

    RENAMED: ClassVar[Mapping[str, str]] = {"draw": "method"}

    group_size: Annotated[int, Field(ge=2)] = 16
    """Candidates per user; their rewards are compared with each other."""
    method: Literal["sample", "stochastic_beam", "beam"] = "sample"
    """`sample`: independent samples; `stochastic_beam`: samples without replacement, with importance weights
    (Kool et al., 2019); `beam`: the likeliest candidates, which biases the gradient, since they are no
    samples."""
    temperature: _Positive = 1.0
    """Sampling temperature; the learner computes ratios at the same temperature."""
    exclude_seen: bool = True
    """Never sample items of the user's history."""
    chunk_users: _Count = 64
    """Users whose candidates are sampled at once. Noise is keyed by chunk, so results do not depend on which
    worker samples it."""
    dynamic: DynamicSamplingConfig | None = None
    """Refill batches until enough groups have signal (default: learn from whatever was read)."""


class LearnerConfig(Config):
    """How the policy is updated."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "kl_weight": "kl_coefficient",
        "anchor_weight": "nll_coefficient",
    }

    learning_rate: _Positive = 1e-4
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: _Positive | None = 1.0
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Optimizer steps over which the learning rate rises from 0."""
    updates_per_batch: _Count = 1
    """Optimizer steps per batch, each on an equal share of its users. With one, and rollouts of the learner's
    own weights, every ratio is 1, and nothing is ever clipped."""
    micro_batches: _Count = 1
    """Parts of an update that are computed one after another, to save memory; their gradients are added."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence to the supervised policy."""
    nll_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the NLL (SFT) term: the negative log-probability of the logged target, at temperature 1."""
    reward_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the policy loss; 0 leaves the other two terms, as a control for what rewards contribute."""

    @model_validator(mode="after")
    def _something_is_learned(self) -> LearnerConfig:
        if not (self.reward_weight or self.kl_coefficient or self.nll_coefficient):
            raise ValueError(
                "learner.reward_weight, kl_coefficient and nll_coefficient are all 0: nothing would be "
                "learned"
            )
        return self


class AlarmConfig(Config):
    """When a policy counts as collapsed: the run stops, and the best snapshot is kept."""

    max_kl: _Positive = 3.0
    """Largest KL divergence to the supervised policy, in nats per candidate."""
    min_entropy_share: _Share = 0.2
    """Smallest entropy, as a share of that of the first steps."""


class RlPlacementConfig(Config):
    """Which processes do what.

    `colocated`: the same processes sample and learn in turn; `disaggregated`: processes of their own, in
    step; `async`: processes of their own, rollouts may be older than the learner.
    """

    kind: Literal["colocated", "disaggregated", "async"] = "colocated"
    learners: _Count = 1
    """Data-parallel learners; with `colocated`, they also sample."""
    rollouts: _Count = 1
    """Rollout workers, unless `colocated`."""
    max_policy_lag: Literal[0, 1] = 0
    """`disaggregated`: steps that rollouts may trail the learner."""
    max_staleness: Annotated[int, Field(ge=1)] = 4
    """`async`: largest age of a batch in optimizer steps, at the last of its updates. Batches are begun as
    early as this allows, so it is also their usual age: choose the smallest value that keeps all processes
    busy."""
    sync_every: _Count = 1
    """`async`: steps between two transfers of weights to the rollout workers."""
    threads: _Count = 1
    """CPU threads of each process."""
    cpus: _Positive = 1.0
    """Ray CPUs that each process reserves."""


class RlEvaluationConfig(Config):
    """How a policy is evaluated."""

    every_steps: _Count = 50
    """Steps between two validations, each of which saves a snapshot."""
    metric: Literal["reward", "recall@1", "recall@10", "recall@50", "ndcg@10", "ndcg@50"] = "ndcg@10"
    """Metric that chooses the best snapshot, on the validation users; with `prompts.split: valid`, on those
    held out. `reward` is that of lists sampled at `rollout.temperature`."""
    max_users: _Count | None = None
    """Validation users during training (default: all)."""
    list_size: _Count = 10
    """Distinct items of the lists that are sampled and scored."""
    temperatures: tuple[_Positive, ...] = Field((0.25, 0.5, 0.7, 0.85, 1.0, 1.2), min_length=1)
    """Temperatures tried for the lists of either policy; each is reported at its best. Codes are sharpened
    one by one, so lists at a low temperature are not those of the likeliest items."""
    batch_size: _Count = 512


class RlConfig(Config):
    """Settings of one run."""

    seed: int = 0
    init_from: str
    """Folder of the supervised run, whose policy is also the reference."""
    snapshot: str = "best"
    device: str | None = None
    """Default: that of the supervised run."""
    steps: _Count = 200
    """Number of batches that are sampled, scored and learned from."""
    algorithm: PolicyLossConfig = Field(default_factory=GspoLoss)
    """The policy loss, chosen by `name`."""
    prompts: PromptsConfig = PromptsConfig()
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig
    learner: LearnerConfig = LearnerConfig()
    alarms: AlarmConfig = AlarmConfig()
    placement: RlPlacementConfig = RlPlacementConfig()
    evaluation: RlEvaluationConfig = RlEvaluationConfig()

    @model_validator(mode="after")
    def _weights_are_sent_in_time(self) -> RlConfig:
        placement, updates = self.placement, self.learner.updates_per_batch
        if placement.kind == "async" and placement.sync_every * updates > placement.max_staleness:
            raise ValueError(
                f"rl.placement.max_staleness is {placement.max_staleness}, and weights are sent every "
                f"{placement.sync_every * updates} optimizer steps (placement.sync_every x "
                "learner.updates_per_batch): the run would wait forever for weights that are young enough; "
                "raise max_staleness, or lower the others"
            )
        return self

    @model_validator(mode="after")
    def _dynamic_sampling_can_fill_a_batch(self) -> RlConfig:
        if (dynamic := self.rollout.dynamic) is None:
            return self
        if self.algorithm.learns_from_equal_rewards:
            raise ValueError(
                f"rl.rollout.dynamic leaves out groups of equal rewards, and {self.algorithm.name} learns "
                "from these, too: it compares candidates with the logged target; leave out dynamic, or "
                "choose a policy-gradient loss"
            )
        most = dynamic.max_reads * self.prompts.users_per_step
        if dynamic.groups > most:
            raise ValueError(
                f"rl.rollout.dynamic.groups is {dynamic.groups}, and {dynamic.max_reads} reads (max_reads) "
                f"of {self.prompts.users_per_step} rows (prompts.users_per_step) have {most} users at most: "
                "no batch would ever be full; lower groups, or raise one of the others"
            )
        return self

    @property
    def max_staleness(self) -> int:
        """Largest age of a batch in optimizer steps, at the last of its updates."""
        placement, updates = self.placement, self.learner.updates_per_batch
        if placement.kind == "async":
            return placement.max_staleness
        lag = placement.max_policy_lag if placement.kind == "disaggregated" else 0
        return (lag + 1) * updates - 1

    def with_absolute_paths(self) -> RlConfig:
        """Return the same settings, with paths that hold in any working directory."""
        parts = tuple(part.with_absolute_paths() for part in self.rewards.parts)
        rewards = self.rewards.model_copy(update={"parts": parts})
        return self.model_copy(update={"init_from": absolute(self.init_from), "rewards": rewards})
