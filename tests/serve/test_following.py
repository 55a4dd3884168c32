"""A service follows the versions that are published, and each answer is of one of them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from safetensors.numpy import load_file, save_file

from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import WEIGHTS, read_snapshot
from rayrec.pipelines.versions import publisher
from rayrec.pipelines.versions.loading import load_version
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError
from rayrec.serve.app import loading
from rayrec.serve.app.loading import device_of, load_api, load_service
from rayrec.serve.config.compile import CompileConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine.current import CurrentService
from rayrec.serve.engine.following import VersionFollower
from rayrec.serve.engine.pointer import AGAIN_AFTER_S
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.web.metrics import PrometheusMeter
from rayrec.serve.wire.schemas import RecommendRequest
from tests.helpers.later_data import run_of_words
from tests.helpers.runs import make_run

SETTINGS = {"item_matrix": "sparse", "user_embedding": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    return RunFolder.open(make_run(tmp_path_factory.mktemp("run"), snapshots_after=(0, 1), **SETTINGS))


@pytest.fixture(scope="module")
def answers_by_step(run) -> dict[int, list[tuple[str, float]]]:
    """To u1, by the steps that were trained."""
    found = {}
    for name in run.snapshot_names():
        recommender = Recommender(TrainedModel.load(run.path, name))
        (items,) = recommender.recommend([recommender.query_of_user("u1")], k=5)
        found[recommender.committed_step + 1] = [(item.item_key, item.score) for item in items]
    return found


@pytest.fixture
def store(tmp_path) -> VersionStore:
    return VersionStore(tmp_path / "store")


def publish(run: RunFolder, store: VersionStore, place: int) -> None:
    Publisher(run, store).publish(read_snapshot(run.snapshots / run.snapshot_names()[place]))


def followed(
    store: VersionStore, clock=time.monotonic, wall_clock=time.time
) -> tuple[CurrentService, VersionFollower, list[int]]:
    """The third says which versions were built."""
    built: list[int] = []

    def build(version):
        built.append(version.manifest.number)
        return RecommendationService(Recommender(version.model), max_k=50)

    loaded = load_version(store, store.serving())
    current = CurrentService(build(loaded))
    follower = VersionFollower(store, current, loaded, build, clock=clock, wall_clock=wall_clock)
    return current, follower, built


def test_a_published_version_answers_after_a_look_and_going_back_builds_nothing(run, store):
    publish(run, store, 0)
    current, follower, built = followed(store)
    assert not follower.look()
    publish(run, store, 1)
    assert follower.look()
    assert (current.model.version, current.model.step) == (2, 2)
    store.point_to(1, is_held=True)
    assert follower.look()
    assert current.model.version == 1
    store.point_to(2, is_held=False)
    assert follower.look()
    assert current.model.version == 2
    assert built == [1, 2]
    publish(run, store, 2)
    assert follower.look()
    assert (current.model.version, built) == (3, [1, 2, 3])
    assert current.held(2) is not None
    assert current.held(1) is None
    metrics = follower.metrics()
    assert (metrics["serving_version"], metrics["serving_version_not_loaded"]) == (3, False)


def test_items_of_a_later_catalog_are_answered_without_another_training(store, tmp_path):
    path, later = run_of_words(tmp_path)
    publish(RunFolder.open(path), store, -1)
    current, follower, _ = followed(store)
    old = RecommendRequest(history=["i0", "i1"], k=50)
    before = {item.item_id for item in current.pinned.recommend(old).items}

    Publisher(RunFolder.open(path), store, data=later.root).publish_catalog()

    assert follower.look()
    after = {item.item_id for item in current.pinned.recommend(old).items}
    assert after == before | {"a0", "a1", "a2"} > before
    assert current.pinned.recommend(RecommendRequest(history=["a0"], k=5)).source == "model"


def test_a_version_waits_for_its_products_and_no_longer_than_it_may(run, store):
    publish(run, store, 0)
    now, covered = [0.0], set[str]()
    current, follower, built = followed(store, lambda: now[0])
    follower.wait_for(lambda recommender: recommender.identity in covered, most_s=60)
    publish(run, store, 1)
    assert not follower.look()
    now[0] = 30.0
    assert not follower.look()
    assert follower.metrics()["serving_version_waits_for_products"] == 1
    assert (current.model.version, built) == (1, [1, 2])
    covered.add(Recommender(load_version(store, store.version(2)).model).identity)
    assert follower.look()
    assert (current.model.version, built) == (2, [1, 2])
    assert follower.metrics()["serving_version_waits_for_products"] == 0
    publish(run, store, 2)
    assert not follower.look()
    now[0] = 89.0
    assert not follower.look()
    now[0] = 90.0
    assert follower.look()
    assert (current.model.version, built) == (3, [1, 2, 3])


def test_a_clock_that_is_put_back_or_forward_changes_no_wait(run, store):
    publish(run, store, 0)
    now, wall = [0.0], [1e9]
    current, follower, built = followed(store, lambda: now[0], lambda: wall[0])
    follower.wait_for(lambda recommender: False, most_s=60)
    publish(run, store, 1)
    assert not follower.look()
    for now[0], wall[0] in ((20.0, 2e9), (40.0, 0.0), (59.0, 1e9 + 59)):
        assert not follower.look()
    now[0] = 60.0
    assert follower.look()
    assert (current.model.version, built) == (2, [1, 2])


def test_a_version_that_is_given_up_while_it_waits_is_not_held_and_waits_again(run, store):
    publish(run, store, 0)
    now = [0.0]
    current, follower, built = followed(store, lambda: now[0])
    follower.wait_for(lambda recommender: False, most_s=60)
    publish(run, store, 1)
    assert not follower.look()
    store.point_to(1, is_held=True)
    assert not follower.look()
    assert follower.metrics()["serving_version_waits_for_products"] == 0
    now[0] = 100.0
    store.point_to(2, is_held=False)
    assert not follower.look()
    assert (current.model.version, built) == (1, [1, 2, 2])
    now[0] = 160.0
    assert follower.look()
    assert (current.model.version, built) == (2, [1, 2, 2])


def test_versions_of_one_catalog_share_what_was_made_of_it(tmp_path):
    """Made anew for each, of millions of items, it would stop requests for as long as it takes."""
    run = RunFolder.open(make_run(tmp_path, "prefix", snapshots_after=(0,)))
    other = make_run(tmp_path / "other", "prefix")
    store = VersionStore(tmp_path / "store")
    publish(run, store, 0)
    publish(run, store, 1)
    first = load_version(store, store.version(1))
    second = load_version(store, store.version(2), held=first)
    before = RecommendationService(Recommender(first.model), max_k=50)
    service = RecommendationService(Recommender(second.model), max_k=50, before=before)
    elsewhere = RecommendationService(Recommender.load(other), max_k=50, before=before)

    assert service.item_texts is before.item_texts is not None
    assert service._item_keys is before._item_keys
    assert elsewhere.item_texts is not before.item_texts
    alone = RecommendationService(Recommender(load_version(store, store.version(2)).model), max_k=50)
    request = RecommendRequest(user_id="u1", k=5)
    assert service.recommend(request).items == alone.recommend(request).items


def test_versions_of_one_data_set_share_its_sorted_users(run, store):
    publish(run, store, 0)
    current, follower, _ = followed(store)
    first = current.pinned.dataset.sorted_user_keys
    assert first == sorted(first)
    publish(run, store, 1)
    assert follower.look()
    assert current.pinned.dataset.sorted_user_keys is first


def test_a_version_that_cannot_be_loaded_leaves_the_one_before_and_is_tried_again(run, store, caplog):
    now = 0.0
    publish(run, store, 0)
    current, follower, built = followed(store, clock=lambda: now)
    publish(run, store, 1)
    path = store.fetch(store.version(2).segments[1].bundle) / "item-00000.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:100])
    for _ in range(3):
        assert not follower.look()
    assert current.model.version == 1
    metrics = follower.metrics()
    assert (metrics["serving_version_wanted"], metrics["serving_version_not_loaded"]) == (2, True)
    assert metrics["serving_version_errors_total"] == 1
    assert "what is held goes on answering" in caplog.text
    assert "item-00000.parquet" in caplog.text
    path.write_bytes(content)
    assert not follower.look()  # not yet
    now = AGAIN_AFTER_S
    assert follower.look()
    assert current.model.version == 2
    (Path(store.url) / "current.json").write_text("?")
    assert not follower.look()
    assert current.model.version == 2
    assert built == [1, 2]


def test_going_back_to_what_cannot_be_loaded_is_shown(run, store):
    publish(run, store, 0)
    publish(run, store, 1)
    current, follower, built = followed(store)
    (store.fetch(store.version(1).weights) / WEIGHTS).write_bytes(b"")
    store.point_to(1, is_held=True)
    assert not follower.look()
    assert (current.model.version, built) == (2, [2])
    metrics = follower.metrics()
    assert (metrics["serving_version"], metrics["serving_version_wanted"]) == (2, 1)
    assert metrics["serving_version_not_loaded"]
    store.point_to(2, is_held=False)
    assert not follower.look()
    assert not follower.metrics()["serving_version_not_loaded"]


def test_where_changes_do_not_build_on_what_is_held_all_rows_are_read(
    run, store, answers_by_step, monkeypatch
):
    """As after a snapshot that does not say what has changed since the version before."""
    publish(run, store, 0)
    publish(run, store, 1)
    current, follower, _ = followed(store)
    with monkeypatch.context() as patched:
        patched.setattr(publisher, "load_changes", lambda *arguments: None)
        publish(run, store, 2)
    assert [segment.since for segment in store.serving().segments] == [None]
    assert follower.look()
    answer = current.pinned.recommend(RecommendRequest(user_id="u1", k=5))
    assert [(item.item_id, item.score) for item in answer.items] == answers_by_step[answer.model.step]
    assert answer.model.version == 3
    held = store.version(2).segments[0].bundle
    for file in store.fetch(held).iterdir():
        file.unlink()
    store.point_to(2, is_held=True)
    assert follower.look()  # which is held, though its own base is gone


@pytest.mark.slow
def test_each_answer_is_entirely_of_one_version_while_versions_change(run, store, answers_by_step):
    """Also what waits for its turn when the version changes, and all rows of one message."""
    publish(run, store, 0)
    config = ServeConfig(follow_every_s=0.01, page=False)
    infer = {
        "inputs": [{"name": "user_id", "shape": [3], "datatype": "BYTES", "data": ["u1"] * 3}],
        "parameters": {"k": 5},
    }
    seen: set[int] = set()
    done = threading.Event()

    def ask(client: TestClient) -> None:
        while not done.is_set():
            answer = client.post("/v1/recommend", json={"user_id": "u1", "k": 5}).json()
            expected = answers_by_step[answer["model"]["step"]]
            assert [item["item_id"] for item in answer["items"]] == [key for key, _ in expected]
            # Up to what the size of a batch rounds; versions are a thousand times farther apart.
            scores = [item["score"] for item in answer["items"]]
            assert scores == pytest.approx([score for _, score in expected], abs=1e-6)
            seen.add(answer["model"]["version"])
            rows = client.post("/v2/models/recommend/infer", json=infer).json()
            by_name = {each["name"]: each["data"] for each in rows["outputs"]}
            step = store.version(int(rows["model_version"])).step + 1
            assert by_name["item_id"] == [key for key, _ in answers_by_step[step]] * 3

    with TestClient(load_api(store.url, config, PrometheusMeter())) as client, ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, client) for _ in range(3)]
        try:
            for number, place in ((2, 1), (3, 2)):
                publish(run, store, place)
                _wait_until(lambda number=number: number in seen or any(each.done() for each in asking))
            store.point_to(2, is_held=True)
            _wait_until(lambda: client.get("/health/ready").json()["model"]["version"] == 2)
        finally:
            done.set()
        for each in asking:
            each.result()
        assert {2, 3} <= seen
        metrics = client.get("/metrics").text
        assert "rayrec_serving_version 2.0" in metrics
        assert "rayrec_serving_version_age_s" in metrics
    assert not [thread for thread in threading.enumerate() if thread.name == "versions"]


def _wait_until(holds, timeout_s: float = 60.0) -> None:
    ends = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_where_nothing_is_published_a_run_is_expected(run, store, tmp_path):
    with pytest.raises(InputError, match="not a run folder"):
        load_service(store.url, ServeConfig(), None)
    publish(run, store, 0)
    assert device_of(store.url, ServeConfig()) == "cpu"
    with pytest.raises(InputError, match="leave out --data and --snapshot"):
        load_service(store.url, ServeConfig(snapshot="last"), None)


def test_every_version_is_given_the_compiled_programs_and_only_the_first_is_waited_for(
    run, store, monkeypatch
):
    given, waited, closed = [], [], []

    class Compilation:
        records = False

        def __init__(self, folder, config, threads, fewer_beams):
            assert folder == Path(store.url)

        def give(self, recommender):
            given.append(recommender.version)

        def warm_up(self, ranking, ks):
            waited.append(list(given))

        def close(self):
            closed.append(True)

    monkeypatch.setattr(loading, "CompileService", Compilation)
    publish(run, store, 0)
    config = ServeConfig(follow_every_s=0.01, page=False, compile=CompileConfig())
    with TestClient(load_api(store.url, config, PrometheusMeter())) as client:
        publish(run, store, 1)
        _wait_until(lambda: client.get("/health/ready").json()["model"]["version"] == 2)
    assert (given, waited, closed) == ([1, 2], [[1]], [True])


def test_versions_compute_with_the_threads_of_their_model(run, store, monkeypatch):
    """Not with those of a model that was loaded behind it."""
    seen: list[int] = []
    recommend_all = RecommendationService.recommend_all

    def noted(self, requests):
        seen.append(torch.get_num_threads())
        return recommend_all(self, requests)

    monkeypatch.setattr(RecommendationService, "recommend_all", noted)
    publish(run, store, 0)
    before = torch.get_num_threads()
    try:
        config = ServeConfig(page=False, threads=2)
        with TestClient(load_api(store.url, config, PrometheusMeter())) as client:
            torch.set_num_threads(1)
            assert client.post("/v1/recommend", json={"user_id": "u1"}).status_code == 200
    finally:
        torch.set_num_threads(before)
    assert seen == [2]


def break_weights(store: VersionStore, number: int, value: float) -> None:
    """As somebody publishes it who has no gate: checksums and all."""
    manifest = store.version(number)
    path = store.fetch(manifest.weights) / WEIGHTS
    weights = load_file(path)
    folder = Path(store.url) / "broken"
    folder.mkdir()
    save_file({name: np.full_like(values, value) for name, values in weights.items()}, folder / WEIGHTS)
    broken = manifest.model_copy(update={"weights": store.put("weights", [folder / WEIGHTS])})
    (Path(store.url) / "versions" / f"{number:06d}.json").write_bytes(broken.to_bytes())


@pytest.mark.parametrize(("value", "message"), [(np.nan, "not finite"), (0.0, "different histories")])
def test_a_broken_version_is_held_back_at_the_flip_and_counted(run, store, caplog, value, message):
    publish(run, store, 0)
    current, follower, _ = followed(store)
    publish(run, store, 1)
    break_weights(store, 2, value)

    assert not follower.look()

    assert current.model.version == 1
    metrics = follower.metrics()
    assert (metrics["serving_versions_refused_total"], metrics["serving_version_not_loaded"]) == (1, 1)
    assert message in caplog.text
    publish(run, store, 2)
    assert follower.look()
    assert follower.metrics()["serving_version_as_published"] == 1


def test_the_share_of_answers_as_published_is_that_of_the_version_that_serves(run, store, monkeypatch):
    """After a rollback, an alert on the version before did not end."""
    shares = {2: 0.25, 3: 0.5}
    monkeypatch.setattr(
        RecommendationService, "check_answers", lambda self, published: shares.get(self.model.version)
    )
    publish(run, store, 0)
    _, follower, built = followed(store)
    publish(run, store, 1)

    def share_after(number: int) -> float:
        store.point_to(number, is_held=True)
        assert follower.look()
        return follower.metrics()["serving_version_as_published"]

    assert share_after(2) == 0.25
    assert share_after(1) == 1
    assert share_after(2) == 0.25
    publish(run, store, 2)
    assert share_after(3) == 0.5
    assert built == [1, 2, 3]


def test_a_service_does_not_start_with_a_broken_version(run, store):
    publish(run, store, 0)
    break_weights(store, 1, 0.0)
    with pytest.raises(InputError, match=r"version 1: .* users with different histories all get the same"):
        load_api(store.url, ServeConfig(), PrometheusMeter())
