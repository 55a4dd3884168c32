"""A model that was trained before some items were there, serving the catalog that has them."""

import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.snapshot.snapshot import load_tables
from rayrec.models.sequence.next_item import DenseNextItemModel
from rayrec.models.sequence.sequence_model import SequenceModel
from rayrec.models.tokenizers.extend import NewItems, extend_registry
from rayrec.models.tokenizers.item_vectors import content_vectors
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.models.tokenizers.rq_kmeans import ResidualKMeans
from rayrec.models.tokenizers.vector_sources import vector_source
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.export import export_run
from rayrec.pipelines.inference.item_ranker import UnloadedRanker
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig, _item_data, tokenize
from rayrec.pipelines.semantic_ids.tokenization import extend as extend_for
from rayrec.pipelines.tasks.assembly import assemble, open_task
from rayrec.pipelines.tasks.features import SEMANTIC_IDS_FOLDER
from rayrec.pipelines.training.initial_weights import initial_snapshot
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError
from rayrec.platform.item_bags import ItemBags
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import random_events, write_source
from tests.helpers.examples import cases
from tests.helpers.runs import (
    MODELS,
    NUM_ITEMS,
    NUM_NEW,
    NUM_USERS,
    dataset_of,
    grown_dataset,
    make_run,
    make_semantic_ids,
    trained,
)


def extend(registry, dataset, vectors_of_new):
    quantizer = ResidualKMeans(2, registry.codebooks_CKD.shape[1]).restore(
        {"codebooks_LKD": registry.codebooks_CKD}
    )
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


def trained_on_words(data, run, model="sasrec"):
    config = {
        "data": {"path": str(data)},
        "model": MODELS[model] | {"content": {"min_items": 2}},
        "pipeline": {"trainer_threads": 1},
        "training": {"batch_size": 16, "epochs": 1},
    }
    return trained(RunConfig.parse(config), run)


def run_of_words(folder, model="sasrec"):
    """(A run that knows items by words, too; a later data set: three more items with words that others have,
    and one without a known word.)"""
    keys = [f"i{item}" for item in range(NUM_ITEMS)]
    titles = [f"w{item % 7} w{item % 3}" for item in range(NUM_ITEMS)]
    described = described_dataset(folder, "data", keys, titles)
    run = trained_on_words(described.root, folder / "run", model)
    fresh = [f"a{n}" for n in range(NUM_NEW + 1)]
    grown = described_dataset(folder, "grown", fresh + keys, ["w1 w2", "w3 x", "w0 x", "unknown x", *titles])
    return run, grown


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


def test_a_later_data_set_that_lacks_known_items_is_refused(tmp_path):
    run, _ = run_of_words(tmp_path)
    keys = [f"i{item}" for item in range(1, NUM_ITEMS)]
    events = [(user, item, time) for user, item, time in random_events(NUM_USERS, NUM_ITEMS) if item != "i0"]
    titles = [f"w{item % 7} w{item % 3}" for item in range(1, NUM_ITEMS)]
    source = write_source(tmp_path / "less-source", events, items={"item_id": keys, "title": titles})
    prepare(source, tmp_path / "less", PrepareConfig())

    with pytest.raises(InputError, match=r"less lacks 1 of the items that it was trained on, such as 'i0'"):
        Recommender.load(run, data=tmp_path / "less")


def dataset_with_brands(folder):
    """That of `make_run`, which knows a brand of each item, too."""
    keys = [f"i{item}" for item in range(NUM_ITEMS)]
    items = {"item_id": keys, "title": [f"Title of {key}" for key in keys], "brand": ["b"] * NUM_ITEMS}
    source = write_source(folder / "later-source", random_events(NUM_USERS, NUM_ITEMS), items=items)
    prepare(source, folder / "later", PrepareConfig())
    return Dataset.open(folder / "later")


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


def going_on(run, dataset, **further):
    """Settings that begin with the weights of a run and hardly change them."""
    values = RunFolder.open(run).config.model_dump(mode="json")
    values["data"]["path"] = str(dataset.root)
    values["training"] |= {"init_from": str(run), "optimizer": {"learning_rate": 1e-12}}
    values["sparse"] |= {"optimizer": {"kind": "sgd", "lr": 1e-12}}
    values["evaluation"] |= {"max_users": 8}
    return RunConfig.parse(values | further)


TRAINED_ON = (
    ("sasrec", {}),
    ("sasrec", {"content": {"min_items": 2}}),
    ("prefix", {}),
)


@pytest.mark.parametrize(
    ("model", "settings"),
    cases(
        [
            *TRAINED_ON,
            ("sasrec", {"item_matrix": "sparse", "num_negatives": 8, "user_embedding": True}),
            ("hstu", {}),
            ("gnn", {}),
            ("prefix", {"softmax": "items"}),
            ("prefix", {"softmax": "hybrid"}),
            ("prefix", {"composed": 8}),
            ("prefix", {"collision_policy": "share"}),
            ("prefix", {"prefix_matrix": "sparse"}),
            ("prefix", {"content": {"min_items": 2}}),
            ("generative", {"item_embedding": True}),
            ("lazy", {}),
            ("encoder", {}),
        ],
        TRAINED_ON,
    ),
)
def test_training_goes_on_with_what_was_learned_of_a_smaller_catalog(model, settings, tmp_path):
    described = dataset_of(tmp_path)
    policy = settings.get("collision_policy", "extra_digit")
    settings = {name: value for name, value in settings.items() if name != "collision_policy"}
    make_semantic_ids(described, policy, codebook_size=16)  # many prefixes are free for new items
    config = {
        "data": {"path": str(described.root)},
        "model": MODELS[model] | settings,
        "pipeline": {"trainer_threads": 1},
        "training": {"batch_size": 16, "epochs": 1},
    }
    run, dataset = trained(RunConfig.parse(config), tmp_path / "run"), grown_dataset(tmp_path)
    vectors = np.random.default_rng(1).normal(size=(NUM_NEW, 6)).astype(np.float32)
    extend(SemanticIdRegistry.load(described.root / SEMANTIC_IDS_FOLDER), dataset, vectors)
    config, second = going_on(run, dataset), tmp_path / "second"

    train(config, second, cluster=in_process)

    before, after = Recommender.load(run), Recommender.load(second)
    (theirs, their_rows), (ours, our_rows) = (weights_of(each) for each in (before, after))
    assert theirs.keys() == ours.keys()
    for name, weight in ours.items():
        if name not in our_rows:
            np.testing.assert_allclose(weight, theirs[name], atol=1e-6, err_msg=name)
            continue
        place_V = {ident: row for row, ident in enumerate(their_rows[name].tolist())}
        known = [
            (row, place_V[ident]) for row, ident in enumerate(our_rows[name].tolist()) if ident in place_V
        ]
        assert len(known) == len(place_V), "everything of the smaller catalog is there"
        rows, their = np.array(known).T
        np.testing.assert_allclose(weight[rows], theirs[name][their], atol=1e-6, err_msg=name)
        new_rows = np.delete(weight, rows, axis=0)
        assert (np.abs(new_rows) < 0.2).all()
    if our_rows:
        assert sum(map(len, our_rows.values())) > sum(map(len, their_rows.values()))
    for table, rows in rows_of(second).items():
        learned = rows_of(run)[table]
        assert learned
        for ident, row in learned.items():
            np.testing.assert_allclose(rows[ident], row, atol=1e-6)
    answers = after.recommend([Query(before.dataset.items.ids_I[:4])], k=NUM_ITEMS + NUM_NEW)
    assert {f"i{NUM_ITEMS + n}" for n in range(NUM_NEW)} <= {item.item_key for item in answers[0]}
    # Which is what it goes on from where it is resumed; the earlier data are not needed any more.
    shutil.rmtree(tmp_path / "data")
    assert train(config, second, resume=True, cluster=in_process).steps


def weights_of(recommender):
    """Weights of the network, and whose rows those have that grow with the catalog."""
    network = recommender._ranker.model
    weights = {name: weight.detach().numpy() for name, weight in network.named_parameters()}
    return weights, network.row_ids(recommender.dataset.items.ids_I)


def rows_of(run):
    """Of each table, by id."""
    folder = RunFolder.open(run)
    snapshot = read_snapshot(folder.chosen_snapshot("last"))
    tables = assemble(folder.config, columns=None).tables
    loaded = load_tables(snapshot.sparse_chain, tables, ShardMap(1), shard=0) if tables else {}
    return {
        name: {
            ident: row
            for part in parts
            for ident, row in zip(part.ids_M.tolist(), part.weights_MD, strict=True)
        }
        for name, parts in loaded.items()
    }


def test_what_is_said_of_items_is_counted_again_in_a_later_catalog(tmp_path):
    """Word vectors are carried over; items that have gone must not be missed for ever."""
    keys = [f"i{item}" for item in range(NUM_ITEMS)]
    titles = [f"w{item % 7} w{item % 3}" for item in range(NUM_ITEMS)]
    described = described_dataset(tmp_path, "data", keys, titles)
    config = {
        "data": {"path": str(described.root)},
        "model": MODELS["sasrec"] | {"content": {"min_items": 5}},
        "pipeline": {"trainer_threads": 1},
        "training": {"batch_size": 16, "epochs": 1},
    }
    run = trained(RunConfig.parse(config), tmp_path / "run")
    fresh = [f"a{n}" for n in range(NUM_NEW)]
    grown = described_dataset(tmp_path, "grown", fresh + keys, ["w1 x", "w1 x", "w2 x", *titles])
    config, second = going_on(run, grown), tmp_path / "second"

    train(config, second, cluster=in_process)

    new = RunConfig.parse(config.model_dump(mode="json", exclude={"training": {"init_from"}}))
    ours, as_new = Recommender.load(second).ranking_model.catalog.content, assemble(new).task.catalog.content
    assert ours.features_P.tolist() == as_new.features_P.tolist()
    assert ours.weights_P.tobytes() == as_new.weights_P.tobytes()
    theirs = read_snapshot(RunFolder.open(run).chosen_snapshot("last")).weights["content.rows_VD"]
    after = read_snapshot(RunFolder.open(second).chosen_snapshot("last")).weights["content.rows_VD"]
    np.testing.assert_allclose(after, theirs, atol=1e-6)


def test_other_columns_of_the_catalog_are_refused(tmp_path):
    run = make_run(tmp_path, "sasrec", content={"min_items": 2})
    later = dataset_with_brands(tmp_path)

    with pytest.raises(InputError, match=r"has read text of its items, and would read text, brand"):
        initial_snapshot(assemble(going_on(run, later)))


def test_a_model_that_does_not_say_whose_its_weights_are_is_refused(tmp_path, monkeypatch):
    """As many items need not be the same ones."""
    run = make_run(tmp_path, "sasrec")
    keys = [f"i{item}" for item in range(1, NUM_ITEMS + 1)]
    events = [
        (user, f"i{int(item[1:]) + 1}", time) for user, item, time in random_events(NUM_USERS, NUM_ITEMS)
    ]
    prepare(
        write_source(
            tmp_path / "later-source",
            events,
            items={"item_id": keys, "title": [f"Title of {key}" for key in keys]},
        ),
        tmp_path / "later",
        PrepareConfig(),
    )
    later = Dataset.open(tmp_path / "later")
    snapshot = initial_snapshot(assemble(going_on(run, later)))
    before = Recommender.load(run).dataset
    theirs = read_snapshot(snapshot.path).weights["items_ID"]
    place_I = before.item_positions(later.items.ids_I)
    assert (place_I != np.arange(NUM_ITEMS)).any()
    assert np.array_equal(snapshot.weights["items_ID"][place_I >= 0], theirs[place_I[place_I >= 0]])

    monkeypatch.setattr(DenseNextItemModel, "row_ids", SequenceModel.row_ids)

    with pytest.raises(InputError, match=r"DenseNextItemModel does not say which of its weights"):
        initial_snapshot(assemble(going_on(run, later)))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (lambda ids_I: {}, r"does not name 'items_ID', whose shape depends on the catalog"),
        (lambda ids_I: {"items_ID": ids_I[1:]}, r"gives 29 ids for 'items_ID', which has the shape .30, 8"),
        (lambda ids_I: {"items_DI": ids_I}, r"gives 30 ids for 'items_DI', which is no weight"),
    ],
)
def test_a_model_that_says_wrong_whose_its_weights_are_is_refused_by_name(
    said, message, tmp_path, monkeypatch
):
    run, dataset = make_run(tmp_path, "sasrec"), grown_dataset(tmp_path)
    monkeypatch.setattr(DenseNextItemModel, "row_ids", lambda model, ids_I: said(ids_I))

    with pytest.raises(InputError, match=rf"DenseNextItemModel.row_ids {message}"):
        initial_snapshot(assemble(going_on(run, dataset)))


def test_training_goes_on_where_items_have_gone(tmp_path):
    """As where a log is of the last weeks."""
    run = make_run(tmp_path, "sasrec")
    keys = [f"i{item}" for item in range(8, NUM_ITEMS + 2)]
    events = [each for each in random_events(NUM_USERS, NUM_ITEMS) if each[1] in keys]
    events += [("x", key, 2000 + n) for n, key in enumerate(reversed(keys))]
    source = write_source(tmp_path / "later-source", events)
    prepare(source, tmp_path / "later", PrepareConfig(allow=frozenset({"short-users"})))
    dataset = Dataset.open(tmp_path / "later")

    snapshot = initial_snapshot(assemble(going_on(run, dataset)))

    before = Recommender.load(run)
    place_I = before.dataset.item_positions(dataset.items.ids_I)
    theirs = weights_of(before)[0]["items_ID"]
    assert (place_I < 0).sum() == 2
    assert np.array_equal(snapshot.weights["items_ID"][place_I >= 0], theirs[place_I[place_I >= 0]])


def test_semantic_ids_that_were_made_again_for_the_same_data_are_refused(tmp_path):
    run = make_run(tmp_path, "prefix")
    dataset = Dataset.open(tmp_path / "data")
    make_semantic_ids(dataset, codebook_size=8)

    with pytest.raises(
        InputError, match=r"semantic IDs have changed since: prepare again in .*data what it was"
    ):
        initial_snapshot(assemble(going_on(run, dataset)))


def test_a_run_that_died_before_its_first_snapshot_begins_again_with_these_weights(tmp_path):
    run = make_run(tmp_path, "sasrec")
    config, second = going_on(run, grown_dataset(tmp_path)), tmp_path / "second"
    RunFolder.create(second, config)

    train(config, second, resume=True, cluster=in_process)

    (theirs, their_rows), (ours, our_rows) = (weights_of(Recommender.load(each)) for each in (run, second))
    _, to_V, from_V = np.intersect1d(our_rows["items_ID"], their_rows["items_ID"], return_indices=True)
    assert len(to_V) == NUM_ITEMS
    np.testing.assert_allclose(ours["items_ID"][to_V], theirs["items_ID"][from_V], atol=1e-6)


def other_log(folder, change):
    """That of `make_run` with other keys of items, titles or users."""
    events = random_events(NUM_USERS, NUM_ITEMS)
    keys = [f"i{item}" for item in range(NUM_ITEMS)]
    titles = [f"Title of {key}" for key in keys]
    match change:
        case "items":
            events, keys = (
                [(user, f"new-{key}", time) for user, key, time in events],
                [f"new-{k}" for k in keys],
            )
        case "titles":
            titles = [f"A film called {key}" for key in keys]
        case "users":
            events = [(int(str(user)[1:]), key, time) for user, key, time in events]
    prepare(
        write_source(folder / "other-source", events, items={"item_id": keys, "title": titles}),
        folder / "other",
        PrepareConfig(),
    )
    return Dataset.open(folder / "other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("items", r"has 30 items, of which .*other has 0: they are not of the same log"),
        ("titles", r"its data set, 30 of 30 items have other titles than in .*other"),
        ("users", r"has user ids of the kind 'string', and .*other of the kind 'integer'"),
    ],
)
def test_weights_of_another_log_are_refused(change, message, tmp_path):
    run = make_run(tmp_path, "sasrec")

    with pytest.raises(InputError, match=message):
        initial_snapshot(assemble(going_on(run, other_log(tmp_path, change))))


def test_semantic_ids_of_another_log_are_not_extended(tmp_path):
    """Ids alone would not tell: both have the same."""
    dataset, other = dataset_of(tmp_path), other_log(tmp_path, "titles")
    ids = tokenize(dataset.root, config=TokenizeConfig(codebook_size=4)).path

    with pytest.raises(
        InputError, match=rf"^{ids}: in its data set, 30 of 30 items have other titles.*without --extend"
    ):
        extend_for(other.root, ids)


def test_weights_whose_data_are_gone_are_refused(tmp_path):
    """Nothing else says which row is whose."""
    run = make_run(tmp_path, "sasrec")
    dataset = grown_dataset(tmp_path)
    config = going_on(run, dataset)
    shutil.rmtree(tmp_path / "data")

    with pytest.raises(
        InputError, match=r"its own cannot be opened \(.*data: no such data set.*data says .*: leave it"
    ):
        initial_snapshot(assemble(config))
    shutil.copytree(dataset.root, tmp_path / "data")
    with pytest.raises(InputError, match=r"data has changed since: .*data says .*: leave it"):
        initial_snapshot(assemble(config))


def test_weights_of_semantic_ids_that_were_made_again_are_refused(tmp_path):
    run = make_run(tmp_path, "prefix")
    dataset = grown_dataset(tmp_path)
    with pytest.raises(
        InputError, match=r"there are no semantic IDs.* tokenize .*with --extend and the IDs of"
    ):
        assemble(going_on(run, dataset))
    make_semantic_ids(dataset)

    with pytest.raises(
        InputError, match=r"semantic IDs that those of .* do not extend.* tokenize .* --extend "
    ):
        initial_snapshot(assemble(going_on(run, dataset)))
