"""A model that was trained before some items were there, serving the catalog that has them."""

import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from rayrec.models.tokenizers.item_vectors import content_vectors
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.models.tokenizers.vector_sources import vector_source
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.export import export_run
from rayrec.pipelines.inference.item_ranker import UnloadedRanker
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.semantic_ids.tokenization import _item_data
from rayrec.pipelines.tasks.assembly import assemble, open_task
from rayrec.pipelines.tasks.features import SEMANTIC_IDS_FOLDER
from rayrec.platform.errors import InputError
from rayrec.platform.item_bags import ItemBags
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import random_events, write_source
from tests.helpers.examples import cases
from tests.helpers.later_data import (
    NUM_NEW,
    dataset_with_brands,
    described_dataset,
    extend,
    grown_dataset,
    run_of_words,
    trained_on_words,
)
from tests.helpers.runs import (
    MODELS,
    NUM_ITEMS,
    NUM_USERS,
    make_run,
    make_semantic_ids,
    trained,
)

GROWN = (
    ("generative", "extra_digit", {"item_embedding": True}),
    ("generative", "share", {"item_embedding": False}),
    ("prefix", "extra_digit", {"prefix_matrix": "sparse"}),
    ("prefix", "share", {"prefix_matrix": "sparse", "held_prefixes": 0}),
    ("lazy", "extra_digit", {}),
)


@pytest.mark.parametrize(
    ("model", "policy", "settings"),
    cases(
        [
            (model, policy, settings)
            for model, settings in (
                ("generative", {"item_embedding": True}),
                ("generative", {"item_embedding": False}),
                ("prefix", {}),
                ("prefix", {"prefix_matrix": "sparse"}),
                ("prefix", {"prefix_matrix": "sparse", "held_prefixes": 0}),
                ("lazy", {}),
            )
            for policy in ("extra_digit", "share")
        ],
        GROWN,
    ),
)
def test_a_model_serves_items_that_came_after_it_was_trained(policy, model, settings, tmp_path):
    run = make_run(tmp_path, model, collision_policy=policy, **settings)
    before = Recommender.load(run)
    registry = SemanticIdRegistry.load(tmp_path / "data" / SEMANTIC_IDS_FOLDER)
    dataset = grown_dataset(tmp_path)
    extended = extend(registry, dataset, np.zeros((NUM_NEW, 6), dtype=np.float32))
    if policy == "share":
        assert extended.level_sizes[-1] > registry.level_sizes[-1]  # all three have one tuple

    after = Recommender.load(run, data=dataset.root)

    known = Query(before.dataset.items.ids_I[:4])
    (old,), (new,) = (
        recommender.recommend([known], k=NUM_ITEMS + NUM_NEW, exclude_seen=False)
        for recommender in (before, after)
    )
    assert len(old) == NUM_ITEMS
    assert len(new) == NUM_ITEMS + NUM_NEW
    assert sum(np.exp(item.score) for item in new) == pytest.approx(1.0, rel=1e-4)
    fresh = {f"i{NUM_ITEMS + n}" for n in range(NUM_NEW)}
    assert fresh <= {item.item_key for item in new}
    # A history of new items is as good as any.
    ids = dataset.items.ids_I[np.isin(dataset.items.keys.to_pylist(), sorted(fresh))]
    assert len(after.recommend([Query(ids)], k=5)[0]) == 5
    assert evaluate(run, data=dataset.root).count > 0


@pytest.mark.parametrize("model", ["prefix", "lazy"])
def test_a_grown_catalog_leaves_what_is_said_of_old_items_the_same_bits(model, tmp_path):
    """New items repeat words: `i0` is above `min_items` now, and is the first that the columns have."""
    keys = [f"i{item}" for item in range(NUM_ITEMS)]
    titles = [f"w{item % 7} w{item % 3}" + (" rare" if item < 4 else "") for item in range(NUM_ITEMS)]
    described = described_dataset(tmp_path, "data", keys, titles)
    make_semantic_ids(described, "share")
    settings = {"content": {"min_items": 5}} | ({"composed": 8} if model == "prefix" else {})
    config = {
        "data": {"path": str(described.root)},
        "model": MODELS[model] | settings,
        "pipeline": {"trainer_threads": 1},
        "training": {"batch_size": 16, "epochs": 1},
    }
    run = trained(RunConfig.parse(config), tmp_path / "run")
    before = Recommender.load(run)
    fresh = [f"a{n}" for n in range(NUM_NEW)]
    new_titles = ["zz rare w1", "rare w1 extra", "rare w2"]
    dataset = described_dataset(tmp_path, "grown", fresh + keys, new_titles + titles)
    extend(
        SemanticIdRegistry.load(described.root / SEMANTIC_IDS_FOLDER),
        dataset,
        np.zeros((NUM_NEW, 6), dtype=np.float32),
    )

    after = Recommender.load(run, data=dataset.root)

    old, new = (recommender.ranking_model.catalog for recommender in (before, after))
    assert old.content is not None
    assert new.content is not None
    assert len(old.content.features_P)
    is_old_I = np.isin(dataset.items.ids_I, described.items.ids_I)
    counts_I = np.diff(new.content.offsets_I1)
    is_old_P = np.repeat(is_old_I, counts_I)
    assert counts_I[is_old_I].tolist() == np.diff(old.content.offsets_I1).tolist()
    assert new.content.features_P[is_old_P].tolist() == old.content.features_P.tolist()
    assert new.content.weights_P[is_old_P].tobytes() == old.content.weights_P.tobytes()
    if model == "prefix":
        networks = [recommender._ranker.model.backbone.eval() for recommender in (before, after)]
        with torch.inference_mode():
            for depth in range(2):
                first, second = (network.own_vectors(depth) for network in networks)
                assert torch.equal(first, second)


@pytest.mark.parametrize("model", ["sasrec", "bsarec", "hstu", "gnn"])
def test_a_model_that_reads_words_serves_items_that_came_later_without_semantic_ids(model, tmp_path, caplog):
    run, grown = run_of_words(tmp_path, model)
    before = Recommender.load(run)
    with caplog.at_level(logging.INFO):
        after = Recommender.load(run, data=grown.root)
    assert "1 of the 4 items that came since say nothing that it has learned" in caplog.text

    known = Query(before.dataset.items.ids_I[:4])
    (old,), (new,) = (
        recommender.recommend([known], k=NUM_ITEMS + NUM_NEW + 1, exclude_seen=False)
        for recommender in (before, after)
    )

    words = {f"a{n}" for n in range(NUM_NEW)}
    assert {item.item_key for item in new} == {item.item_key for item in old} | words
    if model != "gnn":  # whose neighbors are those of the later data set
        scores = {item.item_key: item.score for item in new}
        assert {key: score for key, score in scores.items() if key not in words} == pytest.approx(
            {item.item_key: item.score for item in old}, abs=1e-6
        )
    ids = grown.items.ids_I[np.isin(grown.items.keys.to_pylist(), sorted(words))]
    assert len(after.recommend([Query(ids)], k=5)[0]) == 5  # a history of new items is as good as any
    report = evaluate(run, data=grown.root)
    assert report.count > evaluate(run).count  # further users have met the new items


def test_vectors_are_those_of_items_that_the_run_was_trained_on_or_knows_by_their_words(tmp_path):
    """`i3` had no event when the run was trained, and says nothing that others say; later it has events."""
    keys = [f"i{item}" for item in range(NUM_ITEMS)]
    titles = [f"w{item % 7} w{item % 3}" if item != 3 else "alone" for item in range(NUM_ITEMS)]
    events = random_events(NUM_USERS, NUM_ITEMS)
    items = {"item_id": keys, "title": titles}
    source = write_source(tmp_path / "source", [event for event in events if event[1] != "i3"], items=items)
    prepare(source, tmp_path / "data", PrepareConfig(allow=("cold-items",)))
    run = trained_on_words(tmp_path / "data", tmp_path / "run")
    later = described_dataset(tmp_path, "later", ["a0", "a1", *keys], ["w1", "unknown", *titles])

    exported = export_run(run, tmp_path / "vectors", data=later.root)

    names = (tmp_path / "vectors" / "items.txt").read_text().split()
    assert exported.num_items == len(names)
    assert sorted(names) == sorted({"a0", *keys} - {"i3"})


def test_what_is_said_of_old_items_is_what_the_run_was_trained_on(tmp_path):
    run, grown = run_of_words(tmp_path)
    before, after = Recommender.load(run), Recommender.load(run, data=grown.root)

    vectors = [recommender._ranker.item_vectors() for recommender in (before, after)]

    is_old_I = np.isin(grown.items.ids_I, before.dataset.items.ids_I)
    assert vectors[0].tobytes() == vectors[1][is_old_I].tobytes()
    assert np.abs(vectors[1][~is_old_I]).sum(1).astype(bool).sum() == NUM_NEW  # the last has no known word


def test_items_whose_texts_were_changed_are_counted(tmp_path, caplog):
    run, _ = run_of_words(tmp_path)
    keys = [f"i{item}" for item in range(NUM_ITEMS)]
    titles = [f"w{item % 7} w{item % 3}" for item in range(NUM_ITEMS)]
    titles[:3] = ["w5 w2", "w4", titles[2] + " unheard"]  # of the third, nothing that the model reads
    later = described_dataset(tmp_path, "later", ["a0", *keys], ["w1 w2", *titles])

    assert Recommender.load(run, data=later.root)

    assert f"2 of the {NUM_ITEMS} items that it knows have other words or values in" in caplog.text


def test_a_later_data_set_that_lacks_known_items_is_refused(tmp_path):
    run, _ = run_of_words(tmp_path)
    keys = [f"i{item}" for item in range(1, NUM_ITEMS)]
    events = [(user, item, time) for user, item, time in random_events(NUM_USERS, NUM_ITEMS) if item != "i0"]
    titles = [f"w{item % 7} w{item % 3}" for item in range(1, NUM_ITEMS)]
    source = write_source(tmp_path / "less-source", events, items={"item_id": keys, "title": titles})
    prepare(source, tmp_path / "less", PrepareConfig())

    with pytest.raises(InputError, match=r"less lacks 1 of the items that it was trained on, such as 'i0'"):
        Recommender.load(run, data=tmp_path / "less")


def test_a_later_data_set_whose_columns_are_others_is_refused(tmp_path):
    run = make_run(tmp_path, "sasrec", content={"min_items": 2})
    later = dataset_with_brands(tmp_path)

    with pytest.raises(InputError, match=r"has read text of its items, and would read text, brand"):
        Recommender.load(run, data=later.root)


def test_a_later_data_set_needs_the_one_that_a_run_of_words_was_trained_on(tmp_path):
    run, grown = run_of_words(tmp_path)
    shutil.rmtree(tmp_path / "data")

    with pytest.raises(InputError, match=r"its own cannot be opened .*says which items it knows: leave it"):
        Recommender.load(run, data=grown.root)


def test_a_data_set_that_was_moved_needs_no_other(tmp_path):
    run, _ = run_of_words(tmp_path)
    shutil.move(tmp_path / "data", tmp_path / "moved")

    assert Recommender.load(run, data=tmp_path / "moved").recommend([Query(np.array([1]))], k=3) is not None


def test_a_model_of_ids_alone_does_not_serve_items_that_came_later(tmp_path):
    run = make_run(tmp_path, "sasrec")

    with pytest.raises(InputError, match=r"another data set than .*: the model knows items by their ids"):
        Recommender.load(run, data=grown_dataset(tmp_path).root)


def test_whether_a_service_can_be_loaded_is_known_before_it_starts(tmp_path):
    """`rayrec serve` looks at shapes first: each item that came later would add a prefix to a new network."""
    run = make_run(tmp_path, "prefix")
    dataset = grown_dataset(tmp_path)
    registry = SemanticIdRegistry.load(tmp_path / "data" / SEMANTIC_IDS_FOLDER)
    extend(registry, dataset, np.zeros((NUM_NEW, 6), dtype=np.float32))

    assert UnloadedRanker.of(TrainedModel.load(run, data=dataset.root, with_weights=False))


def test_whether_a_service_of_words_can_be_loaded_is_known_before_it_starts(tmp_path):
    run, grown = run_of_words(tmp_path)

    assert UnloadedRanker.of(TrainedModel.load(run, data=grown.root, with_weights=False))


@pytest.mark.parametrize("num_trained", [NUM_ITEMS, 20])
def test_items_that_come_later_have_the_vectors_of_content_that_they_would_have_had(num_trained, tmp_path):
    """Words weigh as in the items that were analyzed, however many items have them now."""
    random = np.random.default_rng(0)
    words = [f"word{number}" for number in range(12)]
    keys = [f"i{item}" for item in range(NUM_ITEMS + NUM_NEW)]
    titles = [" ".join(random.choice(words, 4)) for _ in keys]
    titles[-1], titles[-2] = titles[0], "nothing known"
    old = described_dataset(tmp_path, "old", keys[:NUM_ITEMS], titles[:NUM_ITEMS])
    new = described_dataset(tmp_path, "new", keys, titles)
    items = _item_data(old)
    trained_I = np.isin(items.keys, keys[:num_trained])
    source = vector_source("content", {"dim": 4})
    fitted = source.fit(replace(items, trained_I=trained_I))

    found_ID = source.of_others(_item_data(new, np.arange(len(new.items))), fitted.learned)

    place_of = {key: place for place, key in enumerate(new.items.keys.to_pylist())}
    theirs_ID = found_ID[[place_of[key] for key in items.keys]]
    np.testing.assert_allclose(theirs_ID, fitted.vectors_ID, atol=1e-5)
    np.testing.assert_array_equal(found_ID[place_of[keys[-1]]], found_ID[place_of["i0"]])
    assert np.isnan(found_ID[place_of[keys[-2]]]).all()
    assert np.isfinite(found_ID[place_of[keys[-3]]]).all()


def test_an_item_of_which_the_analysis_holds_nothing_has_no_vector_alone_either():
    """Of twelve groups without a word in common, four directions know four."""
    groups = np.repeat(np.arange(12), np.arange(14, 2, -1))
    bags = ItemBags(np.arange(len(groups) + 1), groups, np.ones(len(groups), np.float32))
    vectors_ID, directions = content_vectors(bags, dim=4)
    assert np.isnan(vectors_ID[groups == 11]).all()
    assert np.isfinite(vectors_ID[groups == 0]).all()

    def alone(*features):
        return directions.vectors(
            ItemBags(np.array([0, len(features)]), np.array(features), np.ones(len(features), np.float32))
        )

    np.testing.assert_allclose(alone(0), vectors_ID[:1], atol=1e-6)
    for nothing in (alone(11), alone(99), alone()):
        assert np.isnan(nothing).all()


def test_training_is_told_which_items_of_the_catalog_it_has_no_event_of(tmp_path):
    dataset = grown_dataset(tmp_path)  # two of the new items come last, and are not trained on
    make_semantic_ids(dataset)
    settings = {"data": {"path": str(dataset.root)}, "model": MODELS["prefix"]}
    assembly = assemble(RunConfig.parse(settings))

    spec = assembly.task.program(assembly.dense_optimizer())

    trained = {dataset.items.keys[place].as_py() for place in np.flatnonzero(spec.catalog.trained_I)}
    assert set(dataset.items.keys.to_pylist()) - trained == {f"i{NUM_ITEMS + n}" for n in (1, 2)}
    # No count is known of rows that are read from elsewhere.
    settings["data"]["samples"] = str(tmp_path / "raw")
    task = open_task(RunConfig.parse(settings))
    assert task.program(assembly.dense_optimizer()).catalog.trained_I is None


def test_an_extension_of_other_semantic_ids_is_refused(tmp_path):
    run = make_run(tmp_path, "generative")
    registry = SemanticIdRegistry.load(tmp_path / "data" / SEMANTIC_IDS_FOLDER)
    dataset = grown_dataset(tmp_path)
    other = replace(registry, method="another one")
    extend(other, dataset, np.zeros((NUM_NEW, 6), dtype=np.float32))

    with pytest.raises(InputError, match="was trained on another data set"):
        Recommender.load(run, data=dataset.root)
