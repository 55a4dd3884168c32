"""Settings of `rayrec prepare`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from rayrec.platform.config import Config

Role = Literal["user_id", "item_id", "timestamp", "behavior", "scenario", "title"]
TargetRule = Literal["first", "last", "random"]
Allowance = Literal[
    "duplicates",
    "short-users",
    "cold-items",
    "missing-ids",
    "bad-times",
    "repeated-descriptions",
    "unmatched-ids",
    "ids-alike",
]

TimeUnit = Literal["s", "ms", "us", "ns"]

_DEFAULT_FRACTION = 0.1


def option(name: str, flag: str = "") -> str:
    """How messages name a setting: its key, as Python has it, and the option of the command."""
    return f"{name} ({flag or '--' + name.replace('_', '-')})"


def _unix_seconds(value: Any, info: ValidationInfo) -> Any:
    """An ISO date, in UTC unless it says otherwise, as UNIX seconds; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(
            f"{option(str(info.field_name))} is {value!r}; expected a date such as 2020-01-31 or "
            "2020-01-31T12:00:00Z, or UNIX seconds"
        ) from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


Boundary = Annotated[
    float, BeforeValidator(_unix_seconds), Field(ge=0, le=100_000_000_000, allow_inf_nan=False)
]
"""UNIX seconds before the year 5138; an ISO date, as a text, is turned into them."""


class PrepareConfig(Config):
    """How a source becomes a data set."""

    layout: str = "auto"
    """Layout of the source: `folder`, `movielens`, `recbole`, `splits`, `s3rec`, `lists`, `events` or one
    that an installed package adds; `auto` looks at the names of the files."""
    layout_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the layout's importer, where it has any."""
    columns: dict[Role, str] = Field(default_factory=dict)
    """What the columns are called, where the usual names do not tell."""
    names: tuple[str, ...] | None = None
    """Names of the columns of a log in text files that have no line of names."""
    time_format: str | None = None
    """How dates are written that are not in ISO 8601, in the words of `strptime`: `%d/%m/%Y`."""
    time_unit: TimeUnit | None = None
    """Unit of numbers in the timestamp column, counted from 1970; None: seconds, unless they look like years,
    months or Excel's days."""
    split: Literal["leave_one_out", "time"] = "leave_one_out"
    """`leave_one_out`: each user's last event is tested, the last but one validates; `time`: nobody's events
    on or after a boundary are trained on, and one of each user's between the boundaries, and one after them,
    is predicted."""
    targets: TargetRule = "first"
    """Split by time: which of a user's events in a period is predicted, of those that have an event before
    them. `first`: the one that a model from before the period is asked for first, whose history ends before
    the period; `last`; `random`: by a hash of the seed and the user, which judges a model on average as all
    events of the period would, each user counted once."""
    valid_fraction: float | None = Field(None, ge=0, lt=1)
    """Split by time: part of all events between the two boundaries; a tenth if nothing else is said."""
    test_fraction: float | None = Field(None, gt=0, lt=1)
    """Split by time: part of all events on or after the later boundary; a tenth if nothing else is said."""
    valid_start: Boundary | None = None
    """Split by time: the first time that validates, as an ISO date or UNIX seconds, instead of fractions."""
    test_start: Boundary | None = None
    """Split by time: the first time that is tested, as an ISO date or UNIX seconds, instead of fractions."""
    seed: int = Field(0, ge=0)
    """Seed for the order of events with the same time, and for random targets."""
    ties: Literal["shuffle", "file"] = "shuffle"
    """Events of one user at the same time: in an order given by the seed, or as the source has
    them, which may give away what a model should predict."""
    behaviors: tuple[str, ...] | None = None
    """Keep only these behaviors; None keeps all."""
    text_columns: tuple[str, ...] = ()
    """Columns of `items` that are part of an item's text besides those with a usual name."""
    allow: frozenset[Allowance] = frozenset()
    """What is accepted and counted instead of refused."""
    clean: bool = False
    """Accept and count all of it."""
    num_partitions: int = Field(16, ge=1)
    """Parts the users are divided into to build their sequences; does not change the result."""
    rows_per_group: int = Field(1024, ge=1)
    """Rows of a Parquet row group of the training files: the unit that readers permute."""
    rows_per_file: int = Field(262_144, ge=1)
    """Most rows of one training file."""
    overwrite: bool = False
    """Replace a data set that is already there."""

    @model_validator(mode="after")
    def _check_boundaries(self) -> Self:
        starts = {"valid_start": self.valid_start, "test_start": self.test_start}
        fractions = {"valid_fraction": self.valid_fraction, "test_fraction": self.test_fraction}
        given = [name for name, value in (starts | fractions).items() if value is not None]
        if self.split == "leave_one_out" and self.targets != "first":
            given.append("targets")
        if self.split == "leave_one_out" and given:
            raise ValueError(
                f"{option(given[0])} belongs to the split by time; set split to time (--split time)"
            )
        if set(starts) & set(given) and set(fractions) & set(given):
            raise ValueError(
                f"{option(given[0])} and {option(given[-1])} say the same thing twice; "
                "give either boundaries or fractions"
            )
        if (self.valid_start is None) != (self.test_start is None):
            raise ValueError(
                f"{option('valid_start')} and {option('test_start')} go together; give both or neither"
            )
        if (
            self.valid_start is not None
            and self.test_start is not None
            and self.valid_start > self.test_start
        ):
            raise ValueError(
                f"{option('valid_start')} lies after {option('test_start')}, "
                f"at {self.valid_start:.0f} and {self.test_start:.0f} (UNIX s); swap them"
            )
        held_out = sum(self.fractions)
        if held_out >= 1:
            raise ValueError(
                f"{option('valid_fraction')} and {option('test_fraction')} are {held_out:g} together, "
                "which leaves no event to train on"
            )
        if self.rows_per_file < self.rows_per_group:
            raise ValueError(
                f"rows_per_file ({self.rows_per_file}) is less than rows_per_group ({self.rows_per_group})"
            )
        return self

    @property
    def allowed(self) -> frozenset[Allowance]:
        """Kinds of rows that are accepted and counted."""
        return frozenset(get_args(Allowance)) if self.clean else self.allow

    @property
    def starts(self) -> tuple[float, float] | None:
        """The boundaries of a split by time, where they are given."""
        if self.valid_start is None or self.test_start is None:
            return None
        return self.valid_start, self.test_start

    @property
    def fractions(self) -> tuple[float, float]:
        """Parts of the events that validate and that are tested, in a split by time without boundaries."""
        valid, test = self.valid_fraction, self.test_fraction
        return (
            _DEFAULT_FRACTION if valid is None else valid,
            _DEFAULT_FRACTION if test is None else test,
        )
