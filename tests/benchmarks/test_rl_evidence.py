"""Intervals over pairs of seeds, the simulated world, and the tables of docs/benchmarks/rl.md."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from benchmarks.paired_seeds import change_of, mean_of
from benchmarks.rl_evidence import check_work, prepared_world, record_of, world
from benchmarks.rl_evidence_page import EVIDENCE, PAGE, TITLES, marks, tables_of
from benchmarks.rl_lists import ItemMeans, ListMaker
from benchmarks.simulated_world import MEMORY, LoggedWorld, best_lists
from rayrec.platform.errors import InputError
from rayrec.rl.rewards.config import RewardsConfig
from rayrec.rl.rewards.simulator import World
from tests.helpers.runs import make_run


def test_pairs_of_seeds_take_out_what_seeds_have_in_common():
    """Seeds that differ much, and a gain that is the same for all of them."""
    random = np.random.default_rng(0)
    before_SU = random.random((5, 400)) + np.arange(5)[:, None]
    change = change_of(1.1 * before_SU, before_SU)
    assert change == pytest.approx((0.1, 0.1, 0.1))
    mean = mean_of(before_SU)
    assert mean.low < mean.value - 0.5 < mean.value + 0.5 < mean.high
    with pytest.raises(ValueError, match="not paired"):
        change_of(before_SU[:3], before_SU)


@pytest.mark.parametrize(("num_seeds", "of_users"), [(2, 0.0), (5, 0.0), (3, 0.2)])
def test_the_interval_covers_as_often_as_it_says(num_seeds, of_users):
    """Gains that vary by seed, and by user."""
    covered, num_trials = 0, 200
    random = np.random.default_rng(1)
    for _ in range(num_trials):
        before_SU = 1 + 0.1 * random.normal(size=(num_seeds, 1)) + np.zeros((num_seeds, 50))
        gain_SU = 0.2 + 0.1 * random.normal(size=(num_seeds, 1)) + of_users * random.normal(size=(1, 50))
        found = change_of(before_SU * (1 + gain_SU), before_SU, num_resamples=100)
        covered += found.low <= 0.2 <= found.high
    assert covered / num_trials >= 0.92


def test_item_means_shrink_what_was_hardly_asked():
    means = ItemMeans.of(np.array([0, 0, 1, -1]), np.array([1.0, 1.0, 0.0, 9.0]), 3)
    expected = [(2.0 + 10 * 2 / 3) / 12, (10 * 2 / 3) / 11, 2 / 3]
    np.testing.assert_allclose(means(None, np.array([[0, 1, 2]]))[0], expected)


def test_the_log_shows_what_is_exposed_and_not_what_is_good(tmp_path):
    logged = LoggedWorld.random(num_users=400, num_items=60, num_categories=6)
    logged.write(tmp_path, shortest=5, longest=10)
    rows = pq.read_table(tmp_path / "source" / "interactions.parquet").to_pandas()
    assert not rows.duplicated(["user_id", "item_id"]).any()
    count_I = rows["item_id"].value_counts().reindex(logged.item_keys).fillna(0).to_numpy()
    assert np.corrcoef(count_I, logged.exposure_I)[0, 1] > 0.3
    assert np.corrcoef(count_I, logged.world.quality_I)[0, 1] < 0.0

    # The truth survives its files, in whatever order a catalog has.
    keys = logged.item_keys[::-1]
    read = World.read(tmp_path / "world", keys, logged.world.satiation)
    np.testing.assert_allclose(read.quality_I, logged.world.quality_I[::-1])
    assert list(read.user_keys) == list(logged.world.user_keys)


def test_no_list_is_better_than_the_optimum():
    world = LoggedWorld.random(num_users=50, num_items=60, num_categories=6).world
    random = np.random.default_rng(0)
    order_UI = np.argsort(random.random((50, 60)), axis=1)
    seen_UE, rest_UI = order_UI[:, :8], order_UI[:, 8:]
    rows_U, newest_UM = np.arange(50), seen_UE[:, -MEMORY:]
    best_U = best_lists(world, rows_U, newest_UM, np.pad(seen_UE, ((0, 0), (0, 2)), constant_values=-1))
    value_UI = world.satisfaction(rows_U, rest_UI, newest_UM)
    np.testing.assert_allclose(best_U, np.sort(value_UI, axis=1)[:, -10:].mean(axis=1))
    assert (best_U > value_UI[:, :10].mean(axis=1)).all()
    assert isinstance(world.user_keys, pd.Index)


@pytest.mark.parametrize("path", sorted(EVIDENCE.glob("*.json")), ids=lambda path: path.stem)
def test_the_page_shows_what_the_record_says(path):
    record = json.loads(path.read_text())
    begin, end = marks(record["setting"])
    shown = PAGE.read_text().partition(begin)[2].partition(end)[0].strip()
    assert shown == tables_of(record).strip()
    assert set(record["results"]) <= set(TITLES)
    assert len(record["seeds"]) >= 5


def test_the_best_of_many_samples_is_worth_more_than_a_sampled_list(tmp_path):
    run = make_run(tmp_path, "prefix")
    lists = ListMaker(str(run), "last", RewardsConfig.parse({"parts": [{"kind": "novelty"}]}), 0.5)
    best, sampled = lists.temperature((0.5, 1.0), "worth")
    assert best in (0.5, 1.0)
    chosen = lists.best_of(14, lists.worth)
    assert chosen["worth"].mean() > sampled["worth"].mean()
    beam = lists.beam()
    assert set(beam) == {"recall@10", "ndcg@10", "worth", "worth, users held out"}
    assert (beam["ndcg@10"] <= beam["recall@10"]).all()
    num_held_out = int((~np.isnan(beam["worth, users held out"])).sum())
    assert 0 < num_held_out < len(beam["worth"])


@pytest.mark.slow
def test_a_measurement_in_small_compares_every_method_and_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    small = LoggedWorld.random(num_users=60, num_items=120, num_categories=6)
    monkeypatch.setattr(LoggedWorld, "random", lambda: small)
    setting = world(*prepared_world(tmp_path))
    methods = {name: setting.methods[name] for name in ("supervised learning", "DAPO, async")}
    setting = replace(
        setting,
        supervised=[*setting.supervised, "training.epochs=1"],
        common=setting.common | {"steps": 2},
        methods=methods | {"GRPO": {}},
    )
    record = record_of(setting, [0, 1], tmp_path)
    assert set(record["results"]) == {
        "supervised",
        *setting.methods,
        "temperature",
        "best of 64 by the reward",
        "best of 64 by item means",
        "optimum",
    }
    worth = {name: found["worth"]["mean"]["value"] for name, found in record["results"].items()}
    assert worth["supervised"] < worth["best of 64 by the reward"] < worth["optimum"]
    assert record["facts"]["DAPO, async"]["staleness"] > 0
    assert record["facts"]["GRPO"]["oversampling"] == 1
    assert "| the known optimum | " in tables_of(record)
    begun = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("world-*/rl.yaml"))]
    again = record_of(setting, [0, 1], tmp_path)
    assert json.dumps(again["results"]) == json.dumps(record["results"])
    assert begun == [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("world-*/rl.yaml"))]


def test_runs_of_other_settings_are_not_taken(tmp_path):
    setting = world(tmp_path, tmp_path)
    check_work(setting, tmp_path)
    check_work(setting, tmp_path)
    with pytest.raises(InputError, match="other settings"):
        check_work(replace(setting, metric="ndcg@10"), tmp_path)
