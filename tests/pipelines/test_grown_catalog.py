"""A model that was trained before some items were there, serving the catalog that has them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rayrec.models.tokenizers.extend import NewItems, extend_registry
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.tasks.assembly import assemble, open_task
from rayrec.pipelines.tasks.features import SEMANTIC_IDS_FOLDER
from rayrec.pipelines.training.initial_weights import initial_snapshot
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import random_events, write_source
from tests.helpers.examples import cases
from tests.helpers.runs import MODELS, NUM_ITEMS, NUM_USERS, make_run, make_semantic_ids, trained

NUM_NEW = 3


def grown_dataset(folder):
    """That of `make_run`, and three more items that two further users have met."""
    keys = [f"i{item}" for item in range(NUM_ITEMS + NUM_NEW)]
    events = random_events(NUM_USERS, NUM_ITEMS)
    events += [
        (user, key, 2000 + n) for user in ("x", "y") for n, key in enumerate(["i0", *keys[NUM_ITEMS:]])
    ]
    source = write_source(folder / "grown-source", events, items={"item_id": keys, "title": keys})
    prepare(source, folder / "grown", PrepareConfig(num_partitions=3))
    return Dataset.open(folder / "grown")


def extend(registry, dataset, vectors_of_new):
    quantizer = ResidualKMeans(2, 4).restore({"codebooks_LKD": registry.codebooks_CKD})
    ids_I = dataset.items.ids_I
    new_ids = ids_I[~np.isin(ids_I, registry.item_ids_I)]
    new = NewItems(new_ids, torch.from_numpy(vectors_of_new))
    extended = extend_registry(registry, quantizer, new, ids_I, dataset.fingerprint)
    extended.save(dataset.root / SEMANTIC_IDS_FOLDER)
    return extended


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


def described_dataset(folder, name, keys, titles):
    """Old items have the events of `make_run`; the others are met once, by further users."""
    old = [f"i{item}" for item in range(NUM_ITEMS)]
    events = random_events(NUM_USERS, NUM_ITEMS)
    fresh = [key for key in keys if key not in old]
    events += [
        (user, key, 2000 + n) for user in "xyz" * bool(fresh) for n, key in enumerate([*fresh, *old[:3]])
    ]
    source = write_source(folder / f"{name}-source", events, items={"item_id": keys, "title": titles})
    prepare(source, folder / name, PrepareConfig(num_partitions=3))
    return Dataset.open(folder / name)


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


def test_training_on_does_not_begin_with_weights_of_the_catalog_before(tmp_path):
    run = make_run(tmp_path, "prefix")
    registry = SemanticIdRegistry.load(tmp_path / "data" / SEMANTIC_IDS_FOLDER)
    dataset = grown_dataset(tmp_path)
    extend(registry, dataset, np.zeros((NUM_NEW, 6), dtype=np.float32))
    config = RunConfig.load(run / "config.yaml", [f"data.path={dataset.root}", f"training.init_from={run}"])

    with pytest.raises(InputError, match="an earlier catalog"):
        initial_snapshot(assemble(config))
