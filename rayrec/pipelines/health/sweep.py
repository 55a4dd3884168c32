"""All nodes of a cluster at once: a pinned Ray task per node reads, the driver judges them beside each other.

    cluster_nodes ─► one task per node: read_counters ──┐
                     one per free card: burn_in ────────┼─► judge, with the other nodes' cards as peers
                     one actor per node, pair by pair ──┘        └─► NodeHealth, metrics

A task that does not come back makes its node unknown. What holds a card is never burnt in: tasks ask Ray for
the card, and get only one that nobody holds.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, get_args

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayrec.pipelines.cluster.placement import Node
from rayrec.pipelines.health.node_health import Look, NodeHealth, judge_looks
from rayrec.pipelines.health.pairs import PairResult, judge_pairs, rounds
from rayrec.platform.devices import HOST, HOST_COLLECTIVE_BACKEND, device_named, ray_options
from rayrec.platform.health.counters import Card, CardKind, Counters, read_counters
from rayrec.platform.health.findings import AS_NUMBER, Finding
from rayrec.platform.health.verdict import Limits, Seen
from rayrec.platform.metrics import RayMetrics
from rayrec.platform.processors import num_processors
from rayrec.platform.ray_tasks import interruptible

if TYPE_CHECKING:  # whose module needs torch
    from rayrec.platform.health.burn_in import BurnIn

logger = logging.getLogger(__name__)

LOOK_S = 60.0
"""For a node's answer: three drivers' limits, and the start of a process."""
BURN_IN_S = 180.0
PAIR_S = 60.0
PAIR_BYTES = 8 * 2**20
PAIR_REPEATS = 5
CARDS: Mapping[CardKind, str] = {kind: device_named(kind).ray_resource for kind in get_args(CardKind)}
"""Ray's names of cards."""


class Sweep:
    """Looks at a cluster, again and again: counts are judged by what came since the look before."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits
        self._previous: dict[str, Counters] = {}
        self._seen: dict[str, Seen] = {}
        self._metrics = HealthMetrics()

    def look(
        self, nodes: Sequence[Node], with_burn_in: bool = False, with_pairs: bool = False
    ) -> list[NodeHealth]:
        """Look at nodes of the connected cluster.

        Args:
            nodes: as `cluster_nodes` gives them; those that drain are left alone.
            with_burn_in: measure what each can do, where nobody works.
            with_pairs: let all pairs of nodes add numbers together.
        """
        nodes = [node for node in nodes if not node.is_draining]
        looks = read_nodes(nodes)
        further: dict[str, list[Finding]] = defaultdict(list)
        if with_burn_in:
            for node_id, findings in burn_in_nodes(nodes, looks).items():
                further[node_id] += findings
        if with_pairs:
            ids = {node.name: node.id for node in nodes}
            for name, findings in judge_pairs(run_pairs(nodes)).items():
                further[ids[name]] += findings
        health = judge_looks(nodes, looks, self._previous, self._limits, further, self._seen)
        # Both are kept of a node that is silent for a while: that is when cards are lost, and without an
        # earlier look all that its counters ever had would count as new.
        known = self._previous | {node_id: look.counters for node_id, look in looks.items()}
        self._previous = {node.id: known[node.id] for node in nodes if node.id in known}
        self._seen = {
            node.id: seen.also(looks[node.id].counters) if node.id in looks else seen
            for node in nodes
            for seen in [self._seen.get(node.id, Seen())]
        }
        self._metrics.publish(health)
        return health


class HealthMetrics:
    """Publishes `rayrec_node_health` by node, and `rayrec_node_findings` by node and code."""

    def __init__(self) -> None:
        self._nodes: dict[str, RayMetrics] = {}
        self._codes: dict[tuple[str, str], RayMetrics] = {}

    def publish(self, health: Sequence[NodeHealth]) -> None:
        for each in health:
            name = each.node.name
            metrics = self._nodes.setdefault(name, RayMetrics({"node": name}))
            metrics.publish({"node_health": AS_NUMBER[each.verdict]})
            counts = Counter(finding.code for finding in each.wrong)
            for code in counts:
                self._codes.setdefault((name, code), RayMetrics({"node": name, "code": code}))
            for (node, code), by_code in self._codes.items():
                if node == name:  # what is over is 0, not the last that was seen
                    by_code.publish({"node_findings": counts[code]})
        self._end({each.node.name for each in health})

    def _end(self, there: set[str]) -> None:
        """Of nodes that are gone, nothing is known, and nothing is found any more; said once."""
        for name in self._nodes.keys() - there:
            self._nodes.pop(name).publish({"node_health": AS_NUMBER["unknown"]})
        for name, code in [each for each in self._codes if each[0] not in there]:
            self._codes.pop((name, code)).publish({"node_findings": 0})


def expected_cards(node: Node) -> dict[CardKind, int | None]:
    """Cards that Ray was told the node has."""
    return {kind: int(count) for kind, name in CARDS.items() if (count := node.total.get(name, 0)) >= 1}


def pinned(node: Node) -> dict[str, Any]:
    """Ray's options of something small that runs on a node."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False)}


def read_nodes(nodes: Sequence[Node], limit_s: float = LOOK_S) -> dict[str, Look]:
    """Read the counters of all nodes at once; those that do not answer in time are left out."""
    sent_s = time.time()
    read: Any = ray.remote(max_retries=0)(read_counters)
    tasks = {
        read.options(**pinned(node)).remote(expected=expected_cards(node) or None): node.id for node in nodes
    }
    return {
        node_id: Look(counters, sent_s, received_s)
        for node_id, counters, received_s in _answers(tasks, limit_s)
    }


def burn_in_nodes(nodes: Sequence[Node], looks: Mapping[str, Look]) -> dict[str, list[Finding]]:
    """Measure each node and each card that nobody holds, and compare them by kind.

    Nodes of one machine take turns: together they would measure each other.
    """
    from rayrec.platform.health.burn_in import compare_burn_ins

    results: dict[str, BurnIn] = {}
    owners: dict[str, str] = {}
    findings: dict[str, list[Finding]] = defaultdict(list)
    machines: dict[str, list[Node]] = defaultdict(list)
    for node in nodes:
        machines[node.hostname or node.address].append(node)
    for turn in zip_longest(*machines.values()):
        tasks: dict[Any, str] = {}
        for node in filter(None, turn):
            place = f"the CPUs of {node.name}"
            tasks[_of_cpus().options(**pinned(node)).remote()] = place
            owners[place] = node.id
            for kind, resource in CARDS.items():
                if not (total := int(node.total.get(resource, 0))):
                    continue
                free = min(int(node.free.get(resource, 0)), total)
                if free < total:
                    detail = f"{total - free} of {total} are held by actors or jobs, and are not burnt in"
                    findings[node.id].append(
                        Finding.of("burn-in", f"{kind} cards of {node.name}", "unknown", detail=detail)
                    )
                cards = [card for card in _cards_of(looks.get(node.id)) if card.kind == kind]
                for number in range(free):
                    place = f"{kind} card {number} of {node.name}"
                    options = {**pinned(node), **ray_options({resource: 1})}
                    tasks[_of_card().options(**options).remote(kind, resource, cards)] = place
                    owners[place] = node.id
        results |= {place: result for place, result, _ in _answers(tasks, BURN_IN_S)}
    for place, judged in compare_burn_ins(results).items():
        findings[owners[place]] += judged
    for place in owners.keys() - results.keys():
        findings[owners[place]].append(
            Finding.of("burn-in", place, "unknown", detail="its task failed or did not come back")
        )
    return dict(findings)


def _cards_of(look: Look | None) -> tuple[Card, ...]:
    return () if look is None else look.counters.cards


def _of_cpus() -> Any:
    def measure() -> BurnIn:
        import tempfile

        import torch

        from rayrec.platform.health.burn_in import burn_in

        torch.set_num_threads(num_processors())
        return burn_in(HOST.kind, tempfile.gettempdir())

    return ray.remote(max_retries=0, max_calls=1)(interruptible(measure))


def _of_card() -> Any:
    def measure(kind: CardKind, resource: str, cards: Sequence[Card]) -> BurnIn:
        from rayrec.platform.health.burn_in import burn_in

        (given, *_) = ray.get_runtime_context().get_accelerator_ids()[resource]
        card = next((each for each in cards if str(each.index) == given or each.uuid == given), None)
        # Whether the CPUs are busy does not matter for what runs on the card.
        return burn_in(kind, None, card, load=lambda: 0.0)

    return ray.remote(max_retries=0, max_calls=1)(interruptible(measure))


def run_pairs(nodes: Sequence[Node]) -> list[PairResult]:
    """Let every pair of nodes add numbers together, each node in one pair at a time.

    Returns:
        By the nodes' names.
    """
    results = []
    tester: Any = ray.remote(PairTester)
    testers = {node.name: tester.options(**pinned(node)).remote() for node in nodes}
    try:
        for pairs in rounds(sorted(testers)):
            opened = {testers[first].open.remote(): (first, second) for first, second in pairs}
            tasks: dict[Any, tuple[str, str, int]] = {}
            addresses = {pair: address for pair, address, _ in _answers(opened, PAIR_S)}
            for (first, second), address in addresses.items():
                for rank, name in enumerate((first, second)):
                    tasks[testers[name].add.remote(address, rank)] = (first, second, rank)
            found: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)
            for (first, second, _), measured, _ in _answers(tasks, PAIR_S):
                found[first, second].append(measured)
            results += [_pair_result(pair, found.get(pair, [])) for pair in pairs]
    finally:
        for each in testers.values():
            ray.kill(each)
    return results


def _pair_result(pair: tuple[str, str], measured: Sequence[tuple[float, bool]]) -> PairResult:
    if len(measured) < 2:
        return PairResult(*pair, None, error="no answer, or an error of the connection")
    return PairResult(*pair, min(rate for rate, _ in measured), all(right for _, right in measured))


class PairTester:
    """One node's end of pairs; a process on its own, since a process group that failed may stay so."""

    def __init__(self) -> None:
        self._store: Any = None

    def open(self) -> tuple[str, int]:
        """Where a partner finds this one; called once before each pair, of its first member."""
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, 2, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def add(
        self, where: tuple[str, int], rank: int, num_bytes: int = PAIR_BYTES, repeats: int = PAIR_REPEATS
    ) -> tuple[float, bool]:
        """Add numbers with a partner.

        Returns:
            Bytes per second of the best time, and whether every sum was right, every time.
        """
        from datetime import timedelta

        import torch
        from torch.distributed import TCPStore

        limit = timedelta(seconds=PAIR_S / 2)
        store = self._store if rank == 0 else TCPStore(*where, 2, is_master=False, timeout=limit)
        torch.distributed.init_process_group(
            HOST_COLLECTIVE_BACKEND, store=store, rank=rank, world_size=2, timeout=limit
        )
        try:
            # Whole numbers, whose sum is exact; each partner has others.
            numbers = torch.arange(num_bytes // 4, dtype=torch.float32) % 1009
            expected, best_s, right = 3 * numbers + 7, float("inf"), True
            for _ in range(repeats):
                sent = numbers * (rank + 1) + 7 * rank
                torch.distributed.barrier()
                began = time.perf_counter()
                torch.distributed.all_reduce(sent)
                best_s = min(best_s, time.perf_counter() - began)
                right = right and torch.equal(sent, expected)
            return num_bytes / best_s, right
        finally:
            torch.distributed.destroy_process_group()
            self._store = None


def _answers(tasks: Mapping[Any, Any], limit_s: float) -> Iterator[tuple[Any, Any, float]]:
    """(key, answer, when it came) of the tasks that answer in time; of the others, why not is logged."""
    waiting = dict(tasks)
    until = time.monotonic() + limit_s
    while waiting and (left_s := until - time.monotonic()) > 0:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left_s)
        for promise in ready:
            key, received_s = waiting.pop(promise), time.time()
            try:
                yield key, ray.get(promise), received_s
            except Exception as error:
                logger.warning("%s: %s", key, str(error).strip().splitlines()[-1] if str(error) else error)
    for promise, key in waiting.items():
        logger.warning("%s: no answer in %.0f s", key, limit_s)
        ray.cancel(promise, force=False)
