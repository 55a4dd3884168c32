"""Training that begins with what was learned on an earlier data set (`training.init_from`)."""

import shutil

import numpy as np
import pytest

from rayrec.embeddings.base.routing import ShardMap
from rayrec.embeddings.snapshot.snapshot import load_tables
from rayrec.models.sequence.next_item import DenseNextItemModel
from rayrec.models.sequence.sequence_model import SequenceModel
from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig, tokenize
from rayrec.pipelines.semantic_ids.tokenization import extend as extend_for
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.pipelines.tasks.features import SEMANTIC_IDS_FOLDER
from rayrec.pipelines.training.initial_weights import initial_snapshot
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.train import train
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import PrepareConfig
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.prepare.prepare import prepare
from tests.helpers.data import random_events, write_source
from tests.helpers.examples import cases
from tests.helpers.later_data import (
    NUM_NEW,
    dataset_with_brands,
    described_dataset,
    extend,
    grown_dataset,
)
from tests.helpers.runs import (
    MODELS,
    NUM_ITEMS,
    NUM_USERS,
    dataset_of,
    make_run,
    make_semantic_ids,
    trained,
)


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
