"""What a version has to show before it serves: finite numbers, sane answers to users of its data, a catalog.

publication: weights, rows ─► finite? ─► answers to probe users ─► sane, and near those of the version before?
             catalog ─► the store's?                  └─► kept with the version
flip:        weights ─► finite? ─► answers to the same users ─► sane? as they were published?

A model whose weights are no numbers names no items, and one whose weights are all zero names the same to
everybody; both answer quickly and without an error, so nothing but a look at the answers tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayrec.embeddings.table.table_rows import TableRows
from rayrec.pipelines.inference.answers import Answer
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.versions.manifest import Probe
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.manifest import ITEMS_FILE

NUM_PROBES = 32
PROBE_K = 10
LEAST_SHARED_ITEMS = 0.1
"""Of the smaller of two catalogs; below it they are of different things."""


class GateError(InputError):
    """A version is not fit to serve."""


@dataclass(frozen=True)
class Probed:
    """What a model answers to users of its data."""

    users: tuple[str, ...]
    histories: tuple[tuple[int, ...], ...]
    answers: tuple[Answer, ...]

    @property
    def kept(self) -> tuple[Probe, ...]:
        """As a version's manifest has them."""
        return tuple(
            Probe(user=user, items=tuple(item.item_key for item in answer.items))
            for user, answer in zip(self.users, self.answers, strict=True)
        )


def check_weights(weights: Mapping[str, np.ndarray], where: str) -> None:
    """Check that dense weights are finite.

    Raises:
        GateError: some are not; names the tensor.
    """
    for name, values in weights.items():
        _check_finite(values, f"{where}: the dense weights {name!r}")


def finite_rows(parts: Iterable[TableRows], where: str) -> Iterator[TableRows]:
    """The same rows, checked on their way.

    Raises:
        GateError: some are not finite.
    """
    for part in parts:
        _check_finite(part.weights_MD, f"{where}: the rows")
        yield part


def _check_finite(values: np.ndarray, what: str) -> None:
    if values.dtype.kind in "iub":
        return
    # A bfloat16 is no kind of float to numpy.
    is_finite = np.isfinite(values if values.dtype.kind == "f" else values.astype(np.float32))
    if not is_finite.all():
        num_bad = int(is_finite.size - np.count_nonzero(is_finite))
        raise GateError(
            f"{what} have {num_bad:,} of {is_finite.size:,} values that are not finite, so it cannot "
            "recommend; take an earlier snapshot or version, and look at the run's loss"
        )


def probe(recommender: Recommender, users: Sequence[str] | None = None) -> Probed:
    """Ask a model for the items of a few users with a history.

    Args:
        users: to ask for, as far as they are known; None: some that are spread over all.
    """
    if users is None:
        keys = recommender.dataset.users["user_key"]
        positions = np.unique(np.linspace(0, len(keys) - 1, min(NUM_PROBES, len(keys)), dtype=np.int64))
        users = [str(keys[position].as_py()) for position in positions.tolist()]
    found = [(user, recommender.query_of_user(user)) for user in users]
    asked = [(user, query) for user, query in found if query is not None and len(query.history_ids)]
    # Items of the history stay in: without them, a model that reads nothing would seem to tell users apart.
    answers = recommender.answer([query for _, query in asked], PROBE_K, exclude_seen=False) if asked else []
    read = [
        (user, query, answer) for (user, query), answer in zip(asked, answers, strict=True) if answer.num_read
    ]
    return Probed(
        users=tuple(user for user, _, _ in read),
        histories=tuple(tuple(query.history_ids.tolist()) for _, query, _ in read),
        answers=tuple(answer for _, _, answer in read),
    )


def check_answers(probed: Probed, where: str) -> None:
    """Check that answers are those of a model.

    Raises:
        GateError: scores are not finite, half of the users get no item, or users with different histories all
            get the same.
    """
    for user, answer in zip(probed.users, probed.answers, strict=True):
        if not np.isfinite([item.score for item in answer.items]).all():
            raise GateError(f"{where}: scores of items for user {user!r} are not finite; {_INSTEAD}")
    num_empty = sum(not answer.items for answer in probed.answers)
    if num_empty and 2 * num_empty >= len(probed.answers):
        raise GateError(
            f"{where}: {num_empty} of {len(probed.answers)} users of its data get no item at all; {_INSTEAD}"
        )
    if len(set(probed.histories)) > 1 and _are_alike(probed.answers):
        raise GateError(
            f"{where}: {len(probed.answers)} users with different histories all get the same items with the "
            f"same scores, so it reads nothing of them; {_INSTEAD}"
        )


def overlap(mine: Sequence[Probe], others: Sequence[Probe]) -> float | None:
    """Mean share of a user's items that are also in the other list, over users in both; None without any."""
    other = {each.user: each.items for each in others}
    shares = [
        len(set(each.items) & set(other[each.user])) / max(len(each.items), len(other[each.user]))
        for each in mine
        if each.user in other and (each.items or other[each.user])
    ]
    return float(np.mean(shares)) if shares else None


def check_catalog(catalog: Path, before: Path, where: str) -> None:
    """Check that a catalog is a later state of the one before.

    Args:
        catalog: folder with its items.

    Raises:
        GateError: hardly any item is in both, or the same ids have other titles.
    """
    mine, others = (pq.read_table(folder / ITEMS_FILE) for folder in (catalog, before))
    fewer = min(len(mine), len(others))
    if not fewer:
        return
    names = [name for name in ("title",) if name in mine.column_names and name in others.column_names]
    left, right = (table.select(["item_key", *names]) for table in (mine, others))
    both = left.join(right, "item_key", join_type="inner", right_suffix=" before")
    share = len(both) / fewer
    if names and len(both):
        # Ids that are numbers are in every catalog; of those with two titles, most must be the same.
        is_same = pc.equal(both["title"], both["title before"]).drop_null()
        if len(is_same):
            share *= pc.sum(is_same).as_py() / len(is_same)
    if share < LEAST_SHARED_ITEMS:
        raise GateError(
            f"{where}: its catalog has {share:.0%} of the items of the version before (the same ids and "
            "titles), so it is of something else; publish to a store of its own, or say that it is meant: "
            "rayrec publish --other-catalog"
        )


_INSTEAD = "take an earlier snapshot or version, and look at the run's metrics"


def _are_alike(answers: Sequence[Answer]) -> bool:
    first = answers[0].items
    return all(
        [item.item_key for item in answer.items] == [item.item_key for item in first]
        and np.allclose([item.score for item in answer.items], [item.score for item in first], 1e-6, 0.0)
        for answer in answers[1:]
    )
