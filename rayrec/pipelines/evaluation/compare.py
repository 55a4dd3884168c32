"""`rayrec compare`: two methods on the same users, each of one run or of several seeds, by their positions.

    RUN          evaluated first, unless the positions of its snapshot are there
    DATA         a data set, whose neighbors `rayrec evaluate --neighbors` judged
    FILE         positions, or a report or record (JSON) that names a file of positions beside it

Axes: S seeds, U users.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rayrec.pipelines.evaluation.lists import (
    CO_VISITATION,
    MODEL,
    neighbor_positions_path,
    positions_path,
)
from rayrec.pipelines.metrics.evaluation_report import OnBatch
from rayrec.pipelines.metrics.paired_bootstrap import PairedEstimate, compare_scores
from rayrec.pipelines.metrics.positions import FORMAT, ListInfo, Positions, PositionsHeader, read_header
from rayrec.pipelines.metrics.ranking_metrics import MOST_DEPTH, metric_names, score_of
from rayrec.pipelines.metrics.slices import slices_of
from rayrec.pipelines.runs.method import seed_in_words
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import SnapshotName, snapshot_name
from rayrec.platform.arrays import BoolArray, Float64Array
from rayrec.platform.errors import InputError, looked_in
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.dataset_folder import HISTORIES, kind_of
from rayrec.samples.dataset.manifest import Manifest, Split

ALL_USERS = "all users"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sources:
    """Which positions are looked for, and how they are made where they are missing."""

    metric: str = "recall@10"
    """That they are looked for."""
    split: Split = "test"
    snapshot: str = "best"
    """Of runs."""
    max_users: int | None = None
    on: Dataset | None = None
    """A later data set, on whose events runs are judged instead of those of their own."""
    on_batch: OnBatch | None = None


@dataclass(frozen=True)
class Evaluated:
    """One list of one evaluation."""

    where: str
    name: str
    """Of the list."""
    positions: Positions

    @property
    def header(self) -> PositionsHeader:
        return self.positions.header

    @property
    def info(self) -> ListInfo:
        return self.header.lists[self.name]

    @property
    def needs_no_training(self) -> bool:
        """Whether it has no seed: neighbors and the like."""
        return self.header.format > 1 and self.header.method is None

    def scores(self, metric: str) -> Float64Array:
        """[U] the metric of each user."""
        return score_of(metric, self.positions.places[self.name])


@dataclass(frozen=True)
class Comparison:
    """Two methods by one metric."""

    metric: str
    split: Split
    dataset: str
    a: Sequence[Evaluated]
    """A seed each."""
    b: Sequence[Evaluated]
    estimates: dict[str, PairedEstimate]
    """Of all users, and of each slice that has some."""
    empty_slices: tuple[str, ...] = ()
    sliced_by: str | None = None
    """Whose training data say which items are cold, and which are head items; None: there are no slices, or
    all were trained on the same data."""
    num_left_out: int = 0
    """Users of a later data set whose target is not later than what every run knows."""

    @property
    def over(self) -> str:
        """What intervals are over."""
        sides = [("A", self.a), ("B", self.b)]
        several = [name for name, seeds in sides if len(seeds) > 1]
        if len(several) == 1:
            ((other, (only,)),) = (side for side in sides if side[0] != several[0])
            has = "is not trained" if only.needs_no_training else "has one"
            return f"users and seeds of {several[0]}, not of {other}, which {has}"
        return "users and seeds" if several else "users"

    def to_json(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "split": self.split,
            "dataset": self.dataset,
            "interval_over": self.over,
            **{
                side: [
                    {
                        "from": one.where,
                        "run": one.header.run,
                        "snapshot": one.header.snapshot,
                        "list": one.name,
                        **one.info.model_dump(mode="json"),
                    }
                    for one in of_side
                ]
                for side, of_side in (("a_runs", self.a), ("b_runs", self.b))
            },
            "results": {name: estimate.to_json() for name, estimate in self.estimates.items()},
            "empty_slices": list(self.empty_slices),
            **({"sliced_by": self.sliced_by} if self.sliced_by else {}),
            **({"num_left_out": self.num_left_out} if self.num_left_out else {}),
        }


def compare(a: Sequence[Evaluated], b: Sequence[Evaluated], metric: str, slices: bool = False) -> Comparison:
    """Compare two methods, each of one or several seeds.

    Args:
        slices: by slices of the users as well.

    Raises:
        InputError: there is no such metric, or the evaluations are not of the same users, items, split and
            mask rule, or a side is not of different seeds of one method, or a list is too short for the
            metric.
    """
    check_metric(metric)
    everything = _of_common_users([*a, *b])
    a, b = everything[: len(a)], everything[len(a) :]
    first = everything[0]
    for other in everything[1:]:
        _check_same(first, other)
    for side in (a, b):
        _check_seeds(side)
    for one in everything:
        _check_depth(one.where, one.name, one.info, metric)
    a_SU, b_SU = (np.stack([one.scores(metric) for one in side]) for side in (a, b))
    estimates = {ALL_USERS: compare_scores(a_SU, b_SU)}
    empty: list[str] = []
    sliced_by, found = _slices(everything) if slices else (None, [])
    for name, chosen_U in found:
        if chosen_U.any():
            estimates[name] = compare_scores(a_SU[:, chosen_U], b_SU[:, chosen_U])
        else:
            empty.append(name)
    dataset, split = first.header.dataset, first.header.split
    num_left_out = first.header.num_left_out
    return Comparison(metric, split, dataset, a, b, estimates, tuple(empty), sliced_by, num_left_out)


def check_metric(metric: str) -> None:
    """Refuse a metric that does not exist.

    Raises:
        InputError: names those that do.
    """
    if metric not in metric_names(MOST_DEPTH):
        raise InputError(
            f"there is no metric {metric!r} of positions; choose one of {', '.join(metric_names(MOST_DEPTH))}"
        )


def _of_common_users(everything: Sequence[Evaluated]) -> list[Evaluated]:
    """Of evaluations on the same later data set, which leave out users by what each run knows, the users whom
    none leaves out; others as they are.

    Raises:
        InputError: a file does not say whom it is of, or there is no such user.
    """
    known = {one.header.after for one in everything}
    same = {(one.header.fingerprint, one.header.split, one.header.max_users) for one in everything}
    if len(known) == 1 or len(same) > 1:
        return list(everything)
    if None in known:
        logger.warning(
            "a run was trained on %s itself, and so on events of others that are as late as those which are "
            "predicted",
            everything[0].header.dataset,
        )
    ids_of = []
    for one in everything:
        if one.positions.users is None:
            raise InputError(
                f"{one.where}: does not say which users it is of, and others left out some; name the run"
            )
        ids_of.append(one.positions.users.user_ids_U)
    common = functools.reduce(np.intersect1d, ids_of)
    if not len(common):
        raise InputError("there is no user on whom all were judged; compare runs that know less of the log")
    found = []
    for one, ids_U in zip(everything, ids_of, strict=True):
        positions = one.positions.some(np.isin(ids_U, common))
        assert positions.users is not None, "seen above"
        users = positions.users
        changed = {
            "after": max(each for each in known if each is not None),
            "num_users": len(common),
            "num_left_out": one.header.num_left_out + one.header.num_users - len(common),
            "users": xxhash.xxh3_64_hexdigest(users.user_ids_U.tobytes()),
            # The histories are those of one data set.
            "held_out": xxhash.xxh3_64_hexdigest(
                users.targets_U.tobytes() + users.history_lengths_U.tobytes()
            ),
        }
        header = one.header.model_copy(update=changed)
        found.append(replace(one, positions=replace(positions, header=header)))
    return found


def _check_same(one: Evaluated, other: Evaluated) -> None:
    """Refuse evaluations that say nothing of each other."""
    x, y = one.header, other.header
    checks: tuple[tuple[str, object, object, str, str], ...] = (
        (
            "formats, whose hashes differ; evaluate the older one again",
            x.format,
            y.format,
            f"format {x.format}",
            f"format {y.format}",
        ),
        ("splits", x.split, y.split, x.split, y.split),
        ("users", x.users, y.users, _users(x), _users(y)),
        ("catalogs", x.catalog, y.catalog, _catalog(x), _catalog(y)),
        (
            "held-out events of the same users",
            x.held_out,
            y.held_out,
            f"{x.dataset}, split {x.split_rule}",
            f"{y.dataset}, split {y.split_rule}",
        ),
        (
            "mask rules",
            one.info.seen_items,
            other.info.seen_items,
            f"seen items {one.info.seen_items}",
            f"seen items {other.info.seen_items}{_lists_as(one, other)}",
        ),
    )
    for what, left, right, left_said, right_said in checks:
        if left != right:
            raise InputError(
                f"{one.where} ({one.name!r}) and {other.where} ({other.name!r}) cannot be compared: they are "
                f"of different {what} ({left_said}; {right_said})"
            )


def _check_seeds(side: Sequence[Evaluated]) -> None:
    """Refuse what are not different seeds of one method."""
    for one, other in combinations(side, 2):
        x, y = one.header, other.header
        is_same = x.snapshot_fingerprint == y.snapshot_fingerprint
        if is_same and (x.snapshot_fingerprint is not None or x.run == y.run):  # neighbors have no snapshot
            why = f"they are the same run ({x.run}), which would count twice"
        elif x.method != y.method or one.name != other.name:
            why = (
                "their settings differ in more than the seed; compare one method a side, or evaluate both "
                "again if versions of rayrec with other settings did"
            )
        elif one.info.search != other.info.search:
            why = f"their lists were found differently ({one.info.search}; {other.info.search})"
        elif x.seed is not None and x.seed == y.seed:
            why = f"both have {seed_in_words(x.seed)}, so they say nothing of other seeds"
        else:
            continue
        raise InputError(f"{one.where} and {other.where} are not two seeds of one method: {why}")


def _lists_as(one: Evaluated, other: Evaluated) -> str:
    """Which lists of the other evaluation have the mask rule of the one, in words; empty where none has."""
    rule = one.info.seen_items
    found = [f"{name!r}" for name, info in other.header.lists.items() if info.seen_items == rule]
    return f"; take of {other.where} {' or '.join(found)}" if found else ""


def _users(header: PositionsHeader) -> str:
    return f"{header.num_users:,} users of {header.dataset}"


def _catalog(header: PositionsHeader) -> str:
    return f"{header.num_items:,} items of {header.dataset}"


def _check_depth(where: str, name: str, info: ListInfo, metric: str) -> None:
    if metric not in info.metrics:
        raise InputError(
            f"{where}: its lists {name!r} have {info.depth} items, too few for {metric}; evaluate it with "
            f"--depth {metric.partition('@')[2]}, or compare by one of {', '.join(info.metrics)}"
        )


def _slices(everything: Sequence[Evaluated]) -> tuple[str | None, list[tuple[str, BoolArray]]]:
    """(Whose training data they are by, where these differ; users of each slice).

    They are by the data of the run that knows most, whichever side it is on.
    """
    sliced = [(one, users) for one in everything if (users := one.positions.users) is not None]
    if not sliced:
        raise InputError(
            f"--slices: {everything[0].where} and the others have no history lengths and training events of "
            "targets, which files of records leave out; compare with a run instead"
        )
    one, users = max(sliced, key=lambda each: int(each[1].train_counts_U.sum()))
    are_same = all(
        np.array_equal(others.train_counts_U, users.train_counts_U)
        and other.header.head_from == one.header.head_from
        for other, others in sliced
    )
    found = slices_of(users, one.header.head_from, one.header.behaviors)
    return None if are_same else one.where, [(each.name, each.chosen_U) for each in found]


def evaluated(where: str, name: str | None, sources: Sources) -> Evaluated:
    """Positions of a run, a data set's neighbors, a file or a record; a run without them is evaluated.

    Args:
        name: of the list; None for the model, and of neighbors for co-visitation.

    Raises:
        InputError: there are none, or none of this split or list.
    """
    path = Path(where)
    if not path.exists():
        raise InputError(
            f"{where}: no such run, data set or file of positions{looked_in(path)}; "
            "`rayrec runs FOLDER` lists the runs of a folder"
        )
    if kind_of(path) is HISTORIES:
        if sources.on is not None and Manifest.read(path).fingerprint != sources.on.fingerprint:
            raise InputError(
                f"{where}: --on judges runs, and neighbors are judged on their own data set; name "
                f"{sources.on.root}"
            )
        positions = Positions.read(_of_neighbors(path, sources))
    elif path.is_dir():
        positions = _of_run(path, sources)
    else:
        positions = Positions.read(_named_in(path) if path.suffix == ".json" else path)
    lists = positions.header.lists
    if name is None:
        name = next((each for each in (MODEL, CO_VISITATION) if each in lists), next(iter(lists)))
    if name not in lists:
        raise InputError(f"{where}: has no list {name!r}; it has {', '.join(map(repr, lists))}")
    if positions.header.split != sources.split:
        raise InputError(
            f"{where}: is of the split {positions.header.split!r}, not of {sources.split!r} (--split)"
        )
    if sources.on is not None and positions.header.fingerprint != sources.on.fingerprint:
        raise InputError(
            f"{where}: is of events of {positions.header.dataset}, not of {sources.on.root} (--on); name the "
            "run, or what was judged on that data set"
        )
    return Evaluated(where, name, positions)


def _of_neighbors(data: Path, sources: Sources) -> Path:
    path = neighbor_positions_path(data, sources.split, sources.max_users)
    if not path.is_file():
        raise InputError(
            f"{data}: its neighbors are not evaluated on the split {sources.split!r} yet; run "
            f"rayrec evaluate --neighbors {data} --split {sources.split}"
        )
    return path


def _of_run(run: Path, sources: Sources) -> Positions:
    folder = RunFolder.open(run)
    snapshot = snapshot_name(folder.chosen_snapshot(sources.snapshot))
    on = None if sources.on is None else sources.on.fingerprint
    path = positions_path(run, sources.split, snapshot.name, sources.max_users, on)
    if _is_of(path, snapshot):
        return Positions.read(path)
    # These take seconds to import, for which no comparison of files has to wait.
    from rayrec.pipelines.evaluation.evaluate_recommender import model_positions
    from rayrec.pipelines.evaluation.rankers import model_rankers
    from rayrec.pipelines.inference.loading import TrainedModel
    from rayrec.pipelines.inference.recommender import Recommender
    from rayrec.pipelines.tasks.next_item import NextItemTask

    model = TrainedModel.load(run, snapshot.name)
    if not isinstance(model.assembly.task, NextItemTask):
        raise InputError(f"{run}: is no recommender, which positions are of; compare recommenders")
    recommender = Recommender(model)
    _check_depth(str(run), MODEL, model_rankers(recommender)[MODEL].info, sources.metric)
    positions = model_positions(
        recommender, sources.split, on_batch=sources.on_batch, max_users=sources.max_users, on=sources.on
    )
    positions.write(path)
    return positions


def _is_of(path: Path, snapshot: SnapshotName) -> bool:
    """Whether the file is there, of this version and of this snapshot, not of another one of its step, nor of
    a catalog that has grown since."""
    if not path.is_file():
        return False
    header = read_header(path)
    is_of_it = header.snapshot_fingerprint == snapshot.fingerprint and header.grown is None
    return header.format == FORMAT and is_of_it


def _named_in(record: Path) -> Path:
    """The file of positions that a report or record names."""
    try:
        values = json.loads(record.read_text())
        name = values["positions"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{record}: names no file of positions; an earlier version wrote it: evaluate again"
        ) from error
    return record.parent / str(name)


def expanded(said: str, glob: Callable[[str], list[str]]) -> list[str]:
    """The runs of one side: several with commas between them, each perhaps a pattern of names.

    Args:
        glob: paths of a pattern; what is there by just that name is none.

    Raises:
        InputError: a pattern that nothing has, or nothing between two commas.
    """
    found: list[str] = []
    for each in said.split(","):
        if not each:
            raise InputError(f"{said!r}: expected a run, or several with one comma between each two")
        if not set(each) & set("*?[") or Path(each).exists():
            found.append(each)
            continue
        matches = sorted(glob(each))
        if not matches:
            raise InputError(f"{each}: there is nothing of this pattern")
        found += matches
    return found
