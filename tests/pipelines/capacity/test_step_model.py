"""The time of a step and the stage that decides it, by worked numbers."""

from dataclasses import replace

import pytest

from rayrec.pipelines.capacity.calibration import this_machine
from rayrec.pipelines.capacity.planner import changes, sensitivities
from rayrec.pipelines.capacity.step_model import (
    _stretch,
    imbalance,
    parts_of,
    sharded_timeline,
    step_plan,
)
from rayrec.pipelines.capacity.workload import Scale
from tests.pipelines.capacity.plans import COSTS, TABLE, WORK, cluster_with, far

ROOMY = this_machine(64)


def test_a_trainer_of_mode_sync_does_one_thing_after_the_other():
    plan = step_plan(WORK, ROOMY, COSTS)
    parts = plan.parts

    assert parts.dense == pytest.approx(5e-3 + 1e-10 * 1e8)
    assert parts.client == pytest.approx(1e-3 * 2 * 2 + 1e-7 * 10_000)  # two calls to each of two servers
    assert parts.calls == pytest.approx(2e-3)
    assert parts.server == pytest.approx((2 * 1e-3 + 1e-7 * 5000) * imbalance(10_000, 2))
    assert plan.seconds == pytest.approx(parts.dense + parts.exchange)


def test_the_fullest_server_is_that_of_the_placement():
    hot = replace(TABLE, table="hot", ids=30_000, servers=(3,))
    warm = replace(TABLE, table="warm", ids=8_000, servers=(2, 3))
    work = replace(WORK, num_servers=4, tables=(TABLE, hot, warm))

    loads = {load.ids: load.num_servers for load in work.server_loads}
    assert loads == {2_500: 2, 2_500 + 4_000: 1, 2_500 + 4_000 + 30_000: 1}
    assert sum(ids * count for ids, count in loads.items()) == pytest.approx(48_000)
    assert sum(load.num_bytes * load.num_servers for load in work.server_loads) == pytest.approx(
        work.moved_bytes
    )
    # The same rows over all servers, and all of them on the only one, as `ShardMap.among` has it.
    spread = replace(work, tables=tuple(replace(table, servers=None) for table in work.tables))
    assert [tuple(load)[:2] for load in spread.server_loads] == [(4, 12_000)]
    assert [tuple(load)[:2] for load in replace(work, num_servers=1).server_loads] == [(1, 48_000)]
    assert replace(work, num_servers=0).server_loads == []

    parts = parts_of(work, ROOMY, COSTS)
    assert parts.server == pytest.approx(2 * 1e-3 + 1e-7 * 36_500)  # nothing of it is hashed to others
    assert parts_of(spread, ROOMY, COSTS).server == pytest.approx(
        (2 * 1e-3 + 1e-7 * 12_000) * imbalance(48_000, 4)
    )
    network = cluster_with()
    work, spread = (replace(far(each), num_trainers=32) for each in (work, spread))
    assert parts_of(work, network, COSTS).network == pytest.approx(
        parts_of(spread, network, COSTS).network * (36_500 + 6_500) / (2 * 12_000)
    )


@pytest.mark.parametrize(("wire", "row_bytes"), [("bfloat16", 2 * 16), ("int8_row", 16 + 4)])
def test_a_narrow_wire_takes_fewer_bytes_between_nodes(wire, row_bytes):
    """Ids take 8 bytes beside rows of 16 float32, else 4 where they fit."""
    network, costs = cluster_with(), replace(COSTS, server_per_byte=1e-10)
    wide = replace(far(WORK), num_trainers=32)
    narrow = replace(wide, wire=wire)
    before, after = parts_of(wide, network, costs), parts_of(narrow, network, costs)
    assert after.network == pytest.approx(before.network * (row_bytes + 4) / (64 + 8))
    assert after.server == before.server, "it works on float32"
    hashes = replace(narrow, tables=(replace(TABLE, narrow_id_bytes=8),))
    assert parts_of(hashes, network, costs).network == pytest.approx(before.network * (row_bytes + 8) / 72)


def test_fewer_bytes_are_proposed_where_rows_leave_their_node():
    proposal = "rows and gradients in bfloat16 (sparse.wire)"
    assert proposal in [change.what for change in changes(far(WORK), cluster_with(), COSTS)]
    assert proposal not in [change.what for change in changes(WORK, ROOMY, COSTS)]


def test_what_is_read_ahead_hides_behind_dense_compute():
    exact = step_plan(replace(WORK, mode="exact_prefetch"), ROOMY, COSTS)
    stale = step_plan(replace(WORK, mode="bounded_stale"), ROOMY, COSTS)

    assert exact.parts.hidden == pytest.approx(0.5 * 0.8)
    assert stale.parts.hidden == 1.0
    assert stale.seconds == pytest.approx(stale.parts.dense)


@pytest.mark.parametrize(
    ("changed", "stage"),
    [
        ({"read_per_step": 1.0}, "read"),
        ({"features_per_token": 1e-3}, "features"),
        ({"server_per_id": 1e-3}, "sparse"),
        ({"client_per_near_call": 1.0}, "sparse"),
        ({"dense_per_flop": 1e-7}, "dense"),
        ({"driver_per_call": 1.0}, "driver"),
    ],
)
def test_the_slowest_stage_is_named(changed, stage):
    plan = step_plan(WORK, ROOMY, replace(COSTS, **changed))

    assert plan.bottleneck == stage
    assert plan.seconds >= plan.stages[stage]


def test_more_readers_move_a_wall_that_is_reading():
    slow = replace(COSTS, read_per_row=1e-3)

    one, four = (step_plan(replace(WORK, num_readers=count), ROOMY, slow).seconds for count in (1, 4))

    assert one / four == pytest.approx(4.0, rel=0.01)


def test_processes_share_the_cores_of_their_node():
    assert step_plan(WORK, this_machine(1), COSTS).seconds == pytest.approx(
        sum(
            [
                *step_plan(WORK, ROOMY, COSTS).parts[:2],
                COSTS.driver_per_step + 4 * COSTS.driver_per_call,
                step_plan(WORK, ROOMY, COSTS).parts.dense,
                step_plan(WORK, ROOMY, COSTS).parts.client,
                2 * step_plan(WORK, ROOMY, COSTS).parts.server,
            ]
        ),
        rel=0.35,
    )
    two, four = (step_plan(WORK, this_machine(cores), COSTS).seconds for cores in (2, 4))
    assert two > four >= step_plan(WORK, ROOMY, COSTS).seconds


def test_a_process_beside_one_that_always_runs_has_half_of_a_core():
    assert _stretch([1.0], 1) == 2.0
    assert _stretch([0.5], 1) == 1.5
    assert _stretch([1.0], 2) == 1.0
    assert _stretch([1.0, 1.0], 2) == 1.5
    assert _stretch([0.5] * 100, 10) == pytest.approx(5.1)


def test_calls_to_servers_grow_with_the_trainers_and_a_caller_per_node_divides_them():
    cluster = cluster_with()
    one, all_ = (far(WORK.scaled(Scale(trainers=count, servers=16))) for count in (1, 32))
    grouped = replace(all_, group_size=8)

    calls = [
        parts_of(work, cluster, replace(COSTS, server_per_id=0.0)).server for work in (one, all_, grouped)
    ]

    assert calls[1] / calls[0] == pytest.approx(32, rel=0.1)
    assert calls[1] / calls[2] == pytest.approx(8, rel=0.1)


def test_dense_compute_of_a_card_is_products_and_memory():
    cluster = cluster_with()
    work = replace(far(), flops=1e12, tokens=0.0)

    dense = parts_of(work, cluster, COSTS).dense

    assert dense == pytest.approx(5e-3 + 1e12 / 50e12 + 7 * 4 * 1e6 / 1.6e12)


def test_gradients_are_summed_within_nodes_and_then_between_them():
    cluster = cluster_with()
    work = far(WORK.scaled(Scale(trainers=32, servers=16, dense_parameters=1e9)))

    found = parts_of(work, cluster, COSTS).all_reduce

    within = 2 * 7 / 8 * 4e9 / 100e9
    between = 2 * 3 / 4 * (4e9 / 8) / (25e9 / 8)
    assert found == pytest.approx(COSTS.reduce_latency + within + between, rel=0.01)


def test_what_split_weights_move_hides_behind_other_blocks():
    hidden, bound = sharded_timeline(3.0, 0.3), sharded_timeline(0.3, 3.0)

    assert hidden.compute_s == pytest.approx(3.0)
    assert hidden.communicate_s == pytest.approx(0.45)  # two gathers and a scatter, each half of a sum
    assert hidden.exposed_s < 0.1 * hidden.communicate_s
    assert bound.seconds >= bound.communicate_s


def test_the_network_of_the_busier_end_decides():
    parts = parts_of(far(WORK.scaled(Scale(trainers=32, servers=2))), cluster_with(), COSTS)

    # Two servers on two nodes: each has half of what 32 trainers move.
    assert parts.network == pytest.approx(16 * (2 * 640_000 + 160_000) / 25e9)


def test_the_fullest_of_many_servers_has_more_than_the_mean():
    assert imbalance(1e9, 1) == 1.0
    assert 1.0 < imbalance(1e6, 64) < 1.05
    assert imbalance(1e3, 64) > imbalance(1e6, 64)


def test_the_number_that_matters_most_comes_first():
    found = sensitivities(WORK, ROOMY, replace(COSTS, dense_per_flop=1e-8))

    assert found[0].what in ("processor time of dense compute", "cluster: core_speed")
    assert found[0].size == pytest.approx(0.2, abs=0.06)


def test_changes_are_sorted_by_what_they_gain():
    found = changes(WORK, ROOMY, COSTS)

    assert [change.step.seconds for change in found] == sorted(change.step.seconds for change in found)
    assert found[0].what == "mode bounded_stale"


def test_a_run_without_servers_is_not_told_to_change_them():
    found = changes(replace(WORK, tables=(), num_servers=0), ROOMY, COSTS)

    assert {change.what for change in found} == {"twice the feature workers", "twice the readers"}
