"""What is published of a run recommends as the run's snapshots do, version by version."""

import itertools
import json
from pathlib import Path

import fsspec
import numpy as np
import pytest
from pyarrow import fs

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.config.sections import PublishConfig
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.snapshot_writer import PublishedRun
from rayrec.pipelines.training.train import train
from rayrec.pipelines.versions.loading import LoadedVersion, load_version
from rayrec.pipelines.versions.manifest import ModelVersion, _checksum_of
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import CURRENT, VersionStore
from rayrec.platform.errors import InputError, MachineError
from rayrec.platform.remote_files import RemoteFolder
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.graph import graph_of_dataset
from tests.helpers.examples import cases
from tests.helpers.runs import SPARSE_SASREC, make_run

MODELS = {
    "rows": ("sasrec", {"item_matrix": "sparse", "user_embedding": True}),
    "dense": ("sasrec", {}),
    "generative": ("generative", {"user_embedding": True}),
    "prefix": ("prefix", {}),
    "rows of prefixes": ("prefix", {"prefix_matrix": "sparse", "held_prefixes": 4}),
    "hybrid with rows": ("prefix", {"prefix_matrix": "sparse", "softmax": "hybrid", "num_negatives": 8}),
}


@pytest.fixture(scope="module")
def run(request, tmp_path_factory) -> RunFolder:
    model, settings = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return RunFolder.open(make_run(folder, model, snapshots_after=(0, 1), **settings))


@pytest.fixture(scope="module")
def run_with_rows(tmp_path_factory) -> RunFolder:
    model, settings = MODELS["rows"]
    folder = tmp_path_factory.mktemp("run")
    return RunFolder.open(make_run(folder, model, snapshots_after=(0, 1), **settings))


def publish(run: RunFolder, store: VersionStore, names: list[str], **settings) -> list[ModelVersion]:
    publisher = Publisher(run, store, **settings)
    return [publisher.publish(read_snapshot(run.snapshots / name)) for name in names]


def recommendations(model: TrainedModel) -> list[list[tuple[str, float]]]:
    recommender = Recommender(model)
    queries = [recommender.query_of_user(f"u{user}") or Query(np.zeros(0, np.int64)) for user in range(8)]
    return [[(item.item_key, item.score) for item in items] for items in recommender.recommend(queries, k=6)]


@pytest.mark.parametrize(
    ("run", "place"),
    cases(
        itertools.product(MODELS, ("folder", "memory")),
        {("rows", "folder"), ("generative", "memory"), ("rows of prefixes", "folder")},
    ),
    indirect=["run"],
)
def test_each_version_recommends_as_its_snapshot_does(run, tmp_path, place):
    url = str(tmp_path / "store") if place == "folder" else f"memory://{tmp_path.name}-{run.path.parent.name}"
    store = VersionStore(url, cache=tmp_path / "cache")
    names = run.snapshot_names()
    assert len(names) == 3
    held: LoadedVersion | None = None
    versions: list[LoadedVersion] = []
    for number, name in enumerate(names, start=1):
        (published,) = publish(run, store, [name])
        assert published.number == number
        assert store.serving() == published
        held = load_version(store, published, held=held)
        versions.append(held)
    for name, version in zip(names, versions, strict=True):
        expected = recommendations(TrainedModel.load(run.path, name))
        assert recommendations(version.model) == expected
        assert recommendations(load_version(store, version.manifest).model) == expected
    behind = load_version(store, versions[2].manifest, held=versions[0])
    assert recommendations(behind.model) == recommendations(versions[2].model)


def test_a_model_of_neighbors_is_published_with_a_graph_that_services_can_read(tmp_path):
    def saved_graph(dataset: Dataset) -> dict[str, str]:
        graph_of_dataset(dataset).save(tmp_path / "graph")
        return {"graph": str(tmp_path / "graph")}

    without = RunFolder.open(make_run(tmp_path / "without", "gnn"))
    run = RunFolder.open(make_run(tmp_path / "with", "gnn", data_of=saved_graph))
    store = VersionStore(str(tmp_path / "store"), cache=tmp_path / "cache")

    with pytest.raises(InputError, match=r"which versions do not have; train it with data\.graph"):
        Publisher(without, store)
    (version,) = publish(run, store, run.snapshot_names())

    found = recommendations(load_version(store, version).model)
    assert found == recommendations(TrainedModel.load(run.path, "last"))


def test_only_rows_that_have_changed_are_sent(run_with_rows, tmp_path):
    store = VersionStore(tmp_path)
    first, second, third = publish(run_with_rows, store, run_with_rows.snapshot_names())
    assert [segment.since for segment in third.segments] == [None, 0, 1]
    assert third.segments[:2] == second.segments
    assert second.segments[:1] == first.segments
    held = load_version(store, first)
    for file in (tmp_path / "bundles" / first.segments[0].bundle.name).iterdir():
        file.unlink()
    assert load_version(store, third, held=held).tables.num_rows  # the base was not read again
    with pytest.raises(InputError, match="missing from the published version"):
        load_version(store, third)


def test_a_publisher_that_missed_snapshots_publishes_what_changed_since(run_with_rows, tmp_path):
    names = run_with_rows.snapshot_names()
    first, third = publish(run_with_rows, VersionStore(tmp_path), [names[0], names[2]])
    assert first.segments == third.segments[:1]
    assert [segment.since for segment in third.segments] == [None, 0, 1]


def test_dense_weights_may_come_less_often_than_rows(run_with_rows, tmp_path):
    now = 1000.0
    names = run_with_rows.snapshot_names()
    publisher = Publisher(run_with_rows, VersionStore(tmp_path), dense_every_s=100, clock=lambda: now)
    first = publisher.publish(read_snapshot(run_with_rows.snapshots / names[0]))
    now = 1060.0
    second = publisher.publish(read_snapshot(run_with_rows.snapshots / names[1]))
    assert (second.weights, second.weights_step, second.step) == (first.weights, 0, 1)
    now = 1110.0
    third = publisher.publish(read_snapshot(run_with_rows.snapshots / names[2]))
    assert third.weights != first.weights
    assert (third.weights_step, third.weights_at) == (third.step, 1110.0)


def test_dense_weights_do_not_wait_for_a_clock_that_was_put_back(run_with_rows, tmp_path):
    now = 10_000.0
    names = run_with_rows.snapshot_names()
    publisher = Publisher(run_with_rows, VersionStore(tmp_path), dense_every_s=100, clock=lambda: now)
    publisher.publish(read_snapshot(run_with_rows.snapshots / names[0]))
    now = 1_000.0
    second = publisher.publish(read_snapshot(run_with_rows.snapshots / names[1]))
    assert (second.weights_step, second.weights_at) == (second.step, 1_000.0)


def test_dense_weights_of_another_run_of_the_same_name_are_none_of_this_one(run_with_rows, tmp_path):
    """Begun again in its folder, with other settings: rows went out with the weights of the run before."""
    model, settings = MODELS["rows"]
    other = RunFolder.open(make_run(tmp_path, model, snapshots_after=(0, 1), temperature=0.1, **settings))
    assert other.name == run_with_rows.name
    store, name = VersionStore(tmp_path / "store"), run_with_rows.snapshot_names()[1]
    (first,) = publish(other, store, [name], dense_every_s=1000)
    second, third = publish(
        run_with_rows, store, [name, run_with_rows.snapshot_names()[2]], dense_every_s=1000
    )
    assert first.weights != second.weights == third.weights
    assert second.weights_step == second.step


def test_what_was_gone_back_to_stays_until_somebody_lets_go(run_with_rows, tmp_path):
    store = VersionStore(tmp_path)
    names = run_with_rows.snapshot_names()
    publish(run_with_rows, store, names[:2])
    store.point_to(1, is_held=True)
    (third,) = publish(run_with_rows, store, names[2:])
    assert store.serving().number == 1
    store.point_to(third.number, is_held=False)
    (fourth,) = publish(run_with_rows, store, names[2:])
    assert store.serving() == fourth
    with pytest.raises(InputError, match="has no version 9; it has 1 to 4"):
        store.point_to(9, is_held=True)
    assert store.serving() == fourth


class Interrupted(VersionStore):
    """Somebody else does something when this one has looked at the pointer that publications move."""

    def __init__(self, url, do) -> None:
        super().__init__(url)
        self._do = do

    def _pointer(self, name):
        found = super()._pointer(name)
        if name == CURRENT and self._do is not None:
            do, self._do = self._do, None
            do()
        return found


def test_going_back_while_a_version_is_published_is_not_lost(run_with_rows, tmp_path):
    names = run_with_rows.snapshot_names()
    publish(run_with_rows, VersionStore(tmp_path), names[:2])
    store = Interrupted(tmp_path, lambda: VersionStore(tmp_path).point_to(1, is_held=True))

    publish(run_with_rows, store, names[2:])

    pointer = VersionStore(tmp_path).current()
    assert pointer is not None
    assert (pointer.version, pointer.is_held) == (1, True)


def test_a_version_that_is_published_while_somebody_lets_go_serves(run_with_rows, tmp_path):
    names = run_with_rows.snapshot_names()
    store = VersionStore(tmp_path)
    publish(run_with_rows, store, names[:2])
    store.point_to(1, is_held=True)
    assert Interrupted(tmp_path, lambda: publish(run_with_rows, store, names[2:])).let_newest_serve() == 3
    assert store.serving().number == 3


def test_a_hold_of_a_store_that_has_no_file_for_it_holds(run_with_rows, tmp_path):
    names = run_with_rows.snapshot_names()
    store = VersionStore(tmp_path)
    publish(run_with_rows, store, names[:2])
    (tmp_path / CURRENT).write_text('{"version": 1, "moved_at": 1.0, "is_held": true}')
    publish(run_with_rows, store, names[2:])
    assert store.serving().number == 1
    assert store.let_newest_serve() == 3
    pointer = store.current()
    assert pointer is not None
    assert (pointer.version, pointer.is_held) == (3, False)


def test_old_versions_go_with_what_only_they_need(run_with_rows, tmp_path):
    store = VersionStore(tmp_path)
    names = run_with_rows.snapshot_names()
    first, _, third = publish(run_with_rows, store, names)
    store.keep_newest(1)
    assert store.numbers() == [2, 3]  # the one before the serving one can be gone back to
    bundles = {path.name for path in (tmp_path / "bundles").iterdir()}
    assert first.weights.name not in bundles
    assert {bundle.name for bundle in third.bundles} <= bundles
    load_version(store, third)


def test_a_bundle_of_a_version_that_appears_while_old_ones_go_stays(run_with_rows, tmp_path, monkeypatch):
    store = VersionStore(tmp_path)
    names = run_with_rows.snapshot_names()
    first, _, third = publish(run_with_rows, store, names)
    store.point_to(3, is_held=True)
    numbers, fourth = store.numbers, third.model_copy(update={"number": 4, "weights": first.weights})

    def after_looking() -> list[int]:
        found = numbers()
        if found == [1, 2, 3]:
            store.add(fourth)
        return found

    monkeypatch.setattr(store, "numbers", after_looking)
    store.keep_newest(1)
    assert numbers() == [2, 3, 4]
    load_version(store, fourth)


def test_a_version_whose_bundle_has_just_been_deleted_does_not_appear(run_with_rows, tmp_path):
    store = VersionStore(tmp_path)
    names = run_with_rows.snapshot_names()
    first, _, third = publish(run_with_rows, store, names)
    store.keep_newest(1)
    fourth = third.model_copy(update={"number": 4, "weights": first.weights})
    with pytest.raises(InputError, match=f"{first.weights.name}/.*: deleted with old versions while"):
        store.add(fourth)
    assert store.numbers() == [2, 3]
    assert store.serving().number == 3


def test_damaged_and_half_versions_are_refused_by_name(run_with_rows, tmp_path):
    store = VersionStore(tmp_path)
    with pytest.raises(InputError, match="nothing was published here"):
        store.serving()
    (version,) = publish(run_with_rows, store, run_with_rows.snapshot_names()[:1])
    rows = tmp_path / "bundles" / version.segments[0].bundle.name / "item-00000.parquet"
    content = rows.read_bytes()
    rows.write_bytes(content[:-1] + b"?")
    with pytest.raises(InputError, match=r"item-00000.parquet: not as it was published"):
        load_version(store, version)
    rows.write_bytes(content)
    manifest = tmp_path / "versions" / "000001.json"
    values = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(values | {"run": "another"}))
    with pytest.raises(InputError, match=r"000001.json: its checksum differs"):
        store.serving()
    manifest.write_text("{")
    with pytest.raises(InputError, match="not the manifest of a version"):
        store.serving()
    (tmp_path / "current.json").write_text("[]")
    with pytest.raises(InputError, match=r"current\.json"):
        store.current()


def test_a_second_publisher_of_a_store_is_refused(run_with_rows, tmp_path):
    store = VersionStore(tmp_path)
    names = run_with_rows.snapshot_names()
    (version,) = publish(run_with_rows, store, names[:1])
    with pytest.raises(MachineError, match="published by somebody else"):
        store.add(version)


def test_what_is_sent_of_a_data_set_cannot_be_trained_on(run_with_rows, tmp_path: Path):
    store = VersionStore(tmp_path)
    (version,) = publish(run_with_rows, store, run_with_rows.snapshot_names()[:1])
    dataset = Recommender(load_version(store, version).model).dataset
    assert not (dataset.root / "train").exists()
    with pytest.raises(InputError, match="only what recommending needs"):
        dataset.train_files  # noqa: B018


def test_what_goes_wrong_with_publishing_is_said_and_the_next_snapshot_brings_it(
    run_with_rows, tmp_path, caplog, monkeypatch
):
    store = tmp_path / "store"
    published = PublishedRun(run_with_rows, PublishConfig(to=str(store), keep=2))
    store.write_text("a file where the folder should be")
    names = run_with_rows.snapshot_names()
    published.update(run_with_rows.snapshots / names[0])
    assert "was not published to" in caplog.text
    assert run_with_rows.state["failed_publications"] == 1

    class ServiceError(Exception):
        """As SDKs of clouds have them: not an OSError."""

    def down(*_: object) -> None:
        raise ServiceError("503")

    with monkeypatch.context() as patch:
        patch.setattr(VersionStore, "check_place", down)
        published.update(run_with_rows.snapshots / names[0])
        PublishedRun(run_with_rows, PublishConfig(to=str(store), keep=2))
    assert "was not published to" in caplog.text
    assert "ServiceError: 503" in caplog.text
    assert run_with_rows.state["failed_publications"] == 2
    store.unlink()
    for name in names[1:]:
        published.update(run_with_rows.snapshots / name)
    assert run_with_rows.state["published_version"] == 2
    assert [segment.since for segment in VersionStore(store).serving().segments] == [None, 0, 1]


def test_models_that_rank_what_is_shown_are_not_published():
    with pytest.raises(InputError, match=r"snapshots.publish: versions are of models that recommend"):
        RunConfig.parse(
            {
                "data": {"path": "data"},
                "model": {"name": "dlrm"},
                "snapshots": {"publish": {"to": "store"}},
            }
        )


def test_a_run_publishes_as_it_trains_and_after_it_was_resumed(tmp_path):
    """The last version is the run's last snapshot, and most of them brought changes only."""
    walked = Path(make_run(tmp_path).parent / "data")
    values = {
        "data": {"path": str(walked)},
        "model": SPARSE_SASREC,
        "sparse": {"num_servers": 2},
        "pipeline": {"cpus_per_actor": 0.1, "cpus_per_trainer": 0.1, "trainer_threads": 1},
        "training": {"batch_size": 8, "epochs": 1, "schedule": {"decay": "none"}},
        "snapshots": {"every_steps": 1, "increments": 3, "publish": {"to": str(tmp_path / "store")}},
    }
    store = VersionStore(tmp_path / "store")
    path = tmp_path / "published"
    for epochs in (1, 2):
        values["training"]["epochs"] = epochs
        train(RunConfig.parse(values), path, resume=epochs > 1, cluster=in_process)
        run = RunFolder.open(path)
        version = load_version(store, store.serving())
        assert run.state["published_version"] == version.manifest.number
        expected = TrainedModel.load(path, "last")
        assert version.manifest.step == expected.state.committed_step
        assert recommendations(version.model) == recommendations(expected)
    kinds = [len(store.version(number).segments) for number in store.numbers()]
    assert {1, 2, 3, 4} <= set(kinds)


NO_NAMES = ("../../evil.py", "/etc/evil", "a/b", "..", ".bashrc", "a\\b", "", "a\0b")


@pytest.mark.parametrize(
    ("name", "place"),
    cases(
        itertools.product(NO_NAMES, ("bundle", "file")),
        {*((name, "file") for name in NO_NAMES), ("../../evil.py", "bundle")},
    ),
)
def test_a_manifest_cannot_name_what_is_elsewhere(run_with_rows, tmp_path, name, place):
    store = VersionStore(tmp_path)
    (version,) = publish(run_with_rows, store, run_with_rows.snapshot_names()[:1])
    values = version.model_dump(mode="json")
    target = values["catalog"] if place == "bundle" else values["catalog"]["files"][0]
    target["name"] = name
    content = json.dumps(values | {"checksum": _checksum_of(values)}).encode()

    with pytest.raises(InputError, match="is no plain name"):
        ModelVersion.from_bytes(content, "here")


KINDS = ("weights", "rows", "catalogue", "run")


@pytest.mark.parametrize(
    ("kind", "url"),
    cases(
        itertools.product(KINDS, ("folder", "memory")),
        {*((kind, "folder") for kind in KINDS), ("rows", "memory")},
    ),
)
def test_publishing_again_repairs_what_was_damaged(run_with_rows, tmp_path, kind, url):
    store = VersionStore(tmp_path if url == "folder" else f"memory://{tmp_path.name}", tmp_path / "cache")
    names = run_with_rows.snapshot_names()[:2]
    (version,) = publish(run_with_rows, store, names[1:])
    bundle = next(each for each in version.bundles if each.name.startswith(kind))
    path = store._there.path_of(f"bundles/{bundle.name}/{bundle.files[0].name}")
    with store._there.filesystem.open_input_stream(path) as file:
        content = file.read()
    with store._there.filesystem.open_output_stream(path) as file:
        file.write(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(InputError, match="its checksum differs"):
        load_version(store, version)

    (again,) = publish(run_with_rows, store, names[1:])

    assert again.bundles == version.bundles
    assert load_version(store, version).tables.num_rows


def test_a_damaged_manifest_is_no_reason_not_to_publish(run_with_rows, tmp_path):
    store = VersionStore(tmp_path)
    names = run_with_rows.snapshot_names()[:1]
    publish(run_with_rows, store, names)
    (tmp_path / "versions" / "000001.json").write_text("{")

    (version,) = publish(run_with_rows, store, names)

    assert version.number == 2
    assert load_version(store, store.serving()).manifest == version


def test_of_two_who_publish_at_once_one_is_refused(run_with_rows, tmp_path):
    store = VersionStore(tmp_path)
    (version,) = publish(run_with_rows, store, run_with_rows.snapshot_names()[:1])

    class Blind(RemoteFolder):
        """Looks before the other one writes."""

        def exists(self, name):
            return False if name.startswith("versions/") else super().exists(name)

    there = store._there
    store._there = Blind(there.url, there.filesystem, there.path)
    before = (tmp_path / "versions" / "000001.json").read_bytes()
    with pytest.raises(MachineError, match="published by somebody else"):
        store.add(version.model_copy(update={"run": "another"}))
    assert (tmp_path / "versions" / "000001.json").read_bytes() == before
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["000001.json"]


def test_a_pointer_is_replaced_whole_where_files_grow_before_ones_eyes(tmp_path):
    """As on HDFS or SFTP; fsspec's local files stand for them."""
    files, moved = fsspec.filesystem("file", skip_instance_cache=True), []
    move = files.mv

    def noted(source, target, **more):
        moved.append(target)
        move(source, target, **more)

    files.mv = noted
    store = VersionStore("memory://anything")
    store._there = RemoteFolder("sftp://there", fs.PyFileSystem(fs.FSSpecHandler(files)), f"{tmp_path}/store")

    store._point(CURRENT, 3)
    store._point(CURRENT, 4)

    assert moved == [f"{tmp_path}/store/{CURRENT}"] * 2
    pointer = store.current()
    assert pointer is not None
    assert pointer.version == 4
    assert [path.name for path in (tmp_path / "store").iterdir()] == [CURRENT]


def test_copies_that_no_version_needs_are_deleted_when_nobody_asked_for_them_of_late(run_with_rows, tmp_path):
    store = VersionStore(f"memory://{tmp_path.name}", cache=tmp_path / "cache")
    first, second = publish(run_with_rows, store, run_with_rows.snapshot_names()[:2])
    load_version(store, first)
    load_version(store, second)

    store.clean_cache([second])
    assert store.fetch(first.weights).is_dir()
    store.clean_cache([second], after_s=-1)

    names = {path.name for folder in (tmp_path / "cache").iterdir() for path in folder.iterdir()}
    assert names == {bundle.name for bundle in second.bundles}
    other = VersionStore(f"memory://{tmp_path.name}-other", cache=tmp_path / "cache")
    other.clean_cache([], after_s=-1)
    assert load_version(store, second).tables.num_rows


@pytest.mark.parametrize("damage", ["a file is gone", "a file is empty", "all files are gone"])
def test_a_copy_that_was_damaged_is_fetched_again(tmp_path, caplog, damage):
    """By a cleaner of old files, or a power cut: publishing the same files again did not help."""
    (tmp_path / "weights").write_bytes(b"weights")
    (tmp_path / "more").write_bytes(b"more")
    store = VersionStore(f"memory://{tmp_path.name}", cache=tmp_path / "cache")
    bundle = store.put("weights", [tmp_path / "weights", tmp_path / "more"])
    folder = store.fetch(bundle)
    if damage == "a file is empty":
        (folder / "weights").write_bytes(b"")
    else:
        (folder / "weights").unlink()
    if damage == "all files are gone":
        (folder / "more").unlink()

    assert store.fetch(bundle) == folder

    assert (folder / "weights").read_bytes() == b"weights"
    assert {path.name for path in folder.parent.iterdir()} == {bundle.name}
    assert f"{folder / 'weights'}: " in caplog.text
    assert "fetched again" in caplog.text
    caplog.clear()
    store.fetch(bundle)
    assert not caplog.records


def test_a_damaged_copy_of_what_is_damaged_in_the_store_is_refused(tmp_path):
    (tmp_path / "weights").write_bytes(b"weights")
    store = VersionStore(f"memory://{tmp_path.name}", cache=tmp_path / "cache")
    bundle = store.put("weights", [tmp_path / "weights"])
    (store.fetch(bundle) / "weights").unlink()
    store.write(f"bundles/{bundle.name}/weights", b"weight?")
    with pytest.raises(InputError, match="not as it was published"):
        store.fetch(bundle)
    store.put("weights", [tmp_path / "weights"])
    assert (store.fetch(bundle) / "weights").read_bytes() == b"weights"


def test_a_cache_that_somebody_else_may_have_filled_is_refused(run_with_rows, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = VersionStore(f"memory://{tmp_path.name}")
    (version,) = publish(run_with_rows, store, run_with_rows.snapshot_names()[:1])
    folder = tmp_path / "rayrec" / "versions"
    folder.mkdir(parents=True)
    folder.chmod(0o777)

    with pytest.raises(InputError, match="others may write to it"):
        store.fetch(version.weights)
    folder.chmod(0o700)
    assert store.fetch(version.weights).is_relative_to(folder)


def test_functions_that_a_version_calls_are_allowed_by_the_host(tmp_path, monkeypatch):
    module = tmp_path / "functions_of_mine.py"
    module.write_text("def same(items):\n    return items\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    operation = {
        "op": "python",
        "function": "functions_of_mine:same",
        "inputs": ["item_ids"],
        "outputs": {"item_ids": "list<int64>"},
    }
    run = RunFolder.open(make_run(tmp_path, data_of=lambda dataset: {"features": [operation]}))
    store = VersionStore(tmp_path / "store")
    (version,) = publish(run, store, run.snapshot_names()[-1:])

    with pytest.raises(InputError, match="RAYREC_ALLOWED_FUNCTIONS=functions_of_mine"):
        load_version(store, version)
    for allowed in ("functions_of_mine", "other, functions_of_mine:same"):
        monkeypatch.setenv("RAYREC_ALLOWED_FUNCTIONS", allowed)
        assert load_version(store, version).model.run == "run"


def test_a_store_lies_in_a_place_of_its_own(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "data" / "versions").mkdir(parents=True)
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)

    with pytest.raises(InputError, match="is a file; give the folder of a store"):
        VersionStore(tmp_path / "file").check_place()
    with pytest.raises(InputError, match="holds 'versions' and no versions"):
        VersionStore(tmp_path / "data").check_place()
    for free in ("disk", "nowhere"):
        VersionStore(tmp_path / free).check_place()


def test_a_run_that_publishes_to_a_place_of_something_else_is_refused_before_it_trains(run_with_rows):
    data = run_with_rows.config.data.path

    with pytest.raises(InputError, match="give the store a place of its own"):
        PublishedRun(run_with_rows, PublishConfig(to=data))
