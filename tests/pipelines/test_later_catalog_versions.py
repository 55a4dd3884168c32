"""Versions whose catalog is later than what their run was trained on."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.config.sections import PublishConfig
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.tasks.features import SEMANTIC_IDS_FOLDER
from rayrec.pipelines.training.snapshot_writer import PublishedRun
from rayrec.pipelines.versions.canary import Canaries, CanarySettings
from rayrec.pipelines.versions.loading import load_version
from rayrec.pipelines.versions.manifest import ModelVersion
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError
from rayrec.samples.dataset.dataset import Dataset
from tests.helpers.later_data import NUM_NEW, extend, grown_dataset, run_of_words
from tests.helpers.runs import NUM_ITEMS, make_run

SNAPSHOTS = (0, 1)
EVERYTHING = NUM_ITEMS + NUM_NEW + 1


def run_of_codes(folder: Path) -> tuple[Path, Dataset]:
    """(A run with semantic IDs, a later data set whose IDs extend them.)"""
    run = make_run(folder, "prefix", prefix_matrix="sparse", snapshots_after=SNAPSHOTS)
    grown = grown_dataset(folder)
    registry = SemanticIdRegistry.load(folder / "data" / SEMANTIC_IDS_FOLDER)
    extend(registry, grown, np.zeros((NUM_NEW, 6), dtype=np.float32))
    return run, grown


KINDS = {
    "words": lambda folder: run_of_words(folder, snapshots_after=SNAPSHOTS),
    "codes": run_of_codes,
}


@pytest.fixture(params=KINDS)
def grown(request, tmp_path) -> tuple[RunFolder, Dataset]:
    run, later = KINDS[request.param](tmp_path)
    return RunFolder.open(run), later


@pytest.fixture
def store(tmp_path) -> VersionStore:
    return VersionStore(f"memory://{tmp_path.name}", cache=tmp_path / "cache")


def publish(run: RunFolder, store: VersionStore, number: int = -1, **settings) -> ModelVersion:
    return Publisher(run, store, **settings).publish(snapshot(run, number))


def snapshot(run: RunFolder, number: int):
    return read_snapshot(run.snapshots / run.snapshot_names()[number])


def answers(recommender: Recommender) -> list[tuple[str, float]]:
    history = Query(np.sort(recommender.dataset.items.ids_I)[:4])
    (items,) = recommender.recommend([history], k=EVERYTHING, exclude_seen=False)
    return [(item.item_key, item.score) for item in items]


def served(store: VersionStore, version: ModelVersion) -> list[tuple[str, float]]:
    return answers(Recommender(load_version(store, version).model))


def keys_of(items: list[tuple[str, float]]) -> set[str]:
    return {key for key, _ in items}


def test_a_version_serves_items_that_came_after_its_run_was_trained(grown, store, caplog):
    run, later = grown
    before = publish(run, store)
    expected = answers(Recommender.load(run.path, "last", data=later.root))
    with caplog.at_level("INFO"):
        version = publish(run, store, data=later.root)
    num_later = len(later.items) - NUM_ITEMS
    assert f"{NUM_ITEMS + num_later} items, of which {num_later} came after" in caplog.text
    for folder in ("data", "grown", "run"):  # nothing of them is where services run
        shutil.rmtree(run.path.parent / folder)

    assert served(store, version) == expected
    assert len(expected) == NUM_ITEMS + NUM_NEW
    assert len(served(store, before)) == NUM_ITEMS
    held = load_version(store, before)
    assert answers(Recommender(load_version(store, version, held=held).model)) == expected
    # Weights and rows are those of the version before, and not written again.
    assert (version.weights, version.segments) == (before.weights, before.segments)


def test_a_run_that_trains_on_goes_on_with_the_later_catalog(grown, store):
    run, later = grown
    publisher = Publisher(run, store)
    publisher.publish(snapshot(run, 0))
    told = publish(run, store, 0, data=later.root)

    same_process = publisher.publish(snapshot(run, 1))
    after_restart = publish(run, store, 2)

    for version in (same_process, after_restart):
        assert (version.catalog, version.semantic_ids) == (told.catalog, told.semantic_ids)
    expected = answers(Recommender.load(run.path, "last", data=later.root))
    assert served(store, after_restart) == expected


def test_a_run_is_told_to_publish_its_own_catalog_again(grown, store):
    run, later = grown
    first = publish(run, store, 0)
    publish(run, store, 0, data=later.root)

    own = publish(run, store, 1, data=run.config.data.path)

    assert (own.catalog, own.semantic_ids, own.earlier) == (first.catalog, first.semantic_ids, None)
    assert publish(run, store, 2).catalog == first.catalog
    assert keys_of(served(store, own)) == {f"i{item}" for item in range(NUM_ITEMS)}


def test_another_run_of_the_same_name_does_not_get_a_catalog_that_it_does_not_know(tmp_path, store, caplog):
    other = make_run(tmp_path / "other", "sasrec")
    run, grown = run_of_words(tmp_path / "words")
    publish(RunFolder.open(run), store, data=grown.root)

    version = publish(RunFolder.open(other), store, other_catalog=True)

    assert "the catalog of version 1 is not gone on with" in caplog.text
    assert len(served(store, version)) == NUM_ITEMS


def test_a_catalog_that_was_extended_in_its_place_is_published(tmp_path, store):
    """What somebody has just prepared for a run is newer than what the store has."""
    run, grown = run_of_codes(tmp_path)
    folder = RunFolder.open(run)
    publish(folder, store)
    shutil.rmtree(tmp_path / "data")
    grown.root.rename(tmp_path / "data")

    assert len(served(store, publish(folder, store))) == NUM_ITEMS + NUM_NEW


def test_a_data_set_without_what_the_model_needs_is_refused_before_anything_is_published(tmp_path, store):
    run = RunFolder.open(make_run(tmp_path, "sasrec"))

    with pytest.raises(InputError, match=r"another data set than .*: the model knows items by their ids"):
        publish(run, store, data=grown_dataset(tmp_path).root)

    assert store.numbers() == []


def test_services_of_before_read_versions_that_have_the_catalog_of_their_run(tmp_path, store):
    run, grown = run_of_words(tmp_path)
    own = publish(RunFolder.open(run), store)
    later = publish(RunFolder.open(run), store, data=grown.root)

    assert b'"earlier"' not in own.to_bytes()
    assert ModelVersion.from_bytes(later.to_bytes(), "later") == later


def test_a_version_that_says_wrong_what_is_earlier_is_refused(tmp_path, store):
    words, grown = run_of_words(tmp_path / "words")
    later = publish(RunFolder.open(words), store, data=grown.root)
    plain = publish(RunFolder.open(make_run(tmp_path / "plain", "sasrec")), store, other_catalog=True)

    with pytest.raises(InputError, match="version 2: its catalog is later than its run, whose model reads"):
        load_version(store, plain.model_copy(update={"earlier": later.earlier}))


def test_a_run_that_publishes_itself_goes_on_with_the_later_catalog(grown, store, tmp_path):
    run, later = grown
    place = str(tmp_path / "store")
    store = VersionStore(place)
    publishing = PublishedRun(run, PublishConfig(to=place))
    names = run.snapshot_names()
    publishing.update(run.snapshots / names[0])
    told = publish(run, store, 0, data=later.root)

    publishing.update(run.snapshots / names[1])

    assert run.state["published_version"] == 3
    assert store.serving().catalog == told.catalog


def test_a_catalog_is_published_beside_the_weights_and_rows_that_serve(grown, store):
    run, later = grown
    of_run = {"rows": "int8_row"} if run.config.model.tables else {}
    publisher = Publisher(run, store, data=later.root)
    assert publisher.publish_catalog() is None  # nothing serves
    before = publish(run, store, 1, **of_run)

    version = publisher.publish_catalog()

    assert version is not None
    for name in ("weights", "segments", "state", "definition"):
        assert getattr(version, name) == getattr(before, name)
    assert len(served(store, version)) == NUM_ITEMS + NUM_NEW
    assert version.overlap is not None
    assert [probe.user for probe in version.probes] == [probe.user for probe in before.probes]


def test_a_catalog_that_is_published_while_the_run_publishes_gets_the_next_number(grown, store, monkeypatch):
    run, later = grown
    publish(run, store, 0)
    add = store.add

    def after_the_run(version: ModelVersion) -> None:
        monkeypatch.setattr(store, "add", add)
        publish(run, store, 1)
        add(version)

    monkeypatch.setattr(store, "add", after_the_run)
    version = Publisher(run, store, data=later.root).publish_catalog()

    assert version is not None
    assert version.number == store.numbers()[-1] == 3
    assert (version.state, version.weights) == (store.version(2).state, store.version(2).weights)
    assert len(served(store, version)) == NUM_ITEMS + NUM_NEW


def test_a_catalog_that_is_deleted_with_old_versions_meanwhile_is_sent_again(tmp_path, store, monkeypatch):
    words, grown = run_of_words(tmp_path / "words", snapshots_after=SNAPSHOTS)
    run = RunFolder.open(words)
    publisher = Publisher(run, store, data=grown.root)
    publisher.publish(snapshot(run, 0))
    for number in (0, 1):  # what served before is kept
        publish(run, store, number, data=run.config.data.path)
    add = store.add

    def after_the_run_has_deleted(version: ModelVersion) -> None:
        store.keep_newest(1)
        add(version)

    monkeypatch.setattr(store, "add", after_the_run_has_deleted)
    version = publisher.publish_catalog()

    assert version is not None
    assert store.numbers() == [2, 3, 4]
    elsewhere = VersionStore(store.url, cache=tmp_path / "another cache")
    assert len(served(elsewhere, version)) == NUM_ITEMS + NUM_NEW


def test_the_catalog_of_a_canary_that_was_returned_is_not_gone_on_with(grown, store):
    run, later = grown
    own = publish(run, store, 0)
    canaries = Canaries(store)
    with canaries.baseline_held() as was_held:
        canary = publish(run, store, 1, data=later.root)
        started = canaries.start(canary.number, CanarySettings(share=0.1), was_held)
    assert publish(run, store, 1).catalog == own.catalog
    canaries.finish(started, "returned", "it is worse")

    assert publish(run, store, 2).catalog == own.catalog


def test_bundles_of_a_run_that_were_deleted_with_old_versions_are_published_again(tmp_path, store):
    words, _ = run_of_words(tmp_path / "words", snapshots_after=SNAPSHOTS)
    run, other = RunFolder.open(words), RunFolder.open(make_run(tmp_path / "other", "sasrec"))
    publisher = Publisher(run, store, other_catalog=True)
    publisher.publish(snapshot(run, 0))
    for _ in range(2):  # what served before is kept
        publish(other, store, other_catalog=True)
        store.keep_newest(1)

    version = publisher.publish(snapshot(run, 1))

    assert len(served(store, version)) == NUM_ITEMS


def test_a_version_of_another_run_in_between_takes_no_items_back(grown, store, tmp_path):
    run, later = grown
    publish(run, store, 0)
    told = publish(run, store, 0, data=later.root)
    other = RunFolder.open(make_run(tmp_path / "other", "sasrec"))
    other.path.rename(tmp_path / "another-name")
    publish(RunFolder.open(tmp_path / "another-name"), store, other_catalog=True)

    assert publish(run, store, 1, other_catalog=True).catalog == told.catalog


def test_a_damaged_catalog_is_not_silently_replaced_by_an_earlier_one(grown, store, tmp_path):
    run, later = grown
    store = VersionStore(str(tmp_path / "store"))
    publish(run, store, 0)
    told = publish(run, store, 0, data=later.root)
    items = tmp_path / "store" / "bundles" / told.catalog.name / "items.parquet"
    items.write_bytes(items.read_bytes()[:-1])

    with pytest.raises(InputError, match=r"go on with the catalog of version 2, which is damaged .*name one"):
        publish(run, store, 1)

    assert len(served(store, publish(run, store, 1, data=later.root))) == NUM_ITEMS + NUM_NEW


def test_a_catalog_is_not_published_beside_weights_that_do_not_serve(tmp_path, store):
    words, later = run_of_words(tmp_path / "words")
    run = RunFolder.open(words)
    publish(run, store)
    other = make_run(tmp_path / "other", "sasrec").rename(tmp_path / "another-name")
    publish(RunFolder.open(other), store, other_catalog=True)

    assert Publisher(run, store, data=later.root).publish_catalog() is None


def test_a_run_of_the_same_name_and_settings_is_another_one(tmp_path, store):
    """The catalog was published beside the weights of the other one, as if they were this one's."""
    path, later = run_of_words(tmp_path / "words")
    run, other, moved = RunFolder.open(path), tmp_path / "other" / path.name, tmp_path / "moved" / path.name
    shutil.copytree(path, other)
    RunFolder.open(other).update(id="of another run")
    publish(RunFolder.open(other), store)

    assert Publisher(run, store, data=later.root).publish_catalog() is None

    before = publish(run, store)
    moved.parent.mkdir()
    path.rename(moved)
    version = Publisher(RunFolder.open(moved), store, data=later.root).publish_catalog()
    assert version is not None
    assert version.weights == before.weights


@pytest.mark.parametrize("what", ["definition", "weights"])
def test_a_catalog_is_not_published_beside_files_that_are_damaged(what, grown, tmp_path):
    run, later = grown
    store = VersionStore(str(tmp_path / "store"))
    serves = publish(run, store, 0)
    for path in (tmp_path / "store" / "bundles" / getattr(serves, what).name).iterdir():
        path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(InputError, match=r"catalog is not published: .*publish a snapshot with it"):
        Publisher(run, store, data=later.root).publish_catalog()

    assert store.numbers() == [1]
    assert len(served(store, publish(run, store, 1, data=later.root))) == NUM_ITEMS + NUM_NEW
