"""Numbers without a unit or a mark, and links that nobody has measured, are refused in one sentence."""

import pytest

from rayrec.pipelines.capacity.cluster_spec import ClusterSpec
from rayrec.pipelines.capacity.quantity import parse_quantity
from rayrec.platform.checkout import CHECKOUT
from rayrec.platform.errors import InputError
from tests.pipelines.capacity.plans import cluster_with

FILES = sorted((CHECKOUT / "configs/clusters").glob("*.yaml"))


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("50 GB/s, assumed", "bytes/s", 50e9),
        ("400 Gbit/s, data sheet: ConnectX-7", "bytes/s", 50e9),
        ("2 GiB, measured", "bytes", 2 * 2**30),
        ("0.56 of peak, measured: RoCE", "share", 0.56),
        ("5 %, assumed", "share", 0.05),
        ("30 days, assumed", "seconds", 30 * 86400),
        ("1_250 nodes, assumed", "nodes", 1250),
        ("9.89e2 TFLOP/s, data sheet", "FLOP/s", 9.89e14),
    ],
)
def test_numbers_are_read_in_base_units(text, kind, value):
    assert parse_quantity(text, kind).value == pytest.approx(value)


def test_a_number_keeps_its_mark_and_its_source():
    quantity = parse_quantity("0.56 of peak, measured: RoCE, arXiv:2310.02784", "share")

    assert (quantity.mark, quantity.source) == ("measured", "RoCE, arXiv:2310.02784")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("storage.write", "1, assumed", "'1, assumed' has no unit; expected one of"),
        ("storage.write", "0 GB/s, assumed", "storage.write is '0 GB/s, assumed': expected more than 0"),
        ("trainers.cores", "0 cores, assumed", "trainers.cores is '0 cores, assumed': expected more than 0"),
        ("core_speed", "0 times, assumed", "core_speed is '0 times, assumed': expected more than 0"),
        ("failures.trainer_node_mtbf", "0 days, assumed", "expected more than 0"),
        ("trainers.card.matrix_rate", "0 TFLOP/s, assumed", "expected more than 0"),
        ("storage.write", "1e400 GB/s, assumed", "is larger than any number"),
        ("trainers.count", "0 nodes, assumed", "trainers.count is '0 nodes, assumed': expected more than 0"),
        ("trainers.count", "1.5 nodes, assumed", "expected a whole number"),
        ("failures.spares", "0.5 nodes, assumed", "expected a whole number"),
        ("trainers.card.matrix_achieved", "120 %, assumed", "expected at most 100 %"),
        ("trainers.card.memory_achieved", "1.2 of peak, assumed", "expected at most 100 %"),
        ("noise.slow_cards", "150 %, assumed", "expected at most 100 %"),
        ("storage.write", "1 GB/s", "is not marked; say whether it is 'measured'"),
        ("storage.write", "1 GB/s, guessed", "is marked 'guessed'"),
        ("storage.write", "1 furlong, assumed", "'furlong' is no unit of bytes/s"),
        ("storage.write", "fast", "is not a number with a unit and a mark"),
        ("storage.write", "-1 GB/s, assumed", "is below 0"),
        (
            "network.achieved",
            "0.5 of peak, assumed",
            "a link is planned with only if what it achieves was measured",
        ),
        ("network.achieved", "1.5 of peak, measured: here", "expected more than 0 and at most 1 of peak"),
        ("network", None, "there are 6 nodes and no network between them"),
        ("trainers.card", None, "card and cards_per_node belong together"),
        ("trainers.memory", None, "trainers.memory"),
    ],
)
def test_what_a_plan_cannot_trust_is_refused(place, value, said):
    with pytest.raises(InputError) as refused:
        cluster_with(place, value)

    assert said in str(refused.value)
    assert "cluster.yaml" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_clusters_that_come_with_the_project_are_valid(path):
    cluster = ClusterSpec.load(path)

    assert cluster.num_nodes >= 1
    assert all(quantity.mark for _, quantity in cluster.numbers())


def test_there_are_clusters_for_the_worked_answers():
    sizes = {path.stem: ClusterSpec.load(path).num_cards for path in FILES}

    assert sizes["h100-1000"] == 1000
    assert sizes["npu-10000"] == 10_000


def test_one_number_can_be_changed_for_sensitivities():
    cluster = cluster_with()

    changed = cluster.with_number("trainers.card.matrix_rate", 0.8)

    assert changed.trainers.card.flops_per_s == pytest.approx(0.8 * cluster.trainers.card.flops_per_s)
    assert changed.network == cluster.network


def test_prices_are_those_of_all_nodes():
    assert cluster_with().money_per_h == 42.0
    assert cluster_with().currency == "USD"
