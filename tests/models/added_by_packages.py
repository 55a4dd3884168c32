"""What users do with the packages of docs/guides/examples, in a process that has them installed.

python -m tests.models.added_by_packages FOLDER
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from rayrec.models.tokenizers.registry import SemanticIdRegistry
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.evaluation.evaluate import evaluate
from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.inference.scorer import Scorer
from rayrec.pipelines.semantic_ids.tokenization import TokenizeConfig, extend, tokenize
from rayrec.platform.errors import InputError
from tests.helpers.impressions import ctr_config, impression_dataset
from tests.helpers.runs import dataset_of, trained


def a_model_recommends(folder: Path) -> None:
    dataset = dataset_of(folder)
    values = {
        "data": {"path": str(dataset.root)},
        "model": {"name": "gru", "dim": 8},
        "pipeline": {"trainer_threads": 1},
        "training": {"batch_size": 16, "epochs": 1},
    }
    run = trained(RunConfig.parse(values), folder / "run")
    recommender = Recommender.load(run)
    (answer,) = recommender.recommend([Query(dataset.items.ids_I[:2])], k=3)
    assert len(answer) == 3
    assert evaluate(run)
    with pytest.raises(InputError, match=re.escape("did you mean 'dim'")):
        RunConfig.parse(values | {"model": {"name": "gru", "dims": 8}})


def a_ranking_model_scores(folder: Path) -> None:
    dataset = impression_dataset(folder)
    run = trained(ctr_config(dataset, {"name": "wide"}), folder / "run")
    scorer = Scorer.load(run)
    scores_BT = scorer.score_rows([{"user": 1, "item": 2, "price": 0.5}, {"user": 1, "item": 3}])
    assert scores_BT.shape == (2, len(scorer.labels))
    assert np.isfinite(scores_BT).all()
    assert evaluate(run)


def a_tokenizer_makes_ids(folder: Path) -> None:
    dataset = dataset_of(folder)
    config = TokenizeConfig(tokenizer="quantiles", num_levels=2, codebook_size=4)
    report = tokenize(dataset.root, folder / "ids", config)
    assert SemanticIdRegistry.load(report.path).method.startswith("quantiles")


def vectors_make_ids(folder: Path) -> None:
    dataset = dataset_of(folder)
    config = TokenizeConfig(
        vectors="interactions+trigrams", vector_settings={"dim": 16}, num_levels=2, codebook_size=4
    )
    made = tokenize(dataset.root, folder / "ids", config)
    # The settings are kept with the tokenizer: new items get vectors that fit.
    again = extend(dataset.root, made.path, folder / "extended")
    before, after = (SemanticIdRegistry.load(report.path) for report in (made, again))
    assert np.array_equal(before.codes_IL, after.codes_IL)
    with pytest.raises(InputError, match=re.escape("there is no setting 'size'")):
        tokenize(dataset.root, folder / "x", config.model_copy(update={"vector_settings": {"size": 1}}))


if __name__ == "__main__":
    for check in (a_model_recommends, a_ranking_model_scores, a_tokenizer_makes_ids, vectors_make_ids):
        check(Path(sys.argv[1]) / check.__name__)
        print(check.__name__)
