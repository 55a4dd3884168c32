"""Settings of `rayrec prepare`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rayrec.platform.config import Config

Layout = Literal["auto", "folder", "movielens", "recbole", "s3rec", "events"]
Role = Literal["user_id", "item_id", "timestamp", "behavior", "title"]
Allowance = Literal["duplicates", "short-users", "cold-items"]


class PrepareConfig(Config):
    """How a source becomes a data set."""

    layout: Layout = "auto"
    """How the source is laid out; `auto` looks at the names of its files."""
    columns: dict[Role, str] = Field(default_factory=dict)
    """What the columns are called in a log of events, where the usual names do not tell."""
    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of numbers in the timestamp column, counted from 1970."""
    split: Literal["leave_one_out", "time"] = "leave_one_out"
    """`leave_one_out`: each user's last event is tested, the last but one validates; `time`: each
    user's first event on or after a boundary."""
    valid_fraction: float = Field(0.1, ge=0, lt=1)
    """Split by time: part of all events between the two boundaries."""
    test_fraction: float = Field(0.1, gt=0, lt=1)
    """Split by time: part of all events on or after the later boundary."""
    valid_start: int | None = Field(None, ge=0)
    """Split by time: the boundary in UNIX seconds, instead of `valid_fraction`."""
    test_start: int | None = Field(None, ge=0)
    """Split by time: the boundary in UNIX seconds, instead of `test_fraction`."""
    seed: int = Field(0, ge=0)
    """Orders events that share their time."""
    ties: Literal["shuffle", "file"] = "shuffle"
    """Events of one user at the same time: in an order drawn from the seed, or as the source has
    them, which may give away what a model should predict."""
    behaviors: tuple[str, ...] | None = None
    """Keep only these behaviours; None keeps all."""
    allow: frozenset[Allowance] = frozenset()
    """What is accepted and counted instead of refused."""
    num_partitions: int = Field(16, ge=1)
    """Parts the users are divided into for the heavy work; does not change the result."""
    rows_per_group: int = Field(1024, ge=1)
    """Rows of a Parquet row group of the training files: the unit that readers permute."""
    rows_per_file: int = Field(262_144, ge=1)
    """Most rows of one training file."""
    overwrite: bool = False
    """Replace a data set that is already there."""

    @model_validator(mode="after")
    def _check_boundaries(self) -> Self:
        if self.split == "leave_one_out" and (self.valid_start is not None or self.test_start is not None):
            raise ValueError("valid_start and test_start belong to the split by time; set split to 'time'")
        if (self.valid_start is None) != (self.test_start is None):
            raise ValueError("valid_start and test_start go together; give both or neither")
        start, stop = self.valid_start, self.test_start
        if start is not None and stop is not None and start > stop:
            raise ValueError(f"valid_start ({start}) lies after test_start ({stop}); swap them")
        held_out = self.valid_fraction + self.test_fraction
        if held_out >= 1:
            raise ValueError(
                f"valid_fraction and test_fraction are {held_out:g} together, "
                "which leaves no event to train on"
            )
        if self.rows_per_file < self.rows_per_group:
            raise ValueError(
                f"rows_per_file ({self.rows_per_file}) is less than rows_per_group ({self.rows_per_group})"
            )
        return self
