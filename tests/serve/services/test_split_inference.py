"""A recommender whose network is elsewhere answers as one that is whole."""

import asyncio
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rayrec.models.decoding.beam_policy import BeamPolicy
from rayrec.models.program.program import AllowedItems, RankedItems
from rayrec.pipelines.inference.answers import Budget, Query
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.versions.loading import load_version
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.samples.base.batches import FeatureBatch, OldChunks, PromptTokens, TableLookup
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray.dense import MOST_VERSIONS, DensePart, DenseThreads, RemoteRanker
from rayrec.serve.on_ray.packed_batch import RankBatch, unpacked_items, version_of
from tests.helpers.runs import SPARSE_SASREC, make_run

RUNS = {
    "rows of the catalog": ("sasrec", {"item_matrix": "sparse", "user_embedding": True}),
    "dense weights alone": ("sasrec", {}),
    "times": ("hstu", {}),
    "neighbors": ("gnn", {"item_matrix": "sparse", "num_negatives": 8}),
    "beams": ("generative", {}),
    "rows of prefixes": ("prefix", {"prefix_matrix": "sparse"}),
    "rows of prefixes, read": ("prefix", {"prefix_matrix": "sparse", "held_prefixes": 4}),
    "hybrid with rows of prefixes": (
        "prefix",
        {"prefix_matrix": "sparse", "softmax": "hybrid", "num_negatives": 8, "held_prefixes": 4},
    ),
    "instructions": ("encoder", {"instruction": {"parts": ["scenario", "behavior", "trigger_item"]}}),
}


def answers_of(recommender: Recommender, budget: Budget, instruction=None):
    queries = [recommender.query_of_user(f"u{user}") for user in (1, 2, 3, 17)]
    queries.append(Query(np.zeros(0, dtype=np.int64)))
    if instruction is not None:
        queries = [
            Query(query.history_ids, query.user_id, query.times, query.labels, instruction)
            for query in queries
        ]
    return [
        recommender.answer(queries, 5, exclude_seen=True, budget=budget),
        recommender.answer(queries, 7, exclude_seen=False, budget=budget),
    ]


@pytest.mark.parametrize("kind", RUNS)
def test_a_network_elsewhere_answers_to_the_bit_like_one_at_hand(tmp_path, kind):
    model, settings = RUNS[kind]
    run = make_run(tmp_path, model, labeled=kind == "instructions", **settings)
    whole = Recommender.load(run)
    part = DensePart.open(run, ServeConfig())
    rowless = TrainedModel.load(run)
    split = Recommender(rowless, RemoteRanker(part.recommend, None, part.beam_width()))
    instruction = None
    if kind == "instructions":
        instruction = whole.instruction_of({"scenario": "search", "trigger_item": "i3"})

    for budget in (Budget(), Budget(max_beams=6, max_events=3)):
        assert answers_of(split, budget, instruction) == answers_of(whole, budget, instruction)
        for k in (1, 5, 60):
            assert split.num_beams(k, budget) == whole.num_beams(k, budget)


def test_a_batch_travels_with_all_that_a_network_reads():
    features = FeatureBatch(
        step=3,
        row_keys_B=np.array([7, 8]),
        offsets_B1=np.array([0, 2, 2]),
        items_N=np.array([4, 5]),
        targets_N=None,
        num_targets=0,
        lookups={
            "item": TableLookup(np.array([40, 50]), np.array([1, 0]), np.array([40, 50])),
            "user": TableLookup(np.array([9]), np.array([[0], [0]]), np.array([9])),
        },
        times_N=np.array([100, 200]),
        labels={"behavior": np.array([1, -1])},
        instruction={"scenario": np.array([0, 2])},
        neighbors_NJ=np.array([[5, 4], [4, 5]]),
        neighbor_weights_NJ=np.array([[1.0, 0.0], [0.25, 0.75]], dtype=np.float32),
        old_chunks=OldChunks(
            offsets_B1=np.array([0, 1, 1]),
            items_XC=np.array([[3, 4]]),
            labels={"behavior": np.array([[0, -1]])},
            ages_X=np.array([0]),
            is_known_X=np.array([True]),
            known_XKD=np.ones((1, 2, 3), dtype=np.float32),
        ),
        prompts=PromptTokens(
            np.array([3, 9, 4]), np.array([0, 2, 3]), np.zeros(3, dtype=bool), {"user": np.array([0, 2])}
        ),
    )
    rows = {"item": np.eye(2, 3, dtype=np.float32), "user": np.zeros((1, 0), dtype=np.float32)}
    batch = RankBatch(11, features, rows, 5, np.array([[4, -1], [-1, -1]]), [30, 20])

    found = RankBatch.unpacked(batch.packed())

    assert (found.version, found.k, found.beams_B, found.features.step) == (11, 5, [30, 20], 3)
    np.testing.assert_array_equal(found.excluded_BE, batch.excluded_BE)
    for name in (
        "row_keys_B",
        "offsets_B1",
        "items_N",
        "times_N",
        "neighbors_NJ",
        "neighbor_weights_NJ",
    ):
        np.testing.assert_array_equal(getattr(found.features, name), getattr(features, name))
    for table, lookup in features.lookups.items():
        np.testing.assert_array_equal(found.features.lookups[table].ids_M, lookup.ids_M)
        np.testing.assert_array_equal(found.features.lookups[table].inverse, lookup.inverse)
        np.testing.assert_array_equal(found.rows[table], rows[table])
        assert found.rows[table].dtype == np.float32
    for field in dataclasses.fields(OldChunks):
        if field.name != "labels":
            found_array = getattr(found.features.old_chunks, field.name)
            np.testing.assert_array_equal(found_array, getattr(features.old_chunks, field.name))
    for field in ("tokens_N", "offsets_B1", "is_target_N"):
        found_array = getattr(found.features.prompts, field)
        np.testing.assert_array_equal(found_array, getattr(features.prompts, field))
    assert found.features.prompts.filled_P["user"].tolist() == [0, 2]
    np.testing.assert_array_equal(found.features.old_chunks.labels["behavior"], [[0, -1]])
    np.testing.assert_array_equal(found.features.labels["behavior"], [1, -1])
    np.testing.assert_array_equal(found.features.instruction["scenario"], [0, 2])


def test_what_is_not_given_is_not_there_after_the_way():
    features = FeatureBatch(0, np.array([7]), np.array([0, 1]), np.array([4]), None, 0, {})

    found = RankBatch.unpacked(RankBatch(None, features, {}, 5, None, None).packed())

    assert (found.version, found.excluded_BE, found.beams_B) == (None, None, None)
    assert (found.features.times_N, found.features.labels, found.rows) == (None, {}, {})
    assert found.features.prompts is None


def test_beam_policies_go_along():
    features = FeatureBatch(0, np.array([7]), np.array([0, 1]), np.array([4]), None, 0, {})
    beams_B = [30, BeamPolicy((64, 32)), BeamPolicy((8,), 2.5), BeamPolicy((8, 16), 1.0)]

    found = RankBatch.unpacked(RankBatch(None, features, {}, 5, None, beams_B).packed())

    assert found.beams_B == [30, BeamPolicy((64, 32)), BeamPolicy((8, 8), 2.5), BeamPolicy((8, 16), 1.0)]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[RunFolder, VersionStore]:
    """Versions 1, 2, ... of the snapshots of a run whose network reads the rows of the catalog."""
    folder = tmp_path_factory.mktemp("published")
    run = RunFolder.open(make_run(folder, snapshots_after=(0, 1), **SPARSE_SASREC))
    store = VersionStore(folder / "store")
    for name in run.snapshot_names():
        Publisher(run, store).publish(read_snapshot(run.snapshots / name))
    return run, store


def test_every_version_is_ranked_by_its_own_network_also_one_that_was_not_held(published):
    _, store = published
    part = DensePart.open(str(store.url), ServeConfig())
    for number in (1, 3, 2, 1):
        loaded = load_version(store, store.version(number))
        split = Recommender(loaded.model, RemoteRanker(part.recommend, number, 0))

        assert answers_of(split, Budget()) == answers_of(Recommender(loaded.model), Budget())


def test_no_more_versions_are_held_than_may_be():
    loaded = []

    def load(version):
        loaded.append(version)
        return SimpleNamespace(device=torch.device("cpu"))

    part = DensePart(load)
    for version in (1, 2, 3, 2, 1, 4, 2, 3, 4, 1):
        part.hold(version)

    assert MOST_VERSIONS == 3
    assert loaded == [1, 2, 3, 4, 3, 1]  # each takes the place of the one that was asked least lately


def test_after_a_rollback_the_version_that_answers_stays():
    loaded = []

    def load(version):
        loaded.append(version)
        return SimpleNamespace(device=torch.device("cpu"))

    part = DensePart(load)
    for version in (1, 2, 3, 1, 4, 1):  # back to 1, then 4 is published
        part.hold(version)

    assert loaded == [1, 2, 3, 4]


@pytest.mark.parametrize("streams", [1, 2])
def test_no_more_batches_are_computed_at_a_time_than_there_are_streams(streams):
    inside, most, lock = [0], [0], threading.Lock()
    both = threading.Barrier(streams)

    def recommend(*arguments):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        both.wait(timeout=20)
        with lock:
            inside[0] -= 1
        return RankedItems(np.zeros((1, 1), dtype=np.int64), np.zeros((1, 1), dtype=np.float32))

    program = SimpleNamespace(device=torch.device("cpu"), recommend=recommend)
    part = DensePart(lambda version: program, streams)
    features = FeatureBatch(0, np.array([7]), np.array([0, 1]), np.array([4]), None, 0, {})
    packed = RankBatch(None, features, {}, 1, None, None).packed()

    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(part.recommend, [packed] * 8))) == 8

    assert most == [streams]


def packed_batch(version: int | None) -> bytes:
    features = FeatureBatch(0, np.array([7]), np.array([0, 1]), np.array([4]), None, 0, {})
    return RankBatch(version, features, {}, 1, None, None).packed()


def test_batches_of_versions_that_are_there_do_not_wait_for_one_that_is_loaded():
    """A replica that made a version ready held up the requests of all others until it was loaded."""
    is_loading, is_there = threading.Event(), threading.Event()

    def load(version):
        if version == 2:
            is_loading.set()
            assert is_there.wait(timeout=60)
        found = RankedItems(np.full((1, 1), version), np.zeros((1, 1), dtype=np.float32))
        return SimpleNamespace(device=torch.device("cpu"), recommend=lambda *arguments: found)

    threads = DenseThreads(DensePart(load), streams=1)

    async def version_for(version: int) -> int:
        return unpacked_items(await threads.recommend(packed_batch(version))).items_BK.item()

    async def asked() -> list[int]:
        first = await version_for(1)
        waiting = [asyncio.create_task(version_for(2)) for _ in range(2)]
        while not is_loading.is_set():
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(10):
                again = await version_for(1)
        finally:
            is_there.set()
        return [first, again, *await asyncio.gather(*waiting)]

    assert asyncio.run(asked()) == [1, 1, 2, 2]


@pytest.mark.parametrize("version", [None, 0, 7, 2**40])
def test_the_version_of_a_batch_is_read_without_the_rest_of_it(version):
    packed = packed_batch(version)
    assert version_of(packed) == RankBatch.unpacked(packed).version == version


@pytest.mark.slow
def test_batches_beside_each_other_are_ranked_as_one_after_the_other(tmp_path):
    run = make_run(tmp_path, "generative")
    part = DensePart.open(run, ServeConfig(), streams=3)
    recommenders = [
        Recommender(TrainedModel.load(run), RemoteRanker(part.recommend, None, 40)) for _ in range(3)
    ]
    expected = answers_of(Recommender.load(run), Budget())

    with ThreadPoolExecutor(3) as threads:
        found = [
            answer
            for _ in range(5)
            for answer in threads.map(lambda each: answers_of(each, Budget()), recommenders)
        ]

    assert all(answer == expected for answer in found)


def test_a_dense_part_says_what_it_keeps_of_histories(tmp_path):
    part = DensePart.open(make_run(tmp_path, "prefix"), ServeConfig(prefix_cache_mib=1))
    recommender = Recommender(TrainedModel.load(tmp_path / "run"), RemoteRanker(part.recommend, None, 4))
    assert part.metrics()["prefix_cache_histories"] == 0
    for _ in range(2):
        recommender.recommend([recommender.query_of_user("u1")], 3)

    metrics = part.metrics()
    assert metrics["dense_versions"] == metrics["prefix_cache_histories"] == 1
    assert metrics["prefix_cache_events_reused_total"] > 0


def test_sets_of_items_travel_eight_to_a_byte():
    features = FeatureBatch(0, np.zeros(2, int), np.array([0, 0, 0]), np.zeros(0, int), None, 0, {})
    mask_SI = np.arange(22).reshape(2, 11) % 3 == 0
    sets = AllowedItems(mask_SI, np.array([1, 0]))

    found = RankBatch.unpacked(RankBatch(None, features, {}, 5, None, None, sets).packed()).allowed

    assert found is not None
    assert found.mask_SI.dtype == np.bool_
    np.testing.assert_array_equal(found.mask_SI, mask_SI)
    assert found.set_B.tolist() == [1, 0]
