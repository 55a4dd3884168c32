import pytest

from rayrec.jobs.queues import Cell, QueueConfig, QueuesConfig
from rayrec.platform.errors import InputError


def refused(**values):
    with pytest.raises(InputError) as error:
        QueuesConfig.parse(values, "queues.yaml")
    return str(error.value)


def test_cycles_of_cohorts_are_refused():
    cohorts = [{"name": "a", "parent": "b"}, {"name": "b", "parent": "c"}, {"name": "c", "parent": "a"}]

    assert "'a' is part of 'b' is part of 'c' is part of 'a'" in refused(cohorts=cohorts)
    assert "'x' is part of 'x'" in refused(cohorts=[{"name": "x", "parent": "x"}])


def test_a_cycle_above_a_queue_is_found():
    cohorts = [{"name": "b", "parent": "c"}, {"name": "c", "parent": "b"}, {"name": "a", "parent": "b"}]

    assert "must make a tree" in refused(queues=[{"name": "q", "cohort": "a"}], cohorts=cohorts)


def test_an_unknown_queue_is_named_with_those_there_are():
    config = QueuesConfig.parse({"queues": [{"name": "team-b"}, {"name": "team-a"}]})

    assert config.queue("team-a").name == "team-a"
    with pytest.raises(InputError, match="no queue 'team-c'; queues are: team-a, team-b; add it with"):
        config.queue("team-c")
    with pytest.raises(InputError, match="queues are: none"):
        QueuesConfig().queue("team-c")


def test_two_queues_of_one_name_are_refused():
    assert "two settings of queue 'a'" in refused(queues=[{"name": "a"}, {"name": "a"}])
    assert "two settings of cohort 'a'" in refused(cohorts=[{"name": "a"}, {"name": "a"}])


def test_names_are_those_that_kubernetes_takes():
    assert "got 'Team A'" in refused(queues=[{"name": "Team A"}])


def test_limits_need_a_cohort():
    queue = {"name": "a", "quotas": {"GPU": {"nominal": 4, "borrowing_limit": 4}}}

    assert "'a': GPU has a borrowing or lending limit, and there is no cohort" in refused(queues=[queue])


def test_a_queue_lends_no_more_than_it_has():
    queue = {"name": "a", "cohort": "all", "quotas": {"GPU": {"nominal": 4, "lending_limit": 5}}}

    assert "queue 'a': lending_limit of GPU must be at most its nominal quota of 4, got 5" in refused(
        queues=[queue]
    )


def test_policies_that_contradict_each_other_are_refused():
    policy = {"reclaim_within_cohort": "Never", "borrow_within_cohort": "LowerPriority"}

    assert "borrow_within_cohort: LowerPriority needs" in refused(
        queues=[{"name": "a", "preemption": policy}]
    )
    assert "max_priority_threshold needs" in refused(
        queues=[{"name": "a", "preemption": {"max_priority_threshold": 3}}]
    )


def test_cells_are_the_nominal_quota():
    queue = QueueConfig(
        name="a",
        cells=(Cell(resources={"GPU": 8, "CPU": 16}, count=2), Cell(resources={"GPU": 1})),
    )

    assert {name: quota.nominal for name, quota in queue.all_quotas.items()} == {"GPU": 17, "CPU": 32}
    assert "its cells have 8 GPU and its nominal quota says 9" in refused(
        queues=[{"name": "a", "cells": [{"resources": {"GPU": 8}}], "quotas": {"GPU": {"nominal": 9}}}]
    )
    assert "must be more than 0" in refused(queues=[{"name": "a", "cells": [{"resources": {"GPU": 0}}]}])
    tenths = {"cells": [{"resources": {"GPU": 0.1}, "count": 3}], "quotas": {"GPU": {"nominal": 0.3}}}
    queue = QueueConfig.parse({"name": "a", **tenths}, source="test")
    assert queue.all_quotas["GPU"].nominal == pytest.approx(0.3)


def test_keys_that_do_not_exist_are_refused():
    assert "there is no setting 'queues.0.nominall'" in refused(queues=[{"name": "a", "nominall": 3}])
