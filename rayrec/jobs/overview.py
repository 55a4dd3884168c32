"""What commands and pages say of queues and jobs, and what they refuse, from the ledger alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rayrec.jobs.admission import Scheduler, check_change
from rayrec.jobs.job import Job, Waiting
from rayrec.jobs.ledger import JobEntry, JobState, Ledger
from rayrec.jobs.queues import QueuesConfig
from rayrec.jobs.quota import UNITS, QuotaTree
from rayrec.pipelines.cluster.placement import Node
from rayrec.platform.errors import InputError


def check_queues(ledger: Ledger, config: QueuesConfig, before: QueuesConfig) -> None:
    """Refuse settings of queues that what runs does not agree with, or that the nodes cannot guarantee.

    Nodes are those that the queue saw last; before it has run, only quotas are compared. What was guaranteed
    in vain before may stay so.

    Raises:
        InputError: a quota below what runs, or guarantees that cannot all be had at once.
    """
    running = [each.running for each in ledger.jobs(JobState.running) if each.running is not None]
    # A quarantined node comes back; what is guaranteed on it is no less for that.
    nodes = [replace(node, quarantined=None) for node in ledger.nodes() or ()]
    if nodes:
        check_change(config, nodes, running, before)
        return
    tree = QuotaTree(config)
    for each in running:
        tree.add(each.job.queue, tree.counted(each.job.queue, each.job.sizes[each.size].amounts))
    tree.check_holds()


def check_job(config: QueuesConfig, nodes: Sequence[Node] | None, job: Job) -> None:
    """Refuse a job that could never run.

    Args:
        nodes: None: not known yet; then the queue looks when it runs.

    Raises:
        InputError: there is no such queue, or its quota or the nodes never have what the job asks for.
    """
    config.queue(job.queue)
    job.check()
    if nodes is None:
        return
    refusal = Scheduler(config, nodes).submit(Waiting(job))
    if refusal is not None:
        raise InputError(f"job {job.id} could never run: {refusal.reason}")


def check_only_service(ledger: Ledger) -> None:
    """Refuse a service beside another one: `rayrec serve` has one application on a Ray cluster.

    Raises:
        InputError: one waits or runs.
    """
    for each in ledger.jobs(JobState.waiting, JobState.running):
        if each.job.kind == "service":
            raise InputError(
                f"job {each.id} is a service, and a Ray cluster has one; stop it first (rayrec jobs --stop "
                f"{each.id}), or let it end"
            )


def queue_list(ledger: Ledger) -> list[dict[str, Any]]:
    """Every queue with its quota, what is used of it, who runs, and who waits, for what and until when."""
    config = ledger.queues()
    tree = QuotaTree(config)
    entries = ledger.jobs(JobState.waiting, JobState.running)
    for each in entries:
        if each.running is not None:
            amounts = each.job.sizes[each.running.size].amounts
            tree.add(each.job.queue, tree.counted(each.job.queue, amounts))
    listed = []
    for queue in config.queues:
        used, nominal = tree.usage(queue.name), tree.nominal(queue.name)
        resources = sorted({*used, *nominal})
        running = [each.id for each in entries if each.job.queue == queue.name and each.running is not None]
        waiting = [
            {
                "id": each.id,
                "priority": each.job.priority,
                "submitted_at": each.job.submitted_at,
                "waits_since": each.job.waits_since if each.waiting is None else each.waiting.since,
                "reason": each.reason or "the queue has not looked at it yet",
                "starts_at": each.starts_at,
            }
            for each in sorted(entries, key=lambda entry: entry.job.order)
            if each.job.queue == queue.name and each.state is JobState.waiting
        ]
        listed.append(
            {
                "name": queue.name,
                "cohort": queue.cohort,
                "weight": queue.weight,
                "quota": {name: nominal.get(name, 0) / UNITS for name in resources},
                "used": {name: used.get(name, 0) / UNITS for name in resources},
                "use": ", ".join(
                    f"{used.get(name, 0) / UNITS:g} of {nominal.get(name, 0) / UNITS:g} {name}"
                    for name in resources
                ),
                "running": running,
                "waiting": waiting,
            }
        )
    return listed


def job_summary(entry: JobEntry) -> dict[str, Any]:
    """A job in one line."""
    job, running = entry.job, entry.running
    size = job.sizes[0 if running is None else running.size]
    nodes = Counter(node for members in (running.placed if running else {}).values() for node in members)
    return {
        "id": entry.id,
        "queue": job.queue,
        "state": entry.state.value,
        "kind": job.kind,
        "priority": job.priority,
        "attempt": entry.attempt,
        "asks": ", ".join(f"{amount / UNITS:g} {name}" for name, amount in sorted(size.amounts.items())),
        "size": None if running is None else f"{running.size + 1} of {len(job.sizes)}",
        "nodes": sorted(nodes),
        "submitted_at": job.submitted_at,
        "starts_at": entry.starts_at,
        "ends_at": None if running is None else running.ends_at,
        "ended_at": entry.ended_at,
        "reason": entry.reason,
    }


def job_details(ledger: Ledger, job_id: str) -> dict[str, Any]:
    """A job with its attempts, and all that was decided about it and why.

    Raises:
        InputError: there is none of this id.
    """
    entry = ledger.job(job_id)
    return {
        **job_summary(entry),
        "command": list(entry.command.argv),
        "run": entry.command.run,
        "attempts": [
            {
                "number": each.number,
                "submission": each.submission,
                "size": each.size + 1,
                "phase": each.phase.value,
                "began_at": each.began_at,
                "ended_at": each.ended_at,
                "lost_s": each.lost_s,
                "outcome": each.outcome,
            }
            for each in ledger.attempts(job_id)
        ],
        "decisions": [
            {"at": each.at, "kind": each.kind, "reason": each.reason} for each in ledger.noted(job_id)
        ],
    }
