"""Where each user's target is in the lists of an evaluation: what two evaluations are compared by.

One Parquet file: a row per user in the order of the data set, a column per list, and a header in the schema's
metadata that says whose users, items and lists these are. Positions count from 1 there, null is not in the
list; here, places count from 0, and what is not in a list has the place `depth`.

Axes: U users.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.pipelines.metrics.ranking_metrics import metric_names
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.files import written_whole
from rayrec.samples.dataset.manifest import Split

SUFFIX = ".positions.parquet"
FORMAT: Final = 2
_KEY = b"rayrec"
_UNKNOWN = -1

SeenItems = Literal["left out", "kept"]


class ListInfo(Config):
    """How the lists of one method were made."""

    depth: int
    """Items of a list; at least the largest cutoff where lists hold all there is."""
    seen_items: SeenItems
    """The mask rule: whether items of a user's history are left out."""
    search: str
    """How the items of a list were found."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return metric_names(self.depth)


class PositionsHeader(Config):
    """What makes two files comparable, and where this one is from."""

    format: Literal[1, 2] = FORMAT
    """Of 1, `held_out` depends on the sizes of batches, and seeds of one side are not told apart."""
    run: str
    """Name of the run, or of the data set where there is none."""
    snapshot: str | None = None
    """Name of its snapshot."""
    snapshot_fingerprint: str | None = None
    """Hash of what is in the snapshot: another one of the same step is told apart."""
    method: str | None = None
    """Hash of the run's settings without its seed; None of what needs no training."""
    seed: int | None = None
    dataset: str
    fingerprint: str
    """Of the data set."""
    split: Split
    after: int | None = None
    """UNIX seconds: users whose target is no later were left out; None: nobody was."""
    num_left_out: int = 0
    """How many these were."""
    max_users: int | None = None
    """The first so many users were asked for; None: all. Files of earlier versions do not say it."""
    grown: str | None = None
    """Fingerprint of the data set whose catalog was ranked, where it is not the one that was trained on."""
    split_rule: str
    """`leave_one_out`, `time` or `given`."""
    users: str
    """Hash of the users' ids, in their order."""
    held_out: str
    """Hash of what every user is judged by: target and history."""
    catalog: str
    """Hash of the items' ids."""
    num_users: int
    num_items: int
    head_from: int
    """Items with at least so many training events are the head."""
    behaviors: tuple[str, ...] = ()
    """Names of the codes of the targets' behavior."""
    lists: dict[str, ListInfo]


@dataclass(frozen=True)
class EvaluatedUsers:
    """What slices are made of, in the order of the data set."""

    user_ids_U: Int64Array
    targets_U: Int64Array
    """Item ids."""
    history_lengths_U: Int64Array
    train_counts_U: Int64Array
    """Training events of each target; 0 as well for an item that is not in the catalog."""
    is_repeat_U: BoolArray
    """Whether the target is in the history: lists without seen items cannot have it."""
    behaviors_U: Int64Array | None = None
    """Codes of the targets' behavior, -1 where it is unknown; None where the data set has none."""

    def __len__(self) -> int:
        return len(self.user_ids_U)

    def some(self, is_chosen_U: BoolArray) -> EvaluatedUsers:
        behaviors_U = self.behaviors_U
        return EvaluatedUsers(
            self.user_ids_U[is_chosen_U],
            self.targets_U[is_chosen_U],
            self.history_lengths_U[is_chosen_U],
            self.train_counts_U[is_chosen_U],
            self.is_repeat_U[is_chosen_U],
            None if behaviors_U is None else behaviors_U[is_chosen_U],
        )


@dataclass(frozen=True)
class Positions:
    """Of all lists of one evaluation."""

    header: PositionsHeader
    places: Mapping[str, Int64Array]
    """[U] by list."""
    users: EvaluatedUsers | None = None
    """None in a file that was written without."""

    def only(self, *names: str) -> Positions:
        """Some lists, without what slices are made of: about a byte a user for each."""
        header = self.header.model_copy(update={"lists": {name: self.header.lists[name] for name in names}})
        return Positions(header, {name: self.places[name] for name in names})

    def some(self, is_chosen_U: BoolArray) -> Positions:
        """Those of some users; the header is the same."""
        users = None if self.users is None else self.users.some(is_chosen_U)
        return Positions(self.header, {name: at_U[is_chosen_U] for name, at_U in self.places.items()}, users)

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        columns: dict[str, pa.Array] = {}
        if (users := self.users) is not None:
            columns |= {
                "user_id": pa.array(users.user_ids_U),
                "target": pa.array(users.targets_U),
                "history_length": pa.array(users.history_lengths_U, pa.int32()),
                "target_train_count": pa.array(users.train_counts_U, pa.int64()),
                "target_in_history": pa.array(users.is_repeat_U),
            }
            if users.behaviors_U is not None:
                columns["target_behavior"] = pa.array(
                    users.behaviors_U, pa.int16(), mask=users.behaviors_U == _UNKNOWN
                )
        for name, places_U in self.places.items():
            depth = self.header.lists[name].depth
            dtype = pa.uint16() if depth <= np.iinfo(np.uint16).max else pa.uint32()
            columns[name] = pa.array(places_U + 1, dtype, mask=places_U >= depth)
        header = json.dumps(self.header.model_dump(mode="json"))
        table = pa.table(columns).replace_schema_metadata({_KEY: header.encode()})
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as unfinished:
            pq.write_table(table, unfinished, compression="zstd", compression_level=15)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            InputError: there is none, or another one.
        """
        header = read_header(path)
        try:
            table = pq.read_table(path)
            places = {
                name: _integers(table[name], null=info.depth + 1) - 1 for name, info in header.lists.items()
            }
            users = _users_in(table) if "user_id" in table.column_names else None
        except (OSError, KeyError, pa.ArrowException) as error:
            raise InputError(f"{path}: not a readable file of positions: {error}") from error
        return cls(header, places, users)


def read_header(path: Path) -> PositionsHeader:
    """The header of a file of positions; nothing else of it is read.

    Raises:
        InputError: there is none, or another file.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such file of positions; rayrec evaluate writes them")
    try:
        metadata: Mapping[bytes, bytes] = pq.read_schema(path).metadata or {}
        values: dict[str, Any] = json.loads(metadata[_KEY])
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise InputError(f"{path}: not a file of positions as rayrec evaluate writes them") from error
    return PositionsHeader.parse(values, source=str(path))


def _users_in(table: pa.Table) -> EvaluatedUsers:
    has_behaviors = "target_behavior" in table.column_names
    return EvaluatedUsers(
        user_ids_U=table["user_id"].to_numpy(),
        targets_U=table["target"].to_numpy(),
        history_lengths_U=_integers(table["history_length"]),
        train_counts_U=_integers(table["target_train_count"]),
        is_repeat_U=table["target_in_history"].to_numpy(),
        behaviors_U=_integers(table["target_behavior"]) if has_behaviors else None,
    )


def _integers(column: pa.ChunkedArray, null: int = _UNKNOWN) -> Int64Array:
    values: Int64Array = column.cast(pa.int64()).fill_null(null).to_numpy()
    return values
