"""Nodes, gangs, queues and jobs for tests of the queue."""

from rayrec.jobs.job import Job, Size
from rayrec.jobs.queues import Cell, CohortConfig, Preemption, QueueConfig, QueuesConfig, ResourceQuota
from rayrec.pipelines.cluster.placement import ActorGroup, Node


def node(name, cards=8, cpus=64.0, free=None, **labels):
    total = {"CPU": cpus, **({"GPU": float(cards)} if cards else {})}
    return Node(name, f"10.0.0.{name}", labels, total, total if free is None else {**total, **free})


def nodes(count, cards=8, per_rack=2, cpus=64.0):
    return [node(f"n{place}", cards, cpus, rack=f"r{place // per_rack}") for place in range(count)]


def gang(count, cards=1, cpus=1, strategy="PACK", labels=None, stage="trainer"):
    """`count` actors with `cards` each."""
    resources = {"CPU": float(cpus), **({"GPU": float(cards)} if cards else {})}
    return Size((ActorGroup(stage, "placement.trainers", count, resources, labels or {}, strategy),))


def job(name, queue="a", size=None, at=0.0, lasts=100.0, **more):
    """A job; `size` is a gang, several from the largest to the least, or a number of cards on one node."""
    if isinstance(size, int | float):
        size = gang(1, size)
    sizes = size if isinstance(size, tuple) else (size or gang(1),)
    return Job(name, queue, sizes, at, expected_s=lasts, **more)


def smaller(size, count, speed=0.5):
    """The same with fewer actors."""
    group = size.groups[0]
    return Size(
        (ActorGroup(group.stage, group.setting, count, group.resources, group.labels, group.strategy),), speed
    )


def queue(name, gpus=None, cells=(), cohort="all", borrow=None, lend=None, weight=1.0, **preemption):
    quotas = {}
    if gpus is not None or borrow is not None:
        limits = {"borrowing_limit": borrow, "lending_limit": lend}
        quotas["GPU"] = ResourceQuota(**({"nominal": gpus} if gpus is not None else {}), **limits)
    return QueueConfig(
        name=name,
        cohort=cohort,
        quotas=quotas,
        cells=tuple(Cell(resources={"GPU": cards}, count=count) for cards, count in cells),
        weight=weight,
        preemption=Preemption(**preemption),
    )


def queues(*members, shared=0):
    """Queues of one cohort that has some cards of its own."""
    cohorts = (CohortConfig(name="all", quotas={"GPU": ResourceQuota(nominal=shared)}),) if shared else ()
    return QueuesConfig(queues=members, cohorts=cohorts)
