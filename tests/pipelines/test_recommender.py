import dataclasses
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.inference.answers import Budget, Query, Wanted
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.tasks.assembly import assemble
from rayrec.platform.errors import InputError
from rayrec.samples.reading.reader import SampleReader
from rayrec.samples.stores import EventBatch, StoreManifest, open_store
from tests.helpers.data import sample_batch, small_dataset
from tests.helpers.runs import NUM_ITEMS, NUM_USERS, change_manifest, make_run

MODELS = {
    "dense": ("sasrec", {}),
    "sparse": ("sasrec", {"item_matrix": "sparse"}),
    "bce": ("sasrec", {"item_matrix": "sparse", "loss": "bce", "negatives_per_event": 2}),
    "hstu": ("hstu", {"loss": "sampled_softmax", "num_negatives": 8, "temperature": 0.1}),
    "gnn": ("gnn", {"item_matrix": "sparse", "num_negatives": 8}),
    "generative": ("generative", {}),
}


@pytest.fixture(scope="module", params=MODELS)
def recommender(request, tmp_path_factory) -> Recommender:
    model, further = MODELS[request.param]
    return Recommender.load(make_run(tmp_path_factory.mktemp(request.param), model, **further))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), user_embedding=True)


def history(recommender: Recommender, user: str) -> np.ndarray:
    found = recommender.dataset.history_of(user)
    assert found is not None
    return found


def test_recommendations_are_new_items_of_the_catalog_best_first(recommender):
    queries = [Query(history(recommender, user)) for user in ("u0", "u1", "u2")]

    for query, answers in zip(queries, recommender.recommend(queries, k=5), strict=True):
        keys = [answer.item_key for answer in answers]
        assert len(set(keys)) == 5
        seen = recommender.dataset.item_positions(query.history_ids)
        assert not set(keys) & {recommender.dataset.items.keys[item].as_py() for item in seen.tolist()}
        assert [answer.title for answer in answers] == [f"Title of {key}" for key in keys]
        scores = [answer.score for answer in answers]
        assert scores == sorted(scores, reverse=True)


def test_asking_for_everything_gives_every_item_not_seen(recommender):
    ids = history(recommender, "u3")

    (answers,) = recommender.recommend([Query(ids)], k=NUM_ITEMS + 5)
    (unmasked,) = recommender.recommend([Query(ids)], k=NUM_ITEMS + 5, exclude_seen=False)

    num_items = len(recommender.dataset.items)
    assert len(answers) == num_items - len(set(ids.tolist()))
    assert len(unmasked) == num_items


def test_a_shorter_history_is_read_and_its_older_items_are_left_out_all_the_same(recommender):
    ids = history(recommender, "u3")
    newest = Query(ids[-2:], times=None)

    (lowered,) = recommender.answer([Query(ids)], NUM_ITEMS, budget=Budget(max_events=2))
    (of_newest,) = recommender.answer([newest], NUM_ITEMS)
    (whole,) = recommender.answer([Query(ids)], NUM_ITEMS)

    seen = {recommender.dataset.items.keys[i].as_py() for i in recommender.dataset.item_positions(ids)}
    expected = [item for item in of_newest.items if item.item_key not in seen]
    assert [item.item_key for item in lowered.items] == [item.item_key for item in expected]
    assert [item.score for item in lowered.items] == pytest.approx([item.score for item in expected])
    assert (lowered.num_read, lowered.num_unread) == (2, whole.num_read + whole.num_unread - 2)


def test_a_shorter_history_begins_at_a_step_of_the_model(recommender, monkeypatch):
    task = recommender._task
    stepping = dataclasses.replace(task, model=task.model.model_copy(update={"window_step": 3}))
    monkeypatch.setattr(recommender, "_task", stepping)
    ids = np.tile(history(recommender, "u3")[:1], 8)  # begins at 6 with a budget of four, and at 7 of one
    read = [recommender.answer([Query(ids)], 1, budget=Budget(max_events=n))[0].num_read for n in (4, 1)]
    assert read == [2, 1]


def test_an_answer_does_not_depend_on_the_others_in_the_batch(recommender):
    queries = [Query(history(recommender, f"u{user}")) for user in range(4)]

    together = recommender.recommend(queries, k=5)

    for query, answers in zip(queries, together, strict=True):
        (alone,) = recommender.recommend([query], k=5)
        assert [answer.item_key for answer in alone] == [answer.item_key for answer in answers]
        assert [answer.score for answer in alone] == pytest.approx(
            [answer.score for answer in answers], rel=1e-4, abs=1e-5
        )


def test_what_is_wanted_of_one_query_does_not_change_the_others_of_the_batch(recommender):
    queries = [Query(history(recommender, f"u{user}")) for user in range(6)]
    most = recommender.num_beams(1)
    wanted = [
        Wanted(1),
        Wanted(3, exclude_seen=False),
        Wanted(2, budget=Budget(max_events=2)),
        Wanted(3, budget=Budget(max_beams=most or 5, max_events=1)),
        Wanted(1, budget=Budget(max_beams=1)),
        Wanted(2, budget=Budget(max_beams=most // 2 or 5)),
    ]

    together = recommender.answer_each(queries, wanted)

    for query, each, answer in zip(queries, wanted, together, strict=True):
        (alone,) = recommender.answer_each([query], [each])
        assert [item.item_key for item in answer.items] == [item.item_key for item in alone.items]
        assert [item.score for item in answer.items] == pytest.approx(
            [item.score for item in alone.items], rel=1e-4, abs=1e-5
        )
        assert (len(answer.items), answer.num_read) == (each.k, alone.num_read)


def test_a_history_without_known_items_gets_nothing(recommender):
    known = history(recommender, "u0")
    unknown = np.array([12345, -9])

    answers = recommender.recommend([Query(unknown), Query(known), Query(np.zeros(0, dtype=np.int64))], k=3)

    assert [len(answer) for answer in answers] == [0, 3, 0]
    assert recommender.recommend([Query(unknown)], k=3) == [[]]
    assert recommender.recommend([], k=3) == []


def test_unknown_items_of_a_history_are_skipped(recommender):
    known = history(recommender, "u0")
    mixed = np.concatenate([[777], known, [888]])

    assert recommender.recommend([Query(mixed)], k=4) == recommender.recommend([Query(known)], k=4)


def test_popular_items_come_by_their_training_events(run):
    recommender = Recommender.load(run)
    counts = dict(
        zip(
            recommender.dataset.items.keys.to_pylist(),
            recommender.dataset.items.train_counts_I.tolist(),
            strict=True,
        )
    )

    answers = recommender.popular(k=NUM_ITEMS)

    assert [answer.score for answer in answers] == sorted(counts.values(), reverse=True)
    assert all(counts[answer.item_key] == answer.score for answer in answers)
    first_id = recommender.dataset.items.ids_I[
        recommender.dataset.items.keys.to_pylist().index(answers[0].item_key)
    ]
    assert recommender.popular(k=3, exclude_ids=np.array([first_id])) == answers[1:4]


def test_a_user_row_changes_the_scores(run):
    recommender = Recommender.load(run)
    ids = history(recommender, "u5")
    known_user = recommender.dataset.user_by_key("u5")

    (as_known,), (as_other,) = (
        recommender.recommend([Query(ids, user_id=user)], k=3) for user in (known_user, 1)
    )

    assert [answer.score for answer in as_known] != [answer.score for answer in as_other]


def test_a_query_without_a_user_is_nobody_of_the_data_set(tmp_path):
    """Also where ids are the integers of the source, 0 among them."""
    recommender = Recommender.load(make_run(tmp_path, integer_users=True, user_embedding=True))
    assert sorted(recommender.dataset.users["user_id"].to_pylist()) == list(range(NUM_USERS))
    ids = history(recommender, "5")

    nobody, user_0, unused = (
        [answer.score for answer in answers]
        for answers in recommender.recommend([Query(ids), Query(ids, 0), Query(ids, NUM_USERS)], k=3)
    )

    assert nobody == unused
    assert nobody != user_0


def test_data_that_was_moved_is_pointed_at(tmp_path):
    run = make_run(tmp_path, "generative")
    expected = Recommender.load(run).popular(k=3)
    (tmp_path / "data").rename(tmp_path / "moved")

    with pytest.raises(InputError, match="no such data set"):
        Recommender.load(run)
    assert Recommender.load(run, data=tmp_path / "moved").popular(k=3) == expected
    assert evaluate(run, data=tmp_path / "moved").count > 0

    other = small_dataset(tmp_path / "other", num_items=29).root
    (tmp_path / "moved" / "semantic_ids").rename(other / "semantic_ids")
    with pytest.raises(InputError, match="another data set"):
        Recommender.load(run, data=other)


def test_ranks_are_catalog_positions(run):
    recommender = Recommender.load(run)
    ids = recommender.dataset.items.ids_I[:3].tolist()

    ranked = recommender.recommend_samples(sample_batch([ids]), k=NUM_ITEMS, exclude_seen=True)

    found = ranked.items_BK[0][ranked.items_BK[0] >= 0]
    assert sorted(found.tolist()) == list(range(3, len(recommender.dataset.items)))


def test_a_run_without_snapshot_is_refused(run, tmp_path):
    RunFolder.create(tmp_path / "new", RunFolder.open(run).config)

    with pytest.raises(InputError, match=r"the run has no snapshot yet \(its state: died\)"):
        Recommender.load(tmp_path / "new")


def test_a_snapshot_of_other_data_is_refused(run, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(run, other)
    change_manifest(other, dataset_fingerprint="of other data")

    with pytest.raises(InputError, match="was trained on another data set"):
        Recommender.load(other)


def test_semantic_ids_made_anew_do_not_fit_an_older_model(tmp_path):
    run = make_run(tmp_path, "generative")
    change_manifest(run, semantic_ids_version="0123456789abcdef")

    with pytest.raises(InputError, match="was made with version 0123456789abcdef of the semantic IDs"):
        Recommender.load(run)

    shutil.rmtree(tmp_path / "data" / "semantic_ids")
    with pytest.raises(InputError, match=r"there are no semantic IDs.*rayrec tokenize"):
        Recommender.load(run)


def test_a_device_that_is_not_there_is_refused(run):
    with pytest.raises(InputError, match="there is no device 'abacus'"):
        Recommender.load(run, device="abacus")


def test_a_run_is_served_where_the_attention_of_its_training_has_no_kernels(run):
    settings = RunFolder.open(run).config
    query = Query(Recommender.load(run).dataset.history_of("u1"))
    (expected,) = Recommender.load(run).recommend([query], k=5)
    trained_on = {"device": "cuda", "model": settings.model.model_copy(update={"attention": "triton"})}
    before = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(settings.model_copy(update=trained_on).to_yaml())

    (answers,) = Recommender.load(run, device="cpu").recommend([query], k=5)

    (run / "config.yaml").write_text(before)
    assert answers == expected


def keyed(folder):
    """Training rows that are a user, a time and an item, with what went before in an event store."""

    def data_of(dataset) -> dict:
        items = dataset.items.ids_I[:8]
        store = open_store(folder / "store", create=StoreManifest(name="clicks", time_unit="s"))
        store.append(EventBatch(np.arange(40) // 8, 1000 + np.arange(40) % 8, np.tile(items, 5), {}))
        store.close()
        rows = {
            "user_id": np.arange(5),
            "timestamp": 1003 + np.arange(5),
            "item_id": dataset.items.ids_I[9:14],
        }
        (folder / "samples").mkdir()
        pq.write_table(pa.table(rows | {"price": np.ones(5)}), folder / "samples" / "a.parquet")
        return {
            "samples": str(folder / "samples"),
            "features": [
                {"op": "join_history", "store": str(folder / "store"), "last": 9},
                {"op": "concat", "inputs": ["item_ids", "item_id"], "output": "item_ids"},
                {"op": "truncate", "inputs": ["item_ids"], "length": 6},
            ],
        }

    return data_of


def test_a_row_gets_the_features_in_serving_that_it_gets_in_training(tmp_path):
    """Also when the training rows are gone."""
    run = make_run(tmp_path, user_embedding=True, data_of=keyed(tmp_path))
    assembly = assemble(RunFolder.open(run).config)
    rows = SampleReader(assembly.plan.spec).read_batch(assembly.plan.batch(0))
    (trained,) = assembly.features.training(0, rows)
    users_B = trained.lookups["user"].ids_M[trained.lookups["user"].inverse]
    shutil.rmtree(tmp_path / "samples")

    recommender = Recommender.load(run)

    for number, row in enumerate(rows.rows.to_pylist()):
        query = recommender.query_of(row)
        low, high = trained.offsets_B1[number : number + 2]
        expected = [*trained.items_N[low:high], trained.targets_N[high - 1]]
        assert recommender.dataset.item_positions(query.history_ids).tolist() == expected
        assert query.user_id == users_B[number] == row["user_id"]
        assert len(expected) == min(4 + row["user_id"], 6)
    assert len(recommender.recommend([query], k=3)[0]) == 3
    assert evaluate(run).count > 0


def test_fields_of_a_row_that_do_not_fit_are_named(tmp_path):
    recommender = Recommender.load(make_run(tmp_path, user_embedding=True, data_of=keyed(tmp_path)))
    row = {"user_id": 1, "timestamp": 1004, "item_id": 3}

    for change, expected in (
        ({"timestmp": 3}, "there is no field 'timestmp'; did you mean 'timestamp'"),
        ({"user_id": "ann"}, "the field 'user_id' must be int64, got 'ann'"),
        ({"user_id": None}, "user_id is null after the operations of the run"),
        ({"timestamp": 10**15}, "timestamp"),
    ):
        with pytest.raises(InputError, match=expected):
            recommender.query_of(row | change)


def test_without_operations_a_row_is_a_user_and_a_list(run):
    recommender = Recommender.load(run)
    ids = history(recommender, "u0").tolist()

    query = recommender.query_of({"user_id": 7, "item_ids": ids})

    assert (query.user_id, query.history_ids.tolist()) == (7, ids)
    with pytest.raises(InputError, match="there is no field 'items'"):
        recommender.query_of({"user_id": 7, "items": ids})


def test_training_files_may_be_gone_where_rates_hang_on_their_number(tmp_path):
    """A cosine schedule asks for the number of steps, which nobody needs who trains nothing."""
    run = make_run(tmp_path)
    folder = RunFolder.open(run)
    values = folder.config.model_dump(mode="json")
    values["training"]["schedule"]["decay"] = "cosine"
    (run / "config.yaml").write_text(RunConfig.parse(values).to_yaml())
    expected = Recommender.load(run).popular(k=3)
    manifest = Recommender.load(run).dataset
    for name in manifest.train_files:
        path = manifest.root / name
        path.write_bytes(bytes(path.stat().st_size))

    assert Recommender.load(run).popular(k=3) == expected


def test_damaged_columns_are_named(tmp_path):
    run = make_run(tmp_path)
    (run / "columns.arrow").write_bytes(b"nothing")

    with pytest.raises(InputError, match=r"columns.arrow: not the columns of a run's rows"):
        Recommender.load(run)
