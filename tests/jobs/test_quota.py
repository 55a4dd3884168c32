"""Kueue's documented examples and the numbers of its unit tests.

Source: kubernetes-sigs/kueue at ff69552e79 (2026-08-23), `pkg/cache/scheduler/`: `resource_test.go`
(TestAvailable), `resource_node_test.go` (TestCohortLendable), `fair_sharing_test.go`
(TestDominantResourceShare, TestIsBorrowingOn); and the site's concepts "Cluster Queue" and "Cohort".
"""

import math

import pytest

from rayrec.jobs.queues import QueuesConfig
from rayrec.jobs.quota import UNITS, Candidate, FairShare, QuotaTree, in_units, units
from rayrec.platform.errors import InputError


def quota(nominal, borrowing=None, lending=None):
    return {"nominal": nominal, "borrowing_limit": borrowing, "lending_limit": lending}


def member(name, over=None, weight=1.0, **quotas):
    """A queue in a cohort, or a cohort in its parent; quotas as numbers or as `quota`."""
    settings = {
        resource: each if isinstance(each, dict) else quota(each) for resource, each in quotas.items()
    }
    return {"name": name, "over": over, "weight": weight, "quotas": settings}


def tree(queues, cohorts=()):
    def entries(members, key):
        return [{key if name == "over" else name: value for name, value in each.items()} for each in members]

    return QuotaTree(
        QueuesConfig.parse({"queues": entries(queues, "cohort"), "cohorts": entries(cohorts, "parent")})
    )


def use(quotas, queue, **amounts):
    quotas.add(queue, in_units(amounts))


def available(quotas, queue, resource="CPU"):
    return quotas.available(queue, resource) / UNITS


AVAILABLE = {
    "a cohort's own quota is added; a lending limit keeps the rest": (
        [member("cq1", "cohort", CPU=10), member("cq2", "cohort", CPU=quota(10, None, 9))],
        [member("cohort", CPU=10)],
        {"cq1": 1, "cq2": 0.5},
        {"cq1": 28, "cq2": 28.5},
        {"cq1": 29, "cq2": 30},
    ),
    "a queue borrows from its cohort": (
        [member("cq1", "cohort", CPU=10)],
        [member("cohort", CPU=10)],
        {"cq1": 11},
        {"cq1": 9},
        {"cq1": 20},
    ),
    "what is used beyond all quota is missing for all": (
        [member("cq1", "cohort", CPU=10), member("cq2", "cohort", CPU=quota(10, 0, 0))],
        [member("cohort", CPU=10)],
        {"cq1": 31},
        {"cq1": 0, "cq2": 0},
        {"cq1": 20, "cq2": 10},
    ),
    "borrowing and lending limits together": (
        [
            member("cq1", "cohort", CPU=10),
            member("cq2", "cohort", CPU=quota(10, 2)),
            member("cq3", "cohort", CPU=quota(10, None, 5)),
        ],
        [member("cohort", CPU=10)],
        {"cq1": 20, "cq2": 10, "cq3": 6},
        {"cq1": 4, "cq2": 2, "cq3": 4},
        {"cq1": 35, "cq2": 12, "cq3": 40},
    ),
    "cohorts in a cohort": (
        [member("cq1", "left", CPU=10), member("cq2", "right", CPU=quota(10, None, 0))],
        [member("root"), member("left", "root", CPU=10), member("right", "root", CPU=10)],
        {"cq1": 10, "cq2": 5},
        {"cq1": 20, "cq2": 25},
        {"cq1": 30, "cq2": 40},
    ),
    "a cohort's borrowing limit": (
        [
            member("left-cq1", "left", CPU=10),
            member("left-cq2", "left", CPU=quota(10, 5)),
            member("right-cq", "right", CPU=10),
        ],
        [member("root"), member("left", "root", CPU=quota(10, 5)), member("right", "root", CPU=10)],
        {},
        {"left-cq1": 35, "left-cq2": 15, "right-cq": 50},
        {"left-cq1": 35, "left-cq2": 15, "right-cq": 50},
    ),
    "a cohort's lending limit": (
        [
            member("left-cq1", "left", CPU=quota(10, None, 5)),
            member("left-cq2", "left", CPU=10),
            member("right-cq", "right", CPU=0),
            member("root-cq", "root", CPU=0),
        ],
        # Kueue allows a cohort to lend more than its own quota, out of what its queues lend.
        [member("root"), member("left", "root", CPU=quota(0, None, 5)), member("right", "root", CPU=0)],
        {},
        {"left-cq1": 20, "left-cq2": 15, "right-cq": 5, "root-cq": 5},
        {"left-cq1": 20, "left-cq2": 15, "right-cq": 5, "root-cq": 5},
    ),
}


@pytest.mark.parametrize("case", AVAILABLE)
def test_available_and_potential_are_those_of_kueue(case):
    queues, cohorts, usage, now, ever = AVAILABLE[case]
    quotas = tree(queues, cohorts)

    assert {name: available(quotas, name) for name in ever} == ever, "nothing is in use"
    for name, amount in usage.items():
        use(quotas, name, CPU=amount)
    assert {name: available(quotas, name) for name in now} == now
    assert {name: quotas.potential(name, "CPU") / UNITS for name in ever} == ever
    for name, amount in usage.items():
        quotas.remove(name, {"CPU": units(amount)})
    assert {name: available(quotas, name) for name in ever} == ever, "all is given back"


def test_a_queue_without_a_cohort_uses_its_own():
    quotas = tree([member("cq1", CPU=0), member("cq2", CPU=5)])
    use(quotas, "cq1", CPU=1)
    use(quotas, "cq2", CPU=2.5)

    assert available(quotas, "cq1") == 0, "never less than nothing"
    assert available(quotas, "cq2") == 2.5


def test_documented_borrowing_example():
    quotas = tree([member("team-a-cq", "team-ab", CPU=9), member("team-b-cq", "team-ab", CPU=12)])

    assert available(quotas, "team-a-cq") == 21
    use(quotas, "team-a-cq", CPU=9)
    assert not quotas.borrows("team-a-cq")
    assert quotas.borrows("team-a-cq", {"CPU": units(1)})


def test_documented_borrowing_limit_example():
    quotas = tree([member("team-a-cq", "team-ab", CPU=quota(9, 1)), member("team-b-cq", "team-ab", CPU=12)])

    assert available(quotas, "team-a-cq") == 10
    assert available(quotas, "team-b-cq") == 21


def test_documented_lending_limit_example():
    quotas = tree(
        [member("team-a-cq", "team-ab", CPU=9), member("team-b-cq", "team-ab", CPU=quota(12, None, 1))]
    )

    use(quotas, "team-b-cq", CPU=11)
    assert available(quotas, "team-a-cq") == 10
    use(quotas, "team-b-cq", CPU=1)
    assert available(quotas, "team-a-cq") == 9
    assert tree([member("a", "ab", CPU=9), member("b", "ab", CPU=quota(12, None, 1))]).potential(
        "b", "CPU"
    ) == units(21)


def test_documented_shared_pool_of_a_cohort():
    quotas = tree([member("my-cluster-queue", "hello-cohort", CPU=0)], [member("hello-cohort", CPU=12)])

    assert available(quotas, "my-cluster-queue") == 12
    assert quotas.borrows("my-cluster-queue", {"CPU": 1}), "the pool is nobody's own"


def test_lendable_is_what_all_members_lend():
    quotas = tree(
        [
            member("cq1", "test-cohort", CPU=quota(8, None, 8), GPU=quota(3, None, 3)),
            member("cq2", "test-cohort", CPU=quota(2, None, 2)),
        ]
    )

    assert quotas.lendable("test-cohort", "CPU") == units(10)
    assert quotas.lendable("test-cohort", "GPU") == units(3)


LENDER = member("lending-cq", "test-cohort", CPU=8, GPU=5)
SHARES = {
    "no cohort": ([member("cq", CPU=2000, GPU=5)], {"CPU": 1, "GPU": 2}, {}, (0, "", False)),
    "below nominal": (
        [member("cq", "test-cohort", CPU=2, GPU=5), LENDER],
        {"CPU": 1, "GPU": 2},
        {},
        (0, "", False),
    ),
    "above nominal: (7-5)*1000/10": (
        [member("cq", "test-cohort", CPU=2, GPU=5), LENDER],
        {"CPU": 3, "GPU": 7},
        {},
        (200, "GPU", True),
    ),
    "slightly above in a large cohort": (
        [member("cq", "test-cohort", GPU=500), member("lending-cq", "test-cohort", 300, GPU=1000)],
        {"GPU": 501},
        {},
        (1, "GPU", True),
    ),
    "far above, large weights": (
        [member("cq", "test-cohort", 300, GPU=500), member("lending-cq", "test-cohort", 300, GPU=1000)],
        {"GPU": 800},
        {},
        (1, "GPU", True),
    ),
    "one resource above: (3-2)*1000/10": (
        [member("cq", "test-cohort", CPU=2, GPU=5), LENDER],
        {"CPU": 3, "GPU": 3},
        {},
        (100, "CPU", True),
    ),
    "with a job to come: (1+4-2)*1000/10": (
        [member("cq", "test-cohort", CPU=2, GPU=5), LENDER],
        {"CPU": 1, "GPU": 2},
        {"CPU": 4, "GPU": 4},
        (300, "CPU", True),
    ),
    "nothing is lendable of a resource": (
        [
            member("cq", "test-cohort", CPU=2, GPU=quota(2, None, 0)),
            member("lending-cq", "test-cohort", CPU=8, GPU=quota(64, None, 0)),
        ],
        {"CPU": 1, "GPU": 1},
        {"CPU": 4, "GPU": 4},
        (300, "CPU", True),
    ),
    "integer weight: ((7-5)*1000/10)/2": (
        [member("cq", "test-cohort", 2, GPU=5), member("lending-cq", "test-cohort", GPU=5)],
        {"GPU": 7},
        {},
        (100, "GPU", True),
    ),
    "decimal weight: ((7-5)*1000/10)/(1/2)": (
        [member("cq", "test-cohort", 0.5, GPU=5), member("lending-cq", "test-cohort", GPU=5)],
        {"GPU": 7},
        {},
        (400, "GPU", True),
    ),
    "weight zero": (
        [member("cq", "test-cohort", 0, GPU=5), member("lending-cq", "test-cohort", GPU=10)],
        {"GPU": 7},
        {},
        (math.inf, "GPU", True),
    ),
}


@pytest.mark.parametrize("case", SHARES)
def test_dominant_resource_share_is_that_of_kueue(case):
    queues, usage, more, (value, resource, borrows) = SHARES[case]
    quotas = tree(queues)
    use(quotas, "cq", **usage)

    with quotas.with_more("cq", in_units(more)):
        share = quotas.share("cq")

    rounded = share.value if math.isinf(share.value) else math.ceil(share.value)
    assert (rounded, share.resource, share.borrows) == (value, resource, borrows)
    if any(queue["name"] == "lending-cq" for queue in queues):
        assert quotas.share("lending-cq").value == 0
    if queues[0]["over"]:
        assert quotas.cohort_share("test-cohort").value == 0, "a root has nobody to borrow from"


@pytest.mark.parametrize(
    ("nominal", "child", "root", "of_queue", "of_child"),
    [
        (5, member("child-cohort", "root", 2), 45, 100, 50),
        (0, member("child-cohort", "root", 2), 50, 200, 100),
        # What a cohort may borrow is all that its queue sees.
        (0, member("child-cohort", "root", GPU=quota(0, 10)), 50, 1000, 200),
    ],
)
def test_share_of_a_cohort_is_that_of_kueue(nominal, child, root, of_queue, of_child):
    quotas = tree([member("cq", "child-cohort", GPU=nominal)], [child, member("root", GPU=root)])
    use(quotas, "cq", GPU=10)

    assert quotas.share("cq").value == of_queue
    assert quotas.cohort_share("child-cohort").value == of_child
    assert quotas.cohort_share("root").value == 0


def test_shares_of_weight_zero_are_above_all_others_and_ordered_among_themselves():
    small, large = FairShare(10, 0.0), FairShare(20, 0.0)

    assert small < large
    assert FairShare(1000, 0.001) < small
    assert FairShare(0, 0.0) == FairShare(0, 1.0), "who borrows nothing has no share"
    assert FairShare(400, 2).value == 200
    assert FairShare(10, 4).value == 2.5


def test_the_least_share_is_next_then_priority_then_age():
    quotas = tree([member("a", "all", GPU=4), member("b", "all", GPU=4), member("c", "all", GPU=8)])
    use(quotas, "a", GPU=5)
    one = {"GPU": units(1)}
    waiting = [Candidate("a", one, 100, 0.0), Candidate("b", one, 0, 5.0), Candidate("c", one, 0, 4.0)]

    assert quotas.next_of(waiting).queue == "c", "b and c are within their quota; c waits for longer"
    assert quotas.next_of([waiting[0], Candidate("b", one, 1, 5.0), waiting[2]]).queue == "b", "priority"
    assert quotas.next_of([waiting[0], Candidate("b", {"GPU": units(7)}, 0, 5.0)]).queue == "a", (
        "7 - 4 > 6 - 4"
    )


def test_a_cohort_competes_as_one():
    """Of two organizations, the one that borrows less is next, however little one of its queues has."""
    quotas = tree(
        [member("a1", "a", GPU=0), member("a2", "a", GPU=0), member("b1", "b", GPU=0)],
        [member("root", GPU=40), member("a", "root"), member("b", "root")],
    )
    use(quotas, "a1", GPU=8)
    use(quotas, "b1", GPU=4)
    one = {"GPU": units(1)}

    assert quotas.next_of([Candidate("a2", one, 0, 0.0), Candidate("b1", one, 0, 1.0)]).queue == "b1"
    assert quotas.next_of([Candidate("a2", one, 0, 0.0), Candidate("a1", one, 9, 0.0)]).queue == "a2"


def test_borrowing_on_what_is_asked_for():
    quotas = tree([member("cq", "cohort", CPU=2, GPU=5), member("lending-cq", "cohort", CPU=8, GPU=5)])
    use(quotas, "cq", CPU=1, GPU=7)

    assert quotas.borrows("cq")
    assert not quotas.borrows_any_of("cq", ["CPU"])
    assert quotas.borrows_any_of("cq", ["CPU", "GPU"])


def test_reclaim_is_from_queues_that_borrow_only():
    quotas = tree([member("a", "all", GPU=4), member("b", "all", GPU=4), member("c", "all", GPU=4)])
    use(quotas, "b", GPU=8)
    use(quotas, "c", GPU=4)
    asked = {"GPU": units(4)}

    (right,) = quotas.reclaim_rights("a", asked, ["GPU"])

    assert (right.queue, right.by_tree) == ("b", True)
    quotas.remove("b", {"GPU": units(4)})
    assert not quotas.still_borrows(right, ["GPU"]), "the rest is its own"


def test_reclaim_across_cohorts_needs_a_cohort_that_borrows():
    """As in Kueue's "avoid queues within nominal quota" of `preemption_hierarchical_test.go`."""
    quotas = tree(
        [member("a", "left", GPU=4), member("b", "right", GPU=2), member("c", "right", GPU=2)],
        [member("root"), member("left", "root"), member("right", "root")],
    )
    use(quotas, "b", GPU=4)
    asked = {"GPU": units(4)}

    assert quotas.reclaim_rights("a", asked, ["GPU"]) == [], "b borrows from c, within their cohort"
    use(quotas, "c", GPU=2)
    (right,) = quotas.reclaim_rights("a", asked, ["GPU"])
    assert (right.queue, right.below) == ("b", ("right",))


def test_a_job_beyond_its_subtrees_quota_has_no_right_by_the_tree():
    quotas = tree([member("a", "all", GPU=2), member("b", "all", GPU=2)], [member("all", GPU=4)])
    use(quotas, "b", GPU=8)

    (right,) = quotas.reclaim_rights("a", {"GPU": units(4)}, ["GPU"])

    assert not right.by_tree


def test_what_a_queue_names_not_is_not_counted_or_not_there():
    quotas = tree([member("a", GPU=4)])

    assert quotas.counted("a", {"CPU": 1, "GPU": 1, "NPU": 1, "rack-slot": 1}) == {"GPU": 1, "NPU": 1}
    assert quotas.could_fit("a", {"GPU": units(4)})
    assert not quotas.could_fit("a", {"NPU": 1})


def test_quota_below_what_runs_is_refused():
    quotas = tree([member("team-a", "all", GPU=4), member("b", "all", GPU=quota(4, None, 0))])
    use(quotas, "team-a", GPU=6)

    with pytest.raises(InputError, match=r"queue 'team-a': its jobs hold 6 GPU, .* may have 4 at most"):
        quotas.check_holds()


def test_a_cohort_below_what_runs_is_refused():
    quotas = tree([member("a", "all", GPU=4), member("b", "all", GPU=4)])
    use(quotas, "a", GPU=5)
    use(quotas, "b", GPU=5)

    with pytest.raises(InputError, match=r"cohort 'all': jobs of its queues hold 10 GPU, .* there are 8"):
        quotas.check_holds()


def test_shares_of_cards_add_up_exactly():
    quotas = tree([member("a", GPU=1)])
    for _ in range(10):
        use(quotas, "a", GPU=0.1)

    assert available(quotas, "a", "GPU") == 0
    quotas.check_holds()
