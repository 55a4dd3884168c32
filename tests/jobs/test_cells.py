import numpy as np
import pytest

from rayrec.jobs.cells import Guarantees, check_guarantees
from rayrec.jobs.queues import Cell, CohortConfig, QueueConfig, QueuesConfig, ResourceQuota
from rayrec.jobs.room import Room
from rayrec.platform.errors import InputError
from tests.helpers.jobs import gang, node, nodes, queue, queues


def bound(config, members):
    room = Room(members)
    guarantees = Guarantees(config, room)
    assert guarantees.bind_rest() == []
    assert (guarantees.slack_NR >= 0).all()
    return room, guarantees


def test_guarantees_of_shapes_that_fit_together_are_accepted():
    check_guarantees(queues(queue("a", cells=[(8, 1), (1, 4)]), queue("b", cells=[(4, 1), (8, 1)])), nodes(3))


def test_shapes_that_do_not_fit_are_refused_although_their_sum_does():
    config = queues(queue("a", cells=[(5, 2)]), queue("b", cells=[(6, 1)]))

    with pytest.raises(InputError, match=r"queue 'a': 1 of 2 cells of 5 GPU on one node find no node beside"):
        check_guarantees(config, nodes(2))


def test_more_than_there_is_is_refused_by_its_sum():
    with pytest.raises(
        InputError, match=r"guaranteed 20 GPU together \(a 8, b 12\), and the usable nodes have 16"
    ):
        check_guarantees(queues(queue("a", cells=[(8, 1)]), queue("b", gpus=12)), nodes(2))


def test_what_a_cohort_has_of_its_own_counts():
    config = QueuesConfig(
        queues=(queue("a", gpus=8),),
        cohorts=(CohortConfig(name="all", quotas={"GPU": ResourceQuota(nominal=9)}),),
    )

    with pytest.raises(InputError, match=r"guaranteed 17 GPU together \(a 8, all 9\)"):
        check_guarantees(config, nodes(2))


def test_a_queue_counts_although_its_cohort_has_the_same_name():
    cohort = CohortConfig(name="team", quotas={"CPU": ResourceQuota(nominal=1)})
    config = QueuesConfig(queues=(queue("team", gpus=16, cohort="team"),), cohorts=(cohort,))

    with pytest.raises(InputError, match=r"guaranteed 16 GPU together \(team 16\), and"):
        check_guarantees(config, nodes(1))


def test_shares_of_cards_that_are_all_there_are_accepted():
    """Added as fractions, they are a little more."""
    shares = [queue("a", gpus=0.1), queue("b", gpus=2.7), queue("c", gpus=0.2)]
    check_guarantees(queues(*shares), nodes(1, 3))


def test_cells_of_one_rack_are_on_one_rack():
    cell = Cell(resources={"GPU": 8}, count=2, within="rack")
    room, guarantees = bound(QueuesConfig(queues=(QueueConfig(name="a", cells=(cell,)),)), nodes(4))

    placed = guarantees.nodes_of("a", guarantees.choose("a", gang(16), None))
    assert len({room.nodes[room.index[each]].labels["rack"] for each in placed["trainer"]}) == 1
    with pytest.raises(InputError, match="with one value of 'rack'"):
        check_guarantees(
            QueuesConfig(queues=(QueueConfig(name="a", cells=(cell.model_copy(update={"count": 3}),)),)),
            nodes(4),
        )


def test_a_cell_has_its_share_of_the_cpus_unless_it_says_otherwise():
    _, guarantees = bound(queues(queue("a", cells=[(2, 1)])), nodes(1))

    assert guarantees.could_hold("a", gang(2, cpus=8), None), "2 of 8 cards come with 16 of 64 CPUs"
    assert not guarantees.could_hold("a", gang(2, cpus=9), None)


def test_a_job_larger_than_every_cell_is_not_guaranteed():
    _, guarantees = bound(queues(queue("a", cells=[(4, 2)])), nodes(1))

    assert guarantees.could_hold("a", gang(8), None), "eight actors, four in each"
    assert not guarantees.could_hold("a", gang(1, cards=8), None), "one actor needs one cell"


def test_an_unused_cell_is_brought_to_free_room():
    room, guarantees = bound(queues(queue("a", cells=[(8, 1)])), nodes(2))
    (at,) = set(guarantees.nodes_of("a", guarantees.choose("a", gang(8), None))["trainer"])
    other = next(each.id for each in room.nodes if each.id != at)
    free = room.total_NR.copy()
    free[room.index[at], room.columns["GPU"]] = 0

    placed, _ = guarantees.place("a", gang(8), None, free)

    assert set(placed["trainer"]) == {other}


def test_cells_change_places_when_there_is_no_slack():
    room, guarantees = bound(queues(queue("a", cells=[(8, 1)]), queue("b", cells=[(8, 1)])), nodes(2))
    (at,) = set(guarantees.nodes_of("a", guarantees.choose("a", gang(8), None))["trainer"])
    free = room.total_NR.copy()
    free[room.index[at]] = 0

    placed, cells = guarantees.place("a", gang(8), None, free)
    guarantees.hold("a", gang(8), cells)

    assert set(placed["trainer"]) != {at}
    assert set(guarantees.nodes_of("b", guarantees.choose("b", gang(8), None))["trainer"]) == {at}


def test_a_cell_in_use_stays_where_it_is():
    room, guarantees = bound(queues(queue("a", cells=[(8, 1)])), nodes(2))
    placed, cells = guarantees.place("a", gang(4), None, room.total_NR)
    guarantees.hold("a", gang(4), cells)
    free = room.total_NR.copy()
    free[room.index[placed["trainer"][0]]] = 0

    assert guarantees.place("a", gang(4), None, free) is None, (
        "the rest of the cell is on a node that is full"
    )


def test_a_promise_moves_unused_cells_out_of_its_way():
    room, guarantees = bound(queues(queue("a", cells=[(8, 1)])), nodes(2))
    (at,) = set(guarantees.nodes_of("a", guarantees.choose("a", gang(8), None))["trainer"])
    held = room.held(gang(3).groups, {"trainer": (at,) * 3})

    assert guarantees.promise(held)
    assert set(guarantees.nodes_of("a", guarantees.choose("a", gang(8), None))["trainer"]) != {at}
    other = next(each.id for each in room.nodes if each.id != at)
    assert not guarantees.promise(room.held(gang(1).groups, {"trainer": (other,)})), (
        "now it has nowhere to go"
    )
    assert (guarantees.slack_NR >= 0).all()


def test_a_job_that_runs_outside_of_its_cells_gets_some_where_it_is():
    _, guarantees = bound(queues(queue("a", cells=[(4, 1), (2, 1)])), nodes(3))

    cells = guarantees.cover("a", gang(5), {"trainer": ("n2", "n2", "n2", "n2", "n1")})

    guarantees.hold("a", gang(5), cells)
    assert guarantees.nodes_of("a", cells) == {"trainer": ("n2", "n2", "n2", "n2", "n1")}
    assert guarantees.cover("a", gang(2), {"trainer": ("n0", "n0")}) is None, (
        "one card is left, on another node"
    )


def test_a_job_of_before_is_found_in_its_cells_again():
    config, members = queues(queue("a", cells=[(8, 2)]), queue("b", cells=[(8, 1)])), nodes(3)
    _, guarantees = bound(config, members)
    placed, cells = guarantees.place("a", gang(12), None, Room(members).total_NR)
    later = Guarantees(config, Room(members))

    assert later.pin("a", gang(12), placed, cells)
    assert later.bind_rest() == []
    assert later.nodes_of("a", cells) == placed
    assert not later.pin("a", gang(12), placed, cells), "they are in use"
    assert not later.pin("gone", gang(12), placed, cells), "settings without this queue"


def test_a_node_that_is_lost_leaves_a_cell_without_room_and_says_so():
    lacking = Guarantees(queues(queue("a", cells=[(8, 2)])), Room(nodes(1))).bind_rest()

    assert len(lacking) == 1
    assert "queue 'a': 1 of 2 cells of 8 GPU" in lacking[0]


def test_every_kind_of_cells_without_a_node_is_named():
    """Others are bound as they were when the fewest kinds were left over."""
    in_rack = {"within": "rack"}
    a = (Cell(resources={"GPU": 5}), Cell(resources={"GPU": 4}, count=2, **in_rack))
    b = (Cell(resources={"GPU": 2}, count=3, **in_rack), Cell(resources={"GPU": 3}, count=3))
    config = QueuesConfig(queues=(QueueConfig(name="a", cells=a), QueueConfig(name="b", cells=b)))
    members = [node("n0", 4, rack="r0"), node("n1", 8, rack="r0"), node("n2", 8, rack="r1")]
    guarantees = Guarantees(config, Room(members))

    (sentence,) = guarantees.bind_rest()

    assert "queue 'b': 3 of 3 cells of 3 GPU" in sentence
    assert guarantees.could_hold("a", gang(1, 5), None)


def test_bindings_hold_through_random_use():
    """Whatever is placed, promised, brought and released: no node is promised twice, and every cell has
    room."""
    random = np.random.default_rng(1)
    config = queues(
        queue("a", cells=[(8, 1), (2, 2)]), queue("b", cells=[(4, 2), (1, 3)]), queue("c", gpus=4)
    )
    members = nodes(4)
    room, guarantees = bound(config, members)
    live, promised = [], []
    for _ in range(400):
        action = random.integers(4)
        size = gang(int(random.choice([1, 2, 3, 8])))
        free = np.minimum(room.total_NR, (random.integers(0, 9, room.total_NR.shape) * 80_000))
        name = str(random.choice(["a", "b"]))
        if action == 0 and (found := guarantees.place(name, size, None, free)) is not None:
            guarantees.hold(name, size, found[1])
            live.append((name, size, found))
        elif action == 1 and live:
            name, size, found = live.pop(int(random.integers(len(live))))
            assert guarantees.nodes_of(name, found[1]) == found[0], "its cells stayed where it is"
            guarantees.release(name, size, found[1])
        elif action == 2:
            held = room.held(gang(1).groups, {"trainer": (f"n{random.integers(4)}",)})
            if len(promised) < 4 and guarantees.promise(held):
                promised.append(held)
        elif promised:
            guarantees.unpromise(promised.pop())
        assert (guarantees.slack_NR >= 0).all()
        firm = np.zeros_like(room.total_NR)
        for cell in guarantees._all():
            firm[cell.node] += cell.amounts_R
        for held in promised:
            for place, amounts in held.items():
                firm[place] += amounts
        assert np.array_equal(firm, guarantees.firm_NR)


def test_labels_of_a_cell_choose_its_nodes():
    cell = Cell(resources={"GPU": 8}, labels={"kind": "h100"})
    config = QueuesConfig(queues=(QueueConfig(name="a", cells=(cell,)),))
    members = [node("old", kind="a100"), node("new", kind="h100")]
    _, guarantees = bound(config, members)

    assert set(guarantees.nodes_of("a", guarantees.choose("a", gang(8), None))["trainer"]) == {"new"}
    with pytest.raises(InputError, match="find no node with kind=h100"):
        check_guarantees(config, members[:1])
