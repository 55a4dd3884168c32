"""What docs/guides/plan-a-cluster.md says of 10 TB and 10 B on 1,000 GPUs and on 10,000 NPUs."""

from dataclasses import replace

import pytest

from benchmarks.capacity import CLUSTERS, EXAMPLE
from rayrec.embeddings.config import TableConfig
from rayrec.pipelines.capacity.calibration import SHIPPED, Calibration
from rayrec.pipelines.capacity.cluster_spec import ClusterSpec
from rayrec.pipelines.capacity.planner import changes, plan_cluster
from rayrec.pipelines.capacity.workload import Scale
from rayrec.platform.errors import InputError

TABLES = [TableConfig(name="feature", dim=64, seed=1)]
SIZES = {"h100-1000": (1_000, 64), "npu-10000": (10_000, 128)}


@pytest.fixture(scope="module")
def costs():
    return Calibration.load(SHIPPED)


def answered(name):
    """The cluster, and the run with split weights."""
    trainers, servers = SIZES[name]
    work = replace(EXAMPLE, is_near=False, is_sharded=True).scaled(
        Scale(
            trainers=trainers,
            servers=servers,
            readers=trainers // 8,
            feature_workers=trainers // 8,
            batch=4096 * trainers,
            dense_parameters=10e9,
            sparse_bytes=10e12,
            dim=64,
        )
    )
    return ClusterSpec.load(CLUSTERS / f"{name}.yaml"), work


@pytest.mark.parametrize("name", SIZES)
def test_the_first_wall_is_the_memory_of_a_card(name, costs):
    cluster, work = answered(name)

    with pytest.raises(InputError, match="gradients of the dense weights"):
        plan_cluster(replace(work, is_sharded=False), TABLES, cluster, costs)


@pytest.mark.parametrize("name", SIZES)
def test_the_second_wall_is_the_servers_work_for_calls(name, costs):
    cluster, work = answered(name)

    plan = plan_cluster(work, TABLES, cluster, costs)

    assert plan.step.bottleneck == "sparse"
    assert plan.step.sparse_reason == "the servers' own work"


@pytest.mark.parametrize("name", SIZES)
def test_the_least_change_is_one_caller_for_each_node(name, costs):
    cluster, work = answered(name)

    best = changes(work, cluster, costs.costs)[0]

    assert best.what == "one caller for the 8 trainers of a node"
    assert costs.plan(work, cluster).seconds / best.step.seconds > 2


def test_twice_the_servers_change_next_to_nothing(costs):
    cluster, work = answered("h100-1000")

    twice = costs.plan(replace(work, num_servers=2 * work.num_servers), cluster).seconds

    assert twice == pytest.approx(costs.plan(work, cluster).seconds, rel=0.05)


def test_ten_times_the_cards_train_no_more_rows(costs):
    rates = {
        name: work.rows / costs.plan(work, cluster).seconds
        for name, (cluster, work) in ((name, answered(name)) for name in SIZES)
    }

    assert rates["npu-10000"] < 1.5 * rates["h100-1000"]


def test_a_caller_per_node_is_enough_for_a_thousand_cards_and_not_for_ten_thousand(costs):
    found = {}
    for name in SIZES:
        cluster, work = answered(name)
        found[name] = costs.plan(replace(work, group_size=8), cluster).bottleneck

    assert found == {"h100-1000": "dense", "npu-10000": "sparse"}
