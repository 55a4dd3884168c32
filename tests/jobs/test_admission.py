from dataclasses import replace

import pytest

from rayrec.jobs.admission import Scheduler, SchedulingConfig, check_change, decide
from rayrec.jobs.job import (
    Grow,
    Plan,
    Refuse,
    Reserve,
    Running,
    Shrink,
    Size,
    Start,
    Step,
    Stop,
    Wait,
    Waiting,
)
from rayrec.jobs.queues import QueueConfig, QueuesConfig, ResourceQuota
from rayrec.jobs.simulation import check_no_card_twice
from rayrec.pipelines.cluster.placement import ActorGroup
from rayrec.platform.errors import InputError
from tests.helpers.jobs import gang, job, node, nodes, queue, queues, smaller


def running(a_job, at=0.0, **placed_on):
    """A job that runs, with so many of its actors on each node."""
    placed = {"trainer": tuple(name for name, count in placed_on.items() for _ in range(count))}
    number = next(
        number
        for number, size in enumerate(a_job.sizes)
        if size.counts()["trainer"] == len(placed["trainer"])
    )
    return Running(
        a_job, number, placed, at, ends_at=None if a_job.expected_s is None else at + a_job.expected_s
    )


def deciding(config, members, run=(), wait=(), now=0.0, **settings):
    """All decisions, by job."""
    waiting = [each if isinstance(each, Waiting) else Waiting(each) for each in wait]
    return {
        each.job_id: each for each in decide(config, members, run, waiting, now, SchedulingConfig(**settings))
    }


ONE = queues(queue("a", gpus=64, cohort=None))


def test_a_job_that_fits_starts_with_a_node_for_every_actor():
    found = deciding(ONE, nodes(2), wait=[job("j", size=gang(10))])["j"]

    assert isinstance(found, Start)
    assert sorted(found.placed["trainer"].count(name) for name in ("n0", "n1")) == [2, 8]
    assert found.ends_at == 100.0
    assert "within the guarantee of queue 'a'" in found.reason
    assert not found.borrows


def test_a_gang_starts_whole_or_not_at_all():
    found = deciding(ONE, nodes(2), [running(job("r"), n0=1)], [job("j", size=gang(16))])["j"]

    assert isinstance(found, Wait)
    assert "1 of 16 trainers find no room" in found.reason


def test_priority_then_age():
    waiting = [
        job("old", size=12, at=0.0),
        job("new", size=12, at=1.0),
        job("first", size=12, at=2.0, priority=5),
    ]
    members = [node("n0", cards=16)]

    found = deciding(ONE, members, wait=waiting, now=3.0)

    assert isinstance(found["first"], Start)
    assert isinstance(found["old"], Wait)
    assert isinstance(found["new"], Wait)
    assert "1 of its queue are before it" in found["new"].reason
    assert next(iter(deciding(ONE, members, wait=waiting[:2], now=3.0))) == "old"


def test_of_two_queues_that_borrow_the_smaller_share_is_next():
    config = queues(queue("a", gpus=2), queue("b", gpus=2), shared=4)
    members = [node("n0")]
    run = [running(job("ra", "a", gang(4)), n0=4), running(job("rb", "b", gang(3)), n0=3)]

    found = deciding(config, members, run, [job("ja", "a", at=0.0), job("jb", "b", at=9.0)], now=9.0)

    assert isinstance(found["jb"], Start), "b borrows 1 and would borrow 2; a would borrow 3"
    assert found["jb"].borrows
    assert "on what queue 'b' borrows" in found["jb"].reason
    assert isinstance(found["ja"], Wait)


def test_what_is_guaranteed_goes_before_what_is_borrowed():
    config = queues(queue("a", gpus=4), queue("b", gpus=4))
    run = [running(job("r", "a", gang(4)), n0=4)]

    found = deciding(
        config, [node("n0")], run, [job("x", "a", gang(4), at=0.0), job("y", "b", gang(4), at=5.0)], 6.0
    )

    assert isinstance(found["y"], Start)
    assert isinstance(found["x"], Wait)


def test_a_short_job_passes_one_that_waits_for_others_to_end():
    """EASY: `wide` gets all cards at 100; what ends before then may start, what does not may not."""
    run = [running(job("r", size=gang(4), lasts=100.0), n0=4)]
    waiting = [
        job("wide", size=gang(8), at=1.0),
        job("long", size=gang(2), at=2.0, lasts=200.0),
        job("short", size=gang(2), at=3.0, lasts=50.0),
    ]

    found = deciding(ONE, [node("n0")], run, waiting, now=4.0)

    assert isinstance(found["short"], Start)
    assert isinstance(found["long"], Wait)
    assert found["wide"].starts_at == 100.0
    assert found["wide"].num_passed == 1
    assert "would delay job wide, which is to have this room in 96 s" in found["long"].reason


def test_a_long_job_passes_on_what_the_first_one_does_not_need():
    run = [running(job("r", size=gang(4), lasts=100.0), n0=4)]
    waiting = [job("wide", size=gang(6), at=1.0), job("long", size=gang(2), at=2.0, lasts=2000.0)]

    found = deciding(ONE, [node("n0")], run, waiting, now=4.0)

    assert isinstance(found["long"], Start)


def test_nobody_passes_beside_ends_that_are_not_known():
    run = [running(job("r", size=gang(4), lasts=None), n0=4)]
    waiting = [job("wide", size=gang(8), at=1.0), job("unknown", size=gang(2), at=2.0, lasts=None)]

    found = deciding(ONE, [node("n0")], run, waiting, now=4.0)

    assert isinstance(found["unknown"], Wait)
    assert found["wide"].starts_at is None


def test_a_job_that_was_passed_often_enough_is_passed_no_more():
    run = [running(job("r", size=gang(4), lasts=100.0), n0=4)]
    wide, short = job("wide", size=gang(8), at=1.0), job("short", size=gang(2), at=3.0, lasts=50.0)

    passed = deciding(ONE, [node("n0")], run, [Waiting(wide, num_passed=2), short], 4.0, max_passes=3)
    held = deciding(ONE, [node("n0")], run, [Waiting(wide, num_passed=3), short], 4.0, max_passes=3)

    assert isinstance(passed["short"], Start)
    assert passed["wide"].num_passed == 3
    assert isinstance(held["short"], Wait)


def test_a_job_that_waited_for_long_enough_is_first_whatever_its_priority():
    waiting = [job("low", size=8, at=0.0), job("high", size=8, at=90.0, priority=10)]
    config = queues(queue("a", gpus=8, cohort=None))

    assert isinstance(deciding(config, [node("n0")], wait=waiting, now=99.0, max_wait_s=100.0)["high"], Start)
    found = deciding(config, [node("n0")], wait=waiting, now=101.0, max_wait_s=100.0)
    assert isinstance(found["low"], Start)


def test_time_in_which_a_job_ran_is_no_waiting():
    low, high = job("low", size=gang(8), at=0.0), job("high", size=gang(8), at=90.0, priority=10)
    config, patience = queues(queue("a", gpus=8, cohort=None)), {"max_wait_s": 100.0}

    found = deciding(config, [node("n0")], wait=[Waiting(low, ran_s=95.0), high], now=101.0, **patience)
    assert isinstance(found["high"], Start)

    again = replace(running(low, at=120.0, n0=8), ran_s=95.0)
    found = deciding(config, [node("n0")], [again], [high], now=130.0, **patience)
    assert isinstance(found["low"], Stop), "it waited for 25 s"
    kept = deciding(config, [node("n0")], [replace(again, ran_s=10.0)], [high], now=130.0, **patience)
    assert isinstance(kept["high"], Wait), "it waited for 110 s"


def test_jobs_that_only_fit_borrowed_do_not_hold_up_those_that_are_guaranteed():
    config = queues(queue("a", gpus=4), queue("b", gpus=4))
    run = [running(job("r", "b", gang(4)), n0=4)]

    found = deciding(
        config, [node("n0")], run, [job("wide", "a", gang(6), at=0.0), job("j", "a", gang(2), at=1.0)], 2.0
    )

    assert isinstance(found["j"], Start)
    assert isinstance(found["wide"], Wait)


def test_a_job_starts_at_the_largest_size_for_which_there_is_room():
    wish = gang(8)
    elastic = job("j", size=(wish, smaller(wish, 4), smaller(wish, 2)))

    found = deciding(ONE, [node("n0")], [running(job("r", size=gang(3)), n0=3)], [elastic])["j"]

    assert (found.size, len(found.placed["trainer"])) == (1, 4)
    assert found.ends_at == 200.0, "at half the speed"
    assert "as size 2 of 3" in found.reason


def test_a_gang_within_one_rack():
    found = deciding(
        ONE, nodes(4), [running(job("r", size=gang(1)), n0=1)], [job("j", size=gang(16), within="rack")]
    )

    assert set(found["j"].placed["trainer"]) == {"n2", "n3"}


def test_a_reservation_for_a_time_keeps_its_room():
    later = job("later", size=gang(8), at=0.0, not_before=1000.0)
    waiting = [
        later,
        job("long", size=gang(1), at=1.0, lasts=2000.0),
        job("short", size=gang(1), at=2.0, lasts=900.0),
    ]

    early = deciding(ONE, [node("n0")], wait=waiting, now=5.0)

    assert isinstance(early["short"], Start)
    assert isinstance(early["long"], Wait)
    assert "is reserved for a time in 995 s" in early["later"].reason
    assert early["later"].starts_at == 1000.0
    at_its_time = deciding(ONE, [node("n0")], wait=waiting, now=1000.0)
    assert isinstance(at_its_time["later"], Start)


def test_a_reservation_asks_for_its_room_one_grace_period_before():
    config = queues(queue("a", gpus=8), queue("b", gpus=8))
    run = [running(job("r", "b", gang(12)), n0=8, n1=4)]
    later = job("later", size=gang(8), not_before=1000.0)

    assert isinstance(deciding(config, nodes(2), run, [later], 900.0, grace_s=60.0)["later"], Wait)
    found = deciding(config, nodes(2), run, [later], 950.0, grace_s=60.0)
    assert isinstance(found["r"], Stop)
    assert isinstance(found["later"], Reserve)
    plan = found["later"].plan
    assert isinstance(deciding(config, nodes(2), (), [Waiting(later, plan=plan)], 999.0)["later"], Wait)
    assert isinstance(deciding(config, nodes(2), (), [Waiting(later, plan=plan)], 1000.0)["later"], Start)


def test_before_its_time_a_job_does_not_wait():
    """Jobs that end before it take nothing from it, however many they are and however long that goes on."""
    hour = 3600.0
    later = job("later", size=gang(8), at=0.0, not_before=72 * hour)
    short = job("short", size=gang(8), at=24 * hour, lasts=hour)

    found = deciding(ONE, [node("n0")], wait=[Waiting(later, num_passed=100), short], now=25 * hour)
    assert isinstance(found["short"], Start)
    assert found["later"].num_passed == 100, "it was not passed"


def test_a_job_that_waited_for_long_enough_does_not_take_what_is_reserved():
    day = 24 * 3600.0
    later = job("later", size=gang(8), at=day, not_before=1.1 * day)
    aged = job("aged", size=gang(8), at=0.0, lasts=day)

    found = deciding(ONE, [node("n0")], wait=[later, aged], now=1.05 * day)
    assert isinstance(found["aged"], Wait)
    assert isinstance(deciding(ONE, [node("n0")], wait=[later, aged], now=1.1 * day)["later"], Start)


def test_a_job_does_not_grow_beside_one_that_waits_behind_reservations():
    day = 24 * 3600.0
    wish = gang(8)
    small = replace(running(job("j", "a", (wish, smaller(wish, 2)), lasts=None), n0=2), changed_at=0.0)
    other = running(job("r", "a", gang(8), lasts=1.5 * day), n1=8)
    waits, later = job("k", size=gang(8), at=0.0), job("later", size=gang(8), at=day, not_before=3 * day)

    assert "j" not in deciding(ONE, nodes(2), [small, other], [waits], now=1.2 * day)
    assert "j" not in deciding(ONE, nodes(2), [small, other], [waits, later], now=1.2 * day)


def test_a_job_that_started_at_its_time_has_not_waited():
    """Those that have are stopped for nobody of their queue."""
    config = queues(queue("a", gpus=8, cohort=None))
    day = 24 * 3600.0
    run = [running(job("r", size=gang(8), at=0.0, not_before=5 * day), 5 * day, n0=8)]
    asks = [job("j", size=gang(8), at=5 * day, priority=1)]
    assert isinstance(deciding(config, [node("n0")], run, asks, now=5 * day + 60)["r"], Stop)


def test_planned_room_is_nobody_elses():
    config = queues(queue("a", gpus=8), queue("b", gpus=8))
    victim = running(job("r", "b", gang(8)), n0=8)
    plan = Plan(0, {"trainer": ("n0",) * 8}, 0.0)
    stopping = replace(victim, step=Step(None, {}, "j"))

    waiting = [Waiting(job("j", "a", gang(8)), plan=plan), Waiting(job("other", "b", gang(1), at=1.0))]
    still = deciding(config, [node("n0")], [stopping], waiting, 2.0)
    gone = deciding(config, [node("n0")], [], waiting, 3.0)

    assert isinstance(still["j"], Wait)
    assert "waits until r have given it back" in still["j"].reason
    assert isinstance(still["other"], Wait)
    assert isinstance(gone["j"], Start)
    assert isinstance(gone["other"], Wait)


def test_a_plan_on_a_node_that_is_lost_is_made_again():
    plan = Plan(0, {"trainer": ("gone",)}, 0.0)

    found = deciding(ONE, [node("n0")], [], [Waiting(job("j"), plan=plan)])["j"]

    assert isinstance(found, Start)
    assert found.placed == {"trainer": ("n0",)}


def test_what_others_than_our_jobs_hold_is_not_given():
    members = [node("n0", free={"GPU": 3.0})]
    mine = running(job("r", size=gang(2)), n0=2)

    found = deciding(ONE, members, [mine], [job("j", size=gang(4))])

    assert isinstance(found["j"], Wait), "of 8, 3 are free, 2 are r's and 3 somebody's"
    assert isinstance(deciding(ONE, members, [mine], [job("j", size=gang(3))])["j"], Start)


def test_a_node_that_is_not_to_be_used_gets_nothing():
    class Draining(type(node("x"))):
        is_usable = False

    bad = Draining("bad", "10.0.0.9", {}, {"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0, "GPU": 8.0})

    found = deciding(ONE, [bad, node("n0")], wait=[job("j", size=gang(8)), job("k", size=gang(8), at=1.0)])

    assert set(found["j"].placed["trainer"]) == {"n0"}
    assert isinstance(found["k"], Wait), "the other one may come back"


# Bad input


def refused(config, members, a_job):
    refusal = Scheduler(config, members).submit(Waiting(a_job))
    assert isinstance(refusal, Refuse)
    found = deciding(config, members, wait=[a_job])[a_job.id]
    assert isinstance(found, Wait), "nodes may come back"
    assert found.reason == f"could not run on the nodes that there are: {refusal.reason}"
    return refusal.reason


def test_an_unknown_queue_is_refused():
    with pytest.raises(InputError, match="there is no queue 'z'; queues are: a"):
        deciding(ONE, nodes(1), wait=[job("j", "z")])
    with pytest.raises(InputError, match="there is no queue 'z'"):
        deciding(ONE, nodes(1), [running(job("r", "z"), n0=1)])


def test_jobs_that_could_never_fit_are_refused_with_one_sentence():
    big = queues(queue("a", gpus=100, cohort=None))

    assert "17 of 33 trainers find no room" in refused(big, nodes(2), job("j", size=gang(33)))
    assert "a trainer fits on no node" in refused(big, nodes(2), job("j", size=gang(1, cards=9)))
    assert "no node of the Ray cluster has kind=h200" in refused(
        big, nodes(2), job("j", size=gang(1, labels={"kind": "h200"}))
    )
    assert "fit on no set of the cluster's nodes with one value of 'rack'" in refused(
        big, nodes(4), job("j", size=gang(20), within="rack")
    )


def test_jobs_beyond_every_quota_are_refused_with_one_sentence():
    config = queues(queue("a", gpus=4, borrow=2), queue("b", gpus=8))
    npu = Size((ActorGroup("trainer", "placement.trainers", 1, {"NPU": 1.0}, {}),))

    assert "asks for 7 GPU at least, and queue 'a' may use 6 at most" in refused(
        config, nodes(2), job("j", size=gang(7))
    )
    assert "asks for 1 NPU, of which queue 'a' has no quota" in refused(config, nodes(2), job("j", size=npu))


def test_a_service_that_may_not_be_stopped_cannot_borrow_for_good():
    config = queues(queue("a", gpus=2), queue("b", gpus=6))

    why = refused(config, [node("n0")], job("j", "a", gang(3), may_stop=False, kind="service"))

    assert (
        "can have no more than the guarantee of queue 'a' (2 GPU), and its least size asks for 3 GPU" in why
    )
    pool = queues(queue("a", gpus=2), queue("b", gpus=5), shared=1)
    found = deciding(pool, [node("n0")], wait=[job("j", "a", gang(3), may_stop=False, kind="service")])
    assert isinstance(found["j"], Start), "what the cohort has of its own is nobody's guarantee"


def test_a_job_that_may_not_be_stopped_has_to_find_room_beside_all_cells():
    """It would wait on an empty cluster, and keep room from those behind it."""
    pack = gang(2, strategy="STRICT_PACK")
    own = queues(queue("a", cells=[(1, 2)], cohort=None))
    others = queues(queue("a", gpus=4), queue("b", cells=[(4, 1)]))
    many = gang(4, cpus=10)  # of 64 CPUs, the cell has 32

    for config, size in ((own, pack), (others, many)):
        members = nodes(1, cards=2) if config is own else nodes(1)
        refused = Scheduler(config, members).submit(Waiting(job("j", "a", size, may_stop=False)))
        assert isinstance(refused, Refuse)
        assert "finds no room beside the cells that queues are guaranteed" in refused.reason
        assert isinstance(deciding(config, members, wait=[job("k", "a", size)])["k"], Start)
    fits = Waiting(job("j", "a", gang(4, cpus=8), may_stop=False))
    assert Scheduler(others, nodes(1)).submit(fits) is None
    away = [replace(node("n0"), quarantined="bad")]
    assert Scheduler(others, away).submit(fits) is None, "a node that comes back"
    # Six that are placed first on n1 leave no node for both cells; on n0 and n2 they are in nobody's way.
    halves = queues(queue("a", gpus=6), queue("b", cells=[(4, 2)]))
    members = [node("n0", 4), node("n1", 8), node("n2", 2)]
    assert Scheduler(halves, members).submit(Waiting(job("j", "a", gang(6, cpus=10), may_stop=False))) is None


def test_sizes_that_do_not_shrink_are_refused():
    with pytest.raises(InputError, match="must go from the largest to the least"):
        deciding(ONE, nodes(1), wait=[job("j", size=(gang(2), gang(4)))])
    with pytest.raises(InputError, match="at least one size"):
        deciding(ONE, nodes(1), wait=[replace(job("j"), sizes=())])


def test_a_quota_below_what_runs_is_refused():
    run = [running(job("r", "a", gang(6)), n0=6)]

    check_change(queues(queue("a", gpus=6, cohort=None)), [node("n0")], run)
    with pytest.raises(
        InputError, match="queue 'a': its jobs hold 6 GPU, and with these settings it may have 4"
    ):
        check_change(queues(queue("a", gpus=4, cohort=None)), [node("n0")], run)
    with pytest.raises(InputError, match="there is no queue 'a'"):
        check_change(QueuesConfig(), [node("n0")], run)
    with pytest.raises(InputError, match="guaranteed 9 GPU together"):
        check_change(queues(queue("a", gpus=9, cohort=None)), [node("n0")], run)


# Growing again


def test_a_shrunk_job_grows_again_when_nobody_waits_and_not_at_once():
    wish = gang(8)
    elastic = job("j", size=(wish, smaller(wish, 2)), lasts=1000.0)
    small = replace(running(elastic, n0=2), changed_at=100.0, num_shrunk=1, ends_at=2100.0)

    assert deciding(ONE, [node("n0")], [small], now=1200.0) == {}, "600 s, doubled since it was shrunk once"
    grown = deciding(ONE, [node("n0")], [small], now=1400.0)["j"]
    assert isinstance(grown, Grow)
    assert grown.size == 0
    assert grown.placed["trainer"][:2] == ("n0", "n0")
    assert len(grown.placed["trainer"]) == 8
    waits = deciding(ONE, nodes(2), [small], [job("k", size=gang(15))], now=1400.0)
    assert not isinstance(waits.get("j"), Grow), "somebody of its queue waits for cards"


def test_a_job_grows_although_others_wait_who_could_not_have_that():
    wish = gang(8)
    small = replace(
        running(job("j", "a", (wish, smaller(wish, 2)), lasts=1e6), n0=2), changed_at=0.0, ends_at=1e6
    )

    def grows(config, waits, *run, members=1):
        return isinstance(deciding(config, nodes(members), [small, *run], [waits], now=1e5).get("j"), Grow)

    lends = queues(queue("a", gpus=4), queue("b", gpus=4))
    assert not grows(lends, job("k", "b", gang(4)), running(job("r", "b", gang(1)), n0=1))
    full = queues(queue("a", gpus=8), queue("b", gpus=2, borrow=0))
    on_the_other = running(job("r", "b", gang(2)), n1=2)
    assert grows(full, job("k", "b", gang(2)), on_the_other, members=2), "its queue has no more quota"
    assert grows(queues(queue("a", gpus=8)), job("k", "a", gang(8, cards=0, cpus=16)))
    assert grows(queues(queue("a", gpus=8)), job("k", "a", gang(1), not_before=2e6))


def test_a_reservation_for_a_time_leaves_room_for_one_of_who_is_blocked():
    """Without it, jobs that end late would pass the blocked one until it had been passed too often."""
    later = job("later", size=gang(1), not_before=1e6)
    run = [running(job("r", size=gang(6), lasts=100.0), n0=6)]
    wait = [later, job("blocked", size=gang(8), at=1.0), job("long", size=gang(2), at=2.0, lasts=1e5)]
    found = deciding(ONE, [node("n0")], run, wait, now=10.0)
    assert isinstance(found["long"], Wait)
    assert "would delay job blocked" in found["long"].reason


def test_when_a_job_would_start_is_by_quota_too():
    config = queues(queue("a", gpus=4, cohort=None), queue("b", gpus=4, cohort=None))
    run = [running(job("r", "a", gang(4), lasts=500.0), n0=4)]
    found = deciding(config, nodes(2), run, [job("j", "a", gang(2))], now=100.0)["j"]
    assert found.starts_at == 500.0

    never = [replace(run[0], ends_at=None)]
    wait = [job("j", "a", gang(2)), job("k", "b", gang(8, cards=0, cpus=16), at=1.0)]
    again = deciding(config, nodes(2), never, wait, now=100.0)
    assert again["j"].starts_at is None


def test_when_a_job_would_start_does_not_wait_for_one_that_is_reserved_for_a_later_time():
    run = [running(job("r", size=gang(8), lasts=600.0), n0=8)]
    later, short = job("later", size=gang(8), not_before=86_400.0), job("short", size=gang(8), at=1.0)
    found = deciding(ONE, [node("n0")], run, [later, short], now=20.0)
    assert (found["later"].starts_at, found["short"].starts_at) == (86_400.0, 600.0)

    never = [replace(run[0], ends_at=None)]
    assert deciding(ONE, [node("n0")], never, [later], now=20.0)["later"].starts_at is None
    cells = queues(queue("a", cells=((8, 1),)))
    assert deciding(cells, [node("n0")], wait=[later], now=20.0)["later"].starts_at == 86_400.0


def test_a_job_of_which_a_node_is_gone_does_not_grow():
    """It is about to start again elsewhere, and the queue goes on."""
    wish = gang(4)
    for within in (None, "rack"):
        elastic = job("j", size=(wish, smaller(wish, 2)), within=within)
        small = replace(running(elastic, gone=1, n0=1), changed_at=0.0)
        assert deciding(ONE, nodes(2), [small], now=1e6) == {}


def test_growing_stays_within_the_quota_and_the_rack():
    wish = gang(8)
    elastic = job("j", size=(wish, smaller(wish, 2)), within="rack")
    small = replace(running(elastic, n0=2), changed_at=0.0)
    others = [running(job("r", size=gang(8)), n1=8), running(job("s", size=gang(3)), n0=3)]

    assert deciding(queues(queue("a", gpus=64, cohort=None)), nodes(4), [small, *others], now=1e6) == {}
    assert deciding(queues(queue("a", gpus=4, cohort=None)), nodes(1), [small], now=1e6) == {}


def test_the_same_from_the_ledger_as_from_one_that_remembers():
    """What is decided does not depend on whether the state was built now or grew job by job."""
    config = queues(queue("a", gpus=8), queue("b", gpus=8))
    jobs = [
        job(f"j{number}", "ab"[number % 2], gang(1 + number % 5), at=float(number)) for number in range(12)
    ]
    scheduler = Scheduler(config, nodes(2))
    for each in jobs:
        scheduler.submit(Waiting(each))
    first = scheduler.decide(20.0)
    check_no_card_twice(scheduler)

    again = [
        each
        for each in decide(config, nodes(2), (), [Waiting(each) for each in jobs], 20.0)
        if not isinstance(each, Wait)
    ]
    assert again == first
    later = decide(config, nodes(2), scheduler.running, scheduler.waiting, 21.0)
    assert [each for each in later if not isinstance(each, Wait)] == scheduler.decide(21.0)


def test_cpus_are_counted_where_a_queue_names_them():
    config = QueuesConfig(queues=(QueueConfig(name="a", quotas={"CPU": ResourceQuota(nominal=4)}),))

    found = deciding(config, nodes(1), wait=[job("j", size=gang(4, 0)), job("k", size=gang(1, 0), at=1.0)])

    assert isinstance(found["j"], Start)
    assert "asks for 1 CPU of which queue 'a' may use 0 more now" in found["k"].reason
    assert not isinstance(found["k"], Shrink)
