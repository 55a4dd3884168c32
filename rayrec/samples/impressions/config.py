"""Settings of `rayrec impressions`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rayrec.platform.config import Config
from rayrec.samples.base.config import Boundary, TimeUnit, option

LayoutName = Literal["criteo", "avazu", "table", "movielens", "deskdrop"]
SplitRule = Literal["auto", "files", "order", "time", "random"]

FRACTIONS = ("valid_fraction", "test_fraction")
_ROLES = {
    "labels": "label",
    "numbers": "number",
    "ids": "id",
    "lists": "list",
    "group": "",
    "time": "",
    "kept": "keep",
    "origins": "origin",
}
"""Settings that say what columns are for, and the options of the command where they are called otherwise."""


class ImpressionsConfig(Config):
    """How a source becomes a data set of impressions."""

    layout: LayoutName
    """How the source is laid out; `table` is any Parquet, CSV or TSV whose columns are named below."""
    labels: tuple[str, ...] = ()
    """Table: columns of 0, 1 or nothing that are to be predicted."""
    numbers: tuple[str, ...] = ()
    """Table: columns of numbers."""
    ids: dict[str, str] = Field(default_factory=dict)
    """Table: columns of one id each, to the name of their space."""
    lists: dict[str, str] = Field(default_factory=dict)
    """Table: columns of lists of ids, to the name of their space."""
    list_separator: str = Field("|", min_length=1)
    """Table: between the elements of a list that is written as a text."""
    group: str | None = None
    """Table: the column by which rows are grouped for GAUC; one of `ids`, or one of its own."""
    time: str | None = None
    """Table: the column of the time, for a split by time."""
    kept: dict[str, str] = Field(default_factory=dict)
    """Table: columns for operations of `data.features`, which no model reads, to the names that they get: the
    column of the time as times, others as texts."""
    time_unit: TimeUnit | None = None
    """Unit of numbers in the column of the time, counted from 1970; None: seconds."""
    positive_rating: float = 4.0
    """MovieLens: ratings from this one on are positive."""
    history_events: Literal["liked", "all"] = "liked"
    """MovieLens: films in the list `history`. Requests of a recommender do not say what was liked: where the
    model is to rank its items, take `all`, which leaves `share_liked` out."""
    history_length: int = Field(50, ge=1)
    """MovieLens, Deskdrop: most items in the list `history`, the newest. Table: of the histories of those who
    ask, where `origins` name one."""
    origins: dict[str, str] = Field(default_factory=dict)
    """Table: what a column is when a recommender's items are to be ranked: `user` and `item`, their keys;
    `user.NAME` and `item.NAME`, columns of the tables of its data set; `history`, the keys of all items that
    the user had, oldest first."""
    leave_out: tuple[str, ...] = ()
    """Features of the layout that are left out, such as those that are unknown when items are ranked."""
    held_out_of: str | None = None
    """MovieLens, Deskdrop: a data set of `rayrec prepare`, made of the same source; what it holds out is held
    out here, so that a model of these impressions can rerank for recommenders trained on it."""
    split: SplitRule = "auto"
    """`files`: the source has a file for each split; `order`: the last rows are held out; `time`: the latest
    ones; `random`: any rows, by the seed.
    `auto`: by files where there are some, else by time where the layout has one, else by order."""
    valid_fraction: float = Field(0.1, ge=0, lt=1)
    """Part of the rows that validates, where there is no file or date for it."""
    test_fraction: float = Field(0.1, ge=0, lt=1)
    """Part of the rows that is tested, where there is no file or date for it."""
    valid_start: Boundary | None = None
    """Split by time: the first time that validates, as an ISO date or UNIX seconds, instead of fractions."""
    test_start: Boundary | None = None
    """Split by time: the first time that is tested, as an ISO date or UNIX seconds, instead of fractions."""
    min_count: int = Field(1, ge=1)
    """Ids seen less often than this in training rows become one id for all rare ones of their space."""
    seed: int = Field(0, ge=0)
    """Seed of a random split."""
    rows_per_group: int = Field(8192, ge=1)
    """Rows of a Parquet row group: the unit that readers permute."""
    rows_per_file: int = Field(1_048_576, ge=1)
    """Most rows of one training file."""
    overwrite: bool = False
    """Replace a data set of impressions that is already there."""

    @model_validator(mode="after")
    def _roles_fit_the_layout(self) -> Self:
        given = [name for name in _ROLES if getattr(self, name)]
        if self.layout != "table":
            if given:
                named = option(given[0], f"--{_ROLES[given[0]] or given[0]}")
                raise ValueError(f"{named} belongs to the layout table; {self.layout} knows its own columns")
            return self
        if not self.labels:
            raise ValueError("the layout table needs at least one column of labels (--label NAME)")
        if not (self.numbers or self.ids or self.lists):
            raise ValueError(
                "the layout table needs at least one feature: numbers (--number NAME), ids (--id NAME) "
                "or lists (--list NAME:SPACE)"
            )
        named_columns = [*self.labels, *self.numbers, *self.ids, *self.lists]
        if self.group is not None and self.group not in self.ids:
            named_columns.append(self.group)
        twice = [name for name in named_columns if named_columns.count(name) > 1]
        if twice:
            raise ValueError(
                f"the column {twice[0]!r} is named twice; a column is a label, a number, an id, a list or "
                "the group, and only an id may be the group too"
            )
        features = [*self.numbers, *self.ids, *self.lists]
        taken = [*named_columns, *self.kept.values()]
        for column, name in self.kept.items():
            if taken.count(name) > 1:
                raise ValueError(
                    f"--keep {column}: there is another column {name!r}; give it a name, as in "
                    f"{column}:{column}_key"
                )
        for column, origin in self.origins.items():
            if column not in features:
                raise ValueError(f"origins names {column!r}; features are {', '.join(features)}")
            kind, _, name = origin.partition(".")
            if not (origin in ("user", "item", "history") or (kind in ("user", "item") and name)):
                raise ValueError(
                    f"origins.{column} is {origin!r}; expected user, item, history, user.NAME or item.NAME"
                )
        if self.time in self.labels:
            raise ValueError(f"the column {self.time!r} is both label and time; name another as time")
        return self

    @model_validator(mode="after")
    def _split_is_possible(self) -> Self:
        if self.held_out_of is not None and self.layout not in ("movielens", "deskdrop"):
            raise ValueError(
                f"{option('held_out_of')} belongs to the layouts movielens and deskdrop, whose rows are "
                f"events of a log; {self.layout} has others"
            )
        if self.held_out_of is not None and self.split != "auto":
            raise ValueError(f"{option('held_out_of')} says what is held out; leave {option('split')} out")
        if self.time_unit is not None and (
            self.layout in ("criteo", "avazu") or (self.layout == "table" and self.time is None)
        ):
            raise ValueError(
                f"{option('time_unit')} has no effect without a column of times ({option('time')}); leave it "
                "out"
            )
        starts = {"valid_start": self.valid_start, "test_start": self.test_start}
        dated = [name for name, value in starts.items() if value is not None]
        if dated and self.split != "time":
            raise ValueError(f"{option(dated[0])} belongs to the split by time; set split (--split time)")
        if len(dated) == 1:
            raise ValueError(
                f"{option('valid_start')} and {option('test_start')} go together; {dated[0]} stands alone"
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
        if (held_out := self.valid_fraction + self.test_fraction) >= 1:
            raise ValueError(
                f"{option('valid_fraction')} and {option('test_fraction')} are {held_out:g} together, "
                "which leaves no row to train on"
            )
        if self.rows_per_file < self.rows_per_group:
            raise ValueError(
                f"rows_per_file ({self.rows_per_file}) is less than rows_per_group ({self.rows_per_group})"
            )
        return self

    @model_validator(mode="after")
    def _what_is_set_has_an_effect(self) -> Self:
        is_of_ratings, its_layout = self.layout == "movielens", f"in the layout {self.layout}"
        has_history = self.layout in ("movielens", "deskdrop") or "history" in self.origins.values()
        is_by_fractions = self.held_out_of is None and self.split != "files" and self.valid_start is None
        reads_time = self.split in ("auto", "time") or self.time in self.kept
        fractions = "where files, dates or a data set say what is held out"
        for name, has_effect, where in (
            ("positive_rating", is_of_ratings, f"{its_layout}, which has no ratings"),
            ("history_events", is_of_ratings, f"{its_layout}, which has no ratings"),
            ("history_length", has_history, "without a column whose origin is history (--origin)"),
            ("list_separator", bool(self.lists), "without lists (--list)"),
            ("seed", self.split == "random", f"on a split that is not random ({option('split')})"),
            *((fraction, is_by_fractions, fractions) for fraction in FRACTIONS),
            ("time", reads_time, f"on the split {self.split}, unless the column is kept (--keep)"),
        ):
            if self.is_changed(name) and not has_effect:
                raise ValueError(f"{option(name)} has no effect {where}; leave it out")
        return self

    def is_changed(self, name: str) -> bool:
        """Whether a setting is another than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)
