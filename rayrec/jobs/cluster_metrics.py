"""What a cluster's files say, in metrics for Prometheus: queues, jobs, quarantine, health.

    name                                labels            what
    rayrec_queue_seen_age_seconds                         since the queue's process last saw the cluster
    rayrec_queue_quota                  queue, resource   guaranteed
    rayrec_queue_used                   queue, resource   of it and of what is borrowed
    rayrec_queue_running_jobs           queue
    rayrec_queue_waiting_jobs           queue
    rayrec_queue_oldest_wait_seconds    queue             of those that wait; 0 where nobody does
    rayrec_jobs                         state             in the ledger, those that are over included
    rayrec_queue_cells_lacking                            kinds of guaranteed cells that find no node now
    rayrec_quarantined_nodes                              that new actors do not go to
    rayrec_quarantine_alarms_last_hour                    nodes that the breaker has kept in use
    rayrec_health_age_seconds                             since the last health check
    rayrec_health_nodes                 verdict           ok, suspect, bad, unknown
    rayrec_cluster_file_unreadable      file              1 where the ledger or the quarantine cannot be read

All of it is read from the ledger and the cluster's folder whenever Prometheus asks, so it is there while
Ray's head is down, or the queue's process, which is when somebody has to be told. What there is no file of
has no metric, and a file that is damaged hides no other. Trainings, services and the health check publish
theirs through Ray.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from rayrec.jobs.ledger import Ledger
from rayrec.jobs.overview import queue_list
from rayrec.pipelines.cluster.quarantine import Quarantine
from rayrec.pipelines.health.node_health import read_health
from rayrec.platform.health.findings import AS_NUMBER

logger = logging.getLogger(__name__)

HOUR_S = 3600.0


class ClusterMetrics(Collector):
    """A collector of one cluster."""

    def __init__(self, ledger: Path, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            ledger: file of the queue; there may be none.
            folder: of the cluster.
            clock: Unix time.
        """
        self._ledger, self._folder, self._clock = ledger, folder, clock

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: what there is depends on the files."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        unreadable = _labeled("cluster_file_unreadable", "1 where it cannot be read", "file")
        parts = {"quarantine": self._of_quarantine}
        if self._ledger.is_file():
            parts["ledger"] = self._of_ledger
        for file, part in parts.items():
            try:
                yield from list(part())  # all of it or nothing
            except Exception as error:  # of whatever kind: the other files are shown, too
                logger.warning("the %s is not shown: %s", file, error)
                unreadable.add_metric([file], 1)
            else:
                unreadable.add_metric([file], 0)
        yield from self._of_health()
        yield unreadable

    def _of_ledger(self) -> Iterator[GaugeMetricFamily]:
        # Every scrape comes on a thread of its own, which a connection of SQLite does not cross.
        ledger = Ledger(self._ledger)
        try:
            yield from self._of_queues(ledger)
        finally:
            ledger.close()

    def _of_queues(self, ledger: Ledger) -> Iterator[GaugeMetricFamily]:
        now, seen = self._clock(), ledger.seen_at()
        if seen is not None:
            yield _gauge("queue_seen_age_seconds", "Since the queue last saw the cluster", now - seen)
        quota = _labeled("queue_quota", "Guaranteed", "queue", "resource")
        used = _labeled("queue_used", "Used", "queue", "resource")
        running = _labeled("queue_running_jobs", "Jobs that run", "queue")
        waiting = _labeled("queue_waiting_jobs", "Jobs that wait", "queue")
        oldest = _labeled("queue_oldest_wait_seconds", "Longest wait of those that wait", "queue")
        for queue in queue_list(ledger):
            for resource, count in queue["quota"].items():
                quota.add_metric([queue["name"], resource], count)
            for resource, count in queue["used"].items():
                used.add_metric([queue["name"], resource], count)
            running.add_metric([queue["name"]], len(queue["running"]))
            waiting.add_metric([queue["name"]], len(queue["waiting"]))
            since = min((each["waits_since"] for each in queue["waiting"]), default=now)
            oldest.add_metric([queue["name"]], max(0.0, now - since))
        states = _labeled("jobs", "Jobs in the ledger", "state")
        for state, count in ledger.num_jobs().items():
            states.add_metric([state], count)
        yield from (quota, used, running, waiting, oldest, states)
        yield _gauge("queue_cells_lacking", "Guarantees for which no node is left", len(ledger.lacking()))

    def _of_quarantine(self) -> Iterator[GaugeMetricFamily]:
        now, quarantine = self._clock(), Quarantine(self._folder)
        nodes = {session.node_id for session in quarantine.sessions()}
        yield _gauge("quarantined_nodes", "Nodes that new actors do not go to", len(nodes))
        held = {alarm.node_name for alarm in quarantine.alarms() if now - alarm.at < HOUR_S}
        yield _gauge("quarantine_alarms_last_hour", "Nodes that the breaker has kept in use", len(held))

    def _of_health(self) -> Iterator[GaugeMetricFamily]:
        now, health = self._clock(), read_health(self._folder)
        if health is None:
            return
        yield _gauge("health_age_seconds", "Since the last health check", now - health["time"])
        verdicts = Counter(each["verdict"] for each in health["nodes"].values())
        by_verdict = _labeled("health_nodes", "Nodes by verdict", "verdict")
        for verdict in AS_NUMBER:
            by_verdict.add_metric([verdict], verdicts[verdict])
        yield by_verdict


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rayrec_{name}", text, value=value)


def _labeled(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rayrec_{name}", text, labels=labels)
