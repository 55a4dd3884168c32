"""A prepared data set, opened and checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.platform.arrays import Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.event_labels import Label
from rayrec.samples.base.event_labels import HISTORY_LABELS, LABEL_COLUMNS, TARGET_LABELS
from rayrec.samples.base.event_times import HISTORY_TIMES, TIMES
from rayrec.samples.base.jagged import list_values
from rayrec.samples.dataset.dataset_folder import DatasetFolder
from rayrec.samples.dataset.manifest import (
    EVALUATION_FILES,
    HISTORY_FILE,
    ITEMS_FILE,
    USERS_FILE,
    Manifest,
    Split,
)


@dataclass(frozen=True)
class Items:
    """The catalog; an item's index in every array here is its *position*.

    The order is that of a hash of the id, so a position says nothing about the item.
    """

    ids_I: Int64Array
    keys: pa.ChunkedArray
    """[I] strings: the ids as the source writes them."""
    titles: pa.ChunkedArray
    """[I] strings, null where the source has none."""
    texts: pa.ChunkedArray
    """[I] strings: the columns `text_columns` of the manifest, joined; null where all are."""
    train_counts_I: Int64Array
    """Training events of each item: what popularity may be computed from."""

    def __len__(self) -> int:
        return len(self.ids_I)

    def label(self, position: int) -> str:
        """The title of an item, or its key where it has none."""
        return self.titles[position].as_py() or self.keys[position].as_py()


@dataclass(frozen=True)
class EvaluationRows:
    """One row per evaluated user: everything before the target, and the target."""

    user_ids_B: Int64Array
    history_ids_N: Int64Array
    """Item ids, oldest first, concatenated."""
    offsets_B1: Int64Array
    targets_B: Int64Array
    """Item id of the event to predict."""
    times_N: Int64Array | None = None
    """UNIX seconds of the events of the history, where they were asked for."""
    labels: dict[Label, Int64Array] = field(default_factory=dict)
    """[N] codes of the events of the history, of the labels that were asked for."""
    target_labels: dict[Label, Int64Array] = field(default_factory=dict)
    """[B] those of the targets."""

    def __len__(self) -> int:
        return len(self.user_ids_B)


class Dataset(DatasetFolder[Manifest]):
    """A data set folder written by `rayrec prepare`. Tables are read when first asked for."""

    MANIFEST = Manifest

    def __init__(self, root: Path, manifest: Manifest) -> None:
        super().__init__(root, manifest)
        self._histories: dict[str, tuple[Int64Array, Int64Array]] = {}
        """Columns of the file of histories that were asked for: values and offsets."""

    @property
    def train_files(self) -> tuple[str, ...]:
        """Names below `root`, sorted; a file's number is its index here.

        Raises:
            InputError: this is a copy without training rows.
        """
        if self.manifest.held is not None:
            raise InputError(
                f"{self.root}: this copy of the data set has only what recommending needs; train and "
                "evaluate with the one it was made of"
            )
        return super().train_files

    @cached_property
    def item_table(self) -> pa.Table:
        """[I] rows of the catalog: what `items` has, and the further columns of the source."""
        return self.read(ITEMS_FILE)

    @cached_property
    def items(self) -> Items:
        table = self.item_table
        return Items(
            ids_I=table["item_id"].to_numpy(),
            keys=table["item_key"],
            titles=table["title"],
            texts=table["text"],
            train_counts_I=table["train_count"].to_numpy(),
        )

    @cached_property
    def users(self) -> pa.Table:
        """[U] rows: user_id, user_key and the columns of the source, in order of a hash of the id."""
        return self.read(USERS_FILE)

    def item_positions(self, item_ids: Int64Array) -> Int64Array:
        """Catalog position of each id, -1 for ids that are not in it; shape kept."""
        item_ids = np.asarray(item_ids, dtype=np.int64)
        found = self._item_index.get_indexer(pd.Index(item_ids.reshape(-1)))
        return found.astype(np.int64, copy=False).reshape(item_ids.shape)

    def check_times(self) -> None:
        """Check that histories have times.

        Raises:
            InputError: the data set was made before times of histories were kept.
        """
        if (missing := self._without(TIMES, HISTORY_TIMES)) is not None:
            path, column = missing
            raise InputError(
                f"{path}: the times of the histories ({column}) are missing, which the model needs; an "
                "earlier version made this data set: prepare it again, or take a model without times"
            )

    def has_times(self) -> bool:
        """Whether there are times of histories; see `check_times`."""
        return self._without(TIMES, HISTORY_TIMES) is None

    def has_order_alone(self) -> bool:
        """Whether times are places in histories, as the source had no others: they say nothing of what other
        users had done by then."""
        return self.manifest.counts.get("ordered_without_times", 0) > 0

    def newest_time(self) -> int:
        """UNIX seconds of the newest event of all; see `check_times`."""
        parts = self.read_parts(HISTORY_FILE, [TIMES], 1 << 16)
        return max(int(list_values(part[TIMES])[0].max()) for part in parts)  # every user has an event

    def has_label(self, label: Label) -> bool:
        """Whether there are labels of histories; see `check_label`."""
        named = bool(self.manifest.labels[label])
        return named and self._without(LABEL_COLUMNS[label], HISTORY_LABELS[label]) is None

    def check_label(self, label: Label, of_histories: bool = True) -> None:
        """Check that events have this label.

        Args:
            of_histories: whether the model reads it of the events of histories, or knows its names alone.

        Raises:
            InputError: the source said nothing of its events by this label, or the data set was made before
                labels of histories were kept.
        """
        if not self.manifest.labels[label]:
            raise InputError(
                f"{self.root}: its events have no {label}, which the model needs; prepare it from a log with "
                f"such a column (of another name: --column {label}=NAME), or take a model without"
            )
        missing = self._without(LABEL_COLUMNS[label], HISTORY_LABELS[label]) if of_histories else None
        if missing is not None:
            path, column = missing
            raise InputError(
                f"{path}: the {label} of the events of histories ({column}) is missing, which the model "
                "needs; an earlier version made this data set: prepare it again, or take a model without"
            )

    def _without(self, in_histories: str, in_evaluation: str) -> tuple[Path, str] | None:
        """The first file that lacks its column, and that column."""
        names = {HISTORY_FILE: in_histories} | dict.fromkeys(EVALUATION_FILES.values(), in_evaluation)
        for name, column in names.items():
            if name not in self.manifest.held_files:
                continue
            path = self.root / name
            try:
                found = pq.read_schema(path).names
            except (OSError, pa.ArrowException) as error:
                raise InputError(f"{path}: not a readable Parquet file: {error}") from error
            if column not in found:
                return path, column
        return None

    def evaluation_rows(
        self,
        split: Split,
        with_times: bool = False,
        labels: Sequence[Label] = (),
        max_rows: int | None = None,
    ) -> EvaluationRows:
        """The users that have a target in this split.

        Args:
            with_times: read the times of their histories too; `check_times` says whether there are any.
            labels: of histories and targets, to be read too; `check_label` says whether there are any.
            max_rows: the first so many users, in the order of a hash of their ids: a sample. No more of the
                file is read than they take.
        """
        columns = _evaluation_columns(split, with_times, labels)
        if max_rows is None:
            return _evaluation_rows(self.read(EVALUATION_FILES[split], columns), with_times, labels)
        parts = self.read_parts(EVALUATION_FILES[split], columns, max_rows, max_rows)
        table = next(parts, None)
        if table is None:
            table = self.read(EVALUATION_FILES[split], columns)  # which has no rows
        return _evaluation_rows(table, with_times, labels)

    def evaluation_parts(
        self,
        split: Split,
        rows: int,
        with_times: bool = False,
        labels: Sequence[Label] = (),
        max_rows: int | None = None,
    ) -> Iterator[EvaluationRows]:
        """As `evaluation_rows`, so many users at a time: no more of them are in memory."""
        columns = _evaluation_columns(split, with_times, labels)
        for table in self.read_parts(EVALUATION_FILES[split], columns, rows, max_rows):
            yield _evaluation_rows(table, with_times, labels)

    def target_times(self, split: Split, max_rows: int | None = None) -> Int64Array:
        """[B] UNIX seconds of the targets of `evaluation_rows`, in their order."""
        parts = self.read_parts(EVALUATION_FILES[split], ["timestamp"], 1 << 20, max_rows)
        times = [part["timestamp"].to_numpy() for part in parts]
        return np.concatenate(times) if times else np.empty(0, dtype=np.int64)

    def target_labels(self, split: Split, label: Label, max_rows: int | None = None) -> Int64Array | None:
        """[B] codes of the targets of `evaluation_rows`, in their order; None where the source has no such
        labels."""
        column = TARGET_LABELS[label]
        if not self.has_label(label):
            return None
        parts = self.read_parts(EVALUATION_FILES[split], [column], 1 << 20, max_rows)
        codes = [part[column].to_numpy().astype(np.int64) for part in parts]
        return np.concatenate(codes) if codes else np.empty(0, dtype=np.int64)

    def train_events(self) -> tuple[Int64Array, Int64Array]:
        """([E] ids of the users, [E] ids of the items) of all training events."""
        users, items = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for name in self.train_files:
            table = self.read(name, ["user_id", "item_ids"])
            items_E, offsets_B1 = list_values(table["item_ids"])
            users.append(np.repeat(table["user_id"].to_numpy(), np.diff(offsets_B1)))
            items.append(items_E)
        return np.concatenate(users), np.concatenate(items)

    def num_evaluated(self, split: Split) -> int:
        """Users that have a target in this split, by the manifest."""
        _check_evaluated(split)
        return self.manifest.files[EVALUATION_FILES[split]].rows

    def position_by_key(self, key: str) -> int | None:
        """Catalog position of the item the source calls `key`; None when unknown."""
        return _position_of(self._item_keys, key)

    def user_by_key(self, key: str) -> int | None:
        """Id of the user the source calls `key`; None when unknown."""
        row = _position_of(self._user_keys, key)
        return None if row is None else self.users["user_id"][row].as_py()

    def history_of(self, user_key: str) -> Int64Array | None:
        """All item ids of a user, oldest first, targets included; None for an unknown user."""
        return self._events_of(user_key, "item_ids")

    def history_times_of(self, user_key: str) -> Int64Array | None:
        """UNIX seconds of the events of `history_of`; `check_times` says whether there are any."""
        return self._events_of(user_key, TIMES)

    def history_labels_of(self, user_key: str, label: Label) -> Int64Array | None:
        """Codes of the events of `history_of`; `check_label` says whether there are any."""
        return self._events_of(user_key, LABEL_COLUMNS[label])

    def _events_of(self, user_key: str, column: str) -> Int64Array | None:
        """What the file of histories has of each event of a user; None for an unknown user."""
        row = _position_of(self._user_keys, user_key)
        if row is None:
            return None
        if column not in self._histories:
            self._histories[column] = list_values(self.read(HISTORY_FILE, [column])[column])
        # Written in the order of users.parquet: row u is that user's.
        values_N, offsets_U1 = self._histories[column]
        return values_N[offsets_U1[row] : offsets_U1[row + 1]]

    @cached_property
    def sorted_user_keys(self) -> list[str]:
        """Of all users."""
        keys: list[str] = self.users["user_key"].to_pylist()
        return sorted(keys)

    @cached_property
    def _item_index(self) -> pd.Index:
        return pd.Index(self.items.ids_I)

    @cached_property
    def _item_keys(self) -> pd.Index:
        return pd.Index(self.items.keys.to_pandas())

    @cached_property
    def _user_keys(self) -> pd.Index:
        return pd.Index(self.users["user_key"].to_pandas())


def _check_evaluated(split: Split) -> None:
    if split not in EVALUATION_FILES:
        raise InputError(f"there is no split {split!r} to evaluate; choose 'valid' or 'test'")


def _evaluation_columns(split: Split, with_times: bool, labels: Sequence[Label]) -> list[str]:
    _check_evaluated(split)
    columns = ["user_id", "history", "target", *([HISTORY_TIMES] if with_times else [])]
    return columns + [names[label] for names in (HISTORY_LABELS, TARGET_LABELS) for label in labels]


def _evaluation_rows(table: pa.Table, with_times: bool, labels: Sequence[Label]) -> EvaluationRows:
    history_ids_N, offsets_B1 = list_values(table["history"])
    return EvaluationRows(
        user_ids_B=table["user_id"].to_numpy(),
        history_ids_N=history_ids_N,
        offsets_B1=offsets_B1,
        targets_B=table["target"].to_numpy(),
        times_N=list_values(table[HISTORY_TIMES])[0] if with_times else None,
        labels={label: list_values(table[HISTORY_LABELS[label]])[0] for label in labels},
        target_labels={label: table[TARGET_LABELS[label]].to_numpy().astype(np.int64) for label in labels},
    )


def _position_of(keys: pd.Index, key: str) -> int | None:
    try:  # `get_indexer` would make an index of the one key, which takes twenty times as long
        return int(keys.get_loc(str(key)))
    except KeyError:
        return None
