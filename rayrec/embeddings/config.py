"""Settings of an embedding table; those of the optimizers are beside them, in `optim`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field, model_validator

from rayrec.embeddings.base.layout import WeightDtype
from rayrec.embeddings.optim.adagrad import AdagradConfig
from rayrec.embeddings.optim.adam import AdamConfig
from rayrec.embeddings.optim.ftrl import FtrlConfig
from rayrec.embeddings.optim.optimizers import OptimizerConfig
from rayrec.embeddings.optim.partial_rowwise_adam import PartialRowwiseAdamConfig
from rayrec.embeddings.optim.rowwise_adagrad import RowwiseAdagradConfig
from rayrec.embeddings.optim.sgd import SgdConfig
from rayrec.platform.config import Config
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
    max_rows_per_bucket: int | None = Field(default=None, ge=1)
    """Rows left in each of the 65,536 virtual buckets, over all servers; None: any number."""
    keep: Literal["recent", "frequent"] = "recent"
    """Of a bucket that is too full, the rows that were changed last (LRU), or in most steps (LFU)."""
    every_steps: int = Field(default=1000, ge=1)
    """Rows are given up behind steps number n, 2 n, ...; in between a table may be larger."""
    remember_steps: int = Field(default=64, ge=1)
    """Steps for which an evicted id can be reported to those who hold copies of its row; it takes 35 to 62
    bytes meanwhile, unless it gets a row again. Caches of trainers ask at the step itself, and trainers are
    not many steps apart."""

    @model_validator(mode="after")
    def _has_a_reason(self) -> EvictionConfig:
        if self.max_age_steps is None and self.max_rows_per_bucket is None:
            raise ValueError("an eviction needs max_age_steps or max_rows_per_bucket; without, nothing goes")
        return self

    def is_due(self, step: int) -> bool:
        """Whether rows are given up when this step, from 0, commits."""
        return (step + 1) % self.every_steps == 0


class DiskConfig(Config):
    """A table that is larger than its memory: the rows used least lately lie on disk. No value changes.

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

    def times(self, num_servers: int) -> DiskConfig:
        """For one server that holds what so many would have held."""
        return self.model_copy(update={"memory": ByteSize(num_servers * self.memory)})


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
    schedule: RateSchedule = RateSchedule()
    """What the optimizer's learning rate is multiplied by at each step."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """New rows depend on this and the id alone. Tables of one run have different seeds."""

    def evicts_at(self, step: int) -> bool:
        """Whether rows may disappear when this step commits."""
        return self.eviction is not None and self.eviction.is_due(step)
