"""Canaries in a store of versions, and what their counts say."""

import json
import math
import os

import numpy as np
import pytest

from rayrec.pipelines.metrics.proportions import newcombe, wilson
from rayrec.pipelines.runs.run_folder import RunFolder
from rayrec.pipelines.runs.snapshots import read_snapshot
from rayrec.pipelines.versions.canary import (
    Canaries,
    Canary,
    CanarySettings,
    OfflineEvaluation,
    judged,
)
from rayrec.pipelines.versions.canary_counts import (
    FIRST_BIN_S,
    NUM_BINS,
    NUM_GROUPS,
    STEP,
    ArmCounts,
    CanaryCounts,
    bin_of,
)
from rayrec.pipelines.versions.publisher import Publisher
from rayrec.pipelines.versions.store import VersionStore
from rayrec.platform.errors import InputError
from tests.helpers.runs import make_run

SETTINGS = CanarySettings(min_requests=1000, for_s=60)


def test_worked_numbers_of_wilson_and_newcombe():
    """Newcombe (1998), table II, example (a)."""
    assert wilson(56, 70) == pytest.approx((0.8, 0.6923, 0.8773), abs=1e-3)
    assert wilson(0, 10)[:2] == (0.0, 0.0)
    assert newcombe((56, 70), (48, 80)) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)
    assert math.isnan(newcombe((1, 2), (0, 0)).value)


def test_newcombes_interval_covers_the_difference_as_often_as_it_says():
    random = np.random.default_rng(3)
    covered = 0
    for _ in range(2000):
        interval = newcombe((random.binomial(400, 0.03), 400), (random.binomial(900, 0.02), 900))
        covered += interval.low <= 0.01 <= interval.high
    assert 0.93 <= covered / 2000 <= 0.98


def counts_of(canary, baseline=(20_000, 20, 0.010), seed=0, num_users=10**6, spread=0.5):
    """(Requests, errors, median in s) of each: log-normal times, of users who are drawn."""
    random = np.random.default_rng(seed)
    arms = []
    for requests, errors, median_s in (baseline, canary):
        bits = random.integers(0, 2**40, min(num_users, requests)).tolist()
        times = [*(median_s * np.exp(spread * random.standard_normal(requests - errors))).tolist()]
        arm = ArmCounts()
        for number, seconds in enumerate([*times, *[None] * errors]):
            arm.add(seconds, bits[number % len(bits)])
        arms.append(arm)
    return CanaryCounts(*arms)


@pytest.mark.parametrize(
    ("canary", "state", "reason"),
    [
        ((2000, 2, 0.010), "passed", "2,000 requests"),
        ((2000, 2, 0.011), "passed", "no worse"),  # slower, but by less than may be
        ((500, 0, 0.010), "open", "500 of 1,000 requests"),
        ((1001, 2, 0.010), "open", "999 of 1,000 requests"),  # errors are no answers
        ((1500, 1, 0.0124), "open", "may be slower"),  # by more than the 20 % that may be
        ((60, 30, 0.010), "worse", "30 of 60 requests have failed"),
        ((20, 20, 0.010), "open", "0 of 1,000"),  # too few to say so
        (
            (2000, 80, 0.010),
            "worse",
            "80 of 2,000 requests have failed, and of the version that serves 20 of",
        ),
        ((2000, 14, 0.010), "open", "more of its requests may fail"),
        ((2000, 2, 0.020), "worse", "the 50th percentile of its latency is 20"),
    ],
)
def test_a_canary_is_judged_by_its_errors_and_its_latency(canary, state, reason):
    verdict = judged(counts_of(canary), SETTINGS, 100)
    assert verdict.state == state
    assert reason in verdict.reason


def test_a_tail_that_is_worse_is_seen_though_the_median_is_not():
    counts = counts_of((2000, 0, 0.010))
    for number in range(200):
        counts.canary.add(0.5, number)
    verdict = judged(counts, SETTINGS, 100)
    assert verdict.state == "worse"
    assert "95th percentile" in verdict.reason


def test_time_and_evaluation_are_waited_for_and_a_worse_metric_ends_it():
    counts = counts_of((2000, 2, 0.010))
    assert "10 of 60 s" in judged(counts, SETTINGS, 10).reason
    needs = SETTINGS.model_copy(update={"needs_evaluation": True})
    assert "not evaluated yet" in judged(counts, needs, 100).reason
    values = {"metric": "ndcg@10", "split": "test", "num_users": 900, "baseline": 0.2, "canary": 0.19}
    unknown = OfflineEvaluation(**values, ratio=(0.95, 0.89, 1.01))
    verdict = judged(counts, needs, 100, unknown)
    assert verdict.state == "open"
    assert "it may be worse, and more users would tell" in verdict.reason
    worse = OfflineEvaluation(**values, ratio=(0.95, 0.92, 0.975))
    verdict = judged(counts, needs, 100, worse)
    assert verdict.state == "worse"
    assert "0.950 times as much (0.920 to 0.975), and 0.98 is the least" in verdict.reason
    assert judged(counts, needs.model_copy(update={"max_loss": 0.09}), 100, worse).state == "passed"
    same = OfflineEvaluation(**values, ratio=(1.0, 0.985, 1.015))
    assert judged(counts, needs, 100, same).state == "passed"


class Users:
    """Who differ in how much they ask, how often their requests fail, and how long these take."""

    def __init__(self, random, num_users, spread, share_failing):
        activity_U = np.exp(spread * random.standard_normal(num_users))
        self.random, self.activity_U = random, activity_U / activity_U.sum()
        self.errors_U = np.where(random.random(num_users) < share_failing, 1.0, 0.001)
        self.seconds_U = 0.01 * np.exp(0.5 * random.standard_normal(num_users))
        self.group_U = random.integers(0, NUM_GROUPS, num_users)
        self.is_of_canary_U = random.random(num_users) < 0.05

    def ask(self, counts, num_requests):
        asked_U = self.random.multinomial(num_requests, self.activity_U)
        failed_U = self.random.binomial(asked_U, self.errors_U)
        for arm, is_of_it_U in (
            (counts.canary, self.is_of_canary_U),
            (counts.baseline, ~self.is_of_canary_U),
        ):
            np.add.at(arm.errors_G, self.group_U, failed_U * is_of_it_U)
            of_answer = np.repeat(np.arange(len(asked_U)), (asked_U - failed_U) * is_of_it_U)
            seconds = self.seconds_U[of_answer] * np.exp(0.2 * self.random.standard_normal(len(of_answer)))
            bins = np.ceil(np.log(seconds / FIRST_BIN_S) / np.log(STEP)).astype(int)
            np.add.at(arm.bins_GB, (self.group_U[of_answer], np.clip(bins, 0, NUM_BINS - 1)), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_users", "spread", "share_failing"),
    [
        (3000, 1.5, 0.02),
        (1000, 2.0, 0.05),
        (20_000, 0.0, 0.02),
    ],
)
def test_equal_versions_are_hardly_ever_taken_back_though_users_differ(num_users, spread, share_failing):
    """Of 5 % of the users, at 60 looks; as independent requests, more than every tenth would be."""
    taken_back = 0
    for seed in range(50):
        users = Users(np.random.default_rng(seed), num_users, spread, share_failing)
        counts = CanaryCounts(ArmCounts(), ArmCounts())
        for _ in range(60):
            users.ask(counts, 500)
            if judged(counts, SETTINGS, 0).state == "worse":
                taken_back += 1
                break
    assert taken_back <= 1


def test_errors_of_one_user_say_nothing_of_others_and_a_bot_promotes_nothing():
    counts = counts_of((2000, 2, 0.010))
    for _ in range(200):
        counts.canary.add(None, 5)
    assert judged(counts, SETTINGS, 100).state == "open"
    bot = counts_of((5000, 0, 0.010), num_users=1)
    assert judged(bot, SETTINGS, 100).reason == "about 1 of 100 users so far"
    few = counts_of((60, 60, 0.010), num_users=20)
    assert judged(few, SETTINGS, 100).state == "worse"


@pytest.mark.parametrize("num_users", [1, 50, 1000, 8000])
def test_users_are_counted_about(num_users):
    arm = ArmCounts()
    for _ in range(2):
        for bits in np.random.default_rng(7).integers(0, 2**40, num_users).tolist():
            arm.add(0.01, bits)
    assert arm.num_users == pytest.approx(num_users, rel=0.06)
    twice = arm.plus(arm)
    assert (twice.num_users, twice.num_answers) == (arm.num_users, 4 * num_users)


def test_bins_hold_their_times_and_counts_survive_a_file():
    for seconds in (1e-5, 1e-4, 0.0101, 0.3, 7.0, 500.0):
        number = bin_of(seconds)
        assert seconds <= FIRST_BIN_S * STEP**number * (1 + 1e-6)
        assert number == 0 or seconds >= FIRST_BIN_S * STEP ** (number - 1) * (1 - 1e-6)
    assert bin_of(1e9) == NUM_BINS - 1
    counts = counts_of((50, 3, 0.02), (70, 1, 0.01))
    again = CanaryCounts.of_json(counts.to_json().encode())
    assert again.to_json() == counts.to_json()
    assert (again.canary.num_requests, again.canary.num_errors) == (50, 3)
    for content in (b'{"baseline": 1}', counts.to_json().replace('"places": [', '"places": [1, ').encode()):
        with pytest.raises(ValueError, match="no counts of a canary"):
            CanaryCounts.of_json(content)


def test_quantiles_are_interpolated_in_their_bins():
    times = 0.01 * np.exp(0.5 * np.random.default_rng(5).standard_normal(50_000))
    arm = ArmCounts()
    for number, seconds in enumerate(times.tolist()):
        arm.add(seconds, number)
    for share in (0.5, 0.95):
        assert arm.quantile_s(share) == pytest.approx(np.quantile(times, share), rel=0.01)
        above = arm.above(float(np.quantile(times, share)))
        assert above.hits_G.sum() / above.num_trials == pytest.approx(1 - share, abs=0.005)
    assert ArmCounts().quantile_s(0.5) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RunFolder.open(make_run(tmp_path_factory.mktemp("run"), snapshots_after=(0, 1)))


@pytest.fixture
def store(tmp_path):
    return VersionStore(tmp_path / "store")


def publish(run, store, count=1):
    for place in range(count):
        Publisher(run, store).publish(read_snapshot(run.snapshots / run.snapshot_names()[place]))


def test_a_canary_without_a_baseline_is_refused(run, store):
    canaries = Canaries(store)
    with pytest.raises(InputError, match="no version serves, so a canary has no baseline"):
        canaries.start(1, SETTINGS)
    publish(run, store)
    with pytest.raises(InputError, match="version 1 serves already"):
        canaries.start(1, SETTINGS)
    with pytest.raises(InputError, match="has no version 7; it has 1 to 1"):
        canaries.start(7, SETTINGS)
    assert store.current().is_held is False


def test_what_serves_is_held_while_a_canary_runs_and_there_is_one_at_a_time(run, store):
    canaries = Canaries(store, clock=lambda: 5.0)
    publish(run, store)
    was_held = canaries.hold_baseline()
    publish(run, store, 2)
    assert store.current().version == 1
    canary = canaries.start(2, SETTINGS, was_held)
    assert canaries.running() == canary
    assert (canary.version, canary.baseline, canary.began_at, canary.was_held) == (2, 1, 5.0, False)
    with pytest.raises(InputError, match="version 2 is a canary already"):
        canaries.start(3, SETTINGS)
    publish(run, store, 3)
    store.keep_newest(1)
    assert store.numbers() == [1, 2, 6]
    end = canaries.finish(canary, "promoted", "passed")
    assert (canaries.running(), canaries.end(canary)) == (None, end)
    assert (store.current().version, store.current().is_held) == (2, False)


def test_one_that_is_taken_back_leaves_the_version_before_and_the_first_word_counts(run, store):
    publish(run, store)
    canaries = Canaries(store)
    was_held = canaries.hold_baseline()
    publish(run, store)
    canary = canaries.start(2, SETTINGS, was_held)
    assert canaries.finish(canary, "returned", "errors").state == "returned"
    assert canaries.finish(canary, "promoted", "passed").state == "returned"
    assert (store.current().version, store.current().is_held) == (1, True)
    older = canaries.start(2, SETTINGS)
    assert older.was_held
    store.point_to(2, is_held=False)
    canaries.finish(older, "stopped", "somebody has moved it")
    assert (store.current().version, store.current().is_held) == (2, False)
    back = canaries.start(1, SETTINGS)
    canaries.finish(back, "stopped", "enough")
    assert (store.current().version, store.current().is_held) == (2, False)  # as it was before


def test_one_that_was_taken_back_is_not_the_newest_that_serves(run, store):
    publish(run, store)
    canaries = Canaries(store)
    for version, state in ((2, "returned"), (3, "stopped")):
        was_held = canaries.hold_baseline()
        publish(run, store)
        canaries.finish(canaries.start(version, SETTINGS, was_held), state, "errors")
    assert canaries.taken_back() == {2, 3}
    assert canaries.let_newest_serve() == 1
    assert (store.current().version, store.current().is_held) == (1, False)
    publish(run, store)
    assert store.current().version == 4
    canaries.go_back(3)  # somebody says so
    assert canaries.taken_back() == {2}
    assert (store.current().version, store.current().is_held) == (3, True)


def test_a_rollback_stops_a_canary_and_its_undo_waits_for_the_end_of_one(run, store):
    publish(run, store, 2)
    canaries = Canaries(store)
    was_held = canaries.hold_baseline()
    publish(run, store)
    canary = canaries.start(3, SETTINGS, was_held)
    with pytest.raises(InputError, match="version 3 is a canary, and version 2 is held meanwhile"):
        canaries.let_newest_serve()
    with pytest.raises(InputError, match="has no version 9"):
        canaries.go_back(9)
    assert canaries.running() == canary
    canaries.go_back(1)
    assert canaries.end(canary).state == "stopped"
    assert "version 1 serve" in canaries.end(canary).reason
    assert (store.current().version, store.current().is_held) == (1, True)
    assert canaries.let_newest_serve() == 2


class CutOffStore(VersionStore):
    """Stops answering when the pointer is to be moved."""

    def point_to(self, number, is_held):
        if not is_held:
            raise OSError("cut off")
        super().point_to(number, is_held)


@pytest.mark.parametrize("url", ["folder", "memory"])
def test_an_end_that_had_no_effect_has_it_at_the_next_look_and_once(run, tmp_path, url):
    url = str(tmp_path / "store") if url == "folder" else f"memory://{tmp_path.name}-ends"
    store = VersionStore(url)
    publish(run, store)
    canaries = Canaries(store)
    was_held = canaries.hold_baseline()
    publish(run, store)
    canary = canaries.start(2, SETTINGS, was_held)
    with pytest.raises(OSError, match="cut off"):
        Canaries(CutOffStore(url)).finish(canary, "promoted", "passed")
    assert (canaries.running(), store.current().version) == (None, 1)
    canaries.settle()
    assert (store.current().version, store.current().is_held) == (2, False)
    store.point_to(1, is_held=True)  # somebody goes back, and means it
    Canaries(store).settle()
    assert (store.current().version, store.current().is_held) == (1, True)


def test_an_end_without_effect_has_it_before_another_canary_starts(run, store):
    publish(run, store)
    canaries = Canaries(store)
    was_held = canaries.hold_baseline()
    publish(run, store)
    canary = canaries.start(2, SETTINGS, was_held)
    with pytest.raises(OSError, match="cut off"):
        Canaries(CutOffStore(store.url)).finish(canary, "promoted", "passed")
    with pytest.raises(InputError, match="version 2 serves already"):
        Canaries(store).start(2, SETTINGS)


def test_one_that_another_has_followed_is_not_promoted_by_a_replica_that_comes_late(run, store):
    publish(run, store)
    canaries = Canaries(store)
    was_held = canaries.hold_baseline()
    publish(run, store, 2)
    late = canaries.start(2, SETTINGS, was_held)
    canaries.finish(late, "stopped", "enough")
    other = canaries.start(3, SETTINGS)
    end = canaries.finish(late, "promoted", "passed")
    assert (end.state, end.reason) == ("stopped", "another canary was started since")
    assert (canaries.running(), canaries.end(late)) == (other, None)
    assert (store.current().version, store.current().is_held) == (1, True)


@pytest.mark.parametrize("was_held", [False, True])
def test_what_fails_before_a_canary_starts_leaves_the_baseline_as_it_was(run, store, was_held):
    publish(run, store)
    store.point_to(1, is_held=was_held)
    canaries = Canaries(store)

    def interrupted():
        with canaries.baseline_held():
            assert store.current().is_held
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (store.current().version, store.current().is_held) == (1, was_held)


def test_a_version_that_somebody_went_back_to_meanwhile_stays(run, store):
    publish(run, store)
    publish(run, store)
    canaries = Canaries(store)

    def interrupted():
        with canaries.baseline_held():
            store.point_to(1, is_held=True)  # as `rayrec versions rollback` does
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (store.current().version, store.current().is_held) == (1, True)


def test_the_counts_of_all_replicas_are_judged_together(run, store):
    publish(run, store)
    canaries = Canaries(store)
    was_held = canaries.hold_baseline()
    publish(run, store)
    canary = canaries.start(2, SETTINGS, was_held)
    half = counts_of((600, 0, 0.01), (5000, 5, 0.01))
    canaries.report(canary, "a", half)
    assert canaries.verdict(canary).reason == "600 of 1,000 requests so far"
    canaries.report(canary, "b", half)
    canaries.report(canary, "b", half)  # again: it has counted no more
    assert canaries.counts(canary).canary.num_requests == 1200
    folder = os.path.join(store.url, "canary", canary.id)
    with open(os.path.join(folder, "counts-c.json"), "w") as file:
        file.write("?")
    with pytest.raises(InputError, match=r"counts-c\.json"):
        canaries.counts(canary)


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5])
def test_a_share_is_between_none_and_all(share):
    with pytest.raises(InputError, match="share"):
        CanarySettings.parse({"share": share})


def test_replicas_of_other_code_understand_each_other_as_far_as_they_have_to(store, caplog):
    canaries = Canaries(store)
    canary = Canary(id="c", version=2, baseline=1, began_at=0.0, was_held=False, settings=SETTINGS)
    canaries.report(canary, "mine", counts_of((50, 3, 0.02), (70, 1, 0.01)))
    store.write("canary/c/counts-theirs.json", b'{"format": 2, "arms": {}}')
    end = {"state": "returned", "reason": "errors", "at": 5.0, "judged_by": "later code"}
    store.write("canary/c/end.json", json.dumps(end).encode())

    assert canaries.counts(canary).canary.num_requests == 50
    assert "counts-theirs.json: passed over: counts of format 2, and 1 is known here" in caplog.text
    assert canaries.end(canary).state == "returned"
    store.write("canary/c/counts-broken.json", b'{"format": 1}')
    with pytest.raises(InputError, match=r"counts-broken\.json: no counts of a canary"):
        canaries.counts(canary)
