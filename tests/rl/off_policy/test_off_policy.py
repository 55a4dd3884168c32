"""Off-policy estimates: by hand, on logs whose true value is known, and on real ones.

Axes: N rows, A actions.
"""

import gzip
import json
import runpy

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from benchmarks.synthetic_bandit import World
from rayrec.cli import app
from rayrec.platform.errors import InputError
from rayrec.rl.off_policy.estimators import (
    diagnostics,
    direct_method,
    doubly_robust,
    importance_weights,
    inverse_propensity,
    self_normalized,
)
from rayrec.rl.off_policy.intervals import Terms
from rayrec.rl.off_policy.logs import BanditLog, read_log
from rayrec.rl.off_policy.policies import logged_frequencies, softmax_of, uniform
from rayrec.rl.off_policy.reward_model import cross_fitted
from rayrec.serve.config.events import RequestLogConfig
from rayrec.serve.events.request_log import RequestLog
from tests.helpers.data import real_data


def log_of(actions, rewards, propensities, num_actions=2, positions=None) -> BanditLog:
    return BanditLog(
        np.zeros((len(actions), 0)),
        np.array(actions),
        np.array(rewards, dtype=float),
        np.array(propensities, dtype=float),
        num_actions,
        None if positions is None else np.array(positions),
    )


BY_HAND = log_of([0, 1, 0, 1], [1, 0, 0, 1], [0.5, 0.25, 0.5, 0.5])
TARGET_NA = np.array([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])
MODEL_NA = np.array([[0.5, 0.1], [0.2, 0.4], [0.3, 0.9], [0.6, 0.5]])


def test_estimates_by_hand():
    # Weights are 0.25 / 0.5, 0.5 / 0.25, 1 / 0.5 and 1 / 0.5.
    assert importance_weights(BY_HAND, TARGET_NA).tolist() == [0.5, 2.0, 2.0, 2.0]
    assert inverse_propensity(BY_HAND, TARGET_NA).value == pytest.approx((0.5 + 2.0) / 4)
    assert self_normalized(BY_HAND, TARGET_NA).value == pytest.approx(2.5 / 6.5)
    # 0.25 * 0.5 + 0.75 * 0.1, 0.5 * 0.2 + 0.5 * 0.4, 0.3, 0.5
    assert direct_method(BY_HAND, TARGET_NA, MODEL_NA).value == pytest.approx((0.2 + 0.3 + 0.3 + 0.5) / 4)
    # 0.5 * (1 - 0.5), 2 * (0 - 0.4), 2 * (0 - 0.3), 2 * (1 - 0.5) come to that.
    corrections = 0.25 - 0.8 - 0.6 + 1.0
    assert doubly_robust(BY_HAND, TARGET_NA, MODEL_NA).value == pytest.approx((1.3 + corrections) / 4)


def test_weights_may_be_cut():
    assert importance_weights(BY_HAND, TARGET_NA, max_weight=1.5).tolist() == [0.5, 1.5, 1.5, 1.5]
    assert inverse_propensity(BY_HAND, TARGET_NA, max_weight=1.5).value == pytest.approx((0.5 + 1.5) / 4)


def test_diagnostics_by_hand():
    trust = diagnostics(BY_HAND, TARGET_NA)
    assert trust.effective_rows == pytest.approx(6.5**2 / (0.25 + 12.0))
    assert (trust.largest_weight, trust.mean_weight) == (2.0, 6.5 / 4)


def test_a_policy_estimated_on_its_own_log_is_what_it_earned():
    random = np.random.default_rng(0)
    probs_A = np.array([0.2, 0.3, 0.5])
    actions_N = random.choice(3, size=500, p=probs_A)
    log = log_of(actions_N, random.random(500) < 0.3, probs_A[actions_N], 3)
    own_NA = np.tile(probs_A, (500, 1))
    for terms in (inverse_propensity(log, own_NA), self_normalized(log, own_NA)):
        assert terms.value == pytest.approx(log.rewards_N.mean())
    assert diagnostics(log, own_NA).effective_rows == pytest.approx(500)


def test_rows_that_all_say_the_same_have_no_interval_to_speak_of():
    estimate = Terms(np.full(30, 0.25)).estimate()
    assert estimate == (0.25, None, None, "every request says the same")


@pytest.mark.slow
def test_an_interval_of_rare_rewards_is_longer_above_than_below():
    rewards_N = np.zeros(10_000)
    rewards_N[:20] = 1.0
    estimate = Terms(rewards_N).estimate()
    assert estimate.low < 0.002 < estimate.high
    assert estimate.high - 0.002 > 1.1 * (0.002 - estimate.low)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"propensities": [0.5, 0.0]}, "row 2 has the propensity 0"),
        ({"propensities": [np.nan, 0.5]}, "row 1 has the propensity nan"),
        ({"propensities": [0.5, 1.5]}, "row 2 has the propensity 1.5"),
        ({"actions": [0, 2]}, "row 2 has the action 2; there are 2"),
    ],
)
def test_a_log_that_says_nothing_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        log_of(**({"actions": [0, 1], "rewards": [0, 1], "propensities": [0.5, 0.5]} | changes))


def test_a_reward_model_finds_what_there_is_to_find():
    world = World.random()
    log = world.log(4_000, seed=0)
    truth_NA = world.means(log.contexts_NF)
    with_all, without = (cross_fitted(log, interactions=flag) for flag in (True, False))
    assert np.abs(with_all - truth_NA).mean() < 0.05 < np.abs(without - truth_NA).mean()


def test_a_reward_model_has_not_seen_the_rows_that_it_is_asked_of():
    """Each row's reward is noise: a model that knew it would tell."""
    random = np.random.default_rng(0)
    contexts_NF = np.eye(200)  # one feature per row
    actions_N, rewards_N = random.integers(2, size=200), (random.random(200) < 0.5).astype(float)
    log = BanditLog(contexts_NF, actions_N, rewards_N, np.full(200, 0.5), 2)
    model_NA = cross_fitted(log, strength=0.01)
    of_logged_N = model_NA[np.arange(200), actions_N]
    assert of_logged_N[rewards_N == 1].mean() < of_logged_N[rewards_N == 0].mean() + 0.05


def test_rewards_that_are_no_probabilities_and_folds_that_are_none_are_refused():
    log = World.random().log(20, 0)
    with pytest.raises(ValueError, match="at least 2, got 1"):
        cross_fitted(log, num_folds=1)
    graded = BanditLog(log.contexts_NF, log.actions_N, log.rewards_N + 0.5, log.propensities_N, 6)
    with pytest.raises(ValueError, match="0 or 1"):
        cross_fitted(graded)


@pytest.mark.slow
def test_intervals_cover_the_truth_as_often_as_they_say():
    """Of 60 logs, 95 % intervals miss more than 9 times once in a thousand."""
    world, truth = World.random(), World.random().true_value
    missed = dict.fromkeys(("ips", "snips", "dr", "dr, model wrong", "dr, propensities wrong"), 0)
    biased = 0
    for seed in range(60):
        log = world.log(800, seed)
        target_NA = world.target_probs(log.contexts_NF)
        right_NA, wrong_NA = cross_fitted(log, interactions=True), np.full_like(target_NA, 0.9)
        no_propensities = BanditLog(
            log.contexts_NF, log.actions_N, log.rewards_N, np.full(800, 1 / 6), log.num_actions
        )
        made = {
            "ips": inverse_propensity(log, target_NA),
            "snips": self_normalized(log, target_NA),
            "dr": doubly_robust(log, target_NA, right_NA),
            "dr, model wrong": doubly_robust(log, target_NA, wrong_NA),
            # Right means right: what a model of 800 rows still gets wrong, no propensity corrects here.
            "dr, propensities wrong": doubly_robust(no_propensities, target_NA, world.means(log.contexts_NF)),
        }
        for name, terms in made.items():
            estimate = terms.estimate(299, seed)
            missed[name] += not estimate.low <= truth <= estimate.high
        estimate = inverse_propensity(no_propensities, target_NA).estimate(299, seed)
        biased += not estimate.low <= truth <= estimate.high
    assert max(missed.values()) <= 9, missed
    assert biased > 20


def test_policies_are_distributions():
    log = log_of([0, 1, 1], [0, 1, 0], [0.5, 0.2, 0.4], positions=[0, 1, 1])
    assert uniform(log).tolist() == [[0.5, 0.5]] * 3
    np.testing.assert_allclose(softmax_of(BY_HAND, np.array([[0.0, np.log(3.0)]]), 1.0), [[0.25, 0.75]])
    with pytest.raises(ValueError, match="positive"):
        softmax_of(BY_HAND, MODEL_NA, 0.0)
    # At position 0 only action 0 was done, at position 1 only action 1.
    assert logged_frequencies(log, log).tolist() == [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]


@pytest.mark.slow
def test_the_open_bandit_dataset_is_read_and_estimated():
    folder = real_data("open-bandit")
    logs = {name: read_log(folder / name / "all") for name in ("bts", "random")}
    assert {name: int(log.rewards_N.sum()) for name, log in logs.items()} == {"bts": 42, "random": 38}
    assert logs["random"].num_actions == 80
    np.testing.assert_allclose(logs["random"].propensities_N, 1 / 80)
    # The uniform policy on the other one's log, and what it earned itself: the intervals meet.
    estimated = self_normalized(logs["bts"], uniform(logs["bts"])).estimate()
    earned = Terms(logs["random"].rewards_N).estimate()
    assert estimated.low < earned.high
    assert earned.low < estimated.high


@pytest.mark.slow
def test_the_command_shows_every_estimate():
    folder = real_data("open-bandit") / "bts" / "all"
    result = CliRunner().invoke(app, ["off-policy", str(folder), "--resamples", "100", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.output.splitlines()[-1])
    assert set(answer["estimates"]) == {
        "direct method",
        "inverse propensity",
        "self-normalized",
        "doubly robust",
    }
    for estimate in answer["estimates"].values():
        assert estimate["low"] <= estimate["value"] <= estimate["high"]


def table_of_shown(**changes):
    rows = {
        "item_id": [0, 1, 2, 0],
        "position": [1, 2, 3, 1],
        "click": [0, 1, 0, 0],
        "propensity_score": [0.25] * 4,
        "user_feature_0": list("abab"),
    }
    return pd.DataFrame(rows | changes)


def test_a_log_may_have_any_name_and_form(tmp_path):
    table_of_shown().to_csv(tmp_path / "shown.tsv", sep="\t", index=False)
    table_of_shown().rename(columns={"click": "reward"}).to_parquet(tmp_path / "log.parquet")
    first, second = read_log(tmp_path / "shown.tsv"), read_log(tmp_path / "log.parquet")
    assert (first.num_actions, first.contexts_NF.shape) == (3, (4, 2))
    np.testing.assert_array_equal(first.rewards_N, second.rewards_N)
    np.testing.assert_array_equal(first.positions_N, [0, 1, 2, 0])
    with pytest.raises(InputError, match="expected one table of shown items, found 2"):
        read_log(tmp_path)


def test_ids_of_items_may_be_texts(tmp_path):
    table_of_shown(item_id=["b", "a", "b", "c"]).to_csv(tmp_path / "all.csv.gz", index=False)
    assert read_log(tmp_path).actions_N.tolist() == [1, 0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"click": [0, None, 0, 0]}, r"line 3: click is None, expected 0 or 1 \(1 such rows\)"),
        ({"click": ["no", "yes", "no", "no"]}, r"line 2: click is 'no', expected 0 or 1 \(4 such rows\)"),
        ({"position": [0, 1, 2, 0]}, "line 2: position is 0, expected an integer from 1"),
        ({"position": [1, None, 2, 1]}, "line 3: position is None"),
        ({"propensity_score": [0.5, 0.5, 0, 2]}, r"line 4: propensity_score is 0.0, .* \(2 such rows\)"),
        ({"item_id": [0, 9, 1, 1]}, "line 3: item 9 is not in item_context, whose ids are like 0"),
        ({"item_id": ["i0", "i1", "i1", "i1"]}, "line 2: item 'i0' is not in item_context"),
    ],
)
def test_every_column_is_checked_row_by_row(tmp_path, changes, message):
    table_of_shown(**changes).to_csv(tmp_path / "all.csv", index=False)
    pd.DataFrame({"item_id": range(3)}).to_csv(tmp_path / "item_context.csv", index=False)
    with pytest.raises(InputError, match=message):
        read_log(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"item_id,click\n", gzip.compress(b"item_id,click,pscore\n0,1,0.5\n" * 99)[:60], gzip.compress(b"\xe9")],
    ids=["not packed", "cut off", "other encoding"],  # what is packed has the time in it
)
def test_files_that_cannot_be_read_are_refused_by_name(tmp_path, content):
    (tmp_path / "all.csv.gz").write_bytes(content)
    with pytest.raises(InputError, match=r"all.csv.gz: "):
        read_log(tmp_path)


def test_a_folder_that_is_no_log_is_refused_by_name(tmp_path):
    result = CliRunner().invoke(app, ["off-policy", str(tmp_path), "--seed", "-1"])
    assert "--seed" in result.output  # and not what numpy says of it
    result = CliRunner().invoke(app, ["off-policy", str(tmp_path)])
    assert result.exit_code == 2
    assert "found 0 among an empty folder" in " ".join(result.output.split())
    (tmp_path / "all.csv").write_text("item_id,position,click\n0,1,0\n")
    with pytest.raises(InputError, match="has no column propensity_score or propensity or pscore"):
        read_log(tmp_path)


SHOWN = [["a", "b"], ["c"], []]


def write_request_log(folder, **lists):
    """What the service writes of three requests, with lists beside those of what was shown."""
    log = RequestLog(RequestLogConfig(folder=str(folder)))
    for number, items in enumerate(SHOWN):
        log.log.offer({"request_id": f"r{number}", "row": 0, "k": 2, "recommended": items})
    log.close()
    for path in folder.rglob("*.parquet") if lists else ():
        table = pq.read_table(path, partitioning=None)
        for name, values in lists.items():
            table = table.append_column(name, pa.array(values, pa.list_(pa.float64())))
        pq.write_table(table, path)
    return folder


def test_the_request_log_of_the_service_says_why_it_judges_no_other_policy(tmp_path):
    folder = write_request_log(tmp_path / "requests")
    result = CliRunner().invoke(app, ["off-policy", str(folder)])
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "a request log of 3 answers with 3 shown items, but without propensities and rewards" in said
    assert "other items had no chance to be shown" in said


def test_a_request_log_with_propensities_is_a_log_of_shown_items(tmp_path):
    lists = {"propensities": [[0.5, 0.25], [1.0], []], "rewards": [[0.0, 1.0], [1.0], []]}
    log = read_log(write_request_log(tmp_path / "requests", **lists))
    assert log.actions_N.tolist() == [0, 1, 2]
    assert log.propensities_N.tolist() == [0.5, 0.25, 1.0]
    assert log.rewards_N.tolist() == [0, 1, 1]
    assert log.positions_N is not None
    assert log.positions_N.tolist() == [0, 1, 0]


def test_a_request_log_whose_lists_have_become_texts_is_refused_by_its_column(tmp_path):
    lists = {"propensities": [[0.5, 0.25], [1.0], []], "rewards": [[0.0, 1.0], [1.0], []]}
    (path,) = write_request_log(tmp_path / "requests", **lists).rglob("*.parquet")
    pq.read_table(path, partitioning=None).to_pandas().to_csv(tmp_path / "log.csv", index=False)
    with pytest.raises(InputError, match=r"column recommended has the type .*; expected lists of items"):
        read_log(tmp_path / "log.csv")


def test_a_request_that_is_there_twice_is_refused_by_its_row(tmp_path):
    """A join that doubled it would count its clicks twice."""
    lists = {"propensities": [[0.5, 0.25], [1.0], []], "rewards": [[0.0, 1.0], [1.0], []]}
    folder = write_request_log(tmp_path / "requests", **lists)
    (path,) = folder.rglob("*.parquet")
    table = pq.read_table(path, partitioning=None)
    pq.write_table(pa.concat_tables([table, table.slice(1, 1)]), path)
    with pytest.raises(InputError, match=r"row 4: the request 'r1' is there a second time \(1 such rows\)"):
        read_log(folder)
    again = table.set_column(1, "row", pa.array([0, 1, 2])).set_column(0, "request_id", pa.array(["r"] * 3))
    pq.write_table(again, path)
    assert len(read_log(folder)) == 3


@pytest.mark.parametrize(("propensity", "is_implausible"), [(0.5, False), (1.0, True), (0.01, True)])
def test_propensities_that_cannot_be_those_of_the_log_are_said(tmp_path, propensity, is_implausible):
    """The weights of a uniform policy over two items are 1, 0.5 and 50."""
    rows = "".join(f"{row % 2},{propensity},{row % 3 == 0:d}\n" for row in range(40))
    (tmp_path / "log.csv").write_text(f"item_id,propensity,click\n{rows}")
    result = CliRunner().invoke(app, ["off-policy", str(tmp_path), "--resamples", "100", "--json"])
    assert result.exit_code == 0, result.stderr
    said = "too far from 1" in " ".join(result.stderr.split())
    assert (
        said == json.loads(result.stdout.splitlines()[-1])["diagnostics"]["is_implausible"] == is_implausible
    )


def test_the_guides_script_makes_a_log_of_what_the_service_wrote(tmp_path):
    script = runpy.run_path("docs/guides/examples/off_policy/join_outcomes.py")
    requests = write_request_log(tmp_path / "requests")
    shown = [
        {"request_id": "r0", "items": ["b", "a"], "propensities": [0.05, 0.05]},
        {"request_id": "not logged", "items": ["a"], "propensities": [1.0]},
        {"request_id": "r1", "items": ["c"], "propensities": [1.0]},
    ]
    pq.write_table(pa.Table.from_pylist(shown), tmp_path / "shown.parquet")
    pq.write_table(pa.table({"request_id": ["r0"], "item_id": ["a"]}), tmp_path / "clicks.parquet")
    paths = [str(tmp_path / name) for name in ("shown.parquet", "clicks.parquet", "log.parquet")]

    assert script["join_outcomes"](str(requests), *paths) == 2

    log = read_log(paths[-1])
    assert (log.actions_N.tolist(), log.rewards_N.tolist()) == ([1, 0, 2], [0, 1, 0])
    assert log.propensities_N.tolist() == [0.05, 0.05, 1.0]


def test_the_guides_script_knows_rows_of_messages_and_ids_written_otherwise(tmp_path):
    script = runpy.run_path("docs/guides/examples/off_policy/join_outcomes.py")
    answers = {"request_id": ["r", "r"], "row": [0, 1]}
    tables = {
        "requests": {**answers, "user_key": ["ann", "bob"], "version": ["v", "v"]},
        "shown": {**answers, "items": [["1", "2"], ["2", "3"]], "propensities": [[0.5, 0.5]] * 2},
        "clicks": {"request_id": ["r"], "row": [1], "item_id": [2]},
    }
    paths = {name: str(tmp_path / f"{name}.parquet") for name in (*tables, "out")}
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), paths[name])

    assert script["join_outcomes"](*paths.values()) == 2
    found = pq.read_table(paths["out"]).to_pylist()
    assert [(row["user_key"], row["row"], row["rewards"]) for row in found] == [
        ("ann", 0, [0.0, 0.0]),
        ("bob", 1, [1.0, 0.0]),
    ]

    pq.write_table(pa.table({"request_id": ["r"], "item_id": [3]}), paths["clicks"])
    with pytest.raises(
        SystemExit, match=r"1 clicks on what was not shown, as on '3' of the answer \('r', 0\)"
    ):
        script["join_outcomes"](*paths.values())
    shown = pa.table(tables["shown"])
    pq.write_table(pa.concat_tables([shown, shown]), paths["shown"])
    with pytest.raises(SystemExit, match=r"shown\.parquet: the answer .* is there twice"):
        script["join_outcomes"](*paths.values())
    logged = pa.table(tables["requests"])
    pq.write_table(pa.concat_tables([logged, logged]), paths["requests"])
    with pytest.raises(SystemExit, match=r"requests\.parquet: the answer \('r', 0\) is there twice"):
        script["join_outcomes"](*paths.values())


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([[0.0], [1.0], []], "row 1: rewards has another length than recommended"),
        ([[0.0, 1.0], None, []], "row 2: rewards has another length than recommended"),
        ([[0.0, 2.0], [1.0], []], "row 1: reward is 2.0, expected 0 or 1"),
    ],
)
def test_lists_that_do_not_fit_what_was_shown_are_refused(tmp_path, rewards, message):
    lists = {"propensities": [[0.5, 0.25], [1.0], []], "rewards": rewards}
    with pytest.raises(InputError, match=message):
        read_log(write_request_log(tmp_path / "requests", **lists))
