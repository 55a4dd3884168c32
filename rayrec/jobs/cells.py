"""Guarantees as shapes that fit on real nodes: every queue's cells, and where each of them is just now.

    queue's cells (a cluster of its own)        real nodes
      8 cards  ── bound to ──────────────────►  a: 8 cards
      1 card   ── bound to ─────────┐           b: 4 cards of others' jobs, which may be taken back
      1 card   ── bound to ─────────┴────────►  c: 2 of 8 cards

A number does not say whether 8 free cards are on one node or on eight, so a tenant whose guarantee is a
number may wait where it would not in a cluster of its own (HiveD, OSDI'20: the sharing anomaly). Here a
guarantee is cells: each is part of one node (card < node), and `within` ties some of them together (< rack).

Every cell is bound to a node at all times, and the sum of what is bound or promised on a node is never more
than the node has. A cell in use is where its job is. A cell that is not may be bound anywhere: it is moved,
or changed with another, to where room is free, so that nobody has to leave. So the binding is a proof: a job
that fits in the free cells of its queue can be run where they are bound, and those who hold that room are
there on borrowed terms. As in HiveD, cells are bound late; unlike there, a node is not halved into buddies:
cells take any part of it, placed tightest first, which for sizes that divide each other is the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from rayrec.jobs.job import Placed, Size
from rayrec.jobs.queues import Cell, QueuesConfig
from rayrec.jobs.quota import UNITS, units
from rayrec.jobs.room import Room, apart, fits_in
from rayrec.pipelines.cluster.placement import ActorGroup, Node, in_words
from rayrec.platform.arrays import Int64Array
from rayrec.platform.devices import ACCELERATOR_RESOURCES, HOST
from rayrec.platform.errors import InputError

MOST_REMEMBERED = 4096
"""Choices that are not made again while nothing changes."""


@dataclass
class _BoundCell:
    """One cell of a queue."""

    queue: str
    spec: int
    """Which entry of the queue's `cells` it comes from."""
    cell: Cell
    resources: Mapping[str, float]
    amounts_R: Int64Array
    place: int
    """In its queue's room."""
    node: int | None = None
    """Index of the real one; None: no node has room for it now."""
    num_users: int = 0
    """Actors in it: as long as there are any, it stays where it is."""

    @property
    def is_tied(self) -> bool:
        return self.cell.within is not None and self.cell.count > 1


class Guarantees:
    """The cells of all queues on one set of nodes."""

    def __init__(self, config: QueuesConfig, room: Room) -> None:
        self._room = room
        self._cells: dict[str, list[_BoundCell]] = {}
        self._versions = itertools.count(1)
        self._version = dict.fromkeys((queue.name for queue in config.queues), 0)
        """By queue: what was chosen of its cells before may not be there in another one."""
        self._num_promises = 0
        self._promisable_NR = np.zeros_like(room.total_NR)
        self._promisable_at = (-1, -1)
        self._lent: dict[str, tuple[tuple[object, ...], Int64Array, int, list[tuple[Size, str | None]]]] = {}
        """By queue, what was last set aside: for what, what is left then, and its version."""
        self._at: dict[int, dict[tuple[str, int], _BoundCell]] = {}
        """By node, the cells that are bound to it."""
        self.firm_NR = np.zeros_like(room.total_NR)
        """[N, R] what is bound, or promised otherwise, on each node."""
        for queue in config.queues:
            cells: list[_BoundCell] = []
            for spec, cell in enumerate(queue.cells):
                resources = self._with_cpus(cell)
                for _ in range(cell.count):
                    cells.append(
                        _BoundCell(queue.name, spec, cell, resources, room.vector(resources), len(cells))
                    )
            if cells:
                self._cells[queue.name] = cells
        self._chosen: dict[tuple[str, int, str | None], tuple[int, Size, Placed | None]] = {}
        self._holds: dict[tuple[str, int], tuple[Size, bool]] = {}
        """By queue and id of the size, which is kept beside it, whether all cells together hold it."""
        self._rooms = {
            name: Room([_as_node(cell, None) for cell in cells]) for name, cells in self._cells.items()
        }
        self.left = {name: room.total_NR * 0 for name, room in self._rooms.items()}
        """By queue, what is left of each of its cells, in its own room's columns."""

    def __bool__(self) -> bool:
        return bool(self._cells)

    def version(self, queue: str) -> int:
        """Another one whenever what is free of a queue's cells, or where they are, has changed."""
        return self._version[queue]

    def has(self, queue: str) -> bool:
        return queue in self._cells

    def own_nodes(self, queue: str) -> list[Node]:
        """A queue's cells as the nodes of a cluster of its own."""
        return list(self._rooms[queue].nodes)

    @property
    def slack_NR(self) -> Int64Array:
        """What nobody is guaranteed."""
        return self._room.total_NR - self.firm_NR

    def _slack(self, place: int) -> Int64Array:
        """[R] of one node."""
        slack_R: Int64Array = self._room.total_NR[place] - self.firm_NR[place]
        return slack_R

    def _with_cpus(self, cell: Cell) -> dict[str, float]:
        """A cell that says nothing of CPUs has as large a share of its node's as it has of the cards."""
        resources = dict(cell.resources)
        cards = {name: count for name, count in resources.items() if name in ACCELERATOR_RESOURCES}
        if HOST.ray_resource in resources or not cards:
            return resources
        group = cell.group("cell")
        shares = [
            node.total.get(HOST.ray_resource, 0.0)
            * max(count / node.total[name] for name, count in cards.items())
            for node in self._room.nodes
            if group.may_be_on(node)
            and all(node.total.get(name, 0.0) >= count for name, count in cards.items())
        ]
        if shares and min(shares) > 0:
            resources[HOST.ray_resource] = int(min(shares) * UNITS) / UNITS
        return resources

    # Binding

    def bind_rest(self) -> list[str]:
        """Bind every cell that is not bound.

        Returns:
            Of each kind of cell for which there is no room now, one sentence.
        """
        orders: list[Callable[[Sequence[_BoundCell]], tuple[float, ...]]] = [
            lambda cells: (not cells[0].is_tied, -_cards(cells[0].resources), -len(cells)),
            lambda cells: (-_cards(cells[0].resources), not cells[0].is_tied, -len(cells)),
            lambda cells: (self._num_able(cells[0]), -_cards(cells[0].resources), -len(cells)),
        ]
        kinds = self._unbound()
        best, best_order = kinds, orders[0]
        for order in orders:
            missing = [cells for cells in sorted(kinds, key=order) if not self._bind(cells)]
            if not missing:
                return []
            if len(missing) < len(best):
                best, best_order = missing, order
            for cells in kinds:
                for cell in cells:
                    self._unbind(cell)
        # In the same order: in another one, some of them might be in the way of others.
        for cells in sorted((cells for cells in kinds if cells not in best), key=best_order):
            self._bind(cells)
        lacking: list[str] = []
        for cells in best:
            alone = [] if cells[0].is_tied else [cell for cell in cells if not self._bind([cell])]
            if missing_cells := (cells if cells[0].is_tied else alone):
                lacking.append(self._why_not(missing_cells))
        return lacking

    def _unbound(self) -> list[list[_BoundCell]]:
        """Cells without a node, those of one entry of the settings together."""
        kinds: dict[tuple[str, int], list[_BoundCell]] = {}
        for cells in self._cells.values():
            for cell in cells:
                if cell.node is None:
                    kinds.setdefault((cell.queue, cell.spec), []).append(cell)
        return list(kinds.values())

    def _bind(self, cells: Sequence[_BoundCell]) -> bool:
        """All of one kind, or none of them."""
        first = cells[0]
        group = ActorGroup("cell", "cells", len(cells), first.resources, first.cell.labels, "PACK")
        within, slack_NR = first.cell.within, self.slack_NR
        bound = [
            cell for cell in self._cells[first.queue] if cell.spec == first.spec and cell.node is not None
        ]
        if within is not None and bound:  # some of them are in use: the others stay with them
            value = self._room.nodes[bound[0].node or 0].labels.get(within)
            for place, node in enumerate(self._room.nodes):
                if node.labels.get(within) != value:
                    slack_NR[place] = 0
        placed = self._room.place(Size((group,)), within, slack_NR)
        if placed is None:
            return False
        for cell, node_id in zip(cells, placed["cell"], strict=True):
            self._put(cell, self._room.index[node_id])
        return True

    def _num_able(self, cell: _BoundCell) -> int:
        group = cell.cell.group("cell")
        return sum(
            group.may_be_on(node) and bool((self._room.total_NR[place] >= cell.amounts_R).all())
            for place, node in enumerate(self._room.nodes)
        )

    def _why_not(self, cells: Sequence[_BoundCell]) -> str:
        first = cells[0]
        shape = ", ".join(f"{count:g} {name}" for name, count in first.cell.resources.items())
        labels = f" with {in_words(first.cell.labels)}" if first.cell.labels else ""
        together = f" with one value of {first.cell.within!r}" if first.is_tied else ""
        return (
            f"queue {first.queue!r}: {len(cells)} of {first.cell.count} cells of {shape} on one node find no "
            f"node{labels}{together} beside the guarantees of the others; {self._num_able(first)} usable "
            "nodes are large enough for one of them"
        )

    def _put(self, cell: _BoundCell, place: int) -> None:
        assert cell.node is None
        self._version[cell.queue] = next(self._versions)
        self._at.setdefault(place, {})[cell.queue, cell.place] = cell
        cell.node = place
        self.firm_NR[place] += cell.amounts_R
        room = self._rooms[cell.queue]
        room.relabel(cell.place, _as_node(cell, self._room.nodes[place]))
        self.left[cell.queue][cell.place] = room.total_NR[cell.place]

    def _unbind(self, cell: _BoundCell) -> None:
        if cell.node is not None:
            assert not cell.num_users
            self._version[cell.queue] = next(self._versions)
            del self._at[cell.node][cell.queue, cell.place]
            self.firm_NR[cell.node] -= cell.amounts_R
            cell.node = None
            self.left[cell.queue][cell.place] = 0

    def _rebind(self, moves: Sequence[tuple[_BoundCell, int]]) -> None:
        """Unused cells to other nodes, all at once. What of them is set aside stays so."""
        left = [self.left[cell.queue][cell.place].copy() for cell, _ in moves]
        for cell, _ in moves:
            self._unbind(cell)
        for (cell, place), left_R in zip(moves, left, strict=True):
            self._put(cell, place)
            self.left[cell.queue][cell.place] = left_R

    def _move(self, cell: _BoundCell, place: int) -> bool:
        """Bind an unused cell elsewhere; unused ones that are in the way change places with it.

        As buddies do: a cell of eight cards and eight of one change places, whosever they are; and a cell of
        one goes where one of eight is unused, if others beside it go there, too.
        """
        here = cell.node
        if here == place:
            return True
        if cell.num_users or cell.is_tied or here is None or not self._may_be_on(cell, place):
            return False
        there_R = self._slack(place) - cell.amounts_R
        if (there_R >= 0).all():
            self._rebind([(cell, place)])
            return True
        here_R = self._slack(here) + cell.amounts_R
        moves = [(cell, place)]
        # One that is large enough alone, else from the largest down.
        for other in self._movable(place, here, -there_R):
            if (there_R >= 0).all():
                break
            there_R, here_R = there_R + other.amounts_R, here_R - other.amounts_R
            moves.append((other, here))
        if not (there_R >= 0).all():
            return False
        for other in self._movable(here, place, -here_R):
            if (here_R >= 0).all():
                break
            if other is not cell and (there_R >= other.amounts_R).all():
                there_R, here_R = there_R - other.amounts_R, here_R + other.amounts_R
                moves.append((other, place))
        if not (here_R >= 0).all():
            return False
        self._rebind(moves)
        return True

    def _movable(self, place: int, to: int, missing_R: Int64Array) -> list[_BoundCell]:
        """Unused cells of a node that may be on another: one that is enough, or all, large ones first."""
        cells = [
            (int(cell.amounts_R.sum()), cell)
            for cell in self._at.get(place, {}).values()
            if not cell.num_users and not cell.is_tied and self._may_be_on(cell, to)
        ]
        cells.sort(key=lambda each: (-each[0], each[1].queue, each[1].place))
        enough = [each for each in cells if (each[1].amounts_R >= missing_R).all()]
        return [cell for _, cell in (enough[-1:] or cells)]

    def _may_be_on(self, cell: _BoundCell, place: int) -> bool:
        if not self._room.usable_N[place]:
            return False
        return not cell.cell.labels or cell.cell.group("cell").may_be_on(self._room.nodes[place])

    def _all(self) -> Iterable[_BoundCell]:
        for cells in self._cells.values():
            yield from cells

    # Jobs

    def could_hold(self, queue: str, size: Size, within: str | None) -> bool:
        """Whether a size fits in the cells while no job is in them."""
        # Where all cells are bound, and nothing depends on labels, it does not matter where.
        room, cells = self._rooms[queue], self._cells[queue]
        key = None
        is_labeled = within is not None or any(group.labels for group in size.groups)
        if not is_labeled and all(cell.node is not None for cell in cells):
            key = queue, id(size)
            if (known := self._holds.get(key)) is not None and known[0] is size:
                return known[1]
        left_NR = room.total_NR.copy()
        left_NR[[cell.node is None for cell in cells]] = 0
        can = room.place(size, within, left_NR) is not None
        if key is not None:
            if len(self._holds) > MOST_REMEMBERED:
                self._holds.clear()
            self._holds[key] = size, can
        return can

    def choose(self, queue: str, size: Size, within: str | None) -> Placed | None:
        """Free cells of the queue for every actor: where the job would be in a cluster of the queue's own."""
        key = (queue, id(size), within)
        if (
            (known := self._chosen.get(key)) is None
            or known[0] != self._version[queue]
            or known[1] is not size
        ):
            if len(self._chosen) > MOST_REMEMBERED:
                self._chosen.clear()
            placed = self._rooms[queue].place(size, within, self.left[queue])
            known = self._chosen[key] = self._version[queue], size, placed
        return known[2]

    def needs(self, queue: str, size: Size, chosen: Placed) -> list[tuple[str, Int64Array]]:
        """What each of these cells is to take, in the real nodes' columns: those that cannot move first."""
        room, cells = self._rooms[queue], self._cells[queue]
        needs: dict[str, Int64Array] = {}
        for group in size.groups:
            asked_R = self._room.vector(group.resources)
            for cell_id in chosen[group.stage]:
                needs[cell_id] = needs[cell_id] + asked_R if cell_id in needs else asked_R
        return sorted(
            needs.items(),
            key=lambda item: (cells[room.index[item[0]]].num_users == 0, -int(item[1].sum()), item[0]),
        )

    def spots(self, queue: str, cell_id: str, within: str | None) -> list[int]:
        """Nodes where a cell is or may perhaps be brought, that where it is first."""
        cell = self._cells[queue][self._rooms[queue].index[cell_id]]
        assert cell.node is not None, "it was chosen"
        if cell.num_users or cell.is_tied:
            return [cell.node]
        here = self._room.nodes[cell.node].labels
        others = [
            place
            for place, node in enumerate(self._room.nodes)
            if place != cell.node
            and self._may_be_on(cell, place)
            and (within is None or node.labels.get(within) == here.get(within))
        ]
        return [cell.node, *others]

    def bring(self, queue: str, cell_id: str, place: int) -> bool:
        """Bind a cell to a node, if that leaves every other one its room."""
        return self._move(self._cells[queue][self._rooms[queue].index[cell_id]], place)

    @contextmanager
    def held_still(self) -> Iterator[Callable[[str, str], None]]:
        """Inside the block, cells that are named by queue and id stay where they are."""
        still: list[_BoundCell] = []

        def hold(queue: str, cell_id: str) -> None:
            cell = self._cells[queue][self._rooms[queue].index[cell_id]]
            cell.num_users += 1
            still.append(cell)

        try:
            yield hold
        finally:
            for cell in still:
                cell.num_users -= 1

    def place(
        self, queue: str, size: Size, within: str | None, free_NR: Int64Array
    ) -> tuple[Placed, Placed] | None:
        """Cells for every actor, and the nodes they are on, where that room is free now.

        Cells that are bound to nodes in use are moved to free ones, if they can be.
        """
        cells, room = self._cells[queue], self._rooms[queue]
        if (chosen := room.place(size, within, self._free_of(queue, free_NR))) is not None:
            placed = self.nodes_of(queue, chosen)
            if fits_in(self._room.held(size.groups, placed), free_NR):
                return placed, chosen
        if (chosen := self.choose(queue, size, within)) is None:
            return None
        free_NR = free_NR.copy()
        with self.held_still() as hold:
            for cell_id, need_R in self.needs(queue, size, chosen):
                cell = cells[room.index[cell_id]]
                assert cell.node is not None
                if not (free_NR[cell.node] >= need_R).all() and not self._move_to_free(
                    cell, need_R, free_NR, within
                ):
                    return None
                free_NR[cell.node] -= need_R
                hold(queue, cell_id)
        placed = self.nodes_of(queue, chosen)
        return (placed, chosen) if self.labels_fit(size, placed) else None

    def _free_of(self, queue: str, free_NR: Int64Array) -> Int64Array:
        """What is left of each cell and free on its node, in the queue's own columns."""
        room, left_NR = self._rooms[queue], self.left[queue].copy()
        nodes = [cell.node or 0 for cell in self._cells[queue]]
        for name, column in room.columns.items():
            if (there := self._room.columns.get(name)) is not None:
                left_NR[:, column] = np.minimum(left_NR[:, column], free_NR[nodes, there])
        return left_NR

    def _move_to_free(
        self, cell: _BoundCell, need_R: Int64Array, free_NR: Int64Array, within: str | None
    ) -> bool:
        if cell.num_users:
            return False
        assert cell.node is not None
        able = np.flatnonzero((free_NR >= need_R).all(axis=1))
        here = self._room.nodes[cell.node].labels
        for place in sorted(map(int, able), key=lambda place: int(free_NR[place].sum())):
            there = self._room.nodes[place].labels
            if (within is None or here.get(within) == there.get(within)) and self._move(cell, place):
                return True
        return False

    def labels_fit(self, size: Size, placed: Placed) -> bool:
        """A cell was moved, and an actor may ask for what the new node does not have."""
        return all(
            group.may_be_on(self._room.nodes[self._room.index[node]])
            for group in size.groups
            if group.labels
            for node in placed[group.stage]
        )

    def nodes_of(self, queue: str, chosen: Placed) -> Placed:
        cells, room = self._cells[queue], self._rooms[queue]
        return {
            stage: tuple(self._room.nodes[cells[room.index[each]].node or 0].id for each in members)
            for stage, members in chosen.items()
        }

    def hold(self, queue: str, size: Size, chosen: Placed) -> None:
        """Actors are in these cells now."""
        self._use(queue, size, chosen, 1)

    def release(self, queue: str, size: Size, chosen: Placed) -> None:
        self._use(queue, size, chosen, -1)

    def lend(self, queue: str, size: Size, chosen: Placed, back: bool) -> None:
        """Count cells as free while it is looked for room, without letting them go where their job is not."""
        self._version[queue] = next(self._versions)
        apart(self.left[queue], self._rooms[queue].held(size.groups, chosen), -1 if back else 1)

    @contextmanager
    def lent(self, queue: str, sizes: Sequence[tuple[Size, str | None]]) -> Iterator[None]:
        """Inside the block, free cells are set aside for those of these sizes that find some, in their
        order."""
        version, before_NR = self._version[queue], self.left[queue]
        key = version, tuple((id(size), within) for size, within in sizes)
        known = self._lent.get(queue)
        if known is None or known[0] != key:
            self.left[queue] = before_NR.copy()
            for size, within in sizes:
                if (chosen := self.choose(queue, size, within)) is not None:
                    self.lend(queue, size, chosen, back=True)
            known = self._lent[queue] = key, self.left[queue].copy(), next(self._versions), list(sizes)
        after_NR, inside = known[1], known[2]
        self.left[queue], self._version[queue] = after_NR.copy(), inside
        try:
            yield
        finally:
            if self._version[queue] == inside:
                self.left[queue], self._version[queue] = before_NR, version
            else:  # something was given inside
                self.left[queue] = self.left[queue] + before_NR - after_NR
                self._version[queue] = next(self._versions)

    def is_left(self, queue: str, size: Size, chosen: Placed) -> bool:
        """Whether these cells are free."""
        return fits_in(self._rooms[queue].held(size.groups, chosen), self.left[queue])

    def _use(self, queue: str, size: Size, chosen: Placed, times: int) -> None:
        room = self._rooms[queue]
        self._version[queue] = next(self._versions)
        apart(self.left[queue], room.held(size.groups, chosen), -times)
        for group in size.groups:
            for cell_id in chosen.get(group.stage, ())[: group.count]:
                self._cells[queue][room.index[cell_id]].num_users += times

    def pin(self, queue: str, size: Size, placed: Placed, chosen: Placed) -> bool:
        """Bind and use the cells of a job that runs already.

        Returns:
            False, with nothing changed, if they are not there: the settings or the nodes are others now.
        """
        room, cells = self._rooms.get(queue), self._cells.get(queue, [])
        if room is None:
            return False
        bound: list[_BoundCell] = []
        for group in size.groups:
            pairs = zip(placed.get(group.stage, ()), chosen.get(group.stage, ()), strict=False)
            for node, cell_id in list(pairs)[: group.count]:
                place, there = room.index.get(cell_id), self._room.index.get(node)
                cell = None if place is None else cells[place]
                if (
                    cell is not None
                    and there is not None
                    and cell.node is None
                    and (self.slack_NR[there] >= cell.amounts_R).all()
                    and self._may_be_on(cell, there)
                ):
                    self._put(cell, there)
                    bound.append(cell)
                if cell is None or there is None or cell.node != there:
                    for each in bound:
                        self._unbind(each)
                    return False
        if not fits_in(room.held(size.groups, chosen), self.left[queue]):
            for each in bound:
                self._unbind(each)
            return False
        self.hold(queue, size, chosen)
        return True

    def cover(self, queue: str, size: Size, placed: Placed) -> Placed | None:
        """Free cells of its queue, brought to where a job runs outside of them; None: they cannot be."""
        if self.choose(queue, size, None) is None:
            return None
        room, left_NR = self._rooms[queue], self.left[queue].copy()
        on_node: dict[int, list[tuple[str, int, Int64Array]]] = {}
        for group in size.groups:
            if any(amount and name not in room.columns for name, amount in group.resources.items()):
                return None
            asked_R = room.vector(group.resources)
            for member, node in enumerate(placed[group.stage][: group.count]):
                there = self._room.index.get(node)
                if there is None:
                    return None
                on_node.setdefault(there, []).append((group.stage, member, asked_R))
        chosen = {group.stage: [""] * group.count for group in size.groups}
        with self.held_still() as hold:
            for there, actors in sorted(on_node.items(), key=lambda item: -len(item[1])):
                actors.sort(key=lambda actor: -int(actor[2].sum()))
                while actors:
                    cell = self._cell_at(queue, there, [asked_R for _, _, asked_R in actors], left_NR)
                    if cell is None:
                        return None
                    hold(queue, _cell_id(cell))
                    rest = list[tuple[str, int, Int64Array]]()
                    for stage, member, asked_R in actors:
                        if (left_NR[cell.place] >= asked_R).all():
                            left_NR[cell.place] -= asked_R
                            chosen[stage][member] = _cell_id(cell)
                        else:
                            rest.append((stage, member, asked_R))
                    actors = rest
        return {stage: tuple(members) for stage, members in chosen.items()}

    def _cell_at(
        self, queue: str, there: int, asked: Sequence[Int64Array], left_NR: Int64Array
    ) -> _BoundCell | None:
        """A cell for a node that takes at least the first actor: the smallest that takes all of them."""
        all_R: Int64Array = np.sum(asked, axis=0)
        able_N = (left_NR >= asked[0]).all(axis=1)
        enough_places = np.all(left_NR >= all_R, axis=1).tolist()
        sizes = left_NR.sum(axis=1).tolist()
        cells = [self._cells[queue][place] for place in np.flatnonzero(able_N)]

        def preference(cell: _BoundCell) -> tuple[bool, bool, int, int]:
            enough, size = enough_places[cell.place], sizes[cell.place]
            return not enough, cell.node != there, size if enough else -size, cell.place

        cells = sorted((cell for cell in cells if cell.node is not None), key=preference)
        return next((cell for cell in cells if cell.node == there or self._move(cell, there)), None)

    # What is promised without cells

    def promisable(self) -> Int64Array:
        """[N, R] what could at most be promised on each node, were all unused cells elsewhere."""
        if self._promisable_at != self._num_changes():
            promisable_NR = self.slack_NR
            for place, cells in self._at.items():
                for cell in cells.values():
                    if not cell.num_users and not cell.is_tied:
                        promisable_NR[place] += cell.amounts_R
            self._promisable_NR, self._promisable_at = promisable_NR, self._num_changes()
        return self._promisable_NR

    def _num_changes(self) -> tuple[int, int]:
        return max(self._version.values(), default=0), self._num_promises

    def promise(self, held: Mapping[int, Int64Array]) -> bool:
        """Set room apart for good, for a job in the guarantee of numbers or one that may not be stopped.

        Unused cells are moved out of its way. Nothing is changed if that is not enough.
        """
        if not self:
            return True
        for place, amounts_R in held.items():
            if (self._slack(place) >= amounts_R).all():
                continue
            movable = [
                cell for cell in self._at.get(place, {}).values() if not cell.num_users and not cell.is_tied
            ]
            least_R = self._slack(place) + sum((cell.amounts_R for cell in movable), start=0 * amounts_R)
            if not (least_R >= amounts_R).all():
                return False
            for cell in sorted(movable, key=lambda cell: int(cell.amounts_R.sum())):
                if (self._slack(place) >= amounts_R).all():
                    break
                self._move_away(cell, held)
        if not fits_in(held, self.slack_NR):
            return False
        self._num_promises += 1
        apart(self.firm_NR, held, 1)
        return True

    def _move_away(self, cell: _BoundCell, held: Mapping[int, Int64Array]) -> None:
        slack_NR = self.slack_NR
        apart(slack_NR, held)
        able = np.flatnonzero((slack_NR >= cell.amounts_R).all(axis=1))
        for place in sorted(map(int, able), key=lambda place: int(slack_NR[place].sum())):
            if place != cell.node and self._may_be_on(cell, place):
                self._rebind([(cell, place)])
                return

    def unpromise(self, held: Mapping[int, Int64Array]) -> None:
        if self:
            self._num_promises += 1
            apart(self.firm_NR, held)


def check_guarantees(config: QueuesConfig, nodes: Sequence[Node], before: QueuesConfig | None = None) -> None:
    """Refuse guarantees that cannot all be had at once.

    Args:
        before: settings that these change; what they lack already may stay, so that it can be mended step by
            step.

    Raises:
        InputError: names the queue and the cells that find no node, or the resource of which more is
            guaranteed than there is.
    """
    room = Room(nodes)
    lacked = {} if before is None else {name: more for name, (more, _) in _lacks(before, room).items()}
    for name, (more, sentence) in _lacks(config, room).items():
        if more > lacked.get(name, 0.0):
            raise InputError(sentence)


def _lacks(config: QueuesConfig, room: Room) -> dict[str, tuple[float, str]]:
    """By resource, how much more is guaranteed than there is; and of "cells", how many kinds find no node."""
    found: dict[str, tuple[float, str]] = {}
    members = [(queue.name, queue.all_quotas) for queue in config.queues]
    members += [(cohort.name, cohort.quotas) for cohort in config.cohorts]
    for name in sorted({name for _, quotas in members for name in quotas}):
        # A list, and no dict: a queue and its cohort may have the same name.
        promised = [
            (key, units(quotas[name].nominal))
            for key, quotas in members
            if name in quotas and quotas[name].nominal
        ]
        there = int(room.total_NR[:, room.columns[name]].sum()) if name in room.columns else 0
        total = sum(count for _, count in promised)
        if total > there:
            each = ", ".join(f"{key} {count / UNITS:g}" for key, count in sorted(promised))
            found[name] = (
                (total - there) / UNITS,
                f"queues are guaranteed {total / UNITS:g} {name} together ({each}), and the usable nodes "
                f"have {there / UNITS:g}; lower a nominal quota, or join more nodes",
            )
    if lacking := Guarantees(config, room).bind_rest():
        sentence = f"{lacking[0]}; make the cells smaller or fewer, or join more nodes"
        found["cells"] = float(len(lacking)), sentence
    return found


def _cell_id(cell: _BoundCell) -> str:
    return f"{cell.queue}#{cell.place}"


def _as_node(cell: _BoundCell, node: Node | None) -> Node:
    """What a queue sees of a cell: a node with the labels of the one that it is bound to."""
    labels = {} if node is None else node.labels
    return Node(_cell_id(cell), cell.queue, labels, cell.resources, cell.resources)


def _cards(resources: Mapping[str, float]) -> float:
    cards = sum(count for name, count in resources.items() if name in ACCELERATOR_RESOURCES)
    return cards or resources.get(HOST.ray_resource, 0.0) / 1000
