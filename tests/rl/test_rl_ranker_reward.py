"""Rewards by a ranking model: a real one, of the same users, items and held-out events."""

from pathlib import Path

import numpy as np
import pytest

from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.ranking_stage import RankingStage
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.platform.errors import InputError
from rayrec.rl.config import PromptsConfig, RlConfig
from rayrec.rl.policy import Policy
from rayrec.rl.prompts import PromptStream
from rayrec.rl.scoring import RolloutScorer
from tests.helpers.ranking import (
    prepared_histories,
    prepared_ratings,
    ranker_run,
    rated_source,
    recommender_run,
)
from tests.helpers.runs import make_semantic_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    source = rated_source(folder / "source")
    histories = prepared_histories(source, folder / "histories")
    make_semantic_ids(histories)
    recommender_run(histories, folder / "policy", "prefix")
    ranker_run(
        prepared_ratings(source, folder / "ratings", held_out_of=str(histories.root)), folder / "ranker"
    )
    ranker_run(prepared_ratings(source, folder / "others"), folder / "other-ranker")
    return folder


def config_of(folder: Path, ranker: str, **ranking) -> RlConfig:
    part = {"kind": "ranker", "ranking": {"run": str(folder / ranker), **ranking}}
    return RlConfig.parse(
        {"init_from": str(folder / "policy"), "snapshot": "last", "rewards": {"parts": [part]}}
    )


def test_a_ranking_model_scores_candidates_as_of_the_newest_event(folder, monkeypatch):
    config = config_of(folder, "ranker")
    policy = Policy.load(config)
    worker = RolloutScorer.of(config.rewards, policy)
    prompts = PromptStream(policy.task.dataset, PromptsConfig(users_per_step=12), 0).step(0)
    rollouts = policy.sample(prompts, config.rollout, 0)

    _, scored = worker.score(rollouts)
    monkeypatch.setattr("time.time", lambda: 2e9)
    _, later = RolloutScorer.of(config.rewards, policy).score(rollouts)

    assert np.array_equal(scored.rewards_UG, later.rewards_UG)
    samples, row = prompts.samples, 3
    history = slice(*samples.offsets_B1[row : row + 2])
    stage = RankingStage.load(
        Recommender.load(folder / "policy", "last"), RankingConfig(run=str(folder / "ranker"))
    )
    expected_1G = stage.rewards(
        [Query(samples.item_ids_N[history], int(samples.user_ids_B[row]))],
        rollouts.items_UG[row : row + 1],
        samples.times_N[history][-1:],
    )
    np.testing.assert_allclose(scored.rewards_UG[row], expected_1G[0], rtol=1e-6)
    assert np.ptp(scored.rewards_UG) > 0


def test_a_ranking_model_of_other_impressions_is_refused(folder):
    config = config_of(folder, "other-ranker")
    with pytest.raises(InputError, match="holds out other events"):
        RolloutScorer.of(config.rewards, Policy.load(config))


def test_an_objective_that_the_ranking_model_does_not_know_is_refused(folder):
    config = config_of(folder, "ranker", objective={"bought": 1.0})
    with pytest.raises(InputError, match="bought"):
        RolloutScorer.of(config.rewards, Policy.load(config))
