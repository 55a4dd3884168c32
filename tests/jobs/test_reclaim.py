"""Who gives back. Names in quotes are those of Kueue's cases in
`pkg/scheduler/preemption/preemption_test.go`."""

from dataclasses import replace

from rayrec.jobs.job import Reserve, Running, Shrink, Start, Step, Stop, Wait, Waiting
from rayrec.jobs.queues import QueueConfig, ResourceQuota
from rayrec.jobs.reclaim import penalty_until
from tests.helpers.jobs import gang, job, node, nodes, queue, queues, smaller
from tests.jobs.test_admission import deciding, running


def stopped(found):
    return {name for name, each in found.items() if isinstance(each, Stop)}


TWO = queues(queue("a", gpus=8), queue("b", gpus=8))


def test_a_guaranteed_job_gets_its_room_back_from_who_borrows():
    """ "reclaim quota from borrower"."""
    run = [running(job("own", "b", gang(8)), n0=8), running(job("more", "b", gang(4)), 5.0, n1=4)]

    found = deciding(TWO, nodes(2), run, [job("j", "a", gang(8), at=9.0)], 10.0)

    assert stopped(found) == {"more"}
    assert isinstance(found["j"], Reserve)
    assert set(found["j"].plan.placed["trainer"]) == {"n1"}
    assert "queue 'a' is guaranteed this room, for job j" in found["more"].reason
    assert found["more"].for_job == "j"


def test_who_does_not_borrow_gives_nothing_back():
    """ "no workloads borrowing"."""
    config = queues(queue("a", gpus=4), queue("b", gpus=12))
    run = [running(job("own", "b", gang(8)), n0=8), running(job("ra", "a", gang(3)), n1=3)]

    found = deciding(config, nodes(2, cards=8), run, [job("j", "a", gang(2))])

    assert stopped(found) == set()
    assert isinstance(found["j"], Start), "borrowed: 5 cards are free"


def test_no_more_than_is_needed_is_taken():
    """ "minimal set excludes low priority": who was taken first is given back if the others are enough."""
    run = [
        running(job("small", "b", gang(1), priority=-1), n0=1),
        running(job("large", "b", gang(8)), n1=8),
        running(job("own", "b", gang(7)), n0=7),
    ]

    found = deciding(TWO, nodes(2), run, [job("j", "a", gang(8), at=1.0)], 2.0)

    assert len(stopped(found)) == 1, "one of those with eight or seven cards, and not small on top of large"
    assert stopped(found) == {"large"}


def test_low_priorities_go_first_then_least_lost_work():
    def run(name, priority, lost):
        return replace(running(job(name, "b", gang(4), priority=priority), **{name[:2]: 4}), lost_s=lost)

    members = [node(f"n{place}", cards=4) for place in range(4)]
    own = [running(job("own", "b", gang(4), priority=9), n3=4)]

    by_priority = deciding(
        TWO,
        members,
        [*own, run("n0-high", 5, 0.0), run("n1-low", 1, 99.0), run("n2-low", 1, 100.0)],
        [job("j", "a", gang(4))],
    )
    by_loss = deciding(
        TWO,
        members,
        [*own, run("n0-x", 1, 50.0), run("n1-x", 1, 10.0), run("n2-x", 1, 99.0)],
        [job("j", "a", gang(4))],
    )

    assert stopped(by_priority) == {"n1-low"}
    assert stopped(by_loss) == {"n1-x"}


def test_reclaim_from_lower_priority_only():
    """ "do not reclaim borrowed quota from same priority for withinCohort=ReclaimFromLowerPriority"."""
    config = queues(queue("a", gpus=8, reclaim_within_cohort="LowerPriority"), queue("b", gpus=8))
    run = [running(job("x", "b", gang(8)), n0=8), running(job("y", "b", gang(8)), n1=8)]

    assert stopped(deciding(config, nodes(2), run, [job("j", "a", gang(8))])) == set()
    assert len(stopped(deciding(config, nodes(2), run, [job("j", "a", gang(8), priority=1)]))) == 1


def test_never_reclaim():
    config = queues(queue("a", gpus=8, reclaim_within_cohort="Never"), queue("b", gpus=8))
    run = [running(job("x", "b", gang(8)), n0=8), running(job("y", "b", gang(8)), n1=8)]

    assert stopped(deciding(config, nodes(2), run, [job("j", "a", gang(8), priority=99)])) == set()


def test_within_a_queue_by_priority():
    """ "preempt lowest priority", "can't preempt workloads in ClusterQueue for withinClusterQueue=Never"."""
    run = [
        running(job("low", "a", gang(4), priority=-1), n0=4),
        running(job("high", "a", gang(4), priority=1), n0=4),
    ]
    asks = job("j", "a", gang(4), priority=0)

    assert stopped(deciding(queues(queue("a", gpus=8)), nodes(1), run, [asks])) == {"low"}
    never = queues(queue("a", gpus=8, within_queue="Never"))
    assert stopped(deciding(never, nodes(1), run, [asks])) == set()


def test_within_a_queue_from_the_newer_of_equal_priority():
    """ "preempt newer workloads with the same priority"."""
    config = queues(queue("a", gpus=8, within_queue="LowerOrNewerEqualPriority"))
    run = [
        running(job("old", "a", gang(4), at=0.0), n0=4),
        running(job("new", "a", gang(4), at=5.0), 5.0, n0=4),
    ]

    assert stopped(deciding(config, nodes(1), run, [job("j", "a", gang(4), at=2.0)], 9.0)) == {"new"}


def test_borrow_within_cohort():
    """ "use BorrowWithinCohort; allow preempting a lower-priority workload from another ClusterQueue while
    borrowing" and its threshold."""

    def config(**policy):
        return queues(queue("a", gpus=0, **policy), queue("b", gpus=0), shared=8)

    run = [running(job("x", "b", gang(8), priority=-1), n0=8)]
    asks = [job("j", "a", gang(8), priority=0)]

    assert stopped(deciding(config(), nodes(1), run, asks)) == set()
    allowed = config(borrow_within_cohort="LowerPriority")
    assert stopped(deciding(allowed, nodes(1), run, asks)) == {"x"}
    limited = config(borrow_within_cohort="LowerPriority", max_priority_threshold=-2)
    assert stopped(deciding(limited, nodes(1), run, asks)) == set()


def test_a_training_shrinks_before_any_job_of_its_priority_stops():
    wish = gang(8)
    elastic = job("elastic", "b", (wish, smaller(wish, 4)))
    run = [
        running(elastic, n0=8),
        running(job("whole", "b", gang(4)), n1=4),
        running(job("own", "b", gang(4)), n1=4),
    ]

    found = deciding(TWO, nodes(2), run, [job("j", "a", gang(4))])

    assert stopped(found) == set()
    assert isinstance(found["elastic"], Shrink)
    assert found["elastic"].size == 1
    assert found["elastic"].placed == {"trainer": ("n0",) * 4}
    assert "goes on as size 2 of 2" in found["elastic"].reason
    assert set(found["j"].plan.placed["trainer"]) == {"n0"}


def test_a_training_gives_no_more_than_is_needed():
    wish = gang(8)
    elastic = job("elastic", "b", (wish, smaller(wish, 6), smaller(wish, 4), smaller(wish, 2)))
    run = [running(elastic, n0=8), running(job("own", "b", gang(8)), n1=8)]

    found = deciding(TWO, nodes(2), run, [job("j", "a", gang(3))])

    assert (found["elastic"].size, stopped(found)) == (2, set())


def test_a_service_is_made_smaller_and_never_stopped():
    config = queues(queue("a", gpus=6), queue("b", gpus=2))
    wish = gang(6)
    service = job("service", "b", (wish, smaller(wish, 2)), may_stop=False, kind="service")
    run = [running(service, n0=6)]

    found = deciding(config, nodes(1), run, [job("j", "a", gang(6)), job("k", "a", gang(6), at=1.0)])

    assert isinstance(found["service"], Shrink)
    assert found["service"].placed == {"trainer": ("n0", "n0")}
    assert isinstance(found["j"], Reserve)
    assert isinstance(found["k"], Wait)


def test_a_job_that_is_told_something_is_not_told_another_thing():
    run = [running(job("own", "b", gang(8)), n0=8), running(job("more", "b", gang(8)), 5.0, n1=8)]
    first = deciding(TWO, nodes(2), run, [job("j", "a", gang(4), at=9.0)], 10.0)
    step = replace(run[1], step=Step(None, {}, "j"))

    again = deciding(
        TWO,
        nodes(2),
        [run[0], step],
        [Waiting(job("j", "a", gang(4), at=9.0), plan=first["j"].plan), job("k", "a", gang(4), at=9.5)],
        11.0,
    )

    assert stopped(first) == {"more"}
    assert stopped(again) == set(), "what more leaves is enough for both"
    assert isinstance(again["k"], Reserve)


def test_cpus_are_taken_back_for_a_job_that_has_its_cards():
    def team(name):
        nominal = {"GPU": ResourceQuota(nominal=8), "CPU": ResourceQuota(nominal=64)}
        return QueueConfig(name=name, cohort="all", quotas=nominal)

    config, asks = queues(team("a"), team("b"), team("c")), job("j", "a", gang(8, 1, 8))
    without_cards = [
        running(job("own", "b", gang(64, 0)), n0=64),
        running(job("more", "b", gang(40, 0)), n1=40),
        running(job("other", "c", gang(64, 0)), n2=64),
    ]
    with_cards = [
        running(job("own", "b", gang(1, 1, 60)), n0=1),
        running(job("more", "b", gang(1, 1, 44), priority=-1), n1=1),
        running(job("other", "c", gang(1, 1, 64), priority=-2), n2=1),
    ]

    assert stopped(deciding(config, nodes(3), without_cards, [asks])) == {"more"}
    assert stopped(deciding(config, nodes(3), with_cards, [asks])) == {"more"}


def test_jobs_that_fail_fast_lose_the_right_to_take_for_growing_times():
    run = [running(job("own", "b", gang(8)), n0=8), running(job("more", "b", gang(8)), n1=8)]

    def failing(times, now):
        waiting = Waiting(job("j", "a", gang(8)), num_fast_failures=times, failed_at=1000.0)
        return deciding(TWO, nodes(2), run, [waiting], now)

    assert stopped(failing(1, 1599.0)) == set()
    assert (
        "failed 1 times soon after it started, so it takes no room from others for 1 s"
        in failing(1, 1599.0)["j"].reason
    )
    assert len(stopped(failing(1, 1600.0))) == 1
    assert stopped(failing(3, 3399.0)) == set()
    assert len(stopped(failing(3, 3400.0))) == 1
    free = Waiting(job("j", "a", gang(8)), num_fast_failures=9, failed_at=1000.0)
    assert isinstance(deciding(TWO, nodes(2), run[:1], [free], 1001.0)["j"], Start), "free room is for anyone"


def test_the_penalty_doubles_and_has_a_limit():
    waiting = Waiting(job("j"), failed_at=0.0)

    assert penalty_until(waiting, 600.0, 86400.0) == float("-inf")
    assert [
        penalty_until(replace(waiting, num_fast_failures=times), 600.0, 3000.0) for times in (1, 2, 3, 4)
    ] == [
        600.0,
        1200.0,
        2400.0,
        3000.0,
    ]
    assert penalty_until(replace(waiting, num_fast_failures=5000), 600.0, 3000.0) == 3000.0


# Cells

CELLS = queues(queue("a", cells=[(8, 1)]), queue("b", gpus=8))


def test_sharing_anomaly_of_hived_with_numbers_the_tenant_waits():
    """Two nodes of eight cards, two tenants with eight each; b's jobs of one card are on both nodes (HiveD,
    OSDI'20, section 2): a has its number of cards free and no node."""
    numbers = queues(queue("a", gpus=8), queue("b", gpus=8))
    run = [running(job(f"b{place}", "b", gang(1)), **{f"n{place % 2}": 1}) for place in range(8)]

    found = deciding(numbers, nodes(2), run, [job("j", "a", gang(1, cards=8))])

    assert isinstance(found["j"], Wait)
    assert stopped(found) == set()


def test_sharing_anomaly_of_hived_with_cells_it_does_not():
    run, placed = [], {}
    for place in range(8):  # one after the other, with others in between on other nodes
        found = deciding(CELLS, nodes(2), run, [job(f"b{place}", "b", gang(1))], float(place))
        placed[place] = found[f"b{place}"].placed
        run.append(Running(job(f"b{place}", "b", gang(1)), 0, placed[place], float(place)))

    found = deciding(CELLS, nodes(2), run, [job("j", "a", gang(1, cards=8))], 9.0)

    assert isinstance(found["j"], Start)
    assert len({name for each in placed.values() for name in each["trainer"]}) == 1


def test_borrowers_on_a_cell_leave_it():
    config = queues(queue("a", cells=[(8, 1)]), queue("b", gpus=8))
    run = [
        running(job(f"b{place}", "b", gang(1), at=float(place)), float(place), **{f"n{place % 2}": 1})
        for place in range(12)
    ]

    found = deciding(config, nodes(2), run, [job("j", "a", gang(1, cards=8), at=20.0)], 20.0)

    assert isinstance(found["j"], Reserve)
    (at,) = set(found["j"].plan.placed["trainer"])
    assert all(run[int(name[1:])].placed["trainer"] == (at,) for name in stopped(found))
    assert len(stopped(found)) == 6
    assert found["j"].plan.cells == {"trainer": ("a#0",)}


def test_who_has_only_cpus_of_a_cell_leaves_it():
    run = [running(job("cpus", "b", gang(60, 0)), n0=60)]

    found = deciding(
        queues(queue("a", cells=[(8, 1)]), queue("b", gpus=0)), nodes(1), run, [job("j", "a", gang(8))]
    )

    assert stopped(found) == {"cpus"}
    assert isinstance(found["j"], Reserve)


def test_a_job_in_its_cells_is_not_asked_for_anything():
    config = queues(queue("a", cells=[(8, 1)]), queue("b", cells=[(4, 1)]), queue("c", gpus=4))
    owner = Running(
        job("owner", "b", gang(4), priority=-9), 0, {"trainer": ("n1",) * 4}, 0.0, {"trainer": ("b#0",) * 4}
    )
    run = [
        owner,
        running(job("more", "c", gang(4), priority=9), n1=4),
        running(job("most", "c", gang(8), priority=9), n0=8),
    ]

    found = deciding(config, nodes(2), run, [job("j", "a", gang(8), at=1.0)], 2.0)

    assert "owner" not in stopped(found)
    assert stopped(found) == {"most"}


def test_what_may_not_be_stopped_is_never_on_somebodys_cell():
    config = queues(queue("a", cells=[(8, 1)]), queue("b", gpus=2), queue("c", gpus=2), shared=4)
    run = []
    for place, name in enumerate("bbcc"):
        service = job(f"s{place}", name, gang(1), may_stop=False, kind="service")
        found = deciding(config, nodes(2), run, [service], float(place))[service.id]
        run.append(Running(service, 0, found.placed, float(place), found.cells))

    found = deciding(config, nodes(2), run, [job("j", "a", gang(1, cards=8))], 9.0)

    assert isinstance(found["j"], Start)
    assert found["j"].cells is not None


def test_a_job_that_is_shrinking_may_be_told_to_stop():
    """It is not waited for: who is guaranteed the room gets it one grace period after it is asked for."""
    wish = gang(8)
    elastic = job("elastic", "b", (wish, smaller(wish, 4)))
    shrinking = replace(running(elastic, n0=8), step=Step(1, {"trainer": ("n0",) * 4}, "first"))
    config = queues(queue("a", cells=[(8, 1)]), queue("b", gpus=0))

    found = deciding(config, nodes(1), [shrinking], [job("j", "a", gang(1, cards=8), at=1.0)], 2.0)

    assert stopped(found) == {"elastic"}
    assert isinstance(found["j"], Reserve)
