"""Candidates of a recommender, ranked by a model of what would come of showing them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.inference.answers import FULL_BUDGET, Answer, Budget, Query, Wanted
from rayrec.pipelines.inference.ranking_stage import RankingObjective, RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.scorer import Scorer
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import RowBatch
from rayrec.samples.impressions.ids import id_of
from tests.helpers.examples import examples
from tests.helpers.ranking import (
    prepared_clicks,
    prepared_histories,
    prepared_ratings,
    ranker_run,
    rated_source,
    recommender_run,
)

LABEL = "liked"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, its data sets, and runs on them."""
    folder = tmp_path_factory.mktemp("ranking")
    source = rated_source(folder / "source")
    histories = prepared_histories(source, folder / "histories")
    recommender_run(histories, folder / "recommender")
    ratings = prepared_ratings(source, folder / "ratings", held_out_of=str(histories.root))
    ranker_run(ratings, folder / "ranker")
    ranker_run(prepared_clicks(folder / "clicks"), folder / "clicks-ranker")
    return folder


@pytest.fixture(scope="module")
def recommender(folder: Path) -> Recommender:
    return Recommender.load(folder / "recommender")


def stage_of(recommender: Recommender, run: Path, **config: Any) -> RankingStage:
    return RankingStage.load(recommender, RankingConfig(run=str(run), **config))


@pytest.fixture(scope="module")
def stage(folder: Path, recommender: Recommender) -> RankingStage:
    return stage_of(recommender, folder / "ranker", candidates=12)


def query_of(recommender: Recommender, user: str) -> Query:
    query = recommender.query_of_user(user)
    assert query is not None
    return query


class FakeScorer:
    """Gives every row what it is told, and keeps what it was asked."""

    def __init__(self, scorer: Scorer, probability: float = 0.5) -> None:
        self._scorer, self._probability = scorer, probability
        self.asked: list[RowBatch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def score(self, rows: RowBatch) -> np.ndarray:
        self.asked.append(rows)
        return np.full((rows.num_rows, len(self._scorer.labels)), self._probability)


users = st.integers(0, 39).map("u{}".format)
histories = st.lists(st.integers(0, 29), max_size=12)


@examples(20)
@given(
    st.lists(st.tuples(users, histories), min_size=1, max_size=4),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
)
def test_ranking_permutes_what_the_recommender_gives(stage, recommender, asked, k, candidates, exclude_seen):
    items = recommender.dataset.items
    queries = [
        Query(items.ids_I[np.array(history, dtype=np.int64)], recommender.dataset.user_by_key(user))
        for user, history in asked
    ]
    config = stage.config.model_copy(update={"candidates": candidates})
    ranked = RankingStage(recommender, stage.scorer, config).answer(queries, k, exclude_seen)
    given_ = recommender.answer(queries, max(k, candidates), exclude_seen)
    constant = FakeScorer(stage.scorer)
    unchanged = RankingStage(recommender, constant, config).answer(queries, k, exclude_seen)  # type: ignore[arg-type]

    for query, own, pool, same in zip(queries, ranked, given_, unchanged, strict=True):
        keys = [item.item_key for item in own.items]
        assert len(keys) == len(set(keys)) == min(k, len(pool.items))
        assert set(keys) <= {item.item_key for item in pool.items}
        assert not exclude_seen or not set(keys) & {
            items.keys[place].as_py() for place in recommender.dataset.item_positions(query.history_ids)
        }
        scores = [item.ranking.score for item in own.items]
        assert scores == sorted(scores, reverse=True)
        assert {(item.item_key, item.score) for item in own.items} <= {
            (item.item_key, item.score) for item in pool.items
        }
        assert [item.item_key for item in same.items] == [item.item_key for item in pool.items[:k]]
        assert (own.num_read, own.num_unread) == (pool.num_read, pool.num_unread)


class WithBeams:
    """A recommender whose candidates a beam search would find."""

    def __init__(self, recommender: Recommender) -> None:
        self._recommender = recommender
        self.asked_for: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recommender, name)

    def num_beams(self, k: int, budget: Budget = FULL_BUDGET) -> int:
        return max(k, 100 if budget.max_beams is None else budget.max_beams)

    beams_of = Recommender.beams_of

    def answer_each(self, queries: list[Query], wanted: list[Wanted]) -> list[Answer]:
        self.asked_for += [each.k for each in wanted]
        return self._recommender.answer_each(queries, wanted)


def test_with_fewer_beams_there_are_fewer_candidates_but_as_many_as_asked_for(recommender, stage):
    beamed = WithBeams(recommender)
    of_beams = RankingStage(beamed, stage.scorer, stage.config)  # type: ignore[arg-type]
    queries, few = [query_of(recommender, "u3")], Budget(max_beams=5)

    for k, budget in ((2, Budget()), (2, few), (9, few), (2, Budget(max_beams=50))):
        of_beams.answer(queries, k, budget=budget)

    assert beamed.asked_for == [12, 5, 9, 12]
    assert (of_beams.num_beams(2), of_beams.num_beams(2, few), stage.num_beams(2, few)) == (100, 5, 0)
    # A model that scores every item has its candidates for nothing.
    assert stage.answer(queries, 2, budget=few) == stage.answer(queries, 2)


def test_what_is_asked_for_now_is_described_as_the_rows_of_training_were(folder, recommender, stage):
    """The test target of a user, as a candidate, is the row that the layout made of it."""
    dataset, impressions = recommender.dataset, stage.scorer.task.dataset
    of_layout = {row["user"]: row for row in impressions.split_table("test").to_pylist()}
    scorer = FakeScorer(stage.scorer)
    spied = RankingStage(recommender, scorer, stage.config)  # type: ignore[arg-type]
    rows = dataset.evaluation_rows("test")
    histories = np.split(rows.history_ids_N, rows.offsets_B1[1:-1])
    queries = [Query(history, int(user)) for history, user in zip(histories, rows.user_ids_B, strict=True)]

    spied.rewards(queries, dataset.item_positions(rows.targets_B)[:, None])

    (asked,) = scorer.asked
    columns = asked.rows.schema.names
    assert {"num_rated", "history", "gender", "genres", "user", "item"} == set(columns)
    made = asked.rows.to_pylist()
    assert len(made) == len(of_layout) > 30
    for row in made:
        assert row == {name: of_layout[row["user"]][name] for name in columns}


def test_nothing_that_is_held_out_is_learned(folder, recommender):
    dataset = recommender.dataset
    files = [folder / "ratings" / name for name in sorted((folder / "ratings").rglob("train*/*.parquet"))]
    learned = [row for file in files for row in pq.read_table(file).to_pylist()]
    pairs = {(row["user"], row["item"]) for row in learned}
    for split in ("valid", "test"):
        rows = dataset.evaluation_rows(split)
        users_ = dict(
            zip(dataset.users["user_id"].to_pylist(), dataset.users["user_key"].to_pylist(), strict=True)
        )
        keys = dataset.items.keys.to_pylist()
        for user, target in zip(
            rows.user_ids_B.tolist(), dataset.item_positions(rows.targets_B), strict=True
        ):
            assert (id_of("user", users_[user]), id_of("item", keys[target])) not in pairs
    assert len(learned) == dataset.manifest.counts["train_events"]


def test_rewards_are_the_scores_of_the_stage(recommender, stage):
    query = query_of(recommender, "u3")
    (answer,) = stage.answer([query], 5)
    places = [recommender.dataset.position_by_key(item.item_key) for item in answer.items]

    rewards_BK = stage.rewards([query, query], np.array([[*places, -1], [-1, *places]]))

    expected = [item.ranking.probabilities[LABEL] for item in answer.items]
    assert rewards_BK.shape == (2, 6)
    np.testing.assert_allclose(rewards_BK[0, :5], expected, atol=1e-6)
    np.testing.assert_allclose(rewards_BK[1, 1:], expected, atol=1e-6)
    assert np.isnan([rewards_BK[0, 5], rewards_BK[1, 0]]).all()


def test_whoever_is_unknown_is_ranked_for_without_attributes(recommender, stage):
    scorer = FakeScorer(stage.scorer)
    known = query_of(recommender, "u3")
    RankingStage(recommender, scorer, stage.config).answer([Query(known.history_ids)], 2)  # type: ignore[arg-type]

    (asked,) = scorer.asked
    assert set(asked.rows["user"].to_pylist()) == set(asked.rows["gender"].to_pylist()) == {None}
    assert asked.rows.num_rows == 12


def test_labels_are_put_together_as_configured():
    probabilities_BKT = np.array([[[0.5, 0.1], [0.2, 0.4], [np.nan, np.nan]]])
    scores_BK = np.array([[-1.0, -2.0, -np.inf]])

    def made(**config: Any) -> list[float]:
        objective = RankingObjective(RankingConfig(run="r", **config), ("click", "like"), "r")
        return objective(probabilities_BKT, scores_BK)[0, :2].tolist()

    assert made(objective={"like": 1.0}) == pytest.approx([0.1, 0.4])
    assert made(objective={"click": 1.0, "like": 0.5}) == pytest.approx([0.55, 0.4])
    product = np.log([0.5 * 0.1**2, 0.2 * 0.4**2]).tolist()
    assert made(objective={"click": 1, "like": 2}, combine="product") == pytest.approx(product)
    assert made(objective={"like": 1.0}, generator_weight=0.1) == pytest.approx([0.0, 0.2])


def test_a_model_of_several_labels_has_to_be_told_what_counts(folder, recommender):
    run = folder / "clicks-ranker"
    with pytest.raises(InputError, match=r"clicks-ranker predicts click, like; say what counts .*click=1"):
        stage_of(recommender, run)
    with pytest.raises(InputError, match=r"names the label 'buy', but clicks-ranker predicts click, like"):
        stage_of(recommender, run, objective={"buy": 1.0})
    (answer,) = stage_of(recommender, run, objective={"click": 1.0}).answer([query_of(recommender, "u1")], 4)
    assert all(set(item.ranking.probabilities) == {"click", "like"} for item in answer.items)


@pytest.mark.parametrize(
    ("origins", "expected"),
    [
        (
            {"user": "user", "item": "item", "history": "history"},
            "the column sex, which the ranking model reads",
        ),
        (
            {"user": "user", "item": "item", "sex": "user.sex", "history": "history"},
            "the column sex, .* whose users have user_id, user_key, gender and",
        ),
        ({}, "nothing says what its columns are"),
    ],
)
def test_a_column_that_queries_do_not_tell_is_refused_by_name(recommender, tmp_path, origins, expected):
    run = ranker_run(prepared_clicks(tmp_path / "clicks", origins=origins), tmp_path / "run")
    with pytest.raises(InputError, match=expected):
        stage_of(recommender, run, objective={"click": 1})


def test_a_history_of_films_liked_is_refused(folder, recommender, tmp_path):
    liked = prepared_ratings(folder / "source", tmp_path / "data", history_events="liked")
    run = ranker_run(liked, tmp_path / "run")
    with pytest.raises(InputError, match=r"history.*films that a user liked.*--history-events"):
        stage_of(recommender, run)


def test_rare_ids_are_those_of_training(folder, recommender, tmp_path):
    histories = folder / "histories"
    dataset = prepared_ratings(folder / "source", tmp_path / "data", held_out_of=str(histories), min_count=9)
    run = ranker_run(dataset, tmp_path / "run")
    scorer = FakeScorer(Scorer.load(run))
    stage = RankingStage(recommender, scorer, RankingConfig(run=str(run)))  # type: ignore[arg-type]
    stage.answer([query_of(recommender, "u3")], 30)

    learned = pq.read_table(next((dataset.root).rglob("train*/*.parquet")))
    asked = set(scorer.asked[0].rows["item"].to_pylist())
    assert asked <= set(learned["item"].to_pylist())
    assert len(asked) < 20


def test_a_hybrid_is_evaluated_beside_its_model(folder):
    report = evaluate(
        folder / "recommender", ranking=RankingConfig(run=str(folder / "ranker"), candidates=20)
    )
    rows = list(report.results)
    assert rows[:2] == ["model", "model + ranker"]
    assert report.results["model"].keys() == report.results["model + ranker"].keys()
    assert report.to_json()["ranker"] == "ranker"
    alone = evaluate(folder / "recommender")
    assert alone.results["model"] == report.results["model"]
    assert "ranker" not in alone.to_json()


def test_a_ranker_that_may_know_the_targets_is_not_evaluated(folder):
    ranking = RankingConfig(run=str(folder / "clicks-ranker"), objective={"click": 1})
    with pytest.raises(InputError, match="its training rows may have the very events"):
        evaluate(folder / "recommender", ranking=ranking)
    with pytest.raises(InputError, match="a ranking model itself"):
        evaluate(folder / "ranker", ranking=ranking)
