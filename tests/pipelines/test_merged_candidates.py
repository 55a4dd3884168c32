import numpy as np
import pytest

from rayrec.models.program.program import RankedItems
from rayrec.pipelines.evaluation.evaluate_candidates import _compared, evaluate_candidates
from rayrec.pipelines.inference.merged_candidates import merged
from rayrec.pipelines.inference.recommender import Recommender
from tests.cli.commands import answer, refused
from tests.helpers.runs import NUM_ITEMS, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"))


def test_neighbors_take_their_share_and_each_fills_up_for_the_other():
    generated = RankedItems(
        np.array([[4, 3, 2, 1], [4, 3, 2, 1], [-1, -1, -1, -1], [7, -1, -1, -1]]),
        np.array([[4.0, 3, 2, 1], [4.0, 3, 2, 1], [-np.inf] * 4, [7.0] + [-np.inf] * 3]),
    )
    near_BK = np.array([[9, 2, 8, 6], [3, -1, -1, -1], [5, 6, -1, -1], [-1, -1, -1, -1]])

    items_BK, scores_BK = merged(generated, near_BK, k=4, num_generated=2)

    assert items_BK.tolist() == [[4, 3, 9, 2], [4, 3, 2, 1], [5, 6, -1, -1], [7, -1, -1, -1]]
    assert scores_BK[0].tolist() == [4, 3, 1, 2], "an unknown one is as the lowest, a known one as it is"
    assert scores_BK[1].tolist() == [4, 3, 2, 1]
    assert scores_BK[2, :2].tolist() == [0, 0]
    assert (scores_BK[items_BK < 0] == -np.inf).all()


def test_the_ratio_has_an_interval_over_the_same_users():
    generated_U = np.array([True] * 30 + [False] * 70)
    merged_U = np.array([True] * 28 + [False] * 2 + [True] * 12 + [False] * 58)

    found = _compared(generated_U, merged_U)

    assert found["generated"].value == 0.3
    assert found["with neighbors"].value == 0.4
    assert found["ratio"].value == pytest.approx(4 / 3)
    assert 1.0 < found["ratio"].low < 4 / 3 < found["ratio"].high
    assert _compared(generated_U[:0], merged_U[:0]) == {}
    assert "ratio" not in _compared(np.zeros(5, bool), np.ones(5, bool))


def test_as_many_candidates_are_compared_with_and_without_neighbors(run):
    report = evaluate_candidates(Recommender.load(run), "test", num_candidates=6)

    everything = report.results["all items"]
    assert report.count == len(Recommender.load(run).dataset.evaluation_rows("test"))
    assert 0 < everything["generated"].value < 1
    whole = evaluate_candidates(Recommender.load(run), "test", num_candidates=NUM_ITEMS)
    assert whole.results["all items"]["ratio"].value == 1.0, "all items are named either way"


def test_the_command_prints_both(run):
    found = answer("evaluate", run, "--candidates-with-neighbors", 8)

    assert set(found["results"]["all items"]) == {"generated", "with neighbors", "ratio"}
    assert found["num_candidates"] == 8
    assert "--neighbors" in refused("evaluate", "--neighbors", run, "--candidates-with-neighbors", 8)
