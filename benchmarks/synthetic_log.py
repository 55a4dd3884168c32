"""A behavior log whose law is known, so that the best possible ranking, and its recall, are known, too.

    python -m benchmarks.synthetic_log OUT --users 1000000 --items 1000000
    rayrec prepare OUT data/synthetic --clean [--split time --targets random]
    rayrec tokenize data/synthetic --published OUT/codes.json --out data/synthetic/semantic_ids
    python -m benchmarks.synthetic_log OUT --best data/synthetic

Every user has one of T hidden types, and each type is a Markov chain of its own over clusters of items:

    P(item | last item, type) = P(cluster | last item's cluster, type)
                                * (FOLLOWED * [item has the rank that follows the last item]
                                   + (1 - FOLLOWED) * zipf(rank of the item in its cluster))

    P(cluster | last cluster, type) = (1 - EXPLORED) * weights of its few successors
                                      + EXPLORED * zipf(cluster)

The next item depends on the last one (which cluster, which rank) and on the whole history (which type), the
catalog has a long tail, and (cluster, rank) are codes whose prefixes mean something. Given a history, the
probability of a type follows from the transitions between its clusters by Bayes' rule, and with that the
probability of every item: no ranking has a higher expected recall than the one by it. The rank of a target
in it is counted exactly, cluster by cluster, without listing the catalog.

Random numbers are hashes of (seed, user, event), so a chunk of users needs no other, and memory is that of a
chunk.

Axes: U users of a chunk or batch, E events, T types, C clusters, S successors of a cluster, R ranks in a
cluster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import gcd, isqrt
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.pipelines.metrics.estimate import Estimate
from rayrec.pipelines.metrics.ranking_metrics import LIST_LENGTH, summarize
from rayrec.platform.arrays import Float64Array, Int64Array
from rayrec.platform.console import print_rows, progress_bar
from rayrec.platform.errors import InputError
from rayrec.platform.hashing import combine64
from rayrec.samples.dataset.dataset import Dataset, EvaluationRows
from rayrec.samples.dataset.manifest import Split

SUCCESSOR_WEIGHTS = (0.5, 0.3, 0.2)
EXPLORED = 0.15
FOLLOWED = 0.5
_CLUSTER_ZIPF, _CLUSTER_SHIFT = 1.0, 10
_RANK_ZIPF, _RANK_SHIFT = 1.0, 2
_LEAST_EVENTS = 5
_SPAN_S = 365 * 86_400
"""Users begin within this time after 2024-01-01."""
_GAP_S = 86_400
"""Between two events of a user, on average."""
_EPOCH_S = 1_704_067_200
_TYPE, _LENGTH, _BEGIN, _GAP, _SOURCE, _SUCCESSOR, _EXPLORE, _FOLLOW, _RANK, _TABLE, _FOLLOWER = range(11)
"""What a hash is for."""
LAW_FILE, CODES_FILE = "law.json", "codes.json"
_USERS_AT_ONCE = 50_000
_EVALUATED_AT_ONCE = 1 << 20
"""Numbers of a batch of users times clusters whose targets are ranked together."""


@dataclass(frozen=True)
class LawSettings:
    """What the log depends on."""

    num_users: int
    num_items: int
    mean_length: float = 20.0
    num_types: int = 8
    num_clusters: int | None = None
    """A divisor of the items; None: the one next to the square root of their number."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mean_length <= _LEAST_EVENTS:
            raise InputError(
                f"the mean length is {self.mean_length:g}; users have at least {_LEAST_EVENTS} events"
            )
        if self.num_clusters is not None and self.num_items % self.num_clusters:
            raise InputError(
                f"{self.num_items} items cannot be divided into {self.num_clusters} clusters alike"
            )
        if min(self.clusters, self.ranks) < 4:
            raise InputError(
                f"{self.num_items} items make {self.clusters} clusters of {self.ranks} items each; take a "
                "number of items with more divisors, such as a power of ten"
            )

    @property
    def clusters(self) -> int:
        if self.num_clusters is not None:
            return self.num_clusters
        return next(count for count in range(isqrt(self.num_items), 0, -1) if self.num_items % count == 0)

    @property
    def ranks(self) -> int:
        """Items of a cluster."""
        return self.num_items // self.clusters


class Law:
    """Samples users, and knows what is likely to come next."""

    def __init__(self, settings: LawSettings) -> None:
        self.settings = settings
        self.cluster_weights_C = _zipf(settings.clusters, _CLUSTER_ZIPF, _CLUSTER_SHIFT)
        self.rank_weights_R = _zipf(settings.ranks, _RANK_ZIPF, _RANK_SHIFT)
        self._cumulative_C, self._cumulative_R = (
            np.cumsum(weights) for weights in (self.cluster_weights_C, self.rank_weights_R)
        )
        self._cumulative_S = np.cumsum(SUCCESSOR_WEIGHTS)

    # Items

    def item_ids(self, cluster_E: Int64Array, rank_E: Int64Array) -> Int64Array:
        """Numbers from 1 that say nothing of cluster and rank."""
        factor, count = self._factor, self.settings.num_items
        return (cluster_E * self.settings.ranks + rank_E) * factor % count + 1

    def clusters_and_ranks(self, item_E: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The inverse of `item_ids`."""
        inverse = pow(self._factor, -1, self.settings.num_items)
        return np.divmod((item_E - 1) * inverse % self.settings.num_items, self.settings.ranks)

    @cached_property
    def _factor(self) -> int:
        count = self.settings.num_items
        # Near the golden section, which spreads neighbors; a product of two stays within 64 bits.
        return next(factor for factor in range(int(count * 0.618), 2 * count) if gcd(factor, count) == 1)

    @cached_property
    def successors_TCS(self) -> Int64Array:
        """Clusters that often follow; frequent clusters follow more often."""
        settings = self.settings
        shape = settings.num_types, settings.clusters, len(SUCCESSOR_WEIGHTS)
        return self._drawn(self._cumulative_C, self._uniform(_TABLE, *np.indices(shape)))

    def followers(self, item_E: Int64Array) -> Int64Array:
        """The rank that follows an item, in whichever cluster comes next."""
        return (self._uniform(_FOLLOWER, item_E) * self.settings.ranks).astype(np.int64)

    # Samples

    def sample(self, first: int, count: int) -> pa.Table:
        """The events of users from one on: `user_id`, `item_id` and `timestamp`, user after user."""
        users_U = np.arange(first, first + count)
        lengths_U = self._lengths(users_U)
        types_U = (self._uniform(_TYPE, users_U) * self.settings.num_types).astype(np.int64)
        times_U = _EPOCH_S + (self._uniform(_BEGIN, users_U) * _SPAN_S).astype(np.int64)
        items_E, times_E = np.zeros((2, int(lengths_U.sum())), dtype=np.int64)
        starts_U = np.cumsum(lengths_U) - lengths_U
        clusters_U, item_U = np.zeros((2, count), dtype=np.int64)
        for step in range(int(lengths_U.max(initial=0))):
            # A: users who have an event left.
            active_A = np.flatnonzero(lengths_U > step)
            users_A = users_U[active_A]
            clusters_A = self._next_clusters(users_A, types_U[active_A], clusters_U[active_A], step)
            item_A = self.item_ids(clusters_A, self._next_ranks(users_A, item_U[active_A], step))
            gaps_A = -np.log1p(-self._uniform(_GAP, users_A, step)) * _GAP_S
            times_U[active_A] += 1 + gaps_A.astype(np.int64)  # no two events of a user at one time
            clusters_U[active_A], item_U[active_A] = clusters_A, item_A
            items_E[starts_U[active_A] + step] = item_A
            times_E[starts_U[active_A] + step] = times_U[active_A]
        return pa.table(
            {
                "user_id": np.repeat(users_U, lengths_U),
                "item_id": items_E,
                "timestamp": times_E,
            }
        )

    def _lengths(self, users_U: Int64Array) -> Int64Array:
        further = self.settings.mean_length - _LEAST_EVENTS
        # Geometric from 0 with this mean.
        uniform_U = self._uniform(_LENGTH, users_U)
        return _LEAST_EVENTS + np.floor(np.log1p(-uniform_U) / np.log(further / (1 + further))).astype(
            np.int64
        )

    def _next_clusters(
        self, users_U: Int64Array, types_U: Int64Array, clusters_U: Int64Array, step: int
    ) -> Int64Array:
        source_U, which_U = (self._uniform(what, users_U, step) for what in (_SOURCE, _SUCCESSOR))
        anywhere_U = self._drawn(self._cumulative_C, self._uniform(_EXPLORE, users_U, step))
        if step == 0:
            return anywhere_U
        successors_U = self.successors_TCS[types_U, clusters_U, self._drawn(self._cumulative_S, which_U)]
        return np.where(source_U < EXPLORED, anywhere_U, successors_U)

    def _next_ranks(self, users_U: Int64Array, item_U: Int64Array, step: int) -> Int64Array:
        ranks_U = self._drawn(self._cumulative_R, self._uniform(_RANK, users_U, step))
        if step == 0:
            return ranks_U
        return np.where(self._uniform(_FOLLOW, users_U, step) < FOLLOWED, self.followers(item_U), ranks_U)

    def _uniform(self, what: int, *parts: Int64Array | int) -> Float64Array:
        """In [0, 1), of a hash."""
        return (combine64(self.settings.seed, what, *parts) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    @staticmethod
    def _drawn(cumulative: Float64Array, uniform: Float64Array) -> Int64Array:
        found = np.searchsorted(cumulative, uniform, side="right")
        return np.minimum(found, len(cumulative) - 1).astype(np.int64)

    # What is likely

    def type_probabilities(self, clusters_E: Int64Array, offsets_U1: Int64Array) -> Float64Array:
        """[U, T] given the clusters of histories; types are equally frequent."""
        log_probs_UT = np.zeros((len(offsets_U1) - 1, self.settings.num_types))
        user_E = np.repeat(np.arange(len(offsets_U1) - 1), np.diff(offsets_U1))
        is_pair_E = user_E[1:] == user_E[:-1]
        before_P, after_P, user_P = (
            clusters_E[:-1][is_pair_E],
            clusters_E[1:][is_pair_E],
            user_E[1:][is_pair_E],
        )
        for kind in range(self.settings.num_types):
            np.add.at(log_probs_UT[:, kind], user_P, np.log(self._transition(kind, before_P, after_P)))
        log_probs_UT -= log_probs_UT.max(axis=1, keepdims=True)
        probs_UT = np.exp(log_probs_UT)
        return probs_UT / probs_UT.sum(axis=1, keepdims=True)

    def _transition(self, kind: int, before_P: Int64Array, after_P: Int64Array) -> Float64Array:
        """[P] probability of a cluster after another."""
        hits_PS = self.successors_TCS[kind, before_P] == after_P[:, None]
        return (1 - EXPLORED) * (hits_PS @ np.array(SUCCESSOR_WEIGHTS)) + EXPLORED * self.cluster_weights_C[
            after_P
        ]

    def next_clusters(self, clusters_E: Int64Array, offsets_U1: Int64Array) -> Float64Array:
        """[U, C] probability of the next cluster given histories, none of which is empty."""
        num_users = len(offsets_U1) - 1
        types_UT = self.type_probabilities(clusters_E, offsets_U1)
        probs_UC = np.tile(EXPLORED * self.cluster_weights_C, (num_users, 1))
        successors_TUS = self.successors_TCS[:, clusters_E[offsets_U1[1:] - 1]]
        weights_TUS = (1 - EXPLORED) * types_UT.T[:, :, None] * np.array(SUCCESSOR_WEIGHTS)
        user_TUS = np.broadcast_to(np.arange(num_users)[None, :, None], successors_TUS.shape)
        np.add.at(probs_UC, (user_TUS, successors_TUS), weights_TUS)
        return probs_UC

    def within_cluster(self, rank_E: Int64Array, followers_E: Int64Array) -> Float64Array:
        """[E] probability of a rank in its cluster, after an item with these followers."""
        return FOLLOWED * (rank_E == followers_E) + (1 - FOLLOWED) * self.rank_weights_R[rank_E]

    def target_probabilities(self, rows: EvaluationRows) -> Float64Array:
        """[U] probability that the law gives to each target."""
        clusters_N, _ = self.clusters_and_ranks(rows.history_ids_N)
        target_cluster_U, target_rank_U = self.clusters_and_ranks(rows.targets_B)
        probs_UC = self.next_clusters(clusters_N, rows.offsets_B1)
        followers_U = self.followers(rows.history_ids_N[rows.offsets_B1[1:] - 1])
        probs_U: Float64Array = probs_UC[np.arange(len(rows)), target_cluster_U]
        return probs_U * self.within_cluster(target_rank_U, followers_U)

    def places(self, rows: EvaluationRows) -> tuple[Int64Array, Int64Array]:
        """([U] place of each target in the best ranking, from 0; the same with the history's items left out,
        in which a target of the history has the last place)."""
        clusters_N, _ = self.clusters_and_ranks(rows.history_ids_N)
        target_cluster_U, target_rank_U = self.clusters_and_ranks(rows.targets_B)
        num_users, offsets_U1 = len(rows), rows.offsets_B1
        probs_UC = self.next_clusters(clusters_N, offsets_U1)
        followers_U = self.followers(rows.history_ids_N[offsets_U1[1:] - 1])
        at_U = np.arange(num_users)
        within_U = self.within_cluster(target_rank_U, followers_U)
        prob_U = probs_UC[at_U, target_cluster_U] * within_U
        # Ranks of a cluster whose share of its weight is above what the target has of this cluster's.
        least_UC = prob_U[:, None] / probs_UC
        # In the target's own cluster without a division, which might round.
        least_UC[at_U, target_cluster_U] = within_U
        better_UC = np.searchsorted(-self.rank_weights_R, -least_UC / (1 - FOLLOWED), side="left")
        own_U = np.where(
            target_rank_U == followers_U,
            (within_U[:, None] < (1 - FOLLOWED) * self.rank_weights_R).sum(axis=1),
            target_rank_U,
        )
        better_UC[at_U, target_cluster_U] = own_U
        # One rank of each cluster has more than that, and may be better by it alone.
        follows_UC = FOLLOWED + (1 - FOLLOWED) * self.rank_weights_R[followers_U][:, None] > least_UC
        is_new_UC = follows_UC & (better_UC <= followers_U[:, None])
        is_new_UC[at_U, target_cluster_U] &= target_rank_U != followers_U
        places_U = better_UC.sum(axis=1) + is_new_UC.sum(axis=1)
        return places_U, self._unseen(rows, places_U, prob_U, probs_UC, followers_U)

    def _unseen(
        self,
        rows: EvaluationRows,
        places_U: Int64Array,
        prob_U: Float64Array,
        probs_UC: Float64Array,
        followers_U: Int64Array,
    ) -> Int64Array:
        """Places without the items of the histories."""
        user_N = np.repeat(np.arange(len(rows)), np.diff(rows.offsets_B1))
        seen = np.unique(np.stack([user_N, rows.history_ids_N], axis=1), axis=0)
        user_S, item_S = seen[:, 0], seen[:, 1]
        cluster_S, rank_S = self.clusters_and_ranks(item_S)
        prob_S = probs_UC[user_S, cluster_S] * self.within_cluster(rank_S, followers_U[user_S])
        is_target_S = item_S == rows.targets_B[user_S]
        fewer_U = np.bincount(user_S[(prob_S > prob_U[user_S]) & ~is_target_S], minlength=len(rows))
        return np.where(
            np.bincount(user_S[is_target_S], minlength=len(rows)) > 0,
            self.settings.num_items,
            places_U - fewer_U,
        )


def _zipf(count: int, exponent: float, shift: int) -> Float64Array:
    weights = 1.0 / (np.arange(count) + shift) ** exponent
    return weights / weights.sum()


@dataclass(frozen=True)
class BestMetrics:
    """What no model can pass but by chance."""

    num_users: int
    unmasked: dict[str, Estimate]
    masked: dict[str, Estimate]
    """Items of the history left out, as models are usually judged."""


def best_metrics(
    law: Law, dataset: Dataset, split: Split = "test", max_users: int | None = None
) -> BestMetrics:
    """The metrics of the best ranking on a split.

    Args:
        max_users: the first so many, in the order of a hash of their ids, as `rayrec evaluate` takes them.
    """
    at_once = max(_EVALUATED_AT_ONCE // law.settings.clusters, 1)
    found = [law.places(rows) for rows in dataset.evaluation_parts(split, at_once, max_rows=max_users)]
    unmasked_U, masked_U = (np.concatenate(places) for places in zip(*found, strict=True))
    return BestMetrics(
        len(masked_U),
        *(summarize(np.minimum(places_U, LIST_LENGTH)) for places_U in (unmasked_U, masked_U)),
    )


def chunks(law: Law, users_at_once: int = _USERS_AT_ONCE) -> Iterator[pa.Table]:
    """The whole log, some users at a time."""
    num_users = law.settings.num_users
    for first in range(0, num_users, users_at_once):
        yield law.sample(first, min(users_at_once, num_users - first))


def write_log(law: Law, out: Path, users_at_once: int = _USERS_AT_ONCE) -> int:
    """Write the source of a data set, the law, and codes of (cluster, rank); the number of events.

    Raises:
        InputError: something is there already.
    """
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out}: is not empty; give a new folder")
    (out / "interactions").mkdir(parents=True)
    settings, num_events = law.settings, 0
    with progress_bar("write") as progress:
        for number, table in enumerate(chunks(law, users_at_once)):
            pq.write_table(table, out / "interactions" / f"part-{number:05}.parquet", compression="zstd")
            num_events += len(table)
            progress(min((number + 1) * users_at_once, settings.num_users), settings.num_users)
    cluster_I, rank_I = np.divmod(np.arange(settings.num_items), settings.ranks)
    items_I = law.item_ids(cluster_I, rank_I)
    categories = pa.array([f"cluster {cluster}" for cluster in range(settings.clusters)])
    pq.write_table(
        pa.table({"item_id": items_I, "category": categories.take(pa.array(cluster_I))}),
        out / "items.parquet",
    )
    codes_I4 = np.stack(
        [*_two_codes(cluster_I, settings.clusters), *_two_codes(rank_I, settings.ranks)], axis=1
    )
    with (out / CODES_FILE).open("w") as file:
        json.dump(
            {str(item): codes for item, codes in zip(items_I.tolist(), codes_I4.tolist(), strict=True)}, file
        )
    (out / LAW_FILE).write_text(json.dumps(asdict(settings), indent=1) + "\n")
    return num_events


def _two_codes(values_I: Int64Array, count: int) -> tuple[Int64Array, Int64Array]:
    """Numbers below a count as two codes of about equal size."""
    return np.divmod(values_I, isqrt(count - 1) + 1)


def read_law(folder: Path) -> Law:
    """The law of a log that was written.

    Raises:
        InputError: none is there.
    """
    path = folder / LAW_FILE
    if not path.is_file():
        raise InputError(
            f"{path}: no such file; make a log with: python -m benchmarks.synthetic_log {folder}"
        )
    return Law(LawSettings(**json.loads(path.read_text())))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.synthetic_log")
    parser.add_argument("out", type=Path, help="folder of the log")
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--mean-length", type=float, default=20.0, help="events of a user")
    parser.add_argument("--types", type=int, default=8, help="hidden types of users")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--best", type=Path, metavar="DATA", help="judge the best ranking on a data set of the log"
    )
    parser.add_argument("--split", choices=("valid", "test"), default="test")
    parser.add_argument("--max-users", type=int, help="judge it on so many users")
    options = parser.parse_args(arguments)
    if options.best is None:
        settings = LawSettings(
            options.users, options.items, options.mean_length, options.types, seed=options.seed
        )
        num_events = write_log(Law(settings), options.out)
        rows = [("users", f"{settings.num_users:,}"), ("items", f"{settings.num_items:,}")]
        print_rows("Written", [*rows, ("events", f"{num_events:,}"), ("clusters", f"{settings.clusters:,}")])
        return
    best = best_metrics(read_law(options.out), Dataset.open(options.best), options.split, options.max_users)
    rows = [("users", f"{best.num_users:,}")]
    for name in best.masked:
        shown = (f"{found[name].value:.4f}" for found in (best.masked, best.unmasked))
        rows.append((name, "{} (seen items kept: {})".format(*shown)))
    print_rows("The best ranking", rows)


if __name__ == "__main__":
    main()
