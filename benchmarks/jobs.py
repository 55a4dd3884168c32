"""What queues with guarantees cost and keep: 10,000 jobs on 64 nodes of eight cards, simulated.

The decisions are those of the real code (`rayrec.jobs.admission`, `reclaim`), which look every five seconds
as the real loop does; only time is simulated. The trace is seeded: jobs of 1 to 32 cards, most of them
small and short, as in the clusters that Hu et al. describe (Characterization and Prediction of Deep
Learning Workloads in Large-Scale GPU Datacenters, SC'21); every eighth is a training with parameter servers
beside it. They come about as fast as the cluster can end them, so that nearly all cards are wanted. Eight
teams share one cohort. Six have cells, and their jobs one size each, so that what a cluster of their own
would do is known; of the others', half of the large ones can run with half of their trainers, or have to be
in one rack. Bars:

* `jobs-time`: 10 s over the processor's seconds of all decisions, by a `Scheduler` that is told what happens.
* `jobs-decision`: the time between two looks over the processor's seconds of the longest decision as
  `rayrec queue run` takes it: with `decide`, which rebuilds the state from all that runs and waits. One in
  500 looks is measured.
* `jobs-guarantee`: the grace period over the longest time for which a job of a queue with cells, the first of
  its queue and with room in the cells that its queue has free, had not started.
* `jobs-own-cluster`: for each queue with cells, the mean wait in a cluster of its own with the grace period
  before every start, over the mean wait here, of the jobs that its cells can hold; the least of all queues. A
  line says how many single jobs waited longer: jobs start earlier here, so they end in another order, and a
  later one may find its queue's cells in use by others of its queue.
* `jobs-starvation`: the bound on waiting over the longest wait. The bound is the time after which a job is
  passed no more, and the longest job on the cluster that it may then have to wait for.
* `jobs-utilization`: card-seconds in use until the last job came, over those of first come, first served
  without queues.

That no two jobs are on one card, and that the sums add up, is checked while it runs, and by tests.
`RAYREC_BENCH_STEPS` and `_ROWS` do not change it.
"""

from __future__ import annotations

import random
import time

from benchmarks.harness import Bar, BenchOptions
from rayrec.jobs.admission import SchedulingConfig, decide
from rayrec.jobs.cells import check_guarantees
from rayrec.jobs.job import Job, Size
from rayrec.jobs.queues import Cell, QueueConfig, QueuesConfig, ResourceQuota
from rayrec.jobs.simulation import (
    Outcome,
    Simulation,
    check_no_card_twice,
    first_come_first_served,
    own_cluster,
)
from rayrec.pipelines.cluster.placement import ActorGroup, Node
from rayrec.platform.console import log

JOBS, NODES, CARDS, CPUS, NODES_OF_A_RACK = 10_000, 64, 8, 96, 8
LIMIT_S = 10.0
SEED = 28
CARDS_OF_JOBS = {1: 40, 2: 20, 4: 15, 8: 15, 16: 7, 32: 3}
"""Number of cards, and how many of a hundred jobs ask for them."""
MEDIAN_S, SPREAD, LONGEST_S = 600.0, 1.1, 4 * 3600.0
GAP_S = 10.2
"""Between two jobs, on average."""
WITH_CELLS, WITH_NUMBERS = 6, 2
LOOK_S, GRACE_S = 5.0, 60.0
"""Between two looks of the queue; and from wanting room that others hold until the start, two looks
included."""
SETTINGS = SchedulingConfig(grace_s=GRACE_S - 2 * LOOK_S, max_wait_s=2 * 3600.0)
CHECKED_EVERY = 500


def bench(options: BenchOptions) -> list[Bar]:
    nodes, config, jobs = cluster(), queues(), trace(random.Random(SEED))
    check_guarantees(config, nodes)
    seconds, decision_s, vacating_s, outcome = _run(config, nodes, jobs)
    plain = first_come_first_served(nodes, jobs)
    until = jobs[-1].submitted_at
    waits = [record.waited_s for record in outcome.records.values()]
    longest = max(job.expected_s or 0.0 for job in jobs)
    bound_s = SETTINGS.max_wait_s + longest + GRACE_S
    share = outcome.used(until) / plain.used(until)
    records = outcome.records.values()
    log.print(
        f"{seconds:.1f} s of the processor for {outcome.num_decisions} decisions about {len(jobs)} jobs; "
        f"{sum(record.num_stops for record in records)} stops, "
        f"{sum(record.num_shrinks for record in records)} shrinks, "
        f"{sum(record.num_grows for record in records)} grows",
        highlight=False,
    )
    mean, plain_mean = sum(waits) / len(waits), _mean_wait(plain)
    log.print(
        f"mean wait {mean:.0f} s (first come, first served: {plain_mean:.0f} s), longest {max(waits):.0f} s; "
        f"{outcome.used(until) / _capacity(until):.1%} of the cards in use "
        f"({plain.used(until) / _capacity(until):.1%})",
        highlight=False,
    )
    share_alone = _against_own_clusters(config, nodes, jobs, outcome)
    return [
        Bar.once("jobs-time", LIMIT_S / seconds, "10 s", 1.0),
        Bar.once("jobs-decision", LOOK_S / decision_s, "the time between two looks", 1.0),
        Bar.once("jobs-guarantee", GRACE_S / vacating_s, "the grace period", 1.0),
        Bar.once("jobs-own-cluster", share_alone, "clusters of their own", 1.0),
        Bar.once("jobs-starvation", bound_s / max(waits), "the bound on waiting", 1.0),
        Bar.once("jobs-utilization", share, "first come, first served", 0.9),
    ]


def _run(config: QueuesConfig, nodes: list[Node], jobs: list[Job]) -> tuple[float, float, float, Outcome]:
    """Run the trace.

    Returns:
        Processor seconds without the checks, and of the longest decision from nothing; the longest time for
        which a job with room in its queue's cells had not started; and what became of the jobs.
    """
    with_cells = [queue.name for queue in config.queues if queue.cells]
    since: dict[str, float] = {}
    seconds, decision_s, began = 0.0, 0.0, time.process_time()
    simulation = Simulation(config, nodes, jobs, SETTINGS, look_s=LOOK_S)
    for number, now in enumerate(simulation.steps()):
        seconds += time.process_time() - began
        if number % CHECKED_EVERY == 0:
            check_no_card_twice(simulation.scheduler)
            running, waiting = simulation.scheduler.running, simulation.scheduler.waiting
            decided_at = time.process_time()
            decide(config, nodes, running, waiting, now, SETTINGS)
            if (took_s := time.process_time() - decided_at) > decision_s:
                decision_s = took_s
                log.print(
                    f"{len(running)} run, {len(waiting)} wait: decided in {took_s:.2f} s", highlight=False
                )
        for name in with_cells:
            if (job := simulation.scheduler.held_up(name)) is not None:
                since.setdefault(job.id, now)
        for waiting in simulation.scheduler.planned:
            if waiting.job.queue in with_cells:
                since.setdefault(waiting.job.id, now)
        began = time.process_time()
    seconds += time.process_time() - began
    outcome = simulation.outcome
    assert not outcome.refused, "every job of the trace can run"
    assert all(record.ended_at is not None for record in outcome.records.values())
    vacating = [
        outcome.records[name].job.submitted_at + outcome.records[name].waited_s - at
        for name, at in since.items()
    ]
    return seconds, decision_s, max(vacating) + LOOK_S, outcome


def _against_own_clusters(
    config: QueuesConfig, nodes: list[Node], jobs: list[Job], outcome: Outcome
) -> float:
    """Of the queue that gains least: the mean wait in its own cluster over that here."""
    ratios: list[float] = []
    for queue in config.queues:
        if not queue.cells:
            continue
        own = [job for job in jobs if job.queue == queue.name]
        alone = first_come_first_served(own_cluster(config, nodes, queue.name), own, GRACE_S)
        fitting = [job.id for job in own if job.id not in set(alone.refused)]
        here_s = [outcome.records[name].waited_s for name in fitting]
        alone_s = [alone.records[name].waited_s for name in fitting]
        ratios.append(sum(alone_s) / sum(here_s))
        num_late = sum(here > there for here, there in zip(here_s, alone_s, strict=True))
        log.print(
            f"{queue.name}: {len(fitting)} jobs fit its cells; mean wait {sum(here_s) / len(here_s):.0f} s, "
            f"in a cluster of its own {sum(alone_s) / len(alone_s):.0f} s; {num_late} waited longer",
            highlight=False,
        )
    return min(ratios)


def _capacity(until: float) -> float:
    return NODES * CARDS * 10_000 * until


def _mean_wait(outcome: Outcome) -> float:
    waits = [record.waited_s for record in outcome.records.values() if record.started_at is not None]
    return sum(waits) / len(waits)


def cluster() -> list[Node]:
    """64 nodes in racks of eight."""
    total = {"CPU": float(CPUS), "GPU": float(CARDS)}
    return [
        Node(
            f"node-{place:02}", f"10.0.0.{place}", {"rack": f"rack-{place // NODES_OF_A_RACK}"}, total, total
        )
        for place in range(NODES)
    ]


def queues() -> QueuesConfig:
    """Eight teams that are guaranteed all cards together, and lend them."""
    cells = (
        Cell(resources={"GPU": 8}, count=6),
        Cell(resources={"GPU": 4}, count=2),
        Cell(resources={"GPU": 1}, count=8),
    )
    guaranteed = sum(cell.count * cell.resources["GPU"] for cell in cells)
    rest = (NODES * CARDS - WITH_CELLS * guaranteed) / WITH_NUMBERS
    return QueuesConfig(
        queues=(
            *(QueueConfig(name=f"cells-{place}", cohort="all", cells=cells) for place in range(WITH_CELLS)),
            *(
                QueueConfig(
                    name=f"numbers-{place}", cohort="all", quotas={"GPU": ResourceQuota(nominal=rest)}
                )
                for place in range(WITH_NUMBERS)
            ),
        )
    )


def trace(rng: random.Random) -> list[Job]:
    names = [queue.name for queue in queues().queues]
    plain = {cards: _trainers(cards) for cards in CARDS_OF_JOBS}
    training = {cards: _with_servers(cards) for cards in CARDS_OF_JOBS}
    at, jobs = 0.0, list[Job]()
    for number in range(JOBS):
        at += rng.expovariate(1 / GAP_S)
        name = rng.choice(names)
        (cards,) = rng.choices(list(CARDS_OF_JOBS), list(CARDS_OF_JOBS.values()))
        made = training if number % 8 == 0 else plain
        sizes: tuple[Size, ...] = (made[cards],)
        is_free = name.startswith("numbers") and rng.random() < 0.5
        if is_free and cards >= 8:
            sizes = (made[cards], Size(made[cards // 2].groups, speed=0.55))
        jobs.append(
            Job(
                f"job-{number:05}",
                name,
                sizes,
                at,
                priority=rng.choice((0, 0, 0, 10)),
                kind="train",
                expected_s=min(LONGEST_S, rng.lognormvariate(0.0, SPREAD) * MEDIAN_S),
                within="rack" if is_free and cards == 16 else None,
            )
        )
    return jobs


def _trainers(cards: int) -> Size:
    return Size((ActorGroup("trainer", "placement.trainers", cards, {"CPU": 4.0, "GPU": 1.0}, {}, "PACK"),))


def _with_servers(cards: int) -> Size:
    servers = ActorGroup("parameter_server", "placement.servers", 2, {"CPU": 4.0}, {}, "SPREAD")
    return Size((servers, *_trainers(cards).groups))
