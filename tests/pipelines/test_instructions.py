"""Instructions in a run: what settings may say, what data has to have, and what a request gets."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.models.program.program import RankedItems
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.config.sections import EvaluationConfig, WantedConfig
from rayrec.pipelines.evaluation.evaluate_recommender import evaluate_recommender
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.loading import TrainedModel
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.tasks.assembly import Assembly, assemble
from rayrec.pipelines.tasks.features import features_of
from rayrec.pipelines.tasks.instructions import check_labels
from rayrec.pipelines.training.placements import in_process
from rayrec.pipelines.training.stages import Stages
from rayrec.pipelines.training.train import train
from rayrec.pipelines.training.validation import validate
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import FeatureBatch
from rayrec.samples.dataset.dataset import Dataset
from rayrec.samples.reading.reader import SampleReader
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.engine.understanding import RefusedRequestError
from rayrec.serve.wire.schemas import RecommendRequest
from tests.helpers.runs import BACKBONE, change_manifest, make_run

INSTRUCTION = {"parts": ["scenario", "behavior", "trigger_item"], "drop": 0.2}
NETWORK = {"name": "encoder_decoder", "backbone": BACKBONE, "beam_width": 40}
INSTRUCTED: dict[str, Any] = {"instruction": INSTRUCTION, "event_labels": ["behavior"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), "encoder", labeled=True, **INSTRUCTED)


@pytest.fixture(scope="module")
def recommender(run: Path) -> Recommender:
    return Recommender.load(run)


@pytest.fixture(scope="module")
def dataset(recommender: Recommender) -> Dataset:
    return recommender.dataset


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without labels."""
    return make_run(tmp_path_factory.mktemp("plain"), "lazy")


def config(path: Path, model: dict[str, Any], **settings: Any) -> RunConfig:
    further = settings.pop("data", {})
    values = {"data": {"path": str(path), **further}, "model": NETWORK | model}
    return RunConfig.parse(values | {"training": {"batch_size": 16}} | settings)


def first_batch(assembly: Assembly) -> FeatureBatch:
    rows = SampleReader(assembly.plan.spec).read_batch(assembly.plan.batch(0))
    (features,) = features_of(assembly.config, assembly.rows.columns).training(0, rows)
    return features


def test_labels_are_read_only_where_the_model_needs_them(dataset: Dataset):
    def columns(**model: Any) -> list[str]:
        return assemble(config(dataset.root, model)).plan.spec.schema.names

    assert columns() == ["user_id", "item_ids"]
    assert columns(behavior_weights={"LIKE": 2.0}) == ["user_id", "item_ids", "behaviors"]
    assert columns(instruction={"parts": ["trigger_item"]}) == ["user_id", "item_ids"]
    assert columns(event_labels=["scenario"]) == ["user_id", "item_ids", "scenarios"]
    assert first_batch(assemble(config(dataset.root, {}))).target_labels == {}
    assert set(first_batch(assemble(config(dataset.root, INSTRUCTED))).labels) == {"behavior", "scenario"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"instruction": {"parts": ["behavior"]}}, "its events have no behavior, which the model needs"),
        ({"event_labels": ["scenario"]}, "its events have no scenario, which the model needs"),
        ({"behavior_weights": {"LIKE": 2.0}}, "its events have no behavior, which the model needs"),
    ],
)
def test_data_without_the_label_is_refused_at_the_start(plain: Path, model: dict, message: str):
    data = Recommender.load(plain).dataset.root

    with pytest.raises(InputError, match=message):
        assemble(config(data, model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": {"behavior_weights": {"HATE": 2.0}}},
            "model.behavior_weights: no event has the behavior 'HATE'; those that occur: LIKE, SHARE, VIEW",
        ),
        (
            {"model": INSTRUCTED, "evaluation": {"instruction": {"scenario": "moon"}}},
            "evaluation.instruction: no event has the scenario 'moon'; those that occur: home, search",
        ),
        (
            {"model": {}, "evaluation": {"instruction": {"behavior": "LIKE"}}},
            "does not read the part 'behavior' .*: it reads no instructions",
        ),
    ],
)
def test_names_that_no_event_has_are_refused_with_those_that_occur(
    dataset: Dataset, settings: dict, message: str
):
    model = settings.pop("model")

    with pytest.raises(InputError, match=message):
        assemble(config(dataset.root, model, **settings))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"instruction": {"parts": []}}, "instruction.parts"),
        ({"instruction": {"parts": ["behavior", "behavior"]}}, "names a part twice"),
        ({"instruction": {"drop": 1.0}}, "instruction.drop"),
        ({"instruction": {"drop": 0.0}}, "instruction.drop"),
        (
            {"name": "lazy_decoder", "instruction": {"parts": ["behavior", "trigger_item"]}},
            "lazy_decoder begins every ID with the newest event of the history, which the trigger is",
        ),
        ({"behavior_weights": {"LIKE": -1.0}}, "behavior_weights.LIKE"),
        ({"experts": {"count": 1}}, "experts.count"),
        ({"experts": {"balance_weight": 0.01}}, "a row of encoder_decoder is one target of a few codes"),
        (
            {"name": "encoder_decoder", "retrieval": {"num_events": 10, "num_recent": 10}},
            "num_recent < num_events < max_length, got 10, 10 and 500",
        ),
        (
            {"name": "encoder_decoder", "retrieval": {"num_events": 50}},
            "retrieval.num_events is 50 and backbone.max_length 8: the encoder has no places",
        ),
    ],
)
def test_settings_without_meaning_are_refused(model: dict, message: str):
    with pytest.raises(InputError, match=message):
        config(Path("data"), model)


def test_an_instruction_of_evaluation_says_something():
    with pytest.raises(InputError, match=r"evaluation.instruction says nothing: name a scenario"):
        config(Path("data"), INSTRUCTED, evaluation={"instruction": {}})


def test_experts_are_balanced_where_rows_have_many_targets():
    encoder = config(Path("data"), {"experts": {"count": 3}}).model
    lazy = config(Path("data"), {"name": "lazy_decoder", "experts": {"count": 3}}).model

    assert encoder.experts.balance_weight == 0.0
    assert lazy.experts.balance_weight == 0.01


def test_a_request_gets_what_it_wants(recommender: Recommender):
    stored = recommender.query_of_user("u0")
    wanted = recommender.instruction_of({"behavior": "LIKE", "scenario": "home", "trigger_item": "i3"})
    asked = dataclasses.replace(stored, instruction=wanted)

    without, with_it, unsaid = recommender.recommend(
        [stored, asked, dataclasses.replace(stored, instruction=recommender.instruction_of({}))], k=5
    )

    assert set(wanted) == {"behavior", "scenario", "trigger_item"}
    assert [item.score for item in without] != pytest.approx([item.score for item in with_it])
    assert unsaid == without


def test_a_request_for_what_nobody_knows_is_refused(recommender: Recommender, plain: Path):
    for names, message in (
        ({"behavior": "HATE"}, "instruction: no event has the behavior 'HATE'.*: LIKE, SHARE, VIEW"),
        ({"trigger_item": "i99"}, "the trigger_item 'i99' is not in the catalog of 30 items"),
    ):
        with pytest.raises(InputError, match=message):
            recommender.instruction_of(names)
    with pytest.raises(InputError, match=r"does not read the part 'behavior'.*it reads no instructions"):
        Recommender.load(plain).instruction_of({"behavior": "LIKE"})


def test_what_a_history_says_of_its_events_is_read(recommender: Recommender):
    stored = recommender.query_of_user("u0")
    bare = Query(stored.history_ids, stored.user_id)

    with_labels, without = recommender.recommend([stored, bare], k=5)

    assert set(stored.labels) == {"behavior"}
    assert [item.score for item in with_labels] != pytest.approx([item.score for item in without])
    with pytest.raises(ValueError, match="1 codes of behavior"):
        recommender.recommend([dataclasses.replace(stored, labels={"behavior": np.array([0])})], k=1)


def test_a_raw_row_brings_the_labels_of_its_events(recommender: Recommender):
    stored = recommender.query_of_user("u1")
    row = {"user_id": stored.user_id, "item_ids": stored.history_ids.tolist()}

    assert recommender.query_of(row).labels == {}
    labeled = recommender.query_of(row | {"behaviors": stored.labels["behavior"].tolist()})
    assert labeled.labels["behavior"].tolist() == stored.labels["behavior"].tolist()


def test_raw_rows_without_labels_are_refused_when_the_run_is_checked(dataset: Dataset, tmp_path: Path):
    pq.write_table(pa.table({"user_id": [1], "item_ids": [[1, 2]]}), tmp_path / "a.parquet")

    assembly = assemble(config(dataset.root, {"event_labels": ["behavior"]}, data={"samples": str(tmp_path)}))
    with pytest.raises(InputError, match="need a column 'behaviors' of lists of codes, since the model"):
        _ = assembly.features


def test_evaluation_ranks_for_a_fixed_instruction(run: Path, recommender: Recommender):
    folder = RunFolder.open(run)
    evaluation = EvaluationConfig(instruction=WantedConfig(behavior="SHARE", scenario="search"))
    changed = folder.config.model_copy(update={"evaluation": evaluation})
    assembly = assemble(changed.for_inference(), columns=folder.columns)
    instructed = Recommender(
        TrainedModel.of("changed", assembly, read_snapshot(folder.chosen_snapshot("best")))
    )

    assert instructed.evaluation_instruction == recommender.instruction_of(
        {"behavior": "SHARE", "scenario": "search"}
    )
    assert recommender.evaluation_instruction == {}
    reports = [evaluate_recommender(each, "test").to_json()["results"] for each in (instructed, recommender)]
    assert reports[0]["model, seen items kept"] != reports[1]["model, seen items kept"]
    assert reports[0]["popularity"] == reports[1]["popularity"]


def test_weights_learned_for_other_names_are_refused(tmp_path: Path):
    run = make_run(tmp_path, "lazy", labeled=True, event_labels=["behavior"])
    change_manifest(run, labels={"behavior": ["LIKE", "VIEW"]})

    with pytest.raises(InputError, match=r"behavior is one of LIKE, VIEW, and in .* LIKE, SHARE, VIEW"):
        Recommender.load(run)


def test_weights_of_behaviors_ask_nothing_of_those_who_train_nothing(plain: Path, tmp_path: Path):
    run = make_run(tmp_path, "prefix", labeled=True, behavior_weights={"LIKE": 2.0})
    change_manifest(run, labels={"behavior": ["LIKE", "VIEW"]})

    weighted = Recommender.load(run)

    assert weighted.needs_labels == ()
    assert weighted.query_of_user("u0").labels == {}
    settings = config(weighted.dataset.root, {"behavior_weights": {"LIKE": 2.0}})
    inferring = settings.for_inference()
    check_labels(inferring, inferring.model, Recommender.load(plain).dataset)
    with pytest.raises(InputError, match="its events have no behavior"):
        check_labels(settings, settings.model, Recommender.load(plain).dataset)


def test_labels_of_targets_are_not_asked_of_histories(tmp_path: Path):
    run = make_run(tmp_path, "lazy", labeled=True, instruction={"parts": ["behavior"]})

    instructed = Recommender.load(run)

    assert instructed.needs_labels == ()
    assert instructed.instruction_of({"behavior": "VIEW"}) == {"behavior": 2}


LIKED = {"op": "select_events", "by": "behaviors", "values": [0], "inputs": ["item_ids"]}


@pytest.fixture(scope="module")
def of_likes(tmp_path_factory: pytest.TempPathFactory) -> Recommender:
    """Of a model that reads no labels, behind an operation that does."""
    folder = tmp_path_factory.mktemp("likes")
    run = make_run(folder, "prefix", labeled=True, data_of=lambda dataset: {"features": [LIKED]})
    return Recommender.load(run)


def test_an_operation_may_read_labels_that_the_model_does_not(of_likes: Recommender):
    stored = of_likes.query_of_user("u0")
    liked_ids = stored.history_ids[stored.labels["behavior"] == 0]

    (answer,) = of_likes.answer([stored], k=5)

    assert of_likes.needs_labels == ("behavior",)
    assert answer.num_read == len(liked_ids) > 0
    assert answer.num_unread == len(stored.history_ids) - len(liked_ids)
    prepared = Query(liked_ids, stored.user_id, is_prepared=True)
    assert of_likes.recommend([prepared], 5, exclude_seen=False) == (
        of_likes.recommend([stored], 5, exclude_seen=False)
    )
    report = evaluate_recommender(of_likes, "test")
    assert report.results["model"] != report.results["popularity"]


def test_validation_reads_what_operations_read(of_likes: Recommender):
    task, features = of_likes._task, of_likes._features
    num_read: list[int] = []

    def recommend(batch: FeatureBatch, k: int, exclude_seen: bool) -> RankedItems:
        num_read.extend(np.diff(batch.offsets_B1).tolist())
        return RankedItems(np.full((batch.num_rows, k), -1), np.zeros((batch.num_rows, k)))

    def here(answer: Any) -> Any:
        return SimpleNamespace(remote=answer)

    worker: Any = SimpleNamespace(ranking=here(features.ranking))
    trainer: Any = SimpleNamespace(begin_validation=here(lambda: None), recommend=here(recommend))
    watch: Any = SimpleNamespace(get=lambda answers, **_: answers)
    plan: Any = None

    validate(Stages(plan, [], [worker], [], [trainer], watch), task.validation(features))

    rows = of_likes.dataset.evaluation_rows("valid", labels=("behavior",))
    liked = [
        int((rows.labels["behavior"][low:high] == 0).sum())
        for low, high in itertools.pairwise(rows.offsets_B1)
    ]
    longest = task.model.history_length
    assert num_read == np.minimum(liked, longest).tolist()
    assert sum(num_read)


def test_operations_run_once_on_a_raw_row(of_likes: Recommender):
    stored = of_likes.query_of_user("u0")
    row = {
        "user_id": stored.user_id,
        "item_ids": stored.history_ids.tolist(),
        "behaviors": stored.labels["behavior"].tolist(),
    }

    answers = of_likes.answer([of_likes.query_of(row), stored], k=5)

    assert answers[0].num_read == answers[1].num_read > 0


def test_popular_items_answer_a_history_of_which_an_operation_leaves_nothing(of_likes: Recommender):
    answer = RecommendationService(of_likes, 10).recommend(RecommendRequest(history=["i1", "i2"], k=3))

    assert (answer.source, answer.unread_events, len(answer.items)) == ("popular", 2, 3)
    assert not {"i1", "i2"} & {item.item_id for item in answer.items}


def test_an_operation_may_read_times_that_the_model_does_not(tmp_path: Path):
    features = [
        {"op": "bucketize", "input": "timestamps", "output": "late", "boundaries": [1003]},
        {"op": "select_events", "by": "late", "values": [1], "inputs": ["item_ids"]},
    ]
    run = make_run(tmp_path, "sasrec", data_of=lambda dataset: {"features": features})

    timed = Recommender.load(run)

    stored = timed.query_of_user("u0")
    assert stored.times is not None
    (answer,) = timed.answer([stored], k=3)
    assert answer.num_read == (stored.times >= 1003).sum() < len(stored.history_ids)
    assert evaluate_recommender(timed, "test").count


def test_histories_without_what_an_operation_reads_are_ranked_as_they_are(tmp_path: Path):
    """Labels that only the rows of a folder have are no more stored of histories than other columns."""
    samples = tmp_path / "rows"
    samples.mkdir()

    def data_of(dataset: Dataset) -> dict[str, Any]:
        table = pa.concat_tables(pq.read_table(dataset.root / name) for name in dataset.train_files)
        labels = [[0] * len(items) for items in table["item_ids"].to_pylist()]
        pq.write_table(table.append_column("behaviors", [labels]), samples / "a.parquet")
        return {"features": [LIKED], "samples": str(samples)}

    bare = Recommender.load(make_run(tmp_path, "sasrec", data_of=data_of))

    (answer,) = bare.answer([bare.query_of_user("u0")], k=3)
    assert (bare.needs_labels, answer.num_unread) == ((), 0)


def test_a_raw_row_with_a_code_that_has_no_name_is_refused(recommender: Recommender):
    service = RecommendationService(recommender, 10)
    row = {"user_id": 1, "item_ids": recommender.dataset.items.ids_I[:2].tolist(), "behaviors": [0, 99]}

    with pytest.raises(RefusedRequestError, match="row: an event has the behavior 99"):
        service.recommend(RecommendRequest(row=row))


def test_a_trigger_is_the_newest_event_and_is_not_recommended(recommender: Recommender):
    """As in training, where what is looked at is the newest of what there is."""
    stored = recommender.query_of_user("u0")
    codes = {label: np.append(codes, -1) for label, codes in stored.labels.items()}
    unseen = np.setdiff1d(np.arange(30), recommender.dataset.item_positions(stored.history_ids))
    position = int(unseen[0])
    wanted = {"trigger_item": position}
    longer_ids = np.append(stored.history_ids, recommender.dataset.items.ids_I[position])

    by_trigger = dataclasses.replace(stored, instruction=wanted)
    by_hand = Query(longer_ids, stored.user_id, labels=codes, instruction=wanted)

    triggered, spelled = recommender.recommend([by_trigger, by_hand], k=30)
    assert triggered == spelled
    assert recommender.dataset.items.keys[position].as_py() not in {item.item_key for item in triggered}
    (answer,) = recommender.answer([Query(np.zeros(0, dtype=np.int64), instruction=wanted)], k=3)
    assert (answer.num_read, len(answer.items)) == (1, 3)


@pytest.mark.slow
def test_an_instructed_model_trains_through_actors_alike_with_one_trainer_or_two(
    dataset: Dataset, tmp_path: Path
):
    model = INSTRUCTED | {
        "name": "encoder_decoder",
        "experts": {"count": 3},
        "behavior_weights": {"LIKE": 2.0},
        "retrieval": {"max_length": 8, "num_events": 4, "num_recent": 2, "q2i_negatives": 7},
    }
    settings = config(dataset.root, model, evaluation={"instruction": {"behavior": "LIKE"}}).model_dump()
    settings["training"] |= {"epochs": 2, "schedule": {"warmup_steps": 1}}
    results = []
    for num_trainers in (1, 2):
        settings["pipeline"] |= {
            "num_trainers": num_trainers,
            "trainer_threads": 1,
            "cpus_per_trainer": 0.5,
        }
        results.append(train(RunConfig.parse(settings), tmp_path / str(num_trainers), cluster=in_process))

    assert results[0].final_loss == pytest.approx(results[1].final_loss, rel=1e-4)
