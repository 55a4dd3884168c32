"""Evaluating a recommender: every user, all items ranked, beside popularity and neighbors, with intervals.

    samples ─► rankers ─► Tally: place of each target, first ten items ─► metrics, slices, file of positions

Axes: U users, B rows of a batch, K items of a list, N events of histories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import numpy as np
import xxhash

from rayrec.pipelines.evaluation.held_out import HeldOut, model_batches
from rayrec.pipelines.evaluation.rankers import (
    Ranker,
    baselines_of,
    model_rankers,
    neighbor_rankers,
    popularity_rankers,
    repeats_ranker,
    seen_items,
)
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.metrics.beyond_accuracy import FIRST, ListMetrics, list_metrics, users_of_items
from rayrec.pipelines.metrics.evaluation_report import EvaluationReport, OnBatch, RankingDetails
from rayrec.pipelines.metrics.positions import EvaluatedUsers, Positions, PositionsHeader
from rayrec.pipelines.metrics.ranking_metrics import summarize, target_places
from rayrec.pipelines.metrics.slices import head_from, slice_reports
from rayrec.pipelines.runs.method import Method
from rayrec.pipelines.runs.snapshots import SnapshotName
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.samples.base.batches import SampleBatch
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.manifest import Split

_MOST_SCORES = 1 << 28
"""Of a batch, where a model scores all items: 1 GiB."""


def evaluate_recommender(
    recommender: Recommender,
    split: Split,
    batch_size: int = 512,
    on_batch: OnBatch | None = None,
    stage: RankingStage | None = None,
    baselines: bool = True,
    max_users: int | None = None,
    depth: int | None = None,
    on: Dataset | None = None,
) -> EvaluationReport:
    """All items ranked for every user of a split.

    Args:
        max_users: only the first so many users, in the order of a hash of their ids: a sample, and the same
            one for every model. No others are read.
        stage: judged as well, beside the model that it takes candidates of. To it, users ask at the time of
            the event that is to be predicted, and have the same histories as the model.
        baselines: judge neighbors as well, which need no training but time on a large catalog.
        depth: items of each list, see `model_rankers`.
        on: a later data set of the same log, whose split is taken instead of that of the run's own: how the
            model, and what is judged beside it, answers for events that came later. Targets that the run's
            catalog does not have are missed. Users are left out whose target is no later than the newest
            event of the run's data set.

    Raises:
        InputError: the split has no users, the ranking model may have learned what is to be predicted, or
            `on` is of another log, or nothing says which of its events are later.
    """
    held_out = _held_out(recommender, split, max_users, on)
    rankers = model_rankers(recommender, stage, depth)
    rankers |= popularity_rankers(recommender.dataset, recommender.seen, depth)
    if baselines:
        rankers |= baselines_of(recommender.dataset, depth)
    positions, tally = _of_model(recommender, held_out, rankers, batch_size, on_batch, stage)
    return _report(
        positions,
        tally,
        snapshot_step=recommender.committed_step + 1,
        ranker=None if stage is None else stage.scorer.run,
    )


def model_positions(
    recommender: Recommender,
    split: Split,
    batch_size: int = 512,
    on_batch: OnBatch | None = None,
    max_users: int | None = None,
    depth: int | None = None,
    on: Dataset | None = None,
) -> Positions:
    """Positions alone, of the model without baselines; arguments and errors as of `evaluate_recommender`."""
    held_out = _held_out(recommender, split, max_users, on)
    rankers = model_rankers(recommender, depth=depth)
    return _of_model(recommender, held_out, rankers, batch_size, on_batch)[0]


def evaluate_neighbors(
    dataset: Dataset,
    split: Split,
    batch_size: int = 512,
    on_batch: OnBatch | None = None,
    max_users: int | None = None,
    depth: int | None = None,
) -> EvaluationReport:
    """What needs no training, judged on every user of a split: neighbors, popularity, and the history itself.

    Co-visitation is judged at the time of each target as well, where the data set has times.

    Args:
        max_users, depth: as of `evaluate_recommender`.

    Raises:
        InputError: the split has no users.
    """
    rankers = neighbor_rankers(dataset, depth, at_the_time=True)
    rankers |= popularity_rankers(dataset, partial(seen_items, dataset), depth)
    rankers |= repeats_ranker(dataset, depth)
    return evaluate_rankers(dataset, split, rankers, str(dataset.root), batch_size, on_batch, max_users)


def evaluate_rankers(
    dataset: Dataset,
    split: Split,
    rankers: Mapping[str, Ranker],
    name: str,
    batch_size: int = 512,
    on_batch: OnBatch | None = None,
    max_users: int | None = None,
    method: Method | None = None,
) -> EvaluationReport:
    """Anything that ranks items, judged on every user of a split, in the order of the split's rows.

    Args:
        name: of what is judged.
        max_users: as of `evaluate_recommender`.
        method: what other seeds of it have in common; None of what is not trained.

    Raises:
        InputError: the split has no users.
    """
    held_out = HeldOut(dataset, split, max_users)
    held_out.check()
    tally = Tally(dataset, held_out, rankers)
    tally.judge(held_out.batches(batch_size), on_batch)
    return _report(tally.positions(name, None, method), tally)


def _held_out(recommender: Recommender, split: Split, max_users: int | None, on: Dataset | None) -> HeldOut:
    known = recommender.dataset
    held_out = HeldOut(known, split, max_users)
    if on is not None and on.fingerprint != known.fingerprint:
        recommender.check_can_be_judged_on(on)
        held_out = HeldOut(on, split, max_users, after=known.newest_time())
    held_out.check()
    return held_out


def _of_model(
    recommender: Recommender,
    held_out: HeldOut,
    rankers: Mapping[str, Ranker],
    batch_size: int,
    on_batch: OnBatch | None,
    stage: RankingStage | None = None,
) -> tuple[Positions, Tally]:
    if stage is not None:
        stage.check_evaluation()
    if not recommender.num_beams(1):  # it scores every item for every user of a batch
        batch_size = max(min(batch_size, _MOST_SCORES // len(recommender.dataset.items)), 1)
    tally = Tally(recommender.dataset, held_out, rankers)
    tally.judge(model_batches(recommender, held_out, batch_size), on_batch)
    known = recommender.dataset.fingerprint
    grown = None if known == recommender.trained_on else known
    return tally.positions(recommender.run, recommender.snapshot, recommender.method, grown), tally


class Tally:
    """Where each ranker puts the targets of all users, and what it puts first."""

    def __init__(self, known: Dataset, held_out: HeldOut, rankers: Mapping[str, Ranker]) -> None:
        """
        Args:
            known: what the rankers were made of, whose catalog is ranked; usually that of what is held out.
        """
        self._known, self.held_out, self._rankers = known, held_out, rankers
        self._places: dict[str, list[Int64Array]] = {name: [] for name in rankers}
        self._first: dict[str, list[Int64Array]] = {name: [] for name in rankers}
        self._users: list[tuple[Int64Array, Int64Array, Int64Array, BoolArray]] = []
        self._user_hash = xxhash.xxh3_64()
        # One of each array, or the hash would depend on the size of batches, which differs by models.
        self._held_out_hashes = [xxhash.xxh3_64() for _ in range(3)]

    def judge(self, batches: Iterable[SampleBatch], on_batch: OnBatch | None) -> None:
        """Rank for every row."""
        times_U, done = self.held_out.target_times_U, 0
        for samples in batches:
            assert samples.targets_B is not None, "of an evaluation split"
            targets_B = self._known.item_positions(samples.targets_B)
            times_B = times_U[done : done + samples.num_rows]
            for name, ranker in self._rankers.items():
                items_BK = ranker.recommend(samples, times_B).items_BK
                self._places[name].append(target_places(items_BK, targets_B, ranker.info.depth))
                self._first[name].append(items_BK[:, :FIRST].copy())
            self._add_users(samples, samples.targets_B)
            done += samples.num_rows
            if on_batch is not None:
                on_batch(done, len(times_U))

    def _add_users(self, samples: SampleBatch, targets_B: Int64Array) -> None:
        lengths_B = np.diff(samples.offsets_B1)
        rows_N = np.repeat(np.arange(samples.num_rows), lengths_B)
        again_N = samples.item_ids_N == targets_B[rows_N]
        is_repeat_B = np.bincount(rows_N[again_N], minlength=samples.num_rows) > 0
        self._users.append((samples.user_ids_B, targets_B, lengths_B, is_repeat_B))
        self._user_hash.update(samples.user_ids_B.tobytes())
        held_out = (targets_B, lengths_B, samples.item_ids_N)
        for hashed, values in zip(self._held_out_hashes, held_out, strict=True):
            hashed.update(np.asarray(values, dtype=np.int64).tobytes())

    def lists(self) -> dict[str, ListMetrics]:
        """What the lists of each ranker are like."""
        items = self._known.items
        users_E, items_E = self._known.train_events()
        of_items = users_of_items(users_E, self._known.item_positions(items_E), len(items))
        return {
            name: list_metrics(_padded(parts), items.train_counts_I, of_items)
            for name, parts in self._first.items()
        }

    def positions(
        self,
        run: str,
        snapshot: SnapshotName | None,
        method: Method | None = None,
        grown: str | None = None,
    ) -> Positions:
        """All places, with what they are of.

        Args:
            run: name of the run, or of what is judged without one.
            grown: as of `PositionsHeader`.
        """
        dataset, trained_I = self.held_out.dataset, self._known.items.train_counts_I
        manifest, items = dataset.manifest, dataset.items
        user_ids_U, targets_U, lengths_U, is_repeat_U = map(np.concatenate, zip(*self._users, strict=True))
        known_U = self._known.item_positions(targets_U)
        users = EvaluatedUsers(
            user_ids_U=user_ids_U,
            targets_U=targets_U,
            history_lengths_U=lengths_U,
            train_counts_U=np.where(known_U >= 0, trained_I[known_U], 0),
            is_repeat_U=is_repeat_U,
            behaviors_U=self.held_out.target_labels("behavior"),
        )
        header = PositionsHeader(
            run=run,
            snapshot=None if snapshot is None else snapshot.name,
            snapshot_fingerprint=None if snapshot is None else snapshot.fingerprint,
            method=None if method is None else method.settings,
            seed=None if method is None else method.seed,
            dataset=manifest.name,
            fingerprint=manifest.fingerprint,
            split=self.held_out.split,
            after=self.held_out.after,
            num_left_out=self.held_out.num_left_out,
            max_users=self.held_out.max_users,
            grown=grown,
            split_rule=manifest.split.kind,
            users=self._user_hash.hexdigest(),
            held_out=xxhash.xxh3_64_hexdigest(b"".join(each.digest() for each in self._held_out_hashes)),
            catalog=xxhash.xxh3_64_hexdigest(items.ids_I.tobytes()),
            num_users=len(users),
            num_items=len(items),
            head_from=head_from(trained_I),
            behaviors=() if users.behaviors_U is None else manifest.behaviors,
            lists={name: ranker.info for name, ranker in self._rankers.items()},
        )
        places = {name: np.concatenate(parts) for name, parts in self._places.items()}
        return Positions(header, places, users)


def _padded(parts: list[Int64Array]) -> Int64Array:
    """[U, FIRST] of batches whose lists may be shorter, where few items are near."""
    return np.concatenate(
        [
            np.pad(part, ((0, 0), (0, FIRST - part.shape[1])), constant_values=-1).astype(np.int64)
            for part in parts
        ]
    )


def _report(
    positions: Positions, tally: Tally, snapshot_step: int = 0, ranker: str | None = None
) -> EvaluationReport:
    assert positions.users is not None, "they were judged"
    header = positions.header
    slices, empty = slice_reports(positions)
    return EvaluationReport(
        run=header.run,
        split=header.split,
        snapshot_step=snapshot_step,
        count=header.num_users,
        results={
            name: summarize(places_U, header.lists[name].depth) for name, places_U in positions.places.items()
        },
        ranker=ranker,
        ranking=RankingDetails(
            positions=positions,
            lists=tally.lists(),
            slices=slices,
            empty_slices=empty,
            num_repeats=int(positions.users.is_repeat_U.sum()),
            num_left_out=tally.held_out.num_left_out,
        ),
    )
