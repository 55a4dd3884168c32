"""Where a gang finds room on nodes: all of its actors, or none.

`assign` decides which actor goes where; what is decided here is on which nodes it may look, so that small
jobs fill nodes that are in use and whole nodes stay whole, and what counts alone rule out is never tried.
The nodes may also be the cells of a queue's guarantee, which are a cluster of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayrec.jobs.job import Placed, Size
from rayrec.jobs.quota import UNITS, units
from rayrec.pipelines.cluster.placement import ActorGroup, Node, NoNodeError, assign
from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.devices import ACCELERATOR_RESOURCES, HOST

# Axes: N nodes, R resources, G groups of a gang.
ANYWHERE = 1 << 40
"""How many actors fit that ask for nothing."""


@dataclass(frozen=True)
class Gang:
    """A size, with what it asks for as arrays over one set of nodes."""

    size: Size
    within: str | None
    asked_GR: Int64Array
    asked: tuple[tuple[Int64Array, Int64Array], ...]
    """Of each group, the resources that it asks for, and how much."""
    counts: tuple[int, ...]
    all_R: Int64Array
    """Of all actors together."""
    all_asked: Int64Array
    """Which resources that are."""
    may_GN: BoolArray
    """By labels, and by what is asked for at all."""
    may_all_N: BoolArray
    leads: int
    """The group that is hardest to place: most cards, then most CPUs."""
    is_mixed: bool
    """Some actors ask for no cards, and there are nodes without any, to which they go."""
    alike: tuple[bytes, ...]
    """Of each group, the same where another one's actors ask for the same, of the same nodes."""
    on_one_node: bool
    """No strategy spreads it, and it is not mixed."""


class Room:
    """A set of nodes with the arrays that gangs are placed in. What is left is the caller's."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        self.index = {node.id: place for place, node in enumerate(self.nodes)}
        names = {HOST.ray_resource, *ACCELERATOR_RESOURCES} | {name for node in nodes for name in node.total}
        self.columns = {name: place for place, name in enumerate(sorted(names))}
        self.total_NR = np.array([self.vector(node.total) for node in self.nodes], dtype=np.int64).reshape(
            len(self.nodes), len(self.columns)
        )
        self.usable_N = np.array([getattr(node, "is_usable", True) for node in self.nodes], dtype=bool)
        self.total_NR[~self.usable_N] = 0
        self._cards = [self.columns[name] for name in sorted(ACCELERATOR_RESOURCES)]
        self._cpu = self.columns[HOST.ray_resource]
        self.has_cards_N = self.total_NR[:, self._cards].sum(axis=1) > 0
        self._gangs: dict[tuple[object, ...], Gang | None] = {}
        self._known: dict[tuple[int, str | None], tuple[Size, Gang | None]] = {}
        self._vectors: dict[int, tuple[ActorGroup, Int64Array]] = {}
        """By their ids, what is not computed again; they are kept beside it, so that no other gets the id."""
        self._rooms_in: Int64Array | None = None
        self._rooms_by_actor: dict[bytes, Int64Array] = {}
        """What was found in the last array that does not change, for actors that are alike."""
        self._asked_labels: set[str] = set()
        self._domains: dict[str, list[BoolArray]] = {}

    def vector(self, resources: Mapping[str, float]) -> Int64Array:
        """[R] of what the nodes know; others are left out."""
        asked = np.zeros(len(self.columns), dtype=np.int64)
        for name, amount in resources.items():
            if name in self.columns:
                asked[self.columns[name]] = units(amount)
        return asked

    def relabel(self, place: int, node: Node) -> None:
        """A cell is on another node now."""
        before = self.nodes[place].labels
        if node.labels is not before:
            if any(node.labels.get(name) != before.get(name) for name in self._asked_labels):
                self._gangs.clear()
                self._known.clear()
            for name in [name for name in self._domains if node.labels.get(name) != before.get(name)]:
                del self._domains[name]
        self.nodes[place] = node

    def gang(self, size: Size, within: str | None) -> Gang | None:
        """None if some actor asks for what no node has any of."""
        known = self._known.get((id(size), within))
        if known is None or known[0] is not size:
            key = (*size.key, within)
            if key not in self._gangs:
                self._gangs[key] = self._gang(size, within)
            known = self._known[id(size), within] = size, self._gangs[key]
        return known[1]

    def _gang(self, size: Size, within: str | None) -> Gang | None:
        groups = size.groups
        if any(
            units(amount) and name not in self.columns
            for group in groups
            for name, amount in group.resources.items()
        ):
            return None
        self._asked_labels.update(name for group in groups for name in group.labels)
        asked_GR = np.stack([self.vector(group.resources) for group in groups])
        may_GN = np.array([[group.may_be_on(node) for node in self.nodes] for group in groups], dtype=bool)
        may_GN = may_GN.reshape(len(groups), len(self.nodes)) & self.usable_N
        counts = tuple(group.count for group in groups)
        cards_G = asked_GR[:, self._cards].sum(axis=1)
        alone = not any(
            group.strategy.endswith("SPREAD") and group.count > 1 and group.has_state for group in groups
        )
        strictly = any(group.strategy == "STRICT_SPREAD" and group.count > 1 for group in groups)
        idles = bool((cards_G == 0).any()) and not self.has_cards_N.all() and bool((cards_G > 0).any())
        all_R = (asked_GR * np.array(counts)[:, None]).sum(axis=0)
        return Gang(
            size,
            within,
            asked_GR,
            tuple((np.flatnonzero(asked_R), asked_R[asked_R > 0]) for asked_R in asked_GR),
            counts,
            all_R,
            np.flatnonzero(all_R),
            may_GN,
            may_GN.all(axis=0),
            max(range(len(groups)), key=lambda place: (cards_G[place], asked_GR[place, self._cpu])),
            idles,
            tuple(
                asked_R.tobytes() + may_N.tobytes() for asked_R, may_N in zip(asked_GR, may_GN, strict=True)
            ),
            alone and not strictly and not idles,
        )

    def domains(self, label: str) -> list[BoolArray]:
        """Of each value of a label, which nodes have it."""
        if label not in self._domains:
            values = [node.labels.get(label) for node in self.nodes]
            self._domains[label] = [
                np.array([value == each for each in values], dtype=bool)
                for value in sorted({value for value in values if value is not None})
            ]
        return self._domains[label]

    def rooms(self, gang: Gang, group: int, left_NR: Int64Array) -> Int64Array:
        """[N] how many actors of a group fit on each node."""
        key = gang.alike[group]
        if left_NR is not self._rooms_in:
            if left_NR.flags.writeable:
                return self._count_rooms(gang, group, left_NR)
            self._rooms_in, self._rooms_by_actor = left_NR, {}
        if key not in self._rooms_by_actor:
            self._rooms_by_actor[key] = self._count_rooms(gang, group, left_NR)
        return self._rooms_by_actor[key]

    def _count_rooms(self, gang: Gang, group: int, left_NR: Int64Array) -> Int64Array:
        named, amounts = gang.asked[group]
        if not len(named):
            return np.where(gang.may_GN[group], ANYWHERE, 0)
        rooms_N = (left_NR[:, named] // amounts).min(axis=1)
        rooms_N[(rooms_N < 0) | ~gang.may_GN[group]] = 0
        return rooms_N

    def may_fit(self, gang: Gang, left_NR: Int64Array) -> bool:
        """By counts alone; True does not say that it does."""
        return self._rooms_if_enough(gang, left_NR) is not None

    def _rooms_if_enough(self, gang: Gang, left_NR: Int64Array) -> list[Int64Array] | None:
        """[G][N] how many actors of each group fit on each node; None: not enough of them."""
        if len(gang.counts) > 1 and (np.maximum(left_NR, 0).sum(axis=0) < gang.all_R).any():
            return None
        rooms_GN = [self.rooms(gang, group, left_NR) for group in range(len(gang.counts))]
        return rooms_GN if self._counts_fit(gang, rooms_GN) else None

    def _counts_fit(self, gang: Gang, rooms_GN: Sequence[Int64Array]) -> bool:
        for group, rooms_N in zip(gang.size.groups, rooms_GN, strict=True):
            if group.strategy == "STRICT_SPREAD":
                enough = int((rooms_N > 0).sum()) >= group.count
            elif group.strategy == "STRICT_PACK":
                enough = int(rooms_N.max(initial=0)) >= group.count
            else:
                enough = int(np.minimum(rooms_N, group.count).sum()) >= group.count
            if not enough:
                return False
        return True

    def place(self, size: Size, within: str | None, left_NR: Int64Array) -> Placed | None:
        """A node for every actor; None if there is not room for all of them.

        Args:
            left_NR: what may be used of each node, in units.
        """
        gang = self.gang(size, within)
        if gang is None:
            return None
        if within is None and gang.on_one_node:
            placed = self._on_one_node(gang, left_NR, self.usable_N)
            if placed is not None:
                return placed
        rooms_GN = self._rooms_if_enough(gang, left_NR)
        if rooms_GN is None:
            return None
        if within is None:
            return self._on_several(gang, left_NR, rooms_GN)
        # The domain with the least room that is enough, so that a larger one stays for others.
        domains = sorted(
            self.domains(within),
            key=lambda nodes_N: int(
                left_NR[nodes_N][:, self._cards].sum() or left_NR[nodes_N, self._cpu].sum()
            ),
        )
        for nodes_N in domains:
            placed = self._on_one_node(gang, left_NR, nodes_N) if gang.on_one_node else None
            if placed is None:
                rooms = [np.where(nodes_N, rooms_N, 0) for rooms_N in rooms_GN]
                placed = self._on_several(gang, left_NR, rooms) if self._counts_fit(gang, rooms) else None
            if placed is not None:
                return placed
        return None

    def _on_one_node(self, gang: Gang, left_NR: Int64Array, nodes_N: BoolArray) -> Placed | None:
        able_N = (left_NR[:, gang.all_asked] >= gang.all_R[gang.all_asked]).all(axis=1)
        able = np.flatnonzero(able_N & gang.may_all_N & nodes_N)
        if not len(able):
            return None
        node = self.nodes[self._tightest(gang, able, left_NR)].id
        return {group.stage: (node,) * group.count for group in gang.size.groups}

    def _on_several(self, gang: Gang, left_NR: Int64Array, rooms_GN: Sequence[Int64Array]) -> Placed | None:
        if (packed := self._packed(gang, rooms_GN, left_NR)) is not None:
            return packed
        for places in self._choices(gang, rooms_GN, left_NR):
            try:
                placed = assign(gang.size.groups, [self._node(place, left_NR) for place in places])
            except NoNodeError:
                continue
            return {stage: tuple(node.id for node in members) for stage, members in placed.items()}
        return None

    def _packed(self, gang: Gang, rooms_GN: Sequence[Int64Array], left_NR: Int64Array) -> Placed | None:
        """One group that is packed, on the fewest nodes: no other one of its gang has to be weighed against
        it."""
        group = gang.size.groups[0]
        if len(gang.size.groups) > 1 or group.strategy != "PACK":
            return None
        members: list[str] = []
        able = np.flatnonzero(rooms_GN[0] > 0)
        cards_N = left_NR[able][:, self._cards].sum(axis=1)
        for place in self._fewest(able, rooms_GN[0][able], cards_N, left_NR[able, self._cpu], group.count):
            taken = min(group.count - len(members), int(rooms_GN[0][place]))
            members += [self.nodes[place].id] * taken
        return {group.stage: tuple(members)}

    def _tightest(self, gang: Gang, places: Int64Array, left_NR: Int64Array) -> int:
        """Of nodes that take all of the gang, the one that has least left: cards first."""
        cards_N = left_NR[places][:, self._cards].sum(axis=1)
        if not gang.all_R[self._cards].any():
            # To those who ask for no cards, a node with many free ones is the last choice.
            cards_N = cards_N + self.has_cards_N[places] * UNITS
        return int(places[np.lexsort((places, left_NR[places, self._cpu], cards_N))[0]])

    def _choices(
        self, gang: Gang, rooms_GN: Sequence[Int64Array], left_NR: Int64Array
    ) -> Iterator[list[int]]:
        """Sets of nodes to look at, in the order in which they leave most whole."""
        able = np.flatnonzero(np.sum([np.minimum(rooms_N, 1) for rooms_N in rooms_GN], axis=0) > 0)
        lead_N = rooms_GN[gang.leads][able]
        cards_N = left_NR[able][:, self._cards].sum(axis=1)
        cpus_N = left_NR[able, self._cpu]
        spreads = any(group.strategy.endswith("SPREAD") and group.count > 1 for group in gang.size.groups)
        few = self._fewest(able, lead_N, cards_N, cpus_N, gang.counts[gang.leads])
        if spreads:
            # Beside the nodes for the group that is hardest to place, some of those in use for the others.
            num_others = sum(gang.counts) - gang.counts[gang.leads]
            in_use = able[(left_NR[able] < self.total_NR[able]).any(axis=1)]
            roomy = in_use[np.argsort(-left_NR[in_use, self._cpu], kind="stable")[:num_others]]
            few = list(dict.fromkeys([*few, *map(int, roomy)]))
        if len(few) < len(able) and not gang.is_mixed:
            yield few
        # Tightest first: `assign` takes the first of those that are as good.
        yield list(map(int, able[np.lexsort((able, cpus_N, cards_N))]))

    def _fewest(
        self, able: Int64Array, lead_N: Int64Array, cards_N: Int64Array, cpus_N: Int64Array, count: int
    ) -> list[int]:
        """Nodes with most room, and the tightest that takes the rest."""
        order = np.lexsort((able, cpus_N, cards_N, -lead_N))
        chosen: list[int] = []
        for place in map(int, order):
            if lead_N[place] >= count:
                enough = [each for each in map(int, order) if lead_N[each] >= count and each not in chosen]
                last = min(enough, key=lambda each: (lead_N[each], cards_N[each], cpus_N[each], each))
                return [int(able[each]) for each in (*chosen, last)]
            chosen.append(place)
            count -= int(lead_N[place])
        return [int(able[each]) for each in chosen]

    def _node(self, place: int, left_NR: Int64Array) -> Node:
        node = self.nodes[place]
        free = {name: int(left_NR[place, column]) / UNITS for name, column in self.columns.items()}
        return Node(node.id, node.address, node.labels, node.total, free)

    def held(self, groups: Sequence[ActorGroup], placed: Placed) -> dict[int, Int64Array]:
        """What actors hold of each node that is still there: the first members of every group."""
        held: dict[int, Int64Array] = {}
        for group in groups:
            known = self._vectors.get(id(group))
            if known is None or known[0] is not group:
                known = self._vectors[id(group)] = group, self.vector(group.resources)
            counts: dict[str, int] = {}
            for node in placed.get(group.stage, ())[: group.count]:
                counts[node] = counts.get(node, 0) + 1
            for node, count in counts.items():
                if (place := self.index.get(node)) is not None:
                    amounts_R = known[1] * count
                    held[place] = held[place] + amounts_R if place in held else amounts_R
        return held


def fits_in(held: Mapping[int, Int64Array], left_NR: Int64Array) -> bool:
    """Whether all that is held is there."""
    return all((left_NR[place] >= amounts_R).all() for place, amounts_R in held.items())


def apart(left_NR: Int64Array, held: Mapping[int, Int64Array], times: int = -1) -> None:
    """Take what is held out of what is left, or put it back with `times=1`."""
    for place, amounts_R in held.items():
        left_NR[place] += times * amounts_R
