import itertools
import math
import random
from dataclasses import replace

import pytest

from rayrec.jobs.admission import SchedulingConfig, decide
from rayrec.jobs.job import Grow, Reserve, Running, Shrink, Start, Step, Stop, Wait, Waiting
from rayrec.jobs.simulation import Simulation, check_no_card_twice, first_come_first_served, own_cluster
from tests.helpers.examples import cases
from tests.helpers.jobs import gang, job, nodes, queue, queues, smaller

GRACE = 10.0


def trace(seed, count, names, sizes=(1, 1, 2, 4, 8), gap=12.0, lasts=(20, 200), **more):
    """Jobs of one actor each, so that where they fit is a matter of shapes alone."""
    rng, at, made = random.Random(seed), 0.0, []
    for number in range(count):
        at += rng.expovariate(1 / gap)
        size = gang(1, cards=rng.choice(sizes))
        made.append(job(f"j{number:03}", rng.choice(names), size, at, float(rng.randint(*lasts)), **more))
    return made


def fits_by_force(cards, cells):
    """Whether actors of so many cards each fit in cells with so many left: every way is tried."""
    if not cards:
        return True
    first, *rest = cards
    return any(
        left >= first and fits_by_force(rest, (*cells[:place], left - first, *cells[place + 1 :]))
        for place, left in enumerate(cells)
    )


CELLS = queues(queue("a", cells=[(8, 1), (2, 1)]), queue("b", cells=[(4, 1), (1, 2)]), queue("c", gpus=6))


@pytest.mark.parametrize("seed", cases(range(12), range(3)))
def test_a_job_that_fits_in_its_queues_free_cells_starts_within_the_grace_period(seed):
    """Sharing safety, against every possible way to place it (HiveD, OSDI'20, section 3).

    After each event, for the first job that waits in each queue with cells: if any placement of its actors
    in the free cells exists, it has started or its room is being vacated, and it starts within one grace
    period.
    """
    jobs = trace(seed, 120, "abc")
    simulation = Simulation(CELLS, nodes(3), jobs, SchedulingConfig(grace_s=GRACE))
    planned: dict[str, float] = {}
    num_checked = 0
    for now in simulation.steps():
        state = simulation.scheduler.state
        check_no_card_twice(simulation.scheduler)
        for name, queue_config in (("a", CELLS.queues[0]), ("b", CELLS.queues[1])):
            cells = [cell for cell in queue_config.cells for _ in range(cell.count)]
            left = [int(cell.resources["GPU"]) for cell in cells]
            for run in state.runs.values():
                for cell_id in (run.running.cells or {}).get("trainer", ()) if run.job.queue == name else ():
                    left[int(cell_id.split("#")[1])] -= int(run.job.sizes[0].groups[0].resources["GPU"])
            assert min(left) >= 0, "a cell has more than it holds"
            waiting = [
                each.job
                for each in simulation.scheduler.waiting
                if each.job.queue == name and each.plan is None
            ]
            guaranteed = [
                each
                for each in sorted(waiting, key=lambda each: each.order)
                if each.sizes[0].groups[0].resources["GPU"] <= max(cell.resources["GPU"] for cell in cells)
            ]
            for first in guaranteed[:1]:
                num_checked += 1
                asked = [int(first.sizes[0].groups[0].resources["GPU"])]
                # In a cluster of their own, those before it that run on borrowed terms would be there, too.
                for run in state.runs_outside(name):
                    before = int(run.job.sizes[0].groups[0].resources["GPU"])
                    if run.job.order < first.order and fits_by_force([before], tuple(left)):
                        asked.insert(0, before)
                assert not fits_by_force(asked, tuple(left)), (
                    f"{first.id} waits at {now} although {left} are free"
                )
        for each in simulation.scheduler.waiting:
            if each.plan is not None:
                planned.setdefault(each.job.id, now)
    for job_id, since in planned.items():
        assert simulation.outcome.records[job_id].started_at <= since + GRACE + 1e-9
    assert num_checked > 20, "somebody waited"
    assert all(record.ended_at is not None for record in simulation.outcome.records.values())


@pytest.mark.parametrize("seed", cases(range(12), range(3)))
def test_a_queue_within_its_guarantee_waits_no_longer_than_in_its_own_cluster_and_the_grace_period(seed):
    """Its own cluster is its cells, first come first served, where a job holds its room for the grace
    period before it starts; jobs have one size of cells, so that no order of ends can leave holes that
    another would not."""
    config = queues(queue("a", cells=[(4, 3)]), queue("b", cells=[(4, 2)]), queue("c", gpus=4))
    jobs = [
        replace(each, sizes=(gang(1, cards=4),)) if each.queue in "ab" else each
        for each in trace(seed, 150, "abc", gap=14.0)
    ]
    jobs = [each for each in jobs if each.queue in "ab" or each.sizes[0].groups[0].resources["GPU"] <= 8]

    shared = Simulation(config, nodes(3), jobs, SchedulingConfig(grace_s=GRACE)).run()

    num_waited = 0
    for name in "ab":
        own = [each for each in jobs if each.queue == name]
        alone = first_come_first_served(own_cluster(config, nodes(3), name), own, start_s=GRACE)
        for each in own:
            at_most = alone.records[each.id].started_at
            num_waited += at_most > each.submitted_at + GRACE
            assert shared.records[each.id].started_at <= at_most + 1e-6, each.id
    assert num_waited > 5, "in its own cluster, too, somebody waits"


def test_with_numbers_alone_the_same_jobs_wait_for_a_node():
    """HiveD's sharing anomaly over time: b's small jobs come first and end late, and a needs a whole node."""
    small = [
        job(f"b{number}", "b", gang(1), float(number), 1000.0 + 50 * (number % 2)) for number in range(8)
    ]
    ends = [job(f"x{number}", "b", gang(1), number + 0.5, 5.0 + number) for number in range(8)]
    wants = job("want", "a", gang(1, cards=8), 30.0, 100.0)

    def waits(*members):
        settings = SchedulingConfig(grace_s=GRACE)
        return (
            Simulation(queues(*members), nodes(2), [*small, *ends, wants], settings)
            .run()
            .records["want"]
            .waited_s
        )

    assert waits(queue("a", cells=[(8, 1)]), queue("b", cells=[(1, 8)])) <= GRACE
    assert waits(queue("a", gpus=8), queue("b", gpus=8)) > 500


def test_every_job_is_run_to_its_end_and_its_work_is_done_once():
    wish = gang(4)
    jobs = [
        replace(each, sizes=(wish, smaller(wish, 2), smaller(wish, 1, 0.25)), kind="train")
        for each in trace(3, 150, "abc", gap=10.0)
    ]
    config = queues(queue("a", gpus=8), queue("b", gpus=8), queue("c", gpus=8))

    simulation = Simulation(config, nodes(3), jobs, SchedulingConfig(grace_s=GRACE, grow_pause_s=30.0))
    for _ in simulation.steps():
        check_no_card_twice(simulation.scheduler)

    records = simulation.outcome.records.values()
    assert not simulation.outcome.refused
    assert sum(record.num_shrinks for record in records) > 0
    assert sum(record.num_grows for record in records) > 0
    for record in records:
        work = record.job.expected_s * 4  # card-seconds, at any size
        assert record.used / 10_000 == pytest.approx(work)
    assert all(abs(life.left_s) < 1e-6 for life in simulation._lives.values())


def test_growing_and_shrinking_do_not_take_turns():
    """An elastic job and a guaranteed one that comes again and again: the pause doubles each time."""
    wish = gang(8)
    elastic = job("elastic", "b", (wish, smaller(wish, 4)), 0.0, 50_000.0, kind="train")
    owner = [job(f"o{number}", "a", gang(4), 500.0 * number, 100.0) for number in range(1, 60)]
    config = queues(queue("a", gpus=4), queue("b", gpus=4))

    outcome = Simulation(
        config, nodes(1), [elastic, *owner], SchedulingConfig(grace_s=GRACE, grow_pause_s=60.0)
    ).run()

    assert 1 <= outcome.records["elastic"].num_shrinks <= 9, "60 would be once for each"
    assert max(record.waited_s for record in outcome.records.values()) <= GRACE


def test_nobody_starves_behind_an_endless_stream():
    """A job of all cards, and small ones that could always start before it."""
    wide = job("wide", "a", gang(8), 5.0, 50.0)
    small = [job(f"s{number:04}", "a", gang(1), number * 5.0, 60.0) for number in range(600)]
    config = queues(queue("a", gpus=8, cohort=None))

    def waits(**settings):
        return (
            Simulation(config, nodes(1), [wide, *small], SchedulingConfig(**settings))
            .run()
            .records["wide"]
            .waited_s
        )

    assert waits(max_passes=5) < 5 * 10 + 60 + 10
    # Where no end is known, only the bound on passing holds.
    unknown = [replace(each, expected_s=None) for each in (wide, *small)]
    lasts = {each.id: each.expected_s for each in (wide, *small)}
    outcome = Simulation(config, nodes(1), unknown, SchedulingConfig(max_passes=5), lasts).run()
    assert outcome.records["wide"].waited_s < 5 * 10 + 60 + 10


def test_low_priority_is_not_starved_by_high():
    low = job("low", "a", gang(8), 1.0, 50.0)
    high = [job(f"h{number:03}", "a", gang(8), number * 40.0, 50.0, priority=9) for number in range(200)]
    config = queues(queue("a", gpus=8, cohort=None))

    outcome = Simulation(config, nodes(1), [low, *high], SchedulingConfig(max_wait_s=1000.0)).run()

    assert outcome.records["low"].waited_s < 1000 + 2 * 50
    assert outcome.records["low"].num_stops == 0


def test_jobs_that_take_longer_than_expected_delay_and_break_nothing():
    jobs = trace(5, 100, "abc")
    rng = random.Random(1)
    lasts = {each.id: each.expected_s * rng.choice([0.3, 1.0, 3.0]) for each in jobs}

    simulation = Simulation(CELLS, nodes(3), jobs, SchedulingConfig(grace_s=GRACE), lasts)
    for _ in simulation.steps():
        check_no_card_twice(simulation.scheduler)

    assert all(record.ended_at is not None for record in simulation.outcome.records.values())


def test_the_same_seed_gives_the_same_decisions():
    def run():
        simulation = Simulation(CELLS, nodes(3), trace(7, 80, "abc"), keeps_decisions=True)
        return simulation.run().decisions

    assert run() == run()


def test_most_of_what_first_come_first_served_would_use_is_used():
    jobs = trace(11, 400, "abc", gap=9.0)

    shared = Simulation(CELLS, nodes(3), jobs, SchedulingConfig(grace_s=GRACE)).run()
    plain = first_come_first_served(nodes(3), jobs)

    until = jobs[-1].submitted_at
    assert shared.used(until) >= 0.9 * plain.used(until)


@pytest.mark.slow
def test_from_a_ledger_at_every_tick_nobody_is_lost_or_given_a_card_twice():
    """The queue process is built again from what it wrote down, at every tick, as after a crash."""
    config, members = CELLS, nodes(3)
    settings = SchedulingConfig(grace_s=GRACE, grow_pause_s=30.0)
    wish = gang(4)
    jobs = [
        replace(each, sizes=(wish, smaller(wish, 2)), kind="train") if number % 4 == 0 else each
        for number, each in enumerate(trace(13, 60, "abc", gap=8.0))
    ]
    waiting: dict[str, Waiting] = {}
    running: dict[str, Running] = {}
    told: dict[str, float] = {}
    ended: set[str] = set()
    arrivals = list(jobs)
    for tick in itertools.count():
        now = 5.0 * tick
        while arrivals and arrivals[0].submitted_at <= now:
            first = arrivals.pop(0)
            waiting[first.id] = Waiting(first)
        for job_id, run in list(running.items()):
            if job_id in told and now >= told[job_id] + GRACE:
                del told[job_id]
                step = run.step
                if step.size is None:
                    del running[job_id]
                    waiting[job_id] = Waiting(run.job, left_s=max(0.0, run.ends_at - now))
                else:
                    running[job_id] = replace(
                        run,
                        size=step.size,
                        placed=step.placed,
                        cells=step.cells,
                        step=None,
                        changed_at=now,
                        num_shrunk=run.num_shrunk + 1,
                    )
            elif job_id not in told and run.ends_at <= now:
                del running[job_id]
                ended.add(job_id)
        for decision in decide(
            config, members, list(running.values()), list(waiting.values()), now, settings
        ):
            name = decision.job_id
            if isinstance(decision, Start):
                running[name] = Running(
                    waiting.pop(name).job,
                    decision.size,
                    decision.placed,
                    now,
                    decision.cells,
                    decision.ends_at,
                )
            elif isinstance(decision, Reserve):
                waiting[name] = replace(waiting[name], plan=decision.plan)
            elif isinstance(decision, Shrink):
                running[name] = replace(
                    running[name], step=Step(decision.size, decision.placed, decision.for_job, decision.cells)
                )
                told[name] = now
            elif isinstance(decision, Stop):
                running[name] = replace(running[name], step=Step(None, {}, decision.for_job))
                told[name] = now
            elif isinstance(decision, Grow):
                running[name] = replace(
                    running[name],
                    size=decision.size,
                    placed=decision.placed,
                    cells=decision.cells,
                    changed_at=now,
                )
            else:
                assert isinstance(decision, Wait), decision
                waiting[name] = replace(waiting[name], num_passed=decision.num_passed)
        used: dict[str, float] = {}
        for run in running.values():
            for group in run.job.sizes[run.size].groups:
                assert len(run.placed[group.stage]) == group.count
                for node_id in run.placed[group.stage]:
                    used[node_id] = used.get(node_id, 0.0) + group.resources["GPU"]
        assert max(used.values(), default=0.0) <= 8, "no two jobs on one card"
        assert len(waiting) + len(running) + len(ended) + len(arrivals) == len(jobs), "no job is lost"
        if len(ended) == len(jobs):
            break
        assert now < 20_000, f"{list(waiting)} never start"
    assert math.isfinite(now)


def test_a_look_is_not_before_what_it_sees():
    """28,978.2 is a whole number of looks, but for rounding; before, time stood still there."""
    arrives = job("j", "a", gang(1), at=28978.200000000004, lasts=1.0)
    simulation = Simulation(queues(queue("a", gpus=8)), nodes(1), [arrives], look_s=0.1)

    assert len(list(itertools.islice(simulation.steps(), 10))) == 2
    assert simulation.outcome.records["j"].ended_at is not None
