"""Settings of an embedding table; those of the optimizers are beside them, in `optim`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ByteSize, Field, model_validator

from rayrec.embeddings.base.layout import RecordLayout, WeightDtype, record_words
from rayrec.embeddings.base.routing import NUM_BUCKETS
from rayrec.embeddings.optim.adagrad import AdagradConfig
from rayrec.embeddings.optim.adam import AdamConfig
from rayrec.embeddings.optim.ftrl import FtrlConfig
from rayrec.embeddings.optim.optimizers import OptimizerConfig, make_optimizer
from rayrec.embeddings.optim.partial_rowwise_adam import PartialRowwiseAdamConfig
from rayrec.embeddings.optim.rowwise_adagrad import RowwiseAdagradConfig
from rayrec.embeddings.optim.sgd import SgdConfig
from rayrec.platform.config import Config
from rayrec.platform.memory import human_size
from rayrec.platform.schedule import RateSchedule

__all__ = [
    "AdagradConfig",
    "AdamConfig",
    "DiskConfig",
    "EvictionConfig",
    "FtrlConfig",
    "IdAdmissionConfig",
    "OptimizerConfig",
    "PartialRowwiseAdamConfig",
    "RowwiseAdagradConfig",
    "SgdConfig",
    "TableConfig",
]


EVICTION_REASONS = (
    "max_age_steps",
    "ttl_hours",
    "max_rows_per_bucket",
    "max_rows",
    "max_bytes",
    "min_score",
)
_INDEX_BYTES, _INDEX_BYTES_ON_DISK = 54, 13
"""Most bytes of a row's id, in memory where the index has just grown, and of a table with rows on disk."""


class IdAdmissionConfig(Config):
    """Which ids get a row. Until then an id has its initial value, and its gradients are dropped."""

    min_sightings: int = Field(default=1, ge=1, le=65_535)
    """Training steps that must have named an id; the gradient of the last of them is the first applied."""
    forget_after_steps: int | None = Field(default=None, ge=1)
    """An id without a row that no step has named for so long starts from 0 sightings again; None: never."""
    every_steps: int = Field(default=1000, ge=1)
    """How often forgetting happens."""


class EvictionConfig(Config):
    """Which rows are given up. It happens when a step commits, by what committed steps alone say."""

    max_age_steps: int | None = Field(default=None, ge=1)
    """Rows that no step has changed for longer than this are given up; None: age is no reason."""
    ttl_hours: float | None = Field(default=None, gt=0)
    """The same by time: rows that were changed last so many hours ago. The clock is the newest event that
    steps have read, never that of a machine, so that a run that is done again gives up the same rows; it
    stands still while no newer event is read. It is looked at when rows are given up, so that a row may stay
    for `every_steps` longer."""
    max_rows_per_bucket: int | None = Field(default=None, ge=1)
    """Rows left in each of the 65,536 virtual buckets, over all servers; None: any number."""
    max_rows: int | None = Field(default=None, ge=NUM_BUCKETS)
    """Rows left in the table, over all servers. Every bucket keeps its share, so that the same rows go
    whatever number of servers there is. Buckets that chance has filled less make it fewer: some 4 % where a
    bucket has a hundred rows, 10 % with sixteen, and 27 % with two."""
    max_bytes: ByteSize | None = None
    """The same by what the table takes over all servers, such as `64 GiB`: its records, wherever they are,
    and 54 bytes for the index of each (13 where the table has a `disk`)."""
    keep: Literal["recent", "frequent", "score"] = "recent"
    """Of a bucket that is too full, the rows that were changed last (LRU), in most steps (LFU), or of the
    highest score: the number of steps that changed a row, halved for every `half_life_steps` since the last
    of them."""
    half_life_steps: int | None = Field(default=None, ge=1)
    """Of scores."""
    min_score: float | None = Field(default=None, gt=0)
    """Rows of a lower score are given up, also where there is room; None: a score is no reason."""
    every_steps: int = Field(default=1000, ge=1)
    """Rows are given up behind steps number n, 2 n, ...; in between a table may be larger."""
    remember_steps: int = Field(default=64, ge=1)
    """Steps for which an evicted id can be reported to those who hold copies of its row; it takes 35 to 62
    bytes meanwhile, unless it gets a row again. Caches of trainers ask at the step itself, and trainers are
    not many steps apart."""

    @model_validator(mode="after")
    def _has_a_reason(self) -> EvictionConfig:
        if all(getattr(self, name) is None for name in EVICTION_REASONS):
            raise ValueError(
                f"an eviction needs one of {', '.join(EVICTION_REASONS)}; without, nothing is given up"
            )
        return self

    @model_validator(mode="after")
    def _scores_have_a_half_life(self) -> EvictionConfig:
        scores = self.keep == "score" or self.min_score is not None
        if scores and self.half_life_steps is None:
            raise ValueError("eviction.half_life_steps is missing; keep: score and min_score go by it")
        if self.half_life_steps is not None and not scores:
            raise ValueError("eviction.half_life_steps needs keep: score or min_score, which go by it")
        if self.keep == "score" and not self.has_most_rows:
            raise ValueError(
                "eviction.keep: score needs max_rows_per_bucket, max_rows or max_bytes: it says which rows "
                "stay where there are too many"
            )
        return self

    @property
    def has_most_rows(self) -> bool:
        """Whether there may be too many rows."""
        return any(most is not None for most in (self.max_rows_per_bucket, self.max_rows, self.max_bytes))

    def is_due(self, step: int) -> bool:
        """Whether rows are given up when this step commits."""
        return (step + 1) % self.every_steps == 0


class DiskConfig(Config):
    """A table that is larger than its memory: the rows used least lately lie on disk. No value changes;
    `eviction.max_bytes` leaves more rows, since less memory finds them.

    Eviction by capacity and snapshots read all of them in the order of buckets, one by one, some hundred
    thousand rows a second; eviction by age reads those that may be too old.
    """

    memory: ByteSize
    """Most that each server's part of the table may take of memory, such as `8 GiB`: rows, what finds them
    (12 to 13 bytes for every row, also of those on disk) and 23 MiB to move rows."""
    folder: str | None = None
    """On a local disk of every server; None: the system's temporary folder. It needs room for twice the
    rows, and nothing in it outlives the run."""
    may_be_memory: bool = False
    """Take a folder that the system keeps in memory, as it often does with the temporary one. That saves no
    memory, so it is for trying things out."""

    @property
    def folder_path(self) -> Path:
        return Path(self.folder or tempfile.gettempdir())

    def with_absolute_paths(self) -> DiskConfig:
        """The same, to be understood from any working directory. Links stay: each server has its own."""
        if self.folder is None:
            return self
        return self.model_copy(update={"folder": os.path.abspath(self.folder)})

    def times(self, num_servers: int) -> DiskConfig:
        """For one server that holds what so many would have held."""
        return self.model_copy(update={"memory": ByteSize(num_servers * self.memory)})


class MostRows(NamedTuple):
    """Of a virtual bucket."""

    rows: int
    num_larger: int
    """Buckets, the first ones, that may have one row more."""


class TableConfig(Config):
    """One embedding table: rows for any 64-bit ids, created when an update first names them."""

    name: str = Field(min_length=1)
    dim: int = Field(gt=0, le=8192)
    """Numbers in one row."""
    weight_dtype: WeightDtype = "float32"
    """How weights are kept; 16-bit ones are rounded stochastically. Rows travel as float32."""
    optimizer: OptimizerConfig = RowwiseAdagradConfig()
    init_scale: float = Field(default=0.05, ge=0)
    """A new row is uniform in [-init_scale, init_scale)."""
    admission: IdAdmissionConfig = IdAdmissionConfig()
    eviction: EvictionConfig | None = None
    """None: every row stays."""
    disk: DiskConfig | None = None
    """None: every row is in memory."""
    servers: tuple[int, ...] | None = None
    """Numbers of the parameter servers that hold the table, ascending; None: all of them."""
    schedule: RateSchedule = RateSchedule()
    """What the optimizer's learning rate is multiplied by at each step."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """New rows depend on this and the id alone. Tables of one run have different seeds."""

    @model_validator(mode="after")
    def _every_bucket_has_room(self) -> TableConfig:
        if self.eviction is not None and self.eviction.max_bytes is not None:
            least = NUM_BUCKETS * self.bytes_of_row
            if self.eviction.max_bytes < least:
                raise ValueError(
                    f"table {self.name!r}: eviction.max_bytes is {human_size(self.eviction.max_bytes)}, less "
                    f"than a row of {self.bytes_of_row} bytes for each of {NUM_BUCKETS:,} buckets "
                    f"({human_size(least)})"
                )
        return self

    @property
    def bytes_of_row(self) -> int:
        """Most that a row takes, with its id in the index."""
        state_size = make_optimizer(self.optimizer, self.schedule).state_size(self.dim)
        words = record_words(RecordLayout.of(self.weight_dtype, self.dim, state_size))
        return 4 * words + (_INDEX_BYTES if self.disk is None else _INDEX_BYTES_ON_DISK)

    @property
    def most_rows(self) -> MostRows | None:
        """What an eviction leaves in a virtual bucket; None for any number."""
        if self.eviction is None or not self.eviction.has_most_rows:
            return None
        eviction, most = self.eviction, []
        if eviction.max_rows_per_bucket is not None:
            most.append(MostRows(eviction.max_rows_per_bucket, 0))
        if eviction.max_rows is not None:
            most.append(MostRows(*divmod(eviction.max_rows, NUM_BUCKETS)))
        if eviction.max_bytes is not None:
            most.append(MostRows(*divmod(eviction.max_bytes // self.bytes_of_row, NUM_BUCKETS)))
        return min(most)

    def evicts_at(self, step: int) -> bool:
        """Whether rows may disappear when this step commits."""
        return self.eviction is not None and self.eviction.is_due(step)
