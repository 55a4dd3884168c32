"""Sections of the settings of a run: each of one part of it, checked by itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ByteSize, Field, model_validator

from rayrec.embeddings.base.layout import WeightDtype
from rayrec.embeddings.base.row_codec import Wire
from rayrec.embeddings.config import (
    DiskConfig,
    EvictionConfig,
    IdAdmissionConfig,
    OptimizerConfig,
    RowwiseAdagradConfig,
)
from rayrec.embeddings.shard.step_buffer import DEFAULT_STEP_BUFFER
from rayrec.models.base.compute import ComputeSettings, Parallel, Precision, Weights
from rayrec.models.base.config import DenseOptimizerConfig
from rayrec.models.generation.forms import AnswerForm
from rayrec.platform.config import Config
from rayrec.platform.impression_schema import FEATURE_TABLE
from rayrec.platform.remote_files import absolute
from rayrec.samples.operations.config import OperationConfig

TABLE_SEEDS = {"item": 1, "user": 2, "code": 3, FEATURE_TABLE: 4, "prefix": 5}
"""Added to 1,000 times the run's seed: tables of one run start with different rows."""


class FollowConfig(Config):
    """Training on a folder that keeps growing."""

    every_s: float = Field(10.0, gt=0)
    """How often the folder is looked at for new files."""
    stop_after_s: float | None = Field(None, gt=0)
    """The run is over when nothing new has come for so long; None: it goes on until it is stopped."""


class PreparedCacheConfig(Config):
    """Rows that are decoded and have gone through `data.features`, kept on each reader's local disk."""

    folder: str
    """On a local disk; runs may share it, since what is in it is found by its content."""
    max_bytes: ByteSize = Field(ByteSize(16 * 2**30), ge=1)
    """What has not been used for longest goes first."""


class DataConfig(Config):
    """What is trained on."""

    path: str
    """Folder written by `rayrec prepare`: the catalog, the users that are evaluated, and training rows. Of
    ranking models, one written by `rayrec impressions`."""
    semantic_ids: str | None = None
    """Folder written by `rayrec tokenize`; None is `semantic_ids` inside the data set."""
    samples: str | None = None
    """Path or URL of a folder of Parquet (sub-folders included) with the training rows, instead of those of
    the data set. After `features` a row has a `user_id` and the list `item_ids`, oldest first."""
    follow: FollowConfig | None = None
    """`samples` keeps growing: every file is trained on once, and new ones are waited for."""
    filters: tuple[Any, ...] = ()
    """Which rows are read, such as `[["price", ">", 3], ["country", "in", ["de", "fr"]]]`."""
    on_corrupt: Literal["stop", "skip"] = "stop"
    """What to do about Parquet that cannot be decoded: stop, or leave the rows out and count them."""
    features: tuple[OperationConfig, ...] = ()
    """Operations on the columns of a row, in order; see `rayrec.samples.operations`."""
    numbers: tuple[str, ...] = ()
    """Columns that `features` make and a ranking model reads as numbers, beside those of its data set."""
    graph: str | None = None
    """Folder written by `rayrec data graph`, for models that read neighbors of events (`gnn`); None: they are
    found among the training events of the data set."""
    redraw_ties: bool = False
    """Whether training reads events of one user at one time in an order that every step samples, instead of
    the one that the rows have. Needs the times of events."""
    cache: PreparedCacheConfig | None = None
    """None: rows are decoded and prepared again in every epoch."""
    window_rows: int = Field(65_536, gt=0)
    """Rows that are shuffled together, and held in memory by each reader."""

    @model_validator(mode="after")
    def _what_is_followed_is_named(self) -> DataConfig:
        if self.follow is not None and self.samples is None:
            raise ValueError(
                "data.follow needs data.samples, the folder that grows; a prepared data set stays as it is"
            )
        return self


class TableSettings(Config):
    """Of one table; what is None is as for all tables."""

    optimizer: OptimizerConfig | None = None
    weight_dtype: WeightDtype | None = None
    admission: IdAdmissionConfig | None = None
    eviction: EvictionConfig | None = None
    disk: DiskConfig | None = None
    """For a table larger than the memory of its servers; None: every row is in memory."""
    servers: tuple[int, ...] | None = Field(None, min_length=1)
    """Numbers of the parameter servers that hold the table, from 0, such as [0, 1] for one that is asked for
    so often, or is so large, that it should have servers of its own: then the other tables name the others.
    None: all of them hold a part."""
    init_scale: float | None = Field(None, ge=0)
    """None: as for all tables, or as the model has it: rows of `prefix` begin at 0."""


class SparseConfig(Config):
    """The parameter servers and the tables they hold."""

    num_servers: int = Field(2, ge=1)
    optimizer: OptimizerConfig = RowwiseAdagradConfig()
    weight_dtype: WeightDtype = "float32"
    """How servers keep weights; 16-bit ones are rounded stochastically."""
    admission: IdAdmissionConfig = IdAdmissionConfig()
    eviction: EvictionConfig | None = None
    """None: every row stays."""
    tables: dict[str, TableSettings] = Field(default_factory=dict)
    """What is different for one table: `item`, `user`, `code`, `prefix` or, of ranking
    models, `feature`."""
    cache_rows: int = Field(0, ge=0)
    """Rows of each table that every trainer may hold, where it computes: on an accelerator, memory of all of
    them is taken at once. 0 is no cache. Needs mode `exact_prefetch`."""
    init_scale: float = Field(0.02, ge=0)
    """New rows are uniform in [-init_scale, init_scale). Those of 0.035 have the deviation of the networks'
    own weights."""
    wait_timeout_s: float = Field(300.0, gt=0)
    """Longest a lookup waits for the update it depends on before the run is given up. A snapshot that holds
    up a step for a quarter of it, since it is written too slowly, is given up."""
    server_memory: ByteSize | None = None
    """Most that one server may need, such as `8 GiB`; judged before the run, and kept to in it.
    None: what the machine has."""
    step_buffer: ByteSize = Field(ByteSize(DEFAULT_STEP_BUFFER), ge=1)
    """Most that one server keeps of gradients that came before those of lower ranks, in whose order they are
    added up. What does not fit waits at its trainer; the numbers do not depend on it. Records that caches
    write back (`cache_rows`) are kept beside it."""
    server_threads: int = Field(1, ge=1)
    """Threads that one lookup or update of a server may use; the numbers do not depend on it. Ray counts a
    server as `pipeline.cpus_per_actor` all the same."""
    expected_rows: dict[str, int] = Field(default_factory=dict)
    """By table: rows to plan memory for, where there will be more than the data set has ids now."""
    transport: Literal["auto", "ray", "shared_memory"] = "auto"
    """How rows and gradients travel. `auto`: through shared memory between a trainer and the servers of
    its node, as Ray calls to other servers; `ray`: always so; `shared_memory`: refuses servers elsewhere."""
    wire: Wire = "float32"
    """What rows and gradients are rounded to when they travel: `bfloat16`, half the bytes; `int8_row`, whole
    numbers of 8 bits and a scale for each row, a quarter. Servers keep and add up what `weight_dtype` says.
    The bits of a run depend on it, and not on how far its actors are from each other."""

    def with_absolute_paths(self) -> SparseConfig:
        """The same, to be understood from any working directory: servers may have another than the
        driver, which looks whether their folders are on a disk."""
        tables = {
            name: table.model_copy(update={"disk": table.disk.with_absolute_paths()})
            for name, table in self.tables.items()
            if table.disk is not None
        }
        return self.model_copy(update={"tables": self.tables | tables}) if tables else self

    @model_validator(mode="after")
    def _settings_are_of_known_tables(self) -> SparseConfig:
        for setting in ("tables", "expected_rows"):
            for name in getattr(self, setting):
                if name not in TABLE_SEEDS:
                    raise ValueError(
                        f"sparse.{setting} names table {name!r}; tables are {', '.join(TABLE_SEEDS)}"
                    )
        return self

    @model_validator(mode="after")
    def _tables_lie_on_servers_that_are_there(self) -> SparseConfig:
        for name, table in self.tables.items():
            if table.servers is None:
                continue
            if list(table.servers) != sorted(set(table.servers)):
                raise ValueError(
                    f"sparse.tables.{name}.servers is {list(table.servers)}; name each server once, ascending"
                )
            if table.servers[0] < 0 or table.servers[-1] >= self.num_servers:
                raise ValueError(
                    f"sparse.tables.{name}.servers is {list(table.servers)}; the {self.num_servers} servers "
                    f"(sparse.num_servers) have the numbers 0 to {self.num_servers - 1}"
                )
        return self


class PipelineConfig(Config):
    """How the five stages are laid out and joined."""

    mode: Literal["sync", "exact_prefetch", "bounded_stale"] = "exact_prefetch"
    """`sync` looks up batch t after update t - 1; `exact_prefetch` reads ahead what that update cannot
    change, and gives the same bits; `bounded_stale` reads everything ahead, and gives others each time."""
    max_staleness: int = Field(1, ge=0)
    """In mode `bounded_stale`: updates that the rows of a batch may lack."""
    num_readers: int = Field(1, ge=1)
    num_feature_workers: int = Field(1, ge=1)
    num_trainers: int = Field(1, ge=1)
    trainers_per_group: int = Field(1, ge=1)
    """Trainers, in the order of their ranks, that call the parameter servers together: a process beside them
    asks once for what several of them read, and adds up their gradients before they travel. Take as many as
    a node has. The sums are in another order than those of single trainers, so their last bits differ."""
    trainer_threads: int | None = Field(None, ge=1)
    """Threads of each trainer's dense compute; None shares the processors that the driver may use. Name it
    where trainers have more or less of them: on other nodes, or bound to a socket."""
    queue_depth: int = Field(4, ge=2)
    """Batches between reading and update; more are not begun."""
    cpus_per_actor: float = Field(0.25, ge=0)
    """CPUs that Ray reserves for a reader, feature worker or server."""
    cpus_per_trainer: float = Field(1.0, ge=0)

    @property
    def group_size(self) -> int:
        """Trainers of a group; 1 where every trainer calls for itself."""
        return min(self.trainers_per_group, self.num_trainers)


class ScheduleConfig(Config):
    """How learning rates change over the run."""

    warmup_steps: int = Field(100, ge=0)
    """Steps over which the rates rise linearly."""
    decay: Literal["none", "cosine"] = "none"
    """`cosine` lets them fall to zero at the end of the last epoch."""


class TrainingConfig(Config):
    """How long and how fast."""

    batch_size: int = Field(256, gt=0)
    """Rows of a global batch, over all trainers; the most, with `batch_tokens`."""
    batch_tokens: int | None = Field(None, gt=0)
    """Most items of a global batch, over the lists of `length_of` as they are read; a row that has more is a
    batch of its own. None: rows are counted only."""
    length_of: str = "item_ids"
    """The column of the files whose lists `batch_tokens` counts."""
    min_steps_per_epoch: int = Field(1, ge=1)
    """Where the data has too few rows for so many batches of `batch_size`, batches have fewer: a recipe that
    was made for a large log fits a small one."""
    epochs: int = Field(10, gt=0)
    """Most passes over the data."""
    windows: int | None = Field(None, ge=1)
    """Most windows of `max_length` events that are read of one row, so that every event of a longer history
    is a target; of a row with more, every step reads others. 1: the newest events only. None: 8; of
    `data.samples`, whose rows may repeat each other's events, 1."""
    optimizer: DenseOptimizerConfig = DenseOptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    """Of dense and sparse learning rates alike."""
    precision: Precision = "float32"
    """`bfloat16`: products of matrices and what follows them in 16 bits; weights, rows, their optimizers and
    the sums of losses stay float32."""
    micro_batches: int = Field(1, ge=1)
    """Pieces in which each trainer goes through its share of a batch, one after the other: activations take
    that much less memory, and the gradients are the same up to rounding."""
    compile: bool = False
    """Whether torch.compile makes one kernel of neighboring pointwise operations."""
    parallel: Parallel = "replicated"
    """What several trainers hold of the dense weights: all of them, or (`fsdp2`) a part each, with its
    gradients and its optimizer. `tensor`, of language models: each computes its part of every layer, for the
    rows of all."""
    weights: Weights = "float32"
    """`bfloat16_with_master`: matrices are computed with in bfloat16, and a float32 copy of each is what the
    optimizer changes and snapshots hold. Spares forward their rounding, and takes half as much memory again
    for weights. Needs `precision: bfloat16`."""
    reduce_dtype: Precision = "float32"
    """`bfloat16`: trainers send each other dense gradients in 16 bits, half the bytes, and add them up in
    these; what is rounded then is at most the last of eight bits. Not of `parallel: tensor`."""
    reduce_bucket: ByteSize = Field(ByteSize(4 * 2**20), ge=1)
    """Dense gradients that trainers add up at once, such as `4 MiB`: buckets are sent while backward computes
    the next ones. With more than two trainers, the last bits of a sum depend on it."""
    init_from: str | None = None
    """Folder of a run from whose best snapshot this one takes dense weights and embedding rows; optimizers,
    learning rates and the position in the data begin again. None: everything does."""

    @property
    def compute(self) -> ComputeSettings:
        return ComputeSettings(
            self.precision,
            self.micro_batches,
            self.compile,
            self.parallel,
            self.weights,
            self.reduce_dtype,
            int(self.reduce_bucket),
        )

    @model_validator(mode="after")
    def _masters_are_of_whole_weights_in_16_bits(self) -> TrainingConfig:
        if self.weights == "float32":
            return self
        if self.precision != "bfloat16":
            raise ValueError(
                f"training.weights is {self.weights!r} and training.precision {self.precision!r}: weights of "
                "16 bits need products of 16 bits; set precision to 'bfloat16', or weights to 'float32'"
            )
        if self.parallel != "replicated":
            raise ValueError(
                f"training.weights is {self.weights!r} and training.parallel {self.parallel!r}, whose parts "
                "are float32; set weights to 'float32', or parallel to 'replicated'"
            )
        return self

    @model_validator(mode="after")
    def _parts_of_layers_are_added_as_computed(self) -> TrainingConfig:
        if self.parallel == "tensor" and self.reduce_dtype != "float32":
            raise ValueError(
                f"training.reduce_dtype is {self.reduce_dtype!r} and training.parallel 'tensor', which adds "
                "up activations within layers; set reduce_dtype to 'float32', or parallel to 'fsdp2'"
            )
        return self

    @model_validator(mode="after")
    def _pieces_have_rows(self) -> TrainingConfig:
        if self.micro_batches > self.batch_size:
            raise ValueError(
                f"training.micro_batches is {self.micro_batches} and training.batch_size {self.batch_size}: "
                "a batch cannot have more pieces than rows"
            )
        return self


class WantedConfig(Config):
    """What users are recommended to for, by name; None: nothing is said."""

    scenario: str | None = None
    behavior: str | None = None

    @model_validator(mode="after")
    def _something_is_said(self) -> WantedConfig:
        if self.scenario is None and self.behavior is None:
            raise ValueError(
                "evaluation.instruction says nothing: name a scenario or a behavior, or leave it out"
            )
        return self


class EvaluationConfig(Config):
    """Validation while training."""

    every_epochs: int = Field(1, gt=0)
    """A snapshot is written after each validation."""
    every_steps: int | None = Field(None, gt=0)
    """Validation after so many steps instead, as a run that follows a growing folder needs it."""
    patience: int | None = Field(None, ge=1)
    """Validations without improvement after which training stops; None never stops early."""
    metric: Literal["recall", "ndcg"] = "ndcg"
    """At 10: what the best snapshot is best in."""
    exclude_seen: bool = True
    """Whether validation leaves out the items of a history. Set it to false where users often come back to an
    item, so that the best snapshot is the one that may recommend those; `rayrec evaluate` judges both."""
    response_metric: Literal["auc", "gauc"] = "auc"
    """The same of ranking models, for the first of their labels."""
    max_users: int | None = Field(None, gt=0)
    """Users, impressions or records validated on while training; None: all, as finally evaluated."""
    instruction: WantedConfig | None = None
    """Of all users, in validation and evaluation; None is none. Needs `model.instruction`."""
    batch_size: int = Field(512, gt=0)
    answers: int = Field(64, ge=0)
    """Of language models: records whose answers are written, token by token, in each validation."""
    max_new_tokens: int = Field(128, gt=0)
    """Of each such answer; at most half of `model.max_length`."""
    form: AnswerForm | None = None
    """That all such answers are held to; None: none."""


class PublishConfig(Config):
    """Where what a run learns is published as versions for services that follow."""

    to: str
    """Folder, or URL such as `s3://bucket/models/mine`; this run alone publishes there."""
    dense_every_s: float = Field(0.0, ge=0)
    """Versions that come sooner after new dense weights have those, and new rows; 0: none does."""
    keep: int = Field(10, ge=1)
    """The newest so many stay."""
    min_overlap: float = Field(0.0, ge=0, le=1)
    """Share of the items of a few users that the version before gave to them, at least; a version with less
    is not published."""
    rows: Wire = "float32"
    """What rows of tables are rounded to in versions: `bfloat16`, half the bytes; `int8_row`, whole numbers
    of 8 bits and a scale for each row, a quarter. Services answer with what they stand for."""


class SnapshotConfig(Config):
    """When a run's state is written to its folder, besides after validations, and what of it is kept."""

    every_steps: int | None = Field(None, ge=1)
    """Also after every so many steps."""
    every_s: float | None = Field(None, gt=0)
    """Also when the last one was begun so many seconds ago. Which steps these are does not change the run."""
    increments: int = Field(0, ge=0)
    """Snapshots between two full ones that hold only the rows changed since the one before."""
    keep: int = Field(2, ge=1)
    """The newest so many stay, with what they build on, and the best."""
    copy_to: str | None = None
    """Folder to copy the run to as it goes, as a URL such as `s3://bucket/runs/mine`; a run whose own folder
    is gone is resumed from there."""
    publish: PublishConfig | None = None
    """Every snapshot is published, too."""

    def with_absolute_paths(self) -> SnapshotConfig:
        """The same, to be understood from any working directory: a run may be resumed from another."""
        changed: dict[str, Any] = {}
        if self.copy_to is not None:
            changed["copy_to"] = absolute(self.copy_to)
        if self.publish is not None:
            changed["publish"] = self.publish.model_copy(update={"to": absolute(self.publish.to)})
        return self.model_copy(update=changed)


class RecoveryConfig(Config):
    """What becomes of a run when something of it dies or hangs."""

    stage_restarts: int = Field(20, ge=0)
    """Times that each reader and feature worker may be started again."""
    max_rollbacks: int = Field(5, ge=0)
    """Returns to the last snapshot, because a server or trainer was lost, before there is a new one."""
    replace_lost_server: bool = True
    """Whether a server that dies alone is replaced alone: all other actors stay, and go back to the last
    snapshot by the rows that have changed since. Off: all actors end and start again."""
    hang_timeout_s: float = Field(300.0, gt=0)
    """Seconds without an answer of any actor until the one that is at fault counts as hung; up to four times
    as many after a rollback for that reason, until there is a new snapshot."""


TrackerName = Literal["tensorboard", "wandb", "mlflow"]


class TrackingConfig(Config):
    """Where figures of a run go while it trains, besides `metrics.jsonl` in its folder."""

    every_steps: int = Field(100, ge=1)
    """Steps between two records of the loss; validations are recorded in any case."""
    to: tuple[TrackerName, ...] = ()
    """`tensorboard` (RUN/tensorboard), `wandb` (Weights & Biases), `mlflow`; each needs its package."""
    project: str | None = None
    """Project of Weights & Biases, or experiment of MLflow; None: `rayrec`."""
