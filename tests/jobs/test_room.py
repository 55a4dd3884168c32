import numpy as np

from rayrec.jobs.job import Size
from rayrec.jobs.quota import UNITS
from rayrec.jobs.room import Room, fits_in
from rayrec.pipelines.cluster.placement import ActorGroup, Node, assign
from tests.helpers.jobs import gang, node, nodes


def left_of(room, **cards):
    """All that the nodes have, with only so many cards left on some."""
    left = room.total_NR.copy()
    for name, count in cards.items():
        left[room.index[name], room.columns["GPU"]] = count * UNITS
    return left


def place(members, size, within=None, **cards):
    room = Room(members)
    left = left_of(room, **cards)
    placed = room.place(size, within, left)
    if placed is not None:
        assert fits_in(room.held(size.groups, placed), left)
        assert {stage: len(names) for stage, names in placed.items()} == size.counts()
    return placed


def test_a_small_job_fills_a_node_that_is_in_use():
    assert place(nodes(4), gang(2), n1=6, n2=2, n3=3) == {"trainer": ("n2", "n2")}
    assert place(nodes(4), gang(4), n1=6, n2=2, n3=3) == {"trainer": ("n1",) * 4}
    assert place(nodes(4), gang(8), n1=6, n2=2, n3=3) == {"trainer": ("n0",) * 8}


def test_a_gang_of_several_nodes_takes_whole_ones_and_the_tightest_for_the_rest():
    placed = place(nodes(4), gang(10), n1=6, n2=2, n3=3)

    assert placed["trainer"].count("n0") == 8
    assert placed["trainer"].count("n2") == 2


def test_packing_one_group_takes_as_few_nodes_as_assign():
    members = nodes(5)
    for count in (9, 12, 17, 24, 30):
        size = gang(count)
        cards = {"n0": 3, "n1": 5, "n2": 8, "n3": 8, "n4": 7}
        placed = place(members, size, **cards)
        free = [
            Node(each.id, each.address, each.labels, each.total, {**each.total, "GPU": float(cards[each.id])})
            for each in members
        ]
        if count > sum(cards.values()):
            assert placed is None
        else:
            by_assign = assign(size.groups, free)["trainer"]
            assert len(set(placed["trainer"])) <= len({each.id for each in by_assign})


def test_all_of_a_gang_or_nothing():
    assert place(nodes(2), gang(13), n0=6, n1=6) is None
    assert place(nodes(2), gang(3, cards=5)) is None, "16 cards are enough, but 3 times 5 are on no two nodes"


def test_on_one_value_of_a_label_that_leaves_the_larger_one_to_others():
    members = nodes(6)

    assert set(place(members, gang(10), "rack", n0=1, n2=5)["trainer"]) == {"n2", "n3"}
    assert place(members, gang(17), "rack") is None
    assert place(members, gang(2), "no-such-label") is None


def test_nodes_that_are_not_to_be_used_are_not_used():
    class Quarantined(Node):
        is_usable = False

    bad = Quarantined("bad", "10.0.0.9", {}, {"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 8.0})

    assert place([bad], gang(1)) is None
    assert place([bad, node("good")], gang(8)) == {"trainer": ("good",) * 8}
    assert place([bad, node("good")], gang(9)) is None


def test_a_resource_that_no_node_has_fits_nowhere():
    asks = Size((ActorGroup("trainer", "placement.trainers", 1, {"NPU": 1.0}, {}),))

    assert place(nodes(2), asks) is None
    assert place(nodes(2), Size((ActorGroup("x", "y", 1, {"slot": 1.0}, {}),))) is None


def test_labels_and_strict_strategies_hold():
    members = [node("a", kind="h100"), node("b", kind="a100"), node("c", kind="h100")]

    assert set(place(members, gang(3, labels={"kind": "h100"}), a=2)["trainer"]) == {"c"}
    assert len(set(place(members, gang(3, strategy="STRICT_SPREAD"))["trainer"])) == 3
    assert place(members, gang(4, strategy="STRICT_SPREAD")) is None
    assert len(set(place(members, gang(5, strategy="STRICT_PACK"), a=4, b=4)["trainer"])) == 1
    assert place(members, gang(5, strategy="STRICT_PACK"), a=4, b=4, c=4) is None


def test_actors_without_cards_leave_nodes_with_cards_to_others():
    training = Size(
        (
            ActorGroup("parameter_server", "placement.servers", 2, {"CPU": 8.0}, {}, "SPREAD"),
            ActorGroup("trainer", "placement.trainers", 4, {"CPU": 2.0, "GPU": 1.0}, {}, "PACK"),
        )
    )
    members = [node("gpu"), node("cpu0", cards=0), node("cpu1", cards=0)]

    placed = place(members, training)

    assert set(placed["trainer"]) == {"gpu"}
    assert set(placed["parameter_server"]) == {"cpu0", "cpu1"}
    assert place(members, gang(1, cards=0)) == {"trainer": ("cpu0",)}


def test_parts_of_a_card_are_counted_exactly():
    room = Room([node("a", cards=1)])
    left = room.total_NR.copy()
    size = gang(1, cards=0.1)
    for _ in range(10):
        placed = room.place(size, None, left)
        for place_, amounts in room.held(size.groups, placed).items():
            left[place_] -= amounts

    assert left[0, room.columns["GPU"]] == 0
    assert room.place(size, None, left) is None


def test_counts_alone_never_rule_out_what_fits():
    random = np.random.default_rng(0)
    for _ in range(200):
        room = Room(nodes(4))
        left = left_of(room, **{f"n{place}": int(random.integers(0, 9)) for place in range(4)})
        size = gang(int(random.integers(1, 20)), cards=int(random.choice([1, 2, 4])))
        free = [
            Node(
                each.id,
                each.address,
                each.labels,
                each.total,
                {"CPU": 64.0, "GPU": left[place, room.columns["GPU"]] / UNITS},
            )
            for place, each in enumerate(room.nodes)
        ]
        try:
            assign(size.groups, free)
        except Exception:
            assert room.place(size, None, left) is None
        else:
            assert room.place(size, None, left) is not None
