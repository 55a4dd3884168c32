"""The graph of users and items in time: appended to while it is read, dropped by age, kept in files.

    append ─► edges that are new ─► a run per period of time ─► merged with runs of about its size
    save / open ─► one memory-mapped Arrow file for each segment, and a manifest

A *segment* has the edges of a period in both directions. What is in a graph depends on the set of its events
alone, not on their order, nor on how they were grouped or repeated: so a graph that was lost is made again
from the event store, and a writer that does not know whether its append succeeded repeats it.

With a bound, a node has its newest edges of that set, each direction by itself: an edge may be there for its
user and not for its item. Runs give back what lies beyond when they are made and merged; readers skip the
rest. An edge that was given back and comes again is beyond the bound still, and is not taken.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
from numba import njit
from pydantic import Field, ValidationError, model_validator

from rayrec.platform.arrays import BoolArray, Int64Array
from rayrec.platform.compiled import kernel_input
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.platform.files import sync, unfinished_suffix, write_json
from rayrec.samples.dataset.manifest import IdKind
from rayrec.samples.graph.counting import FREE
from rayrec.samples.graph.runs import Edges, Run, order_of
from rayrec.samples.graph.views import ANY_TIME, Side, place_of
from rayrec.samples.stores.manifest import PER_SECOND, TimeUnit

MANIFEST = "graph.json"
_BEFORE = ".before"
"""Below the folder, the manifest before."""
_TEMPORARY = ".segment-"
FORMAT = 1
DAY_S = 86_400
MAX_SEGMENTS = 64
"""A question looks into each of them."""
_EVER = np.iinfo(np.int64).min
_RATIO = 4
"""Runs of a period are merged until each has so many times the edges of the next."""


class GraphConfig(Config):
    """What a graph is of; fixed when it is made."""

    log: str = ""
    """Fingerprint of the log whose events it has; two logs make two graphs."""
    time_unit: TimeUnit = "s"
    kinds: tuple[str, ...] = ()
    """Names of the kinds of edges, by their codes."""
    id_kinds: dict[str, IdKind] = Field({"user": "integer", "item": "integer"})
    period: int | None = Field(None, ge=1)
    """Length of the time of a segment, in `time_unit`. What is older than asked for is dropped a segment at a
    time. None: one segment has all."""
    max_edges_per_node: int | None = Field(None, ge=1)
    """Newest edges of a user, and of an item, that are kept and read; None: all. What a question about the
    past lacks tells what came after it: such a graph is for questions of now."""

    @model_validator(mode="after")
    def _bounds_one_segment(self) -> Self:
        # Edges of a node in many segments could only be found too many together, at each question again.
        if self.period is not None and self.max_edges_per_node is not None:
            raise ValueError(
                "a graph has either segments by time (`period`) or a bound for each node "
                "(`max_edges_per_node`): the bound holds over all time"
            )
        return self


@dataclass(frozen=True)
class Segment:
    """Edges of one period, by user and by item."""

    period: int
    users: Run
    items: Run
    first_time: int
    last_time: int
    file: Path | None = field(default=None, compare=False)
    """Where it was saved or read from."""

    @classmethod
    def of(cls, period: int, edges: Edges, back: Edges, most: int | None = None) -> Segment:
        """Of edges from users to items, and of those back.

        Args:
            most: of a node; the newest are taken.
        """
        return cls._of_runs(period, Run.of(edges).newest(most), Run.of(back).newest(most))

    @classmethod
    def merged(cls, older: Segment, newer: Segment, most: int | None = None) -> Segment:
        users, items = Run.merged(older.users, newer.users), Run.merged(older.items, newer.items)
        return cls._of_runs(newer.period, users.newest(most), items.newest(most))

    def since(self, floor: int) -> Segment:
        """Without the edges before a time, if they are more than half of it; else as it is."""
        kept = [edges.take(edges.times_E >= floor) for edges in (self.users.edges(), self.items.edges())]
        if 2 * max(len(edges.nodes_E) for edges in kept) >= self.num_edges:
            return self
        return self._of_runs(self.period, Run.of(kept[0]), Run.of(kept[1]))

    @classmethod
    def _of_runs(cls, period: int, users: Run, items: Run, file: Path | None = None) -> Segment:
        times = [run.times_E for run in (users, items) if run.num_edges]
        first, last = min(int(one.min()) for one in times), max(int(one.max()) for one in times)
        return cls(period, users, items, first, last, file)

    @property
    def num_edges(self) -> int:
        """Of the direction that has more of them: with a bound, edges of hubs go back one way alone."""
        return max(self.users.num_edges, self.items.num_edges)

    @property
    def num_events(self) -> int:
        """That are there in at least one direction."""
        return Run.of(Edges.joined([self.users.edges(), self.items.edges().reversed()])).num_edges

    def save(self, folder: Path) -> tuple[Segment, str]:
        """Write the file of this segment; its name is that of its content.

        Returns:
            The segment, which now has a file; and the sha256 of it.
        """
        batch = pa.record_batch(self.users.named_columns("users") | self.items.named_columns("items"))
        temporary = folder / f"{_TEMPORARY}{unfinished_suffix()}"
        try:
            with pa.OSFile(str(temporary), "wb") as file, ipc.new_file(file, batch.schema) as out:
                out.write_batch(batch)
            digest = _sha256(temporary)
            path = folder / f"{digest[:16]}.arrow"
            sync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return Segment(self.period, self.users, self.items, self.first_time, self.last_time, path), digest

    @classmethod
    def load(cls, path: Path, period: int, digest: str) -> Segment:
        """Map a saved segment.

        Raises:
            InputError: it is missing, or not what was saved.
        """
        again = "make the graph again"
        try:
            if _sha256(path) != digest:
                raise InputError(f"{path}: this segment of a graph is damaged; {again}")
            with pa.memory_map(str(path)) as file:
                batch = ipc.open_file(file).get_batch(0)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path}: this segment of a graph cannot be read ({error}); {again}") from error
        users, items = (Run.of_columns(side, batch) for side in ("users", "items"))
        return cls._of_runs(period, users, items, path)


@dataclass(frozen=True)
class GraphState:
    """What a graph holds at one moment; it never changes, so readers need no lock."""

    segments: tuple[Segment, ...] = ()
    """The newest period first."""
    floor: int = np.iinfo(np.int64).min
    has_kinds: bool = True
    most: int | None = None
    """Newest edges of a node that are there; runs that are to be merged may have more."""
    users: Side = field(init=False)
    """From users to items."""
    items: Side = field(init=False)
    """From items to users."""

    def __post_init__(self) -> None:
        for side in ("users", "items"):
            runs = [getattr(segment, side) for segment in self.segments]
            object.__setattr__(self, side, Side.of(runs, self.floor, self.has_kinds, self.most))

    @property
    def num_edges(self) -> int:
        """Edges below the floor, which are not read any more, are among them until their segment goes."""
        return sum(segment.num_edges for segment in self.segments)

    def edges(self) -> Edges:
        """From users to items; what lies below the floor or beyond the bound is left out."""
        edges = Edges.joined(segment.users.edges() for segment in self.segments)
        if self.most is not None:
            edges = Run.of(edges).newest(self.most).edges()
        return edges.take(edges.times_E >= self.floor)

    @property
    def num_bytes(self) -> int:
        return sum(segment.users.num_bytes + segment.items.num_bytes for segment in self.segments)


class TemporalGraph:
    """Users and items, joined by events. One thread at a time appends; any number reads `state` meanwhile."""

    def __init__(
        self,
        config: GraphConfig | None = None,
        segments: Iterable[Segment] = (),
        both_ways: bool = True,
    ) -> None:
        """
        Args:
            both_ways: keep edges from items to users as well; without, half as much memory.
        """
        self.config = config or GraphConfig()
        self._both_ways = both_ways
        self.state = GraphState(
            tuple(segments), has_kinds=bool(self.config.kinds), most=self.config.max_edges_per_node
        )
        """What readers take: once per question, so that all of it is of one moment."""
        self.feed_position: str | None = None
        """Of the event store that was read, so that the next reading goes on from there; None: of none."""
        self.keep_days: float | None = None
        """What is older than the newest event by more is forgotten; None: nothing is."""
        self.past = ""
        """Another text as soon as what was there before events that were saved is not what it was: of a graph
        that grows by newer events alone, it stays."""
        self._until = _EVER
        """Newest time of what was saved."""
        self._has_late = False
        self._lock = threading.Lock()

    def append(
        self,
        users_E: Int64Array,
        items_E: Int64Array,
        times_E: Int64Array,
        kinds_E: Any = None,
    ) -> int:
        """Add events, in any order; those that are there already change nothing.

        Returns:
            How many were new, and not beyond the bound of both of their nodes.

        Raises:
            InputError: a kind that has no name.
        """
        edges = self._edges(users_E, items_E, times_E, kinds_E)
        with self._lock:
            state, most = self.state, self.config.max_edges_per_node
            edges = edges.take(edges.times_E >= state.floor)
            period_E = edges.times_E // (self.config.period or ANY_TIME)
            back = edges.reversed()
            new_E = _are_new(state, "users", edges)
            # Without a bound, an edge is there both ways or not at all.
            new_back_E = new_E if most is None else _are_new(state, "items", back)
            new_back_E = new_back_E & self._both_ways
            new = [
                Segment.of(
                    period,
                    edges.take(new_E & (period_E == period)),
                    back.take(new_back_E & (period_E == period)),
                    most,
                )
                for period in np.unique(period_E[new_E | new_back_E]).tolist()
            ]
            if not new:
                return 0
            self._has_late |= any(segment.first_time < self._until for segment in new)
            self.state = replace(state, segments=_tidied([*state.segments, *new], most))
            # Without a bound, all of them are in the first direction.
            return sum(segment.users.num_edges if most is None else segment.num_events for segment in new)

    def drop_before(self, time: int) -> None:
        """Forget edges before a time; memory is given back by whole segments."""
        with self._lock:
            floor = max(time, self.state.floor)
            kept = tuple(one.since(floor) for one in self.state.segments if one.last_time >= floor)
            self.state = replace(self.state, segments=kept, floor=floor)

    def forget(self, now_s: float) -> None:
        """Forget what is older than `keep_days`.

        Args:
            now_s: UNIX seconds; an event whose clock was ahead does not age all others.
        """
        segments = self.state.segments
        if self.keep_days is None or not segments:
            return
        per_s = PER_SECOND[self.config.time_unit]
        newest = min(max(segment.last_time for segment in segments), round(now_s * per_s))
        self.drop_before(newest - round(self.keep_days * DAY_S * per_s))

    def name_kinds(self, kinds: tuple[str, ...]) -> None:
        """Give names to further kinds; the codes of those that have one stay."""
        with self._lock:
            self.config = self.config.model_copy(update={"kinds": kinds})
            self.state = replace(self.state, has_kinds=bool(kinds))

    def _edges(self, users_E: Any, items_E: Any, times_E: Any, kinds_E: Any) -> Edges:
        kinds_E = np.full(len(users_E), -1, np.int16) if kinds_E is None else np.asarray(kinds_E)
        num_kinds = len(self.config.kinds)
        if len(kinds_E) and not -1 <= kinds_E.min() <= kinds_E.max() < num_kinds:
            raise InputError(
                f"events have kinds from {kinds_E.min()} to {kinds_E.max()}, and the graph has names for "
                f"{num_kinds} (-1 is unknown)"
            )
        users_E, items_E, times_E = (np.asarray(one, dtype=np.int64) for one in (users_E, items_E, times_E))
        for entity, ids_E in (("user", users_E), ("item", items_E)):
            if len(ids_E) and ids_E.min() == FREE:
                raise InputError(f"an event has the {entity} id {FREE}, which stands for none here")
        return Edges(users_E, items_E, times_E, kinds_E.astype(np.int16))

    @property
    def fingerprint(self) -> str:
        """Another text for other edges; of segments that were not saved, their sizes and times tell."""
        state = self.state
        segments = [
            (one.num_edges, one.first_time, one.last_time) if one.file is None else one.file.name
            for one in state.segments
        ]
        content = repr((self.config.model_dump(mode="json"), state.floor, segments))
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def check_log(self, fingerprint: str, where: str) -> None:
        """Refuse events of another log.

        Raises:
            InputError: they are of another log than the graph's.
        """
        if self.config.log != fingerprint:
            raise InputError(
                f"{where} has the events of another log ({fingerprint or 'unnamed'}) than this graph "
                f"({self.config.log or 'unnamed'}): ids of one mean nothing in the other; make a graph of it"
            )

    def save(self, folder: str | Path) -> None:
        """Write the graph; a crash leaves the one before. Segments that are there are not written again.

        Raises:
            InputError: the folder holds something else.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / MANIFEST).exists() and any(not one.name.startswith(".") for one in folder.iterdir()):
            raise InputError(f"{folder}: something else is there; give a new folder for the graph")
        with self._lock, _locked(folder):
            for left in folder.glob(f"{_TEMPORARY}*"):  # of a process that was killed
                left.unlink()
            # Before the state: what is appended meanwhile is read again.
            position = self.feed_position
            state, entries = self.state, []
            known = _entries(folder)
            saved = []
            for segment in state.segments:
                name = None if segment.file is None else segment.file.name
                if segment.file is None or segment.file.parent != folder or name not in known:
                    segment, digest = segment.save(folder)
                    assert segment.file is not None
                    name = segment.file.name
                else:
                    digest = known[str(name)]
                saved.append(segment)
                entries.append({"file": name, "sha256": digest, "period": segment.period})
            if self._has_late or not self.past:
                self.past = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
            content = {
                "format": FORMAT,
                "config": self.config.model_dump(mode="json"),
                "floor": state.floor,
                "feed_position": position,
                "keep_days": self.keep_days,
                "past": self.past,
                "segments": entries,
            }
            write_json(folder / MANIFEST, content)
            self.state = replace(state, segments=tuple(saved))
            self._is_saved()
            # Who read the manifest before may be about to map its files: they go with the next one.
            for name in (
                _entries(folder / _BEFORE).keys() - known.keys() - {entry["file"] for entry in entries}
            ):
                (folder / name).unlink(missing_ok=True)
            (folder / _BEFORE).mkdir(exist_ok=True)
            before = [{"file": name, "sha256": digest} for name, digest in known.items()]
            write_json(folder / _BEFORE / MANIFEST, {"segments": before})

    def _is_saved(self) -> None:
        self._has_late = False
        self._until = max((segment.last_time for segment in self.state.segments), default=_EVER)

    @classmethod
    def open(cls, folder: str | Path, held: TemporalGraph | None = None) -> Self:
        """Map a saved graph.

        Args:
            held: of the same folder; its segments are not read again.

        Raises:
            InputError: there is none, or it is damaged.
        """
        segments = () if held is None else held.state.segments
        known = {one.file: one for one in segments if one.file is not None}
        try:
            return cls._open(Path(folder) / MANIFEST, known)
        except InputError:
            # Saved meanwhile, twice: what the manifest named is gone, and a newer one is there.
            return cls._open(Path(folder) / MANIFEST, known)

    @classmethod
    def _open(cls, path: Path, known: Mapping[Path, Segment]) -> Self:
        folder = path.parent
        if not path.is_file():
            raise InputError(f"{folder}: there is no graph; `rayrec data graph SOURCE {folder}` makes one")
        try:
            content = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise InputError(f"{path}: graph format {content['format']!r}, this version reads {FORMAT}")
            graph = cls(
                GraphConfig.model_validate(content["config"]),
                [
                    # A file of this name has this content.
                    known.get(file := folder / Path(entry["file"]).name)
                    or Segment.load(file, entry["period"], entry["sha256"])
                    for entry in content["segments"]
                ],
            )
            graph.state = replace(graph.state, floor=int(content["floor"]))
            graph.feed_position, graph.keep_days = content.get("feed_position"), content.get("keep_days")
            graph.past = str(content.get("past", ""))
            graph._is_saved()
        except (ValueError, KeyError, TypeError, ValidationError) as error:
            raise InputError(f"{path}: is damaged ({error}); make the graph again") from error
        return graph


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time changes a saved graph; the lock goes with the process."""
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entries(folder: Path) -> dict[str, str]:
    """Files of the graph that is there, and their sha256."""
    try:
        content: Mapping[str, Any] = json.loads((folder / MANIFEST).read_text())
        return {entry["file"]: entry["sha256"] for entry in content["segments"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _tidied(segments: list[Segment], most: int | None) -> tuple[Segment, ...]:
    """Few enough segments, those of a period of falling sizes; newer periods first."""
    by_period: dict[int, list[Segment]] = {}
    for segment in sorted(segments, key=lambda one: (-one.period, -one.num_edges)):
        by_period.setdefault(segment.period, []).append(segment)
    for runs in by_period.values():
        while len(runs) > 1 and runs[-2].num_edges < _RATIO * runs[-1].num_edges:
            _merge_last_two(runs, most)
    while sum(map(len, by_period.values())) > MAX_SEGMENTS:
        several = [runs for runs in by_period.values() if len(runs) > 1]
        if several:
            _merge_last_two(min(several, key=lambda runs: runs[-2].num_edges), most)
        else:  # more periods than runs: the two oldest become one
            oldest, newer = sorted(by_period)[:2]
            (older_run,), (newer_run,) = by_period.pop(oldest), by_period[newer]
            by_period[newer] = [Segment.merged(older_run, newer_run, most)]
    return tuple(itertools.chain.from_iterable(by_period[period] for period in sorted(by_period)[::-1]))


def _merge_last_two(runs: list[Segment], most: int | None) -> None:
    smaller, larger = runs.pop(), runs.pop()
    runs.append(Segment.merged(larger, smaller, most))
    runs.sort(key=lambda one: -one.num_edges)


def _are_new(state: GraphState, side: Literal["users", "items"], edges: Edges) -> BoolArray:
    """[E] which edges of a direction a graph lacks, and has not given back for newer ones of their node."""
    new_E, newer_E = np.ones(len(edges.nodes_E), dtype=np.bool_), np.zeros(len(edges.nodes_E), np.int64)
    for segment in state.segments:
        run: Run = getattr(segment, side)
        if run.num_edges:
            _look_up(
                *run,
                segment.first_time,
                segment.last_time,
                kernel_input(edges.nodes_E, np.int64),
                kernel_input(edges.others_E, np.int64),
                kernel_input(edges.times_E, np.int64),
                kernel_input(edges.kinds_E, np.int16),
                state.most is not None,
                new_E,
                newer_E,
            )
    if state.most is not None:
        new_E &= newer_E < state.most
    return new_E


@njit(nogil=True, cache=True)
def _look_up(
    nodes_V: Any,
    offsets_V1: Any,
    run_others: Any,
    run_times: Any,
    run_kinds: Any,
    first_time: int,
    last_time: int,
    nodes_E: Any,
    others_E: Any,
    times_E: Any,
    kinds_E: Any,
    counts: bool,
    new_E: Any,
    newer_E: Any,
) -> None:
    """Mark edges that a run has, and add up how many edges of their nodes stand behind them."""
    for e in range(len(nodes_E)):
        if not new_E[e] or times_E[e] > last_time or (times_E[e] < first_time and not counts):
            continue
        place = place_of(nodes_V, nodes_E[e])
        if place < 0:
            continue
        start, stop = offsets_V1[place], offsets_V1[place + 1]
        at = start + np.searchsorted(run_times[start:stop], times_E[e])
        while at < stop and run_times[at] == times_E[e]:
            order = order_of(
                run_others[at], run_times[at], run_kinds[at], others_E[e], times_E[e], kinds_E[e]
            )
            if order == 0:
                new_E[e] = False
            if order >= 0:
                break
            at += 1
        newer_E[e] += stop - at
