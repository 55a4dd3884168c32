"""A split by time: what is predicted, and that nothing of the future reaches what models are trained on."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.models.tokenizers.vector_sources import vector_source
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate_recommender import evaluate_neighbors
from rayrec.pipelines.inference.neighbors import NeighborRecommender
from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig, _item_data, tokenize
from rayrec.pipelines.tasks.content_items import counted_items
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.dataset.item_content import item_content
from rayrec.samples.impressions.held_out import TEST, TRAIN, VALID, split_codes_like
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import sample_batch, write_source

VALID_START, TEST_START = 100, 200


def divided(tmp_path, events, name="data", **settings):
    """Prepare events, all items of which are described, so that the catalog is known."""
    items = {"item_id": list(range(30)), "title": [f"item {item}" for item in range(30)]}
    source = write_source(tmp_path / f"source-{name}", events, items=items)
    config = {"split": "time", "valid_start": VALID_START, "test_start": TEST_START, "clean": True} | settings
    report = prepare(source, tmp_path / name, PrepareConfig.parse(config))
    return Dataset.open(tmp_path / name), report


def targets_of(dataset, split):
    """User -> (history, target)."""
    rows = dataset.evaluation_rows(split)
    starts, stops = rows.offsets_B1[:-1], rows.offsets_B1[1:]
    return {
        int(user): (rows.history_ids_N[start:stop].tolist(), int(target))
        for user, start, stop, target in zip(rows.user_ids_B, starts, stops, rows.targets_B, strict=True)
    }


EVENTS = [
    *((1, item, time) for item, time in [(1, 10), (2, 110), (3, 120), (4, 210), (5, 220), (6, 230)]),
    *((2, item, time) for item, time in [(7, 20), (8, 30), (9, 205)]),
    *((3, item, time) for item, time in [(1, 210), (2, 220)]),  # nothing before the test
    (4, 1, 150),  # nothing before the validation
    (5, 1, 250),
]


@pytest.mark.parametrize(
    ("targets", "valid", "test", "without"),
    [
        ("first", {1: ([1], 2)}, {1: ([1, 2, 3], 4), 2: ([7, 8], 9)}, (1, 2)),
        (
            "last",
            {1: ([1, 2], 3)},
            {1: ([1, 2, 3, 4, 5], 6), 2: ([7, 8], 9), 3: ([1], 2)},
            (1, 1),
        ),
    ],
)
def test_one_event_of_each_user_in_a_period_is_predicted(tmp_path, targets, valid, test, without):
    dataset, report = divided(tmp_path, EVENTS, targets=targets)

    assert targets_of(dataset, "valid") == valid
    assert targets_of(dataset, "test") == test
    counts = dataset.manifest.counts
    assert (counts["valid_without_history"], counts["test_without_history"]) == without
    assert dataset.manifest.split.targets == targets
    assert f"{targets} event of a period" in dict(report.rows())["split"]
    label = "users whose events for the test have nothing before them, left out there"
    assert dict(report.rows())[label] == str(without[1])


def test_random_targets_are_any_event_with_one_before_it_and_the_same_for_a_seed(tmp_path):
    random = np.random.default_rng(0)
    events = [
        (user, int(item), 95 + time)
        for user in range(300)
        for time, item in enumerate(random.permutation(10))
    ]

    dataset, _ = divided(tmp_path, events, targets="random", test_start=104)
    again, _ = divided(tmp_path, events, "again", targets="random", test_start=104, num_partitions=3)
    other, _ = divided(tmp_path, events, "other", targets="random", test_start=104, seed=1, ties="file")

    found = targets_of(dataset, "valid")
    assert again.fingerprint == dataset.fingerprint
    assert targets_of(other, "valid") != found
    # Events 5 to 8 of ten validate; each is as likely.
    histories = np.bincount([len(history) for history, _ in found.values()], minlength=9)
    assert histories[:5].sum() == 0
    assert (np.abs(histories[5:] - 75) < 30).all()


def test_a_new_user_is_asked_for_events_after_the_first(tmp_path):
    events = [*EVENTS, *((user, item, 110 + item) for user in range(10, 60) for item in range(3))]

    dataset, _ = divided(tmp_path, events, targets="random")

    lengths = {len(history) for user, (history, _) in targets_of(dataset, "valid").items() if user >= 10}
    assert lengths == {1, 2}


def test_targets_need_a_split_by_time():
    with pytest.raises(InputError, match=r"targets \(--targets\) belongs to the split by time"):
        PrepareConfig.parse({"targets": "last"})


def log(seed: int) -> list[tuple[int, int, int]]:
    """The same events before the validation whatever the seed; after it others of the same items."""
    past, future = np.random.default_rng(0), np.random.default_rng(seed)
    events = [(user, int(past.integers(30)), int(past.integers(100))) for user in range(40) for _ in range(6)]
    return events + [
        (user, int(future.integers(30)), int(future.integers(VALID_START, 300)))
        for user in range(40)
        for _ in range(4)
    ]


@pytest.mark.parametrize("targets", ["first", "random"])
def test_nothing_of_the_future_reaches_what_models_are_trained_on(tmp_path, targets):
    """Metamorphic: other events after the boundary, the same training rows, counts, codes and neighbors."""
    (one, _), (two, _) = (divided(tmp_path, log(seed), f"data{seed}", targets=targets) for seed in (1, 2))
    assert targets_of(one, "test") != targets_of(two, "test")

    for first, second in zip(one.train_files, two.train_files, strict=True):
        assert pq.read_table(one.root / first).equals(pq.read_table(two.root / second))
    assert one.items.train_counts_I.tolist() == two.items.train_counts_I.tolist()
    codes, similar = [], []
    for dataset in (one, two):
        for vectors in ("interactions", "graph"):
            out = tmp_path / f"{dataset.root.name}-{vectors}"
            tokenize(dataset.root, out, TokenizeConfig(vectors=vectors, codebook_size=4, num_levels=2))
        codes.append(
            [
                SemanticIdRegistry.load(tmp_path / f"{dataset.root.name}-{vectors}").codes_IL.tolist()
                for vectors in ("interactions", "graph")
            ]
        )
        known, asked = NeighborRecommender(dataset), sample_batch([[3, 4], [5]])
        similar.append(
            [
                known.recommend_samples(asked, 10, name).items_BK.tolist()
                for name in ("co_visitation", "swing")
            ]
        )
    assert codes[0] == codes[1]
    assert similar[0] == similar[1]


def test_what_items_of_the_future_are_called_reaches_no_content(tmp_path):
    """Metamorphic: other texts of items that have events after the boundary alone, the same words, weights
    and vectors of the items before it."""
    made = []
    for seed, future in enumerate((["red", "soap"], ["lamp", "blue"])):
        titles = [f"{'red' if item % 2 else 'blue'} w{item % 5}" for item in range(30)]
        titles += [" ".join([*future, "new"]) for _ in range(10)]
        items = {"item_id": list(range(40)), "title": titles}
        source = write_source(
            tmp_path / f"source{seed}",
            log(1) + [(user, 30 + user % 10, 210) for user in range(40)],
            items=items,
        )
        config = {"split": "time", "valid_start": VALID_START, "test_start": TEST_START, "clean": True}
        prepare(source, tmp_path / f"data{seed}", PrepareConfig.parse(config))
        dataset = Dataset.open(tmp_path / f"data{seed}")
        trained_I = dataset.items.train_counts_I > 0
        assert not trained_I.all()
        bags = item_content(dataset, None, 1 << 40, 2, counted_items(config_of(dataset), dataset))
        vectors_ID = vector_source("content", {"dim": 4}).vectors(_item_data(dataset))
        kept_P = np.repeat(trained_I, np.diff(bags.offsets_I1))
        assert np.isfinite(vectors_ID[trained_I]).all()
        made.append(
            (
                bags.features_P[kept_P].tobytes(),
                bags.weights_P[kept_P].tobytes(),
                vectors_ID[trained_I].tobytes(),
            )
        )

    assert made[0] == made[1]


def config_of(dataset: Dataset) -> RunConfig:
    return RunConfig.parse({"data": {"path": str(dataset.root)}, "model": {"name": "sasrec"}})


def test_histories_of_targets_are_all_that_lies_before_them_and_nothing_else(tmp_path):
    dataset, _ = divided(tmp_path, log(1), targets="random")

    for split, start in (("valid", VALID_START), ("test", TEST_START)):
        rows = dataset.evaluation_rows(split, with_times=True)
        times_B = dataset.target_times(split)
        assert len(rows) > 20
        assert (times_B >= start).all()
        assert (rows.times_N <= np.repeat(times_B, np.diff(rows.offsets_B1))).all()
    assert (dataset.target_times("valid") < TEST_START).all()
    assert (
        pq.read_table(dataset.root / dataset.train_files[0])["timestamps"]
        .combine_chunks()
        .flatten()
        .to_numpy()
        < VALID_START
    ).all()
    report = evaluate_neighbors(dataset, "test")
    assert report.count == dataset.num_evaluated("test")


def test_impressions_that_are_held_out_alike_go_by_the_boundaries(tmp_path):
    """Whichever event of the period is tested: those before it in the period are not for validation."""
    dataset, _ = divided(tmp_path, EVENTS, targets="last")
    users, items, times = (np.array(column) for column in zip(*EVENTS, strict=True))

    codes = split_codes_like(
        dataset, pa.array(users.astype(str)), pa.array(items.astype(str)), times * 1_000_000
    )

    assert codes.tolist() == [TRAIN if t < VALID_START else VALID if t < TEST_START else TEST for t in times]
