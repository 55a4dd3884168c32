"""The log whose law is known: the same whatever the chunks; the best ranking is what brute force finds."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.synthetic_log import (
    CODES_FILE,
    EXPLORED,
    FOLLOWED,
    SUCCESSOR_WEIGHTS,
    Law,
    LawSettings,
    best_metrics,
    chunks,
    main,
    read_law,
    write_log,
)
from rayrec.pipelines.evaluation.evaluate_recommender import evaluate_neighbors
from rayrec.pipelines.evaluation.lists import CO_VISITATION, POPULARITY
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset, EvaluationRows
from rayrec.samples.prepare.prepare import prepare

SMALL = LawSettings(num_users=60, num_items=60, mean_length=9, num_types=3, seed=1)


def log(settings: LawSettings = SMALL, users_at_once: int = 1000) -> pa.Table:
    return pa.concat_tables(chunks(Law(settings), users_at_once))


def test_a_log_depends_on_its_seed_and_not_on_chunks():
    assert log(users_at_once=7).equals(log())
    assert not log(LawSettings(60, 60, 9, 3, seed=2)).equals(log())
    more = log(LawSettings(90, 60, 9, 3, seed=1))
    assert more.slice(0, len(log())).equals(log())


def test_items_have_numbers_that_lead_back_to_cluster_and_rank():
    law = Law(SMALL)
    clusters, ranks = np.divmod(np.arange(60), SMALL.ranks)

    ids = law.item_ids(clusters, ranks)

    assert sorted(ids.tolist()) == list(range(1, 61))
    found = law.clusters_and_ranks(ids)
    assert (found[0].tolist(), found[1].tolist()) == (clusters.tolist(), ranks.tolist())
    large = Law(LawSettings(1, 1_000_000))
    last = np.divmod(np.arange(900_000, 1_000_000), large.settings.ranks)
    ids = large.item_ids(*last)
    assert len(np.unique(ids)) == 100_000
    assert [found.tolist() for found in large.clusters_and_ranks(ids)] == [each.tolist() for each in last]


def brute_force(law: Law, history: list[int], target: int) -> tuple[int, int]:
    """Place of a target among all items, and among those that are not in the history."""
    settings = law.settings
    pairs = [law.clusters_and_ranks(np.array([item])) for item in history]
    clusters = [int(cluster[0]) for cluster, _ in pairs]

    def transition(kind: int, before: int, after: int) -> float:
        successors = law.successors_TCS[kind, before].tolist()
        often = sum(w for s, w in zip(successors, SUCCESSOR_WEIGHTS, strict=True) if s == after)
        return (1 - EXPLORED) * often + EXPLORED * float(law.cluster_weights_C[after])

    types = np.array(
        [
            np.prod([transition(kind, a, b) for a, b in itertools.pairwise(clusters)])
            for kind in range(settings.num_types)
        ]
    )
    types /= types.sum()
    (follower,) = law.followers(np.array([history[-1]])).tolist()
    probabilities = {}
    for item in range(1, settings.num_items + 1):
        (cluster,), (rank,) = law.clusters_and_ranks(np.array([item]))
        of_cluster = sum(p * transition(kind, clusters[-1], cluster) for kind, p in enumerate(types))
        within = FOLLOWED * (rank == follower) + (1 - FOLLOWED) * law.rank_weights_R[rank]
        probabilities[item] = of_cluster * within
    assert sum(probabilities.values()) == pytest.approx(1)
    better = [item for item, p in probabilities.items() if p > probabilities[target] * (1 + 1e-12)]
    unseen = [item for item in better if item not in history]
    return len(better), settings.num_items if target in history else len(unseen)


def test_the_place_of_a_target_is_what_brute_force_finds():
    law, table = Law(SMALL), log()
    histories, targets = [], []
    for user in range(60):
        items = table.filter(pa.compute.equal(table["user_id"], user))["item_id"].to_pylist()
        for length in (1, 2, len(items) - 1):
            histories.append(items[:length])
            targets.append(items[length])
    rows = EvaluationRows(
        user_ids_B=np.arange(len(targets)),
        history_ids_N=np.concatenate([np.array(history) for history in histories]),
        offsets_B1=np.cumsum([0, *map(len, histories)]),
        targets_B=np.array(targets),
    )

    unmasked, masked = law.places(rows)

    expected = [brute_force(law, *pair) for pair in zip(histories, targets, strict=True)]
    assert list(zip(unmasked.tolist(), masked.tolist(), strict=True)) == expected


def test_samples_follow_the_law():
    """Of the items that follow one (type, item), as many as the law says."""
    settings = LawSettings(num_users=20_000, num_items=36, mean_length=12, num_types=1, seed=3)
    law, table = Law(settings), log(settings, 5000)
    users, items = table["user_id"].to_numpy(), table["item_id"].to_numpy()
    most = Counter(items.tolist()).most_common(1)[0][0]
    is_pair = (users[1:] == users[:-1]) & (items[:-1] == most)
    found = np.bincount(items[1:][is_pair], minlength=37)[1:] / is_pair.sum()

    cluster, rank = law.clusters_and_ranks(np.arange(1, 37))
    (probabilities,) = law.next_clusters(law.clusters_and_ranks(np.array([most]))[0], np.array([0, 1]))
    follower = np.broadcast_to(law.followers(np.array([most])), 36)
    expected = probabilities[cluster] * law.within_cluster(rank, follower)

    assert np.abs(found - expected).max() < 5 * np.sqrt(expected.max() / is_pair.sum())
    assert table.num_rows / 20_000 == pytest.approx(12, rel=0.03)


@pytest.mark.slow
def test_the_best_ranking_is_above_neighbors_and_popularity(tmp_path, capsys):
    settings = LawSettings(num_users=1500, num_items=100, mean_length=12, num_types=2, seed=0)
    write_log(Law(settings), tmp_path / "log", users_at_once=400)
    assert len(list((tmp_path / "log" / "interactions").iterdir())) == 4
    codes = json.loads((tmp_path / "log" / CODES_FILE).read_text())
    assert len({tuple(each) for each in codes.values()}) == 100
    prepare(tmp_path / "log", tmp_path / "data", PrepareConfig(clean=True))
    dataset = Dataset.open(tmp_path / "data")

    best = best_metrics(read_law(tmp_path / "log"), dataset)

    others = evaluate_neighbors(dataset, "test").results
    assert best.num_users == 1500
    assert best.masked["recall@10"].low > others[CO_VISITATION]["recall@10"].high
    assert others[CO_VISITATION]["recall@10"].low > others[POPULARITY]["recall@10"].high
    main([str(tmp_path / "log"), "--best", str(tmp_path / "data"), "--max-users", "100"])
    assert "recall@10" in capsys.readouterr().out
    categories = pq.read_table(dataset.root / "items.parquet")["category"].to_pylist()
    assert len(set(categories)) == settings.clusters


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_items": 97}, "1 clusters of 97 items each; take a number of items with more divisors"),
        ({"num_items": 100, "num_clusters": 7}, "cannot be divided into 7 clusters"),
        ({"num_items": 100, "mean_length": 5}, "users have at least 5 events"),
    ],
)
def test_sizes_that_make_no_law_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        LawSettings(num_users=10, **settings)


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "something").touch()
    with pytest.raises(InputError, match="is not empty"):
        write_log(Law(SMALL), tmp_path)
    with pytest.raises(InputError, match=r"law\.json: no such file"):
        read_law(tmp_path)
