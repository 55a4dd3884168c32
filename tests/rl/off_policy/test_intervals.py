"""Intervals of off-policy estimates: by request, and none where the log cannot give one.

Axes: N rows, A actions, R requests.
"""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.platform.errors import InputError
from rayrec.rl.off_policy.estimators import (
    diagnostics,
    doubly_robust,
    estimates,
    importance_weights,
    inverse_propensity,
    self_normalized,
)
from rayrec.rl.off_policy.intervals import Terms, bca
from rayrec.rl.off_policy.logs import BanditLog
from rayrec.rl.off_policy.policies import always, uniform
from rayrec.rl.off_policy.reward_model import cross_fitted


def explored(num_requests: int, seed: int, k: int = 10, explore: float = 0.1) -> BanditLog:
    """One list for all; a share of the requests sees it in random order, drawn for all rows at once."""
    random, places_K = np.random.default_rng(seed), np.arange(k)
    actions_RK = np.tile(places_K, (num_requests, 1))
    is_explored_R = random.random(num_requests) < explore
    actions_RK[is_explored_R] = random.permuted(actions_RK[is_explored_R], axis=1)
    propensities_RK = np.where(actions_RK == places_K, 1 - explore + explore / k, explore / k)
    return BanditLog(
        np.zeros((num_requests * k, 0)),
        actions_RK.ravel(),
        (random.random(num_requests * k) < 0.1).astype(float),
        propensities_RK.ravel(),
        k,
        np.tile(places_K, num_requests),
        requests_N=np.repeat(np.arange(num_requests), k),
        rewards_are_binary=True,
    )


def log_of(actions_N, rewards_N, num_actions: int, **fields) -> BanditLog:
    """Every action had the same chance."""
    num = len(actions_N)
    return BanditLog(
        np.zeros((num, 0)),
        np.asarray(actions_N),
        np.asarray(rewards_N, dtype=float),
        np.full(num, 1 / num_actions),
        num_actions,
        action_names=tuple(range(num_actions)),
        **{"rewards_are_binary": True, **fields},
    )


def test_right_logs_raise_no_alarm_and_by_rows_they_would():
    by_request = by_row = 0
    for seed in range(100):
        log = explored(300, seed)
        by_request += diagnostics(log, uniform(log)).is_implausible
        by_row += diagnostics(replace(log, requests_N=None), uniform(log)).is_implausible
    assert by_request == 0
    assert by_row > 0


def test_propensities_that_are_too_small_or_too_large_raise_the_alarm():
    log = explored(1000, seed=0)
    for factor, is_implausible in ((0.5, True), (1.0, False), (1.9, True)):
        wrong_N = np.minimum(log.propensities_N * factor, 1.0)
        found = diagnostics(replace(log, propensities_N=wrong_N), uniform(log))
        assert found.is_implausible == is_implausible, (factor, found)


def test_a_policy_that_takes_what_had_no_chance_raises_the_alarm():
    """The uniform policy over 200 items, of which a request could show 5: its mean weight is 5 / 200."""
    actions_N = np.random.default_rng(0).integers(0, 5, 1000)
    log = replace(log_of(actions_N, np.zeros(1000), 200), propensities_N=np.full(1000, 0.2))
    found = diagnostics(log, uniform(log))
    assert found.mean_weight == pytest.approx(0.025)
    assert found.is_implausible
    one = log.some(np.arange(1))
    assert not diagnostics(one, uniform(one)).is_implausible  # may be chance


def test_the_error_of_the_mean_is_that_of_requests():
    """All rows of a request are clicked, or none: a thousand rows say as much as a hundred requests."""
    truth, missed, missed_by_row = 0.3, 0, 0
    for seed in range(60):
        clicked_R = (np.random.default_rng(seed).random(100) < truth).astype(float)
        rows_N, requests_N = np.repeat(clicked_R, 10), np.repeat(np.arange(100), 10)
        by_request = Terms(rows_N, requests_N=requests_N).estimate(199, seed)
        alone = Terms(clicked_R).estimate(199, seed)
        assert by_request == pytest.approx(alone)
        missed += not by_request.covers(truth)
        missed_by_row += not Terms(rows_N).estimate(199, seed).covers(truth)
    assert missed <= 8 < 20 < missed_by_row


def test_requests_of_different_lengths_count_by_their_rows():
    rewards_N, requests_N = np.array([1.0, 0.0, 0.0, 1.0]), np.array([7, 7, 7, 2])
    assert Terms(rewards_N, requests_N=requests_N).value == 0.5


def test_the_interval_is_scipys():
    random = np.random.default_rng(0)
    tops_R, bottoms_R = (random.random(400) < 0.1) * random.random(400), random.random(400)
    low, high = bca(tops_R, bottoms_R, 499, seed=3)
    reference = stats.bootstrap(
        (tops_R, bottoms_R),
        lambda top, bottom, axis: top.mean(axis=axis) / bottom.mean(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=499,
        method="BCa",
        rng=np.random.default_rng(3),
    ).confidence_interval
    assert (low, high) == pytest.approx((reference.low, reference.high), rel=1e-6)


def test_a_long_log_has_an_interval():
    """Each row left out of all others would be 10¹¹ numbers."""
    found = Terms(np.random.default_rng(0).random(300_000)).estimate(20)
    assert found.covers(0.5)
    assert found.high - found.low < 0.01


def test_an_action_without_clicks_may_still_earn_something():
    """None of about 60 rows is clicked: the next 60 may have as many as four."""
    random = np.random.default_rng(0)
    actions_N = random.integers(0, 20, 1200)
    rewards_N = ((random.random(1200) < 0.1) & (actions_N != 3)).astype(float)
    log = log_of(actions_N, rewards_N, 20)
    num_rows, target_NA = int((actions_N == 3).sum()), always(log, "3")
    for make in (inverse_propensity, self_normalized):
        found = make(log, target_NA).estimate(100)
        assert (found.value, found.low) == (0.0, 0.0)
        assert found.high == pytest.approx(1.959964**2 / (num_rows + 1.959964**2))
        assert found.note.startswith(f"Wilson's: all of {num_rows} effective requests have the reward 0")
    found = doubly_robust(log, target_NA, cross_fitted(log)).estimate(100)
    assert (found.low, found.high) == (None, None)
    assert "every row that counts has the reward 0" in found.note
    assert found.covers(0.05)


def test_rows_that_count_next_to_nothing_do_not_hide_it():
    """Clicks only where the policy has a chance of a millionth."""
    actions_N = np.arange(400) % 2
    log = log_of(actions_N, actions_N, 2)
    target_NA = np.tile([1 - 1e-6, 1e-6], (400, 1))
    for make in (inverse_propensity, self_normalized):
        found = make(log, target_NA).estimate(100)
        assert found.low == 0.0
        assert found.high == pytest.approx(1.959964**2 / (200 + 1.959964**2), rel=1e-3)


def test_an_action_that_is_always_clicked_may_not_be_next_time():
    log = log_of(np.arange(400) % 2, np.arange(400) % 2, 2)
    found = self_normalized(log, always(log, "1")).estimate(100)
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(200 / (200 + 1.959964**2))


def test_what_was_earned_has_no_bound_and_so_no_interval():
    actions_N = np.arange(400) % 2
    log = log_of(actions_N, 7.5 * (actions_N == 1), 2, rewards_are_binary=False)
    for make in (inverse_propensity, self_normalized):
        found = make(log, always(log, "0")).estimate(100)
        assert (found.value, found.low, found.high) == (0.0, None, None)


def test_a_few_rows_give_no_interval_and_say_so():
    actions_N = np.array([3] * 3 + [0, 1, 2] * 200)
    log = log_of(actions_N, [1.0] + [0.0] * 602, 4)
    for found in estimates(log, always(log, "3"), cross_fitted(log), 100).values():
        assert np.isfinite(found.value)
    found = self_normalized(log, always(log, "3")).estimate(100)
    assert (found.value, found.low, found.high) == (pytest.approx(1 / 3), None, None)
    assert "as little as 3.0 equally weighted requests" in found.note


def test_a_policy_that_takes_nothing_that_was_logged_is_refused():
    log = log_of([0, 1] * 20, [0, 1] * 20, 3)
    target_NA = np.tile([0.0, 0.0, 1.0], (40, 1))
    assert not importance_weights(log, target_NA).any()
    with pytest.raises(InputError, match=r"in none of its 40 rows .* take a longer log"):
        self_normalized(log, target_NA)


def test_the_command_says_what_an_interval_is_made_of(tmp_path):
    rows = {"item_id": [0, 1] * 200, "click": [0, 1] * 200, "propensity": [0.5] * 400}
    pd.DataFrame(rows).to_csv(tmp_path / "log.csv", index=False)

    def said(num_rows: int) -> str:
        pd.DataFrame(rows).head(num_rows).to_csv(tmp_path / "log.csv", index=False)
        command = ["off-policy", str(tmp_path / "log.csv"), "--policy", "always", "--action", "0"]
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command, "--resamples", "100"])
        assert result.exit_code == 0, result.stderr
        return "".join(re.findall(r"[\w.;:(']", result.output))  # however wide the table is

    assert "0.00000(0.00000to0.01885;Wilson's:allof200effectiverequests" in said(400)
    assert "0.00000(nointerval:aslittleas5.0equallyweightedrequests" in said(10)
