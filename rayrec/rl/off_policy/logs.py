"""Logs of a policy with the probability of each logged action (its propensity).

Axes: N rows, A actions, F features of a context, R requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rayrec.platform.arrays import BoolArray, Float64Array, Int64Array
from rayrec.platform.errors import InputError
from rayrec.samples.importers.tables import (
    SUFFIXES,
    RawTable,
    column_names,
    files_of,
    find_table,
    read_table,
    visible,
)
from rayrec.samples.prepare.validation import refuse_nulls

ITEMS_FILE = "item_context"
_REWARDS = ("click", "reward")
_PROPENSITIES = ("propensity_score", "propensity", "pscore")
_OF_REQUESTS = {"request_id", "recommended"}
"""Columns of what `rayrec serve --request-log` writes: a row for each answer, with what was shown."""
_KEYS = ("request_id", "row")
"""Columns that say which request a row is of; messages with several requests number them."""
_OF_DECISIONS = {"request_id", "action", "propensity"}
"""Of the same with `allocate`: how much was computed of each answer, and with which chance."""
_EARNED = "earned"
"""Column of a log of decisions; a reward may be any number from 0."""


@dataclass(frozen=True)
class BanditLog:
    """One action per row, with its reward and its propensity.

    Raises:
        InputError: a propensity is not in (0, 1], or an action is out of range.
    """

    contexts_NF: Float64Array
    actions_N: Int64Array
    rewards_N: Float64Array
    propensities_N: Float64Array
    """Probability of the logged action, given the context and the position."""
    num_actions: int
    positions_N: Int64Array | None = None
    """Position on the page, from 0; None if there is only one."""
    name: str = "log"
    action_names: tuple[str | int, ...] = ()
    """As the log has them, by number."""
    requests_N: Int64Array | None = None
    """Request of each row, from 0: chance decides about the rows of one together. None: about each row."""
    could_show_RA: BoolArray | None = None
    """Actions that each request could get, where requests have lists of their own; None: all of them."""
    rewards_are_binary: bool = False
    """Whether a reward can be only 0 or 1: those of a log may happen to be, and bounds need to know."""
    num_positions: int = 0
    """Of the whole log; found in `positions_N`, and kept by `some`, whose rows may lack the deepest ones."""

    def __post_init__(self) -> None:
        is_wrong_N = ~((self.propensities_N > 0) & (self.propensities_N <= 1))
        if is_wrong_N.any():
            row = int(is_wrong_N.argmax())
            raise InputError(
                f"{self.name}: row {row + 1} has the propensity {self.propensities_N[row]}; it must be "
                "above 0 and at most 1, since actions that were never logged cannot be evaluated"
            )
        is_none_N = (self.actions_N < 0) | (self.actions_N >= self.num_actions)
        if is_none_N.any():
            row = int(is_none_N.argmax())
            raise InputError(
                f"{self.name}: row {row + 1} has the action {self.actions_N[row]}; there are "
                f"{self.num_actions}, from 0"
            )
        assert self.could_show_RA is None or self.requests_N is not None, "the lists are of requests"
        if self.positions_N is not None:
            deepest = int(self.positions_N.max(initial=-1)) + 1
            object.__setattr__(self, "num_positions", max(self.num_positions, deepest))

    def __len__(self) -> int:
        return len(self.actions_N)

    def some(self, rows_M: NDArray[np.integer]) -> BanditLog:
        """Select rows."""
        return replace(
            self,
            contexts_NF=self.contexts_NF[rows_M],
            actions_N=self.actions_N[rows_M],
            rewards_N=self.rewards_N[rows_M],
            propensities_N=self.propensities_N[rows_M],
            positions_N=None if self.positions_N is None else self.positions_N[rows_M],
            requests_N=None if self.requests_N is None else self.requests_N[rows_M],
        )

    @property
    def could_show_NA(self) -> BoolArray | None:
        """Actions that each row could have got; None: all of them."""
        if self.could_show_RA is None:
            return None
        found_NA: BoolArray = self.could_show_RA[self.requests_N]
        return found_NA

    def folds_N(self, num_folds: int, seed: int) -> Int64Array:
        """[N] a random fold for each row; rows of one request are in the same one, since they are alike.

        Raises:
            InputError: all rows are of one request, so no fold has others to learn from.
        """
        requests_N = np.arange(len(self)) if self.requests_N is None else self.requests_N
        known, numbers_N = np.unique(requests_N, return_inverse=True)
        if len(known) < 2:
            raise InputError(
                f"{self.name}: {len(self)} rows of {len(known)} requests; at least two are needed, since the "
                "rewards of each are predicted from those of others"
            )
        folds_R = np.random.default_rng(seed).permutation(len(known)) % num_folds
        return np.asarray(folds_R[numbers_N], np.int64)


def read_log(source: str | Path) -> BanditLog:
    """Read a log of shown items, as the Open Bandit Dataset has them (Saito et al., NeurIPS 2021 Datasets,
    arXiv:2008.07146).

    A table with `item_id`, the reward (`click` or `reward`, 0 or 1), the propensity (`propensity_score`,
    `propensity` or `pscore`), perhaps `position` (from 1) and `user_feature_*`, whose values are the context.
    `item_context` beside it lists all items; without it, they are those of the log. `request_id`, perhaps
    with `row`, says which items were shown together.

    A request log of `rayrec serve` has a row for each answer. It can be used where lists `propensities` and
    `rewards` were added beside `recommended`: the service itself shows what it holds best, at every request.
    A request could show the items of its list, or those of a list `candidates` where there is one.

    With `allocate`, it has another kind of actions, of which the service itself takes some at random: how
    much is computed of an answer (`action`, `propensity`). A column `reward`, any number from 0, makes it a
    log of these. Answers that could have got no other action are left out: all, while power is not short.

    Args:
        source: the table, or a folder with it and no other of this kind.

    Raises:
        InputError: naming the file, the row and the value that cannot be used; a request log without
            propensities, from which nothing can be told of another policy.
    """
    path, shown = _find_log(Path(source))
    raw = shown.raw
    names = raw.table.schema.names
    if not len(raw.table):
        raise InputError(f"{path}: no rows in it; expected one for each item that was shown")
    users = sorted(name for name in names if name.startswith("user_feature_"))
    contexts = raw.table.select(users).to_pandas().astype(str)
    items, item_N = _ids_of_items(path), raw.table["item_id"]
    refuse_nulls(raw, raw.names.get("item_id", "item_id"), item_N)
    keys_A = shown.all_items() if items is None else items
    actions_N = _numbers_of(item_N, keys_A)
    if (actions_N < 0).any():
        row = int(np.argmax(actions_N < 0))
        raise InputError(
            f"{raw.where(row)}: item {item_N[row].as_py()!r} is not in {ITEMS_FILE}, whose ids are like "
            f"{keys_A[0]!r}"
        )
    if _EARNED in names:
        rewards_N = _checked(raw, _EARNED, lambda x_N: np.isfinite(x_N) & (x_N >= 0), "a number from 0")
    else:
        rewards_N = _checked(raw, _named(names, _REWARDS), lambda x_N: (x_N == 0) | (x_N == 1), "0 or 1")
    propensities_N = _checked(
        raw,
        _named(names, _PROPENSITIES),
        lambda x_N: (x_N > 0) & (x_N <= 1),
        "a number above 0 and at most 1",
    )
    positions_N = None
    if "position" in names:
        from_1_N = _checked(
            raw, "position", lambda x_N: (x_N >= 1) & (x_N == np.floor(x_N)), "an integer from 1"
        )
        positions_N = from_1_N.astype(np.int64) - 1
    return BanditLog(
        pd.get_dummies(contexts, dtype=float).to_numpy(dtype=np.float64)
        if users
        else np.empty((len(raw.table), 0)),
        actions_N,
        rewards_N,
        propensities_N,
        num_actions=len(keys_A),
        positions_N=positions_N,
        name=str(path),
        action_names=tuple(keys_A),
        requests_N=shown.requests_N,
        could_show_RA=shown.could_show_RA(actions_N, keys_A),
        rewards_are_binary=_EARNED not in names,
    )


@dataclass(frozen=True)
class _Rows:
    """A table with one row for each action, and what is known of their requests."""

    raw: RawTable
    requests_N: Int64Array | None = None
    candidates: pa.ListArray | None = None
    """[R] items that each request could show."""

    def all_items(self) -> list[str] | list[int]:
        """Those that were shown or could have been, in order.

        Raises:
            InputError: a candidate has no value, or one of another type than what was shown.
        """
        shown = set(self.raw.table["item_id"].to_pylist())
        found = set() if self.candidates is None else set(self.candidates.flatten().to_pylist())
        if None in found:
            raise InputError(f"{self.raw.file}: a list of the column candidates has an item without a value")
        if shown and found and type(next(iter(shown))) is not type(next(iter(found))):
            raise InputError(
                f"{self.raw.file}: items that were shown are like {next(iter(shown))!r}, and candidates like "
                f"{next(iter(found))!r}; write both alike"
            )
        return sorted(shown | found)

    def could_show_RA(self, actions_N: Int64Array, keys_A: Sequence[str | int]) -> BoolArray | None:
        """Which of the items each request could show.

        Raises:
            InputError: a candidate is not among the items, or an item that was shown is no candidate.
        """
        if self.candidates is None:
            return None
        assert self.requests_N is not None, "the lists are of requests"
        lengths_R = pc.fill_null(pc.list_value_length(self.candidates), 0).to_numpy(zero_copy_only=False)
        could_RA = np.zeros((len(lengths_R), len(keys_A)), np.bool_)
        items, owners = self.candidates.flatten(), np.repeat(np.arange(len(lengths_R)), lengths_R)
        numbers = _numbers_of(items, keys_A)
        if (numbers < 0).any():
            strange = int(np.argmax(numbers < 0))
            raise InputError(
                f"{self.raw.file}: the candidate {items[strange].as_py()!r} is not in {ITEMS_FILE}, "
                f"whose ids are like {keys_A[0]!r}"
            )
        could_RA[owners, numbers] = True
        is_none_N = ~could_RA[self.requests_N, actions_N]
        if is_none_N.any():
            row = int(np.argmax(is_none_N))
            raise InputError(
                f"{self.raw.where(row)}: item {keys_A[actions_N[row]]!r} was shown, but is not among the "
                f"candidates of its request ({int(is_none_N.sum())} such items)"
            )
        return could_RA


def _numbers_of(items: pa.Array | pa.ChunkedArray, keys_A: Sequence[str | int]) -> Int64Array:
    """Places of items among the keys; -1 of others."""
    try:
        return np.asarray(pd.Index(keys_A).get_indexer(items.to_pandas()), np.int64)
    except TypeError:  # texts among numbers
        return np.full(len(items), -1, np.int64)


def _find_log(source: Path) -> tuple[Path, _Rows]:
    """The table of a log.

    Raises:
        InputError: there is none, or several.
    """
    if source.is_dir():
        if any("=" in entry.name for entry in visible(source) if entry.is_dir()):
            return source, _with_columns(read_table(source, as_text=()))
        files = [file for file in visible(source) if file.is_file() and file.name.endswith(SUFFIXES)]
        files = [file for file in files if file.name.split(".")[0] != ITEMS_FILE]
        logs = files
        if len(files) > 1:
            logs = [file for file in files if {"item_id", "recommended"} & set(column_names(file))]
        if len(logs) != 1:
            raise InputError(
                f"{source}: expected one table of shown items, found {len(logs)} among {files_of(source)}; "
                "give the file itself"
            )
        source = logs[0]
    return source, _with_columns(read_table(source, as_text=()))


def _with_columns(raw: RawTable) -> _Rows:
    """A log with all columns that are needed, one row for each shown item.

    Raises:
        InputError: one is missing.
    """
    names = raw.table.schema.names
    if set(names) >= _OF_DECISIONS and set(names) & set(_REWARDS):
        # Of the requests of one message, too, chance decides about each by itself.
        return _Rows(_decisions(raw))
    if set(names) >= _OF_REQUESTS:
        return _shown_items(raw)
    for wanted in (("item_id",), _REWARDS, _PROPENSITIES):
        if not set(wanted) & set(names):
            raise InputError(f"{raw.file}: has no column {' or '.join(wanted)}; found {', '.join(names)}")
    return _Rows(raw, _requests_of(raw))


def _requests_of(raw: RawTable) -> Int64Array | None:
    """The request of each row, from 0; a row without an id is a request of its own."""
    names = raw.table.schema.names
    if "request_id" not in names:
        return None
    keys = raw.table.select([name for name in _KEYS if name in names]).to_pandas()
    groups = keys.groupby(list(keys), dropna=False, sort=False)
    requests_N = groups.ngroup().to_numpy(dtype=np.int64, copy=True)
    has_none_N = keys["request_id"].isna().to_numpy()
    requests_N[has_none_N] = len(keys) + np.arange(int(has_none_N.sum()))
    return np.asarray(np.unique(requests_N, return_inverse=True)[1], np.int64)


def _shown_items(raw: RawTable) -> _Rows:
    """The items of a request log, one in a row.

    Raises:
        InputError: there are no propensities or rewards, or not one for each item.
    """
    _refuse_repeated(raw)
    shown = _lists(raw, "recommended", "items")
    lengths_R = pc.fill_null(pc.list_value_length(shown), 0).to_numpy(zero_copy_only=False)
    missing = [name for name in ("propensities", "rewards") if name not in raw.table.schema.names]
    if missing:
        raise InputError(
            f"{raw.file}: a request log of {len(raw.table):,} answers with {lengths_R.sum():,} shown items, "
            f"but without {' and '.join(missing)}; the service shows what its model holds best, so other "
            "items had no chance to be shown, and what another policy would have earned cannot be told from "
            "it. Where something behind the service explores, add lists of these names beside `recommended`; "
            "where the service allocates computing power, add `reward` beside `action` and `propensity`"
        )
    columns = {"item_id": shown.flatten()}
    for name, column in (("propensity", "propensities"), ("reward", "rewards")):
        values = _lists(raw, column, "numbers")
        wrong_R = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False) != lengths_R
        if wrong_R.any():
            raise InputError(
                f"{raw.where(int(np.argmax(wrong_R)))}: {column} has another length than recommended; "
                "expected one for each item"
            )
        columns[name] = values.flatten()
    rows_N = np.repeat(np.arange(len(lengths_R)), lengths_R)
    stops_R = np.cumsum(lengths_R)
    columns["position"] = pa.array(np.arange(len(rows_N)) - (stops_R - lengths_R)[rows_N] + 1)
    for name in raw.table.schema.names:
        if name.startswith("user_feature_"):
            columns[name] = raw.table[name].combine_chunks().take(pa.array(rows_N))
    candidates = shown
    if "candidates" in raw.table.schema.names:
        candidates = _lists(raw, "candidates", "items")
    table = RawTable(pa.table(columns), raw.file, lambda row: raw.where(int(rows_N[row])))
    return _Rows(table, rows_N, candidates)


def _lists(raw: RawTable, name: str, what: str) -> pa.ListArray:
    """A column of lists.

    Raises:
        InputError: it has something else, such as the texts that a CSV file makes of lists.
    """
    values = raw.table[name].combine_chunks()
    if not pa.types.is_list(values.type):
        said = f"column {name} has the type {values.type}; expected lists of {what}"
        raise InputError(f"{raw.file}: {said}")
    return values


def _decisions(raw: RawTable) -> RawTable:
    """How much was computed of answers, one in a row, where chance decided it.

    Raises:
        InputError: there is none, or the propensities are no numbers.
    """
    _refuse_repeated(raw)
    kind = raw.table["propensity"].type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        raise InputError(f"{raw.file}: column propensity has the type {kind}; expected numbers")
    reward = _named(raw.table.schema.names, _REWARDS)
    by_chance_R = pc.less(raw.table["propensity"], 1.0).combine_chunks()
    (rows_N,) = np.nonzero(pc.fill_null(by_chance_R, False).to_numpy(zero_copy_only=False))
    if not len(rows_N):
        raise InputError(
            f"{raw.file}: {len(raw.table):,} answers, of which none could have got another action; what "
            "another policy would have earned can be told only where `allocate.explore` is above 0 and power "
            "was short"
        )
    some = raw.table.take(pa.array(rows_N))
    columns = {
        "item_id": some["action"],
        "propensity": some["propensity"],
        _EARNED: some[reward],
    }
    users = {name: some[name] for name in some.schema.names if name.startswith("user_feature_")}
    names = {"item_id": "action", _EARNED: reward}
    return RawTable(pa.table(columns | users), raw.file, lambda row: raw.where(int(rows_N[row])), names)


def _refuse_repeated(raw: RawTable) -> None:
    """Refuse answers that are there twice: their items would count twice.

    Raises:
        InputError: naming the first row whose request was there before.
    """
    # A request of the Open Inference Protocol has several rows, with a number each.
    by = [name for name in _KEYS if name in raw.table.schema.names]
    keys = raw.table.select(by).to_pandas()
    again_R = (keys.duplicated() & keys["request_id"].notna()).to_numpy()
    if again_R.any():
        row = int(np.argmax(again_R))
        raise InputError(
            f"{raw.where(row)}: the request {keys['request_id'][row]!r} is there a second time "
            f"({int(again_R.sum())} such rows); keep one row of each answer"
        )


def _ids_of_items(log: Path) -> list[int] | list[str] | None:
    """All ids of the table of items beside a log, sorted; None where there is none."""
    path = find_table(log.parent, ITEMS_FILE)
    if path is None or path == log:
        return None
    raw = read_table(path, as_text=())
    if "item_id" not in raw.table.schema.names:
        raise InputError(f"{path}: has no column item_id; found {', '.join(raw.table.schema.names)}")
    return sorted(set(raw.table["item_id"].drop_null().to_pylist()))


def _named(names: Sequence[str], wanted: Sequence[str]) -> str:
    return next(name for name in wanted if name in names)


def _checked(
    raw: RawTable, name: str, is_good: Callable[[Float64Array], NDArray[np.bool_]], expected: str
) -> Float64Array:
    """A column of numbers, each of which is good.

    Raises:
        InputError: naming the first row that is not, or has none.
    """
    column = raw.table[name]
    values_N = pd.to_numeric(column.to_pandas(), errors="coerce").to_numpy(dtype=np.float64)
    bad_N = ~is_good(values_N)  # NaN compares with nothing
    if bad_N.any():
        row = int(np.argmax(bad_N))
        raise InputError(
            f"{raw.where(row)}: {raw.names.get(name, name)} is {column[row].as_py()!r}, "
            f"expected {expected} "
            f"({int(bad_N.sum())} such rows)"
        )
    return values_N
