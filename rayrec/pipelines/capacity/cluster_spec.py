"""The cluster that a plan is for: nodes, links, failures and prices, each number with where it is from.

    configs/clusters/NAME.yaml ─► ClusterSpec.load ─► numbers in base units, marked measured, data sheet or
    assumed

A link counts only with what was measured of it: bandwidth on a data sheet says nothing about what a
collective or a parameter server reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, model_validator

from rayrec.pipelines.capacity.quantity import (
    Bytes,
    BytesPerSecond,
    Cards,
    Cores,
    FlopsPerSecond,
    MoneyPerHour,
    Nodes,
    Quantity,
    Seconds,
    Servers,
    Share,
    Times,
)
from rayrec.platform.config import Config

ABOVE_ZERO = {
    "cards_per_node",
    "core_speed",
    "cores",
    "count",
    "matrix_achieved",
    "matrix_rate",
    "memory_achieved",
    "memory_rate",
    "read",
    "server_node_mtbf",
    "servers_per_node",
    "trainer_node_mtbf",
    "write",
}
"""Numbers that a plan divides by, and those of which there is one at least."""
WHOLE = {"cards_per_node", "count", "servers_per_node", "spares"}
AT_MOST_ALL = {"matrix_achieved", "memory_achieved", "slow_cards"}
"""Shares of what there is."""


class Link(Config):
    """What one end of a link can send and receive at once."""

    peak: BytesPerSecond
    achieved: Share
    """Of the peak, in transfers of the sizes that training makes; has to be measured, here or by others who
    are named."""
    latency: Seconds
    """Of one message."""

    @model_validator(mode="after")
    def _is_measured(self) -> Link:
        if self.achieved.mark != "measured":
            raise ValueError(
                f"achieved is {self.achieved.text!r}: a link is planned with only if what it achieves was "
                "measured; measure it (rayrec health --pairs, or the vendor's test of collectives) and mark "
                "it 'measured: WHERE'"
            )
        if not 0 < self.achieved.value <= 1:
            raise ValueError(
                f"achieved is {self.achieved.text!r}: expected more than 0 and at most 1 of peak"
            )
        if self.peak.value <= 0:
            raise ValueError(f"peak is {self.peak.text!r}: expected more than 0")
        return self

    @property
    def rate(self) -> float:
        """Bytes per second that are reached."""
        return self.peak.value * self.achieved.value


class Card(Config):
    """An accelerator."""

    kind: str
    matrix_rate: FlopsPerSecond
    """Peak in products of matrices, in the precision of the run."""
    matrix_achieved: Share
    """Of the peak, in large products."""
    memory: Bytes
    memory_rate: BytesPerSecond
    memory_achieved: Share

    @property
    def flops_per_s(self) -> float:
        return self.matrix_rate.value * self.matrix_achieved.value

    @property
    def bytes_per_s(self) -> float:
        return self.memory_rate.value * self.memory_achieved.value


class TrainerNodes(Config):
    """Nodes that trainers, readers and feature workers run on."""

    count: Nodes
    cards_per_node: Cards | None = None
    """Each has one trainer; without cards, dense compute is on the cores."""
    card: Card | None = None
    within: Link | None = None
    """Between the cards of a node, for each card; None: through the network of the node."""
    between: Link | None = None
    """Between cards of different nodes, for each card; None: through the network of the node, which its cards
    share."""
    cores: Cores
    """Of a node."""
    memory: Bytes
    price: MoneyPerHour
    """Of a node with its cards."""

    @model_validator(mode="after")
    def _cards_are_described(self) -> TrainerNodes:
        if (self.card is None) != (self.cards_per_node is None):
            raise ValueError("card and cards_per_node belong together; give both, or neither")
        return self


class ServerNodes(Config):
    """Nodes that parameter servers run on; without them, servers run on the trainers' nodes."""

    count: Nodes
    servers_per_node: Servers
    cores: Cores
    memory: Bytes
    price: MoneyPerHour


class Failures(Config):
    """How often nodes fail, and what a failure costs."""

    trainer_node_mtbf: Seconds
    """Mean time between two failures of one node, whatever of it fails."""
    server_node_mtbf: Seconds | None = None
    """None: as a trainer's node."""
    detect: Seconds
    """From the failure until the run stops."""
    restart: Seconds
    """From there until all actors are up, loading aside."""
    repair: Seconds
    """Until a failed node is back."""
    spares: Nodes
    """Nodes that wait, of each kind."""


class Storage(Config):
    """Where snapshots are written, as one server reaches it while all others do."""

    write: BytesPerSecond
    read: BytesPerSecond


class Noise(Config):
    """How far cards and steps differ."""

    steps: Share
    """Standard deviation of the logarithm of a trainer's step."""
    slow_cards: Share
    """Share of cards that are slow all the time."""
    slowdown: Times
    """Of these."""


class ClusterSpec(Config):
    """A cluster."""

    about: str = ""
    """What it stands for, in words."""
    trainers: TrainerNodes
    servers: ServerNodes | None = None
    network: Link | None = None
    """Of one node to all others; needed by more than one node."""
    storage: Storage
    failures: Failures
    noise: Noise
    core_speed: Times
    """Of one core, against a core of the machine that the calibration was made on."""

    @model_validator(mode="after")
    def _numbers_are_possible(self) -> ClusterSpec:
        for place, quantity in self.numbers():
            name, value = place.rpartition(".")[2], quantity.value
            expected = None
            if name in ABOVE_ZERO and value <= 0:
                expected = "more than 0"
            elif name in WHOLE and value != int(value):
                expected = "a whole number"
            elif name in AT_MOST_ALL and value > 1:
                expected = "at most 100 %"
            if expected is not None:
                raise ValueError(f"{place} is {quantity.text!r}: expected {expected}")
        return self

    @model_validator(mode="after")
    def _nodes_are_linked(self) -> ClusterSpec:
        if self.network is None and self.num_nodes > 1:
            raise ValueError(
                f"there are {self.num_nodes} nodes and no network between them; describe it with peak, "
                "achieved and latency"
            )
        return self

    @property
    def num_nodes(self) -> int:
        return int(self.trainers.count) + (0 if self.servers is None else int(self.servers.count))

    @property
    def num_cards(self) -> int:
        """Cards of all trainers' nodes; 0 without accelerators."""
        per_node = self.trainers.cards_per_node
        return 0 if per_node is None else int(per_node) * int(self.trainers.count)

    @property
    def money_per_h(self) -> float:
        servers = 0.0 if self.servers is None else self.servers.count.value * self.servers.price.value
        return self.trainers.count.value * self.trainers.price.value + servers

    @property
    def currency(self) -> str:
        return str(self.trainers.price.text).split(",")[0].split()[-1].removesuffix("/h")

    def numbers(self) -> Iterator[tuple[str, Quantity]]:
        """Every number with its place, such as `trainers.card.memory`."""
        yield from _numbers(self, "")

    def with_number(self, place: str, times: float) -> ClusterSpec:
        """The same cluster with one number changed, for sensitivities."""
        return _with(self, place.split("."), times)


def _numbers(part: BaseModel, prefix: str) -> Iterator[tuple[str, Quantity]]:
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, Quantity):
            yield prefix + name, value
        elif isinstance(value, BaseModel):
            yield from _numbers(value, f"{prefix}{name}.")


def _with(part: Any, place: list[str], times: float) -> Any:
    name, rest = place[0], place[1:]
    value = getattr(part, name)
    if rest:
        return part.model_copy(update={name: _with(value, rest, times)})
    changed = Quantity(value.value * times, value.mark, value.source, value.text)
    return part.model_copy(update={name: changed})
