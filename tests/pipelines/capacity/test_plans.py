"""A plan says whether a model fits, what fails and what it costs; what does not fit is named."""

import json
from dataclasses import replace

import pytest

from rayrec.embeddings.config import TableConfig
from rayrec.pipelines.capacity.pictures import draw_plan
from rayrec.pipelines.capacity.planner import SNAPSHOT_COST, changes, plan_cluster
from rayrec.pipelines.capacity.report import amount, duration, sections, to_json
from rayrec.platform.errors import InputError
from tests.pipelines.capacity.plans import cluster_with, large

TABLES = [TableConfig(name="feature", dim=16, seed=1)]


def test_a_plan_has_steps_money_and_failures(calibration):
    plan = plan_cluster(large(), TABLES, cluster_with(), calibration)

    assert plan.low_s < plan.step.seconds < plan.high_s
    assert plan.rows_per_s == pytest.approx(32_000 / plan.step.seconds)
    assert plan.money_per_billion == pytest.approx(42 / 3600 / plan.useful_rows_per_s * 1e9)
    assert plan.snapshots.mtbf_s == pytest.approx(100 * 86400 / 6)  # four nodes of trainers, two of servers
    assert plan.snapshots.cost_s == pytest.approx(SNAPSHOT_COST * plan.snapshots.write_s)
    assert 0 < plan.snapshots.losses.total < 0.1


@pytest.mark.parametrize(
    ("sizes", "place", "value", "said"),
    [
        ({"dense_parameters": 10e9}, "", None, "most of it is the gradients of the dense weights"),
        ({"sparse_bytes": 10e12}, "", None, "a servers' node would need"),
        ({"sparse_bytes": 10e12}, "", None, "most of a server is the weights of table 'feature'"),
        ({}, "trainers.memory", "1 GB, assumed", "a trainers' node would need"),
        ({"trainers": 64}, "", None, "64 trainers need a card each, and the cluster has 32"),
        ({"servers": 17}, "", None, "17 parameter servers do not fit the 16 places"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_component(calibration, sizes, place, value, said):
    with pytest.raises(InputError) as refused:
        plan_cluster(large(**sizes), TABLES, cluster_with(place, value), calibration)

    assert said in str(refused.value)


def test_tables_that_are_placed_apart_fill_their_servers(calibration):
    work, cluster = large(), cluster_with()
    apart = replace(work, tables=tuple(replace(table, servers=(0,)) for table in work.tables))
    spread, fullest = (plan_cluster(each, TABLES, cluster, calibration).memory for each in (work, apart))

    assert fullest.server.peak_bytes > spread.server.peak_bytes
    assert sum(table.num_rows for table in fullest.server.tables) == 1_000_000
    gone = replace(work, tables=tuple(replace(table, servers=(99,)) for table in work.tables))
    with pytest.raises(InputError, match=r"lies on server 99 \(sparse\.tables\.feature\.servers\)"):
        plan_cluster(gone, TABLES, cluster, calibration)


def test_split_weights_fit_where_whole_ones_do_not(calibration):
    work = replace(large(dense_parameters=10e9), is_sharded=True)

    assert plan_cluster(work, TABLES, cluster_with(), calibration).memory.card_bytes < 80e9


def test_the_report_has_everything_that_was_asked_for(calibration):
    plan = plan_cluster(large(), TABLES, cluster_with(), calibration)
    text = "\n".join(f"{title}\n" + "\n".join(f"{a}: {b}" for a, b in rows) for title, rows in sections(plan))

    for words in (
        "bottleneck",
        "the next one",
        "one every",
        "lost work",
        "a billion rows",
        "with 20 % less",
        "Not modeled",
        "cluster: assumed",
        "cluster: measured",
        "cluster: data sheet",
    ):
        assert words in text, words


def test_money_of_nodes_that_nobody_uses_is_said(calibration):
    plan = plan_cluster(replace(large(), num_trainers=1), TABLES, cluster_with(), calibration)

    (money,) = (rows for title, rows in sections(plan) if title == "Money")
    assert money[0][0].startswith("all 6 nodes, of which the run has processes on 3")


@pytest.mark.parametrize(
    ("money", "shown"), [(0.1, "0.1"), (0.012, "0.012"), (4.1, "4.10"), (42, "42.00"), (1033.4, "1,033")]
)
def test_small_prices_are_not_shown_as_nothing(money, shown):
    assert amount(money) == shown


def test_the_plan_is_plain_values(calibration):
    plan = plan_cluster(large(), TABLES, cluster_with(), calibration)

    found = json.loads(json.dumps(to_json(plan, changes(plan.work, plan.cluster, calibration.costs))))

    assert found["bottleneck"] == plan.step.bottleneck
    assert found["step_low_s"] < found["step_s"] < found["step_high_s"]


@pytest.mark.slow
def test_pictures_are_drawn_where_there_is_matplotlib(calibration, tmp_path):
    pytest.importorskip("matplotlib")
    plan = plan_cluster(large(), TABLES, cluster_with(), calibration)

    paths = draw_plan(plan, changes(plan.work, plan.cluster, calibration.costs), tmp_path / "pictures")

    assert [path.name for path in paths] == ["stages.svg", "sensitivity.svg", "scaling.svg"]
    assert all("<svg" in path.read_text() for path in paths)


def test_durations_are_in_the_unit_that_people_would_use():
    assert [
        duration(seconds) for seconds in (3e-6, 0.0032, 3.2, 90.0, 7200.0, 3 * 86400.0, float("inf"))
    ] == [
        "3 us",
        "3.2 ms",
        "3.2 s",
        "1.5 min",
        "2.0 h",
        "3.0 days",
        "never",
    ]
