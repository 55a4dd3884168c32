"""The time of a step on a cluster, in closed form, and which stage decides it.

    read ─► features ─► exchange (client, calls, network, servers) ─► dense ─► sum over trainers
      R        F          what can be read ahead hides behind dense            ring or tree

    step = max(read / R, features / F, a server's work, network, driver, a trainer's own way)
    way  = dense + sum over trainers + (1 - hidden * early) * exchange + what Ray takes between two batches

All stages work on different batches at once, so the slowest one decides. Processes of a node share its cores:
whatever a trainer computes there takes as much longer as other processes are running (a fixed point, since
they run less where steps are longer). On accelerators dense compute is matrix products and memory traffic of
the card, and the sum of gradients is that of `streams`.

Sources: exposed and hidden communication as in MAD-Max (ISCA'24); the largest of several Poisson loads for
the imbalance of servers, 1 + sqrt(2 ln S * S / U) (Raab & Steger, RANDOM'98).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from rayrec.pipelines.capacity.cluster_spec import ClusterSpec
from rayrec.pipelines.capacity.costs import (
    Costs,
    client_counts,
    dense_counts,
    driver_counts,
    features_counts,
    ray_counts,
    read_counts,
    seconds,
    server_counts,
)
from rayrec.pipelines.capacity.streams import Operation, Timeline, all_reduce_s, schedule
from rayrec.pipelines.capacity.workload import Workload

Stage = Literal["read", "features", "sparse", "dense", "driver"]

LEAST_LEFT = 0.1
"""Of a node's cores, whatever processes take while they have nothing to do."""
MANY = 64
"""Processes of a node, above which their mean number is taken for how many run."""
_ROUNDS = 36
"""Of the fixed point; each halves its error."""


@dataclass(frozen=True)
class Layout:
    """Who is where, and what a node has for it."""

    trainers_per_node: int
    servers_per_node: int
    cores: float
    """Of a trainer's node."""
    server_cores: float
    """Of a server's node; the same where servers are on the trainers' nodes."""
    is_shared: bool
    """Whether servers are on the trainers' nodes."""
    trainer_nodes: int
    server_nodes: int
    """Of their own, that have servers; 0 where these are on the trainers' nodes."""


class Parts(NamedTuple):
    """Pieces of a step, in seconds, as if every process had a core of its own."""

    read: float
    features: float
    server: float
    """Work of the fullest server for all trainers."""
    client: float
    """Work of a trainer for its exchange."""
    calls: float
    """Latency of the exchange's rounds."""
    network: float
    dense: float
    all_reduce: float
    between: float
    """From a trainer's report to its next batch."""
    driver: float
    ray: float
    hidden: float
    """Share of the exchange that hides behind dense compute."""
    on_cores: float
    """Of dense compute, what runs on cores and not on a card."""

    @property
    def exchange(self) -> float:
        """From the ids to the rows, and from the gradients to the acknowledgement."""
        return self.client + self.calls + self.network + self.server


@dataclass(frozen=True)
class StepPlan:
    """A step, and where its time goes."""

    seconds: float
    stages: dict[Stage, float]
    """How long each stage is busy in a step."""
    exposed: float
    """Of the exchange, what a trainer waits for or does itself between two dense computations."""
    parts: Parts
    stretch: float
    """Times as long as with cores of its own that a trainer's work takes."""
    server_stretch: float
    """The same of the fullest server, if those on nodes of their own have too few cores to share."""
    mfu: float
    """Of the peak of all cards in matrix products; 0 without cards."""

    @property
    def order(self) -> list[Stage]:
        """The stages, the busiest first."""
        return sorted(self.stages, key=lambda name: -self.stages[name])

    @property
    def bottleneck(self) -> Stage:
        return self.order[0]

    @property
    def sparse_reason(self) -> str:
        """What of the sparse stage takes longest, in words."""
        parts = self.parts
        pieces = {
            "the servers' own work": parts.server,
            "the trainers' work for calls and ids": parts.client,
            "the latency of calls": parts.calls,
            "the network": parts.network,
        }
        return max(pieces, key=pieces.__getitem__)


def layout_of(work: Workload, cluster: ClusterSpec) -> Layout:
    """Fill node after node where trainers have cards; else spread them over all nodes, as servers are."""
    nodes = max(int(cluster.trainers.count), 1)
    cards = cluster.trainers.cards_per_node
    trainers = -(-work.num_trainers // nodes) if cards is None else min(work.num_trainers, int(cards))
    used = -(-work.num_trainers // max(trainers, 1))
    cores = cluster.trainers.cores.value
    if cluster.servers is None:
        return Layout(trainers, -(-work.num_servers // nodes), cores, cores, True, used, 0)
    servers = -(-work.num_servers // max(int(cluster.servers.count), 1))
    server_nodes = -(-work.num_servers // max(servers, 1))
    return Layout(trainers, servers, cores, cluster.servers.cores.value, False, used, server_nodes)


def imbalance(num_ids: float, num_servers: int) -> float:
    """Of the fullest of several servers that ids are hashed to, over the mean."""
    if num_servers < 2 or num_ids <= 0:
        return 1.0
    return 1 + math.sqrt(2 * math.log(num_servers) * num_servers / num_ids)


def server_seconds(work: Workload, cluster: ClusterSpec, costs: Costs, num_servers: int) -> list[float]:
    """Work of the fullest so many servers for all trainers in a step, the fullest first."""
    found: list[tuple[float, int]] = []
    for load in work.server_loads:
        of_one = seconds(costs, server_counts(work, load)) / cluster.core_speed.value
        among = load.num_servers
        found.append((of_one * imbalance(load.ids * among, among), among))
    return _fullest(found, num_servers)


def _fullest(found: Sequence[tuple[float, int]], num_servers: int) -> list[float]:
    """The largest so many of values that are there a number of times each, the largest first."""
    ordered = sorted(found, reverse=True)
    return [value for value, count in ordered for _ in range(min(count, num_servers))][:num_servers]


def parts_of(work: Workload, cluster: ClusterSpec, costs: Costs) -> Parts:
    """The pieces of a step before processes share cores."""
    speed = cluster.core_speed.value
    layout = layout_of(work, cluster)
    has_cards = cluster.trainers.card is not None
    # On cards, what is left of dense compute on the cores: Python, and the launch of operations.
    on_cores = (costs.dense_per_step if has_cards else seconds(costs, dense_counts(work))) / speed
    dense = on_cores + (_card_seconds(work, cluster) if has_cards else 0.0)
    latency = costs.near_latency if work.is_near else costs.far_latency
    if cluster.network is not None and not work.is_near:
        latency += cluster.network.latency.value
    rounds = 2.0 if work.num_servers else 0.0
    can_hide = costs.hidden(work.mode) * work.early
    return Parts(
        read=seconds(costs, read_counts(work)) / speed / work.num_readers,
        features=seconds(costs, features_counts(work)) / speed / work.num_feature_workers,
        server=max(server_seconds(work, cluster, costs, 1), default=0.0),
        client=seconds(costs, client_counts(work)) / speed if work.num_servers else 0.0,
        calls=rounds * latency,
        network=_network_seconds(work, cluster, layout),
        dense=dense,
        all_reduce=_all_reduce_seconds(work, cluster, costs, layout),
        between=costs.step_latency / speed,
        driver=seconds(costs, driver_counts(work)) / speed,
        ray=seconds(costs, ray_counts(work)) / speed,
        hidden=can_hide,
        on_cores=on_cores,
    )


def _card_seconds(work: Workload, cluster: ClusterSpec) -> float:
    """Dense compute of a card: products, vectors that are gathered twice (rows, gradients), the optimizer."""
    card = cluster.trainers.card
    assert card is not None
    held = work.dense_parameters / (work.num_trainers if work.is_sharded else 1)
    # Gradient read; weight and two moments read and written.
    optimizer = 7 * work.weight_bytes * held
    traffic = 4 * work.gathered_bytes + optimizer
    return work.flops / card.flops_per_s + traffic / card.bytes_per_s


def _all_reduce_seconds(work: Workload, cluster: ClusterSpec, costs: Costs, layout: Layout) -> float:
    """Gradients summed over trainers: within a node first, then between nodes.

    Of weights that are split (FSDP2), what of their gathers and scatters does not hide behind other blocks.
    """
    if work.num_trainers < 2:
        return 0.0
    num_bytes = work.weight_bytes * work.dense_parameters
    found = costs.reduce_latency / cluster.core_speed.value
    network, within = cluster.network, cluster.trainers.within
    per_node = min(layout.trainers_per_node, work.num_trainers)
    if within is not None and per_node > 1:
        found += all_reduce_s(num_bytes, per_node, within.rate, within.latency.value)
    if layout.trainer_nodes > 1 and network is not None:
        # Each card of a node sums its own part with the same cards of other nodes, all at once.
        share = num_bytes / (per_node if within is not None else 1)
        between = cluster.trainers.between
        rate = between.rate if between is not None else network.rate / per_node
        latency = (network if between is None else between).latency.value
        found += all_reduce_s(share, layout.trainer_nodes, rate, latency)
    if not work.is_sharded:
        return found
    card = cluster.trainers.card
    return sharded_timeline(work.flops / card.flops_per_s if card is not None else 0.0, found).exposed_s


SHARDED_BLOCKS = 24
"""Of a network whose weights are split."""


def sharded_timeline(compute_s: float, sum_s: float, num_blocks: int = SHARDED_BLOCKS) -> Timeline:
    """Forward and backward of a network whose weights are split among the trainers (FSDP2).

    A block's weights are gathered while blocks before it compute, two ahead at most; in backward they are
    gathered again, and gradients are scattered behind each block.

    Args:
        compute_s: of forward and backward, backward twice as long as forward.
        sum_s: of a sum over trainers of all gradients, half of which a gather or a scatter takes.
    """
    exchange_s, forward_s = sum_s / 2 / num_blocks, compute_s / 3 / num_blocks
    operations = []
    for block in range(num_blocks):
        before: tuple[str, ...] = (f"forward {block - 2}",)
        operations += [
            Operation(f"gather {block}", "communicate", exchange_s, before),
            Operation(f"forward {block}", "compute", forward_s, (f"gather {block}",)),
        ]
    for block in reversed(range(num_blocks)):
        before = (f"backward {block + 2}", f"forward {num_blocks - 1}")
        operations += [
            Operation(f"gather again {block}", "communicate", exchange_s, before),
            Operation(f"backward {block}", "compute", 2 * forward_s, (f"gather again {block}",)),
        ]
        if block + 1 < num_blocks:  # behind the gather that the next block waits for
            later = f"backward {block + 1}"
            operations.append(Operation(f"scatter {block + 1}", "communicate", exchange_s, (later,)))
    operations.append(Operation("scatter 0", "communicate", exchange_s, ("backward 0",)))
    return schedule(operations)


def _network_seconds(work: Workload, cluster: ClusterSpec, layout: Layout) -> float:
    """Rows and gradients through the busier end: a trainers' node, or a servers' node."""
    if cluster.network is None or (layout.is_shared and int(cluster.trainers.count) == 1):
        return 0.0
    if not work.num_servers:
        return 0.0
    callers = -(-layout.trainers_per_node // work.group_size)
    of_trainers = callers * work.wire_bytes
    loads = [(load.wire_bytes, load.num_servers) for load in work.server_loads]
    of_servers = sum(_fullest(loads, layout.servers_per_node))
    if layout.is_shared:
        of_trainers += of_servers
    return max(of_trainers, of_servers) / cluster.network.rate


@dataclass(frozen=True)
class _Shared:
    """Parts of a step whose processes share the cores of their nodes."""

    parts: Parts
    layout: Layout
    processes: tuple[float, ...]
    """Processor seconds of a step, of every process on the fullest of the trainers' nodes."""
    servers: tuple[float, ...]
    """Likewise of a servers' node; the same processes where nodes are shared."""
    idles: tuple[float, ...]
    """Share of a core that each of `processes` takes besides; none of a trainer's."""
    server_idles: tuple[float, ...]

    @classmethod
    def of(cls, work: Workload, cluster: ClusterSpec, costs: Costs) -> _Shared:
        parts, layout = parts_of(work, cluster, costs), layout_of(work, cluster)
        share = 1 / max(layout.trainer_nodes, 1)
        counted = (
            (parts.on_cores + parts.client, 0.0, min(layout.trainers_per_node, work.num_trainers)),
            (parts.read, costs.reader_idle, math.ceil(work.num_readers * share)),
            (parts.features, costs.worker_idle, math.ceil(work.num_feature_workers * share)),
            (parts.driver, costs.driver_idle, 1),
            (parts.ray * share, costs.ray_idle, 1),
        )
        # The fullest are taken to be on one node.
        servers = tuple(server_seconds(work, cluster, costs, layout.servers_per_node))
        server_idles = (costs.server_idle,) * len(servers)
        processes = tuple(seconds for seconds, _, count in counted for _ in range(count))
        idles = tuple(idle for _, idle, count in counted for _ in range(count))
        if layout.is_shared:
            processes, idles = (*processes, *servers), (*idles, *server_idles)
            servers, server_idles = processes, idles
        return cls(parts, layout, processes, servers, idles, server_idles)

    def stretches(self, total: float) -> tuple[float, float]:
        """Times as long that a trainer's and a server's work takes in steps of this length."""
        trainer = _stretch(_others(self.processes, self.idles, total), self.layout.cores)
        if self.layout.is_shared or not self.servers:
            return trainer, trainer
        return trainer, _stretch(_others(self.servers, self.server_idles, total), self.layout.server_cores)

    def server_stretch(self, total: float) -> float:
        """As of `stretches`; more where the cores of its node take longer for all servers there."""
        _, stretch = self.stretches(total)
        if self.layout.is_shared or not self.parts.server:
            return stretch
        all_s = _shared_s(self.servers, self.server_idles, self.layout.server_cores)
        return max(stretch, all_s / self.parts.server)

    def stages(self, total: float) -> tuple[dict[Stage, float], float]:
        """How long each stage is busy in steps of this length, and the exposed part of the exchange."""
        parts, (stretch, of_servers) = self.parts, self.stretches(total)
        server = parts.server * of_servers
        exposed = (1 - parts.hidden) * (parts.client * stretch + parts.calls + parts.network + server)
        return {
            "read": parts.read * stretch,
            "features": parts.features * stretch,
            "sparse": max(server, parts.network, exposed),
            "dense": parts.on_cores * stretch + (parts.dense - parts.on_cores) + parts.all_reduce,
            "driver": parts.driver * stretch,
        }, exposed

    def length(self, total: float) -> float:
        """Of a step, if processes run as much of the time as they do in steps of `total`."""
        stages, exposed = self.stages(total)
        return max(
            stages["dense"] + exposed + self.parts.between,
            *stages.values(),
            _shared_s(self.processes, self.idles, self.layout.cores),
            _shared_s(self.servers, self.server_idles, self.layout.server_cores),
        )


def step_plan(work: Workload, cluster: ClusterSpec, costs: Costs) -> StepPlan:
    """The time of a step of a run on a cluster.

    Args:
        work: counted on its batches, scaled to its trainers and servers.
        costs: fitted to windows, see `calibration`.
    """
    shared = _Shared.of(work, cluster, costs)
    # The longer steps are, the less of the time others run, so the length falls: one point is fixed.
    low = 1e-9
    high = shared.length(low) + low
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if shared.length(middle) > middle:
            low = middle
        else:
            high = middle
    stages, exposed = shared.stages(high)
    card = cluster.trainers.card
    mfu = 0.0 if card is None else work.flops / high / card.matrix_rate.value
    stretch, _ = shared.stretches(high)
    return StepPlan(high, stages, exposed, shared.parts, stretch, shared.server_stretch(high), mfu)


def _shared_s(processes: Sequence[float], idles: Sequence[float], cores: float) -> float:
    """Seconds that a node's cores take for all that its processes do in a step, besides what they do at any
    rate."""
    return sum(processes) / max(cores - sum(idles), LEAST_LEFT * cores)


def _others(processes: Sequence[float], idles: Sequence[float], total: float) -> list[float]:
    """Share of the time that the processes of a node run, but for the first, whose share is asked for."""
    return [min(1.0, process / total + idle) for process, idle in zip(processes[1:], idles[1:], strict=True)]


def _stretch(others: Sequence[float], cores: float) -> float:
    """Times as long that a process takes beside others that run some of the time.

    With n others running, each of n + 1 gets cores / (n + 1) of a core, at most one. How many run is the sum
    of independent shares; of very many, its mean.
    """
    if len(others) + 1 <= cores:
        return 1.0
    if len(others) > MANY:
        return max(1.0, (1 + sum(others)) / cores)
    chances = np.ones(1)
    for share in others:
        chances = np.convolve(chances, (1 - share, share))
    return float(chances @ np.maximum(1.0, (np.arange(len(chances)) + 1) / cores))
