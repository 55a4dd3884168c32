"""Logs whose rows come in requests: what each could show, and what moves together.

Axes: N rows, A actions, R requests.
"""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.platform.errors import InputError
from rayrec.rl.off_policy.estimators import inverse_propensity, self_normalized
from rayrec.rl.off_policy.logs import BanditLog, read_log
from rayrec.rl.off_policy.policies import always, softmax_of, uniform
from rayrec.rl.off_policy.reward_model import cross_fitted, mean_rewards

CLICKS, EXPLORED = 0.1, 0.1


def requests(num_requests: int, k: int, num_items: int, seed: int = 0) -> pd.DataFrame:
    """As the guide explores: the list as it is, or else in random order; each item is clicked alike."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(num_requests):
        items = random.choice(num_items, k, replace=False)
        shown = items if random.random() < 1 - EXPLORED else random.permutation(items)
        rows.append(
            {
                "request_id": f"r{number}",
                "row": 0,
                "recommended": [f"{item:03}" for item in shown],
                "propensities": np.where(shown == items, 1 - EXPLORED + EXPLORED / k, EXPLORED / k),
                "rewards": (random.random(k) < CLICKS).astype(float),
            }
        )
    return pd.DataFrame(rows)


def log_of_requests(folder, rows: pd.DataFrame) -> BanditLog:
    rows.to_parquet(folder / "log.parquet")
    return read_log(folder / "log.parquet")


def test_a_uniform_policy_orders_what_each_request_could_show(tmp_path):
    log = log_of_requests(tmp_path, requests(2000, k=5, num_items=200))
    target_NA = uniform(log)

    assert (target_NA > 0).sum(axis=1).tolist() == [5] * len(log)
    np.testing.assert_allclose(target_NA[np.arange(len(log)), log.actions_N], 0.2)
    np.testing.assert_allclose(target_NA.sum(axis=1), 1.0)
    for terms in (inverse_propensity(log, target_NA), self_normalized(log, target_NA)):
        assert terms.value == pytest.approx(CLICKS, rel=0.2)


def test_a_softmax_policy_takes_nothing_that_a_request_could_not_show(tmp_path):
    log = log_of_requests(tmp_path, requests(20, k=3, num_items=10))
    target_NA = softmax_of(log, np.tile(np.arange(10.0), (len(log), 1)), temperature=1.0)
    could_NA = uniform(log) > 0
    assert not target_NA[~could_NA].any()
    np.testing.assert_allclose(target_NA.sum(axis=1), 1.0)


def test_one_action_for_all_is_refused_where_some_requests_could_not_show_it(tmp_path):
    rows = requests(40, k=5, num_items=20)
    having = int(rows["recommended"].map(lambda items: "003" in items).sum())
    assert 0 < having < 40
    log = log_of_requests(tmp_path, rows)
    with pytest.raises(InputError, match=rf"only {having} of 40 requests could show '003'"):
        always(log, "003")
    of_it_N = np.isin(log.requests_N, np.flatnonzero(rows["recommended"].map(lambda items: "003" in items)))
    some = log.some(np.flatnonzero(of_it_N))
    assert always(some, "003").sum() == len(some)


def test_candidates_of_a_request_may_be_more_than_it_showed(tmp_path):
    rows = pd.DataFrame(
        {
            "request_id": ["a", "b"],
            "recommended": [["x"], ["y"]],
            "candidates": [["x", "y", "z"], ["y", "w"]],
            "propensities": [[1 / 3], [1 / 2]],
            "rewards": [[1.0], [0.0]],
        }
    )
    log = log_of_requests(tmp_path, rows)
    assert log.action_names == ("w", "x", "y", "z")
    np.testing.assert_allclose(uniform(log), [[0, 1 / 3, 1 / 3, 1 / 3], [1 / 2, 0, 1 / 2, 0]])

    rows["candidates"] = [["x", "y"], ["w"]]
    with pytest.raises(InputError, match=r"row 2: item 'y' was shown, but is not among the candidates"):
        log_of_requests(tmp_path, rows)
    rows["candidates"] = [["x", "y"], ["y", None]]
    with pytest.raises(InputError, match="a list of the column candidates has an item without a value"):
        log_of_requests(tmp_path, rows)
    rows["candidates"] = [[1, 2], [2, 3]]
    with pytest.raises(InputError, match="items that were shown are like"):
        log_of_requests(tmp_path, rows)
    rows["candidates"] = ["x", "y"]
    with pytest.raises(InputError, match="column candidates has the type string; expected lists of items"):
        log_of_requests(tmp_path, rows)
    pd.DataFrame({"item_id": ["x", "y"]}).to_parquet(tmp_path / "item_context.parquet")
    rows["candidates"] = [["x", "v"], ["y"]]
    with pytest.raises(InputError, match="the candidate 'v' is not in item_context"):
        log_of_requests(tmp_path, rows)


def test_a_request_log_and_a_table_with_ids_know_which_rows_are_of_one_request(tmp_path):
    log = log_of_requests(tmp_path, requests(3, k=2, num_items=5))
    assert log.requests_N.tolist() == [0, 0, 1, 1, 2, 2]
    table = {
        "request_id": ["q", "p", "q", None, "q", None],
        "row": [0, 0, 0, 0, 1, 0],
        "item_id": list("aabbab"),
        "click": [0, 1, 0, 0, 0, 0],
        "propensity": [0.5] * 6,
    }
    pq.write_table(pa.table(table), tmp_path / "table.parquet")
    number_of = read_log(tmp_path / "table.parquet").requests_N
    assert number_of is not None
    assert number_of[0] == number_of[2]
    assert len(set(number_of.tolist())) == 5  # those without an id are of nobody else


def test_rows_of_one_request_are_in_one_fold(tmp_path):
    """A click on one item of a request would otherwise tell of the others."""
    log = log_of_requests(tmp_path, requests(30, k=4, num_items=9))
    folds_RK = log.folds_N(3, seed=0).reshape(30, 4)
    assert (folds_RK == folds_RK[:, :1]).all()
    assert np.bincount(folds_RK[:, 0]).tolist() == [10, 10, 10]
    for model in (cross_fitted, mean_rewards):
        with pytest.raises(InputError, match="4 rows of 1 requests; at least two are needed"):
            model(log.some(np.arange(4)))


@pytest.mark.parametrize("num_features", [0, 4])
def test_a_position_that_a_fold_lacks_is_still_a_position(num_features):
    random = np.random.default_rng(0)
    positions_N = random.integers(0, 10, 60)
    positions_N[7] = 11  # one row alone has it, so that two of three models never see it
    rewards_N = (random.random(60) < 0.3).astype(float)
    log = BanditLog(
        random.random((60, num_features)),
        random.integers(0, 5, 60),
        rewards_N,
        np.full(60, 0.2),
        5,
        positions_N,
    )
    assert log.some(np.arange(3)).num_positions == log.num_positions == 12
    model_NA = cross_fitted(log)
    assert np.isfinite(model_NA).all()
    assert model_NA.mean() == pytest.approx(rewards_N.mean(), abs=0.1)


def test_an_item_that_the_log_never_shows_is_refused_with_what_to_do(tmp_path):
    table = {"item_id": [0, 1] * 20, "click": [0, 1] * 20, "propensity": [0.3] * 40}
    pd.DataFrame(table).to_csv(tmp_path / "log.csv", index=False)
    pd.DataFrame({"item_id": range(3)}).to_csv(tmp_path / "item_context.csv", index=False)
    result = CliRunner().invoke(app, ["off-policy", str(tmp_path), "--policy", "always", "--action", "2"])
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "the action '2' is known, but in no row" in said
    assert "take a longer log" in said


@pytest.mark.parametrize("k", [1, 5])
def test_the_command_reads_lists_of_requests(tmp_path, k):
    requests(60, k, num_items=30).to_parquet(tmp_path / "log.parquet")
    options = ["--resamples", "100", "--json"]
    result = CliRunner().invoke(app, ["off-policy", str(tmp_path / "log.parquet"), *options])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["num_rows"] == 60 * k
