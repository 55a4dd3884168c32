"""Event stores: the events of a key in order of time, read for a whole batch of keys at once.

 append(events) ──► heads of their keys ──► chunks from their time on ──► one order ──► new head, new chunks
 get_many(keys) ──► heads ──► the chunks that a window needs ──► Histories

A head holds the newest 256 to 511 events of its key, older ones are in chunks of 256 (`chunk_events`). So an
append of new events rewrites a few kilobytes, and reading the newest 256 takes one request. Late events
rewrite the chunks from their time on.

A log has two sides: what each user did, and who met each item. The second one lies beside the first, in the
same file or database, under names of its own (`SIDES`); `append_sides` adds events to both at once, and to
the feed (`feed`), by which other processes learn of them.

The content of a store depends on the set of events alone, not on the order or number of appends: ties are
ordered by a hash of the event, and an event that is there already changes nothing. So appends are idempotent:
a writer that does not know whether its append succeeded repeats it.

Axes: K keys, E events appended, M events of their keys, R chunks.
"""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

import numpy as np

from rayrec.platform.arrays import Int64Array
from rayrec.platform.deduplication import deduplicate
from rayrec.platform.errors import InputError
from rayrec.samples.base.jagged import offsets_from_lengths
from rayrec.samples.stores.batches import AppendReport, EventBatch, Histories, TimeWindow, columns_of
from rayrec.samples.stores.chunks import (
    choose_chunks,
    chunk_names,
    encoded,
    event_order,
    head_names,
    histories_of,
    key_of,
    part_of,
)
from rayrec.samples.stores.encoding import Column, Layout, Value, Values
from rayrec.samples.stores.errors import NoStoreError
from rayrec.samples.stores.feed import FeedEvents, packed, unpacked
from rayrec.samples.stores.key_values import Changes, Commit, KeyValues, Read
from rayrec.samples.stores.manifest import BEHAVIORS, ITEMS, TIMES, By, StoreManifest
from rayrec.samples.stores.retry import Retry

_T = TypeVar("_T")

_TORN_READS = 20
"""How often a reader starts again because a writer removed chunks between its two requests."""


@dataclass(frozen=True)
class StoredFile:
    """A file whose events a store has."""

    name: str
    events: int


class _TornReadError(Exception):
    """Chunks that a head names are gone: a writer replaced them between our two requests."""


class EventStore(Protocol):
    """Events by key."""

    @property
    def name(self) -> str:
        """For messages: where it is, without any password."""
        ...

    @property
    def manifest(self) -> StoreManifest: ...

    def get_many(
        self, keys_K: Int64Array, columns: Collection[str] | None = None, window: TimeWindow | None = None
    ) -> Histories:
        """The events of some keys: all of them, or at least those that a window needs.

        Args:
            columns: which to read besides `times`; None for all.

        Raises:
            StoreUnavailableError: it did not answer.
        """
        ...

    def append(self, events: EventBatch) -> AppendReport:
        """Add events: all of them, or none if this raises StoreUnavailableError and nothing else is known."""
        ...

    def close(self) -> None: ...


class KeyValueEvents(KeyValues):
    """An event store on anything that keeps bytes under names."""

    def __init__(self, name: str, retry: Retry, create: StoreManifest | None = None, by: By = "user") -> None:
        """
        Args:
            create: what to write if there is no store yet.
            by: the side to read and to append to.
        """
        self._name = name
        self._retry = retry
        self._by = by
        self._prefix_of_side = SIDES[by]
        if create is not None:
            self._change(lambda read: {} if read([MANIFEST])[0] else {MANIFEST: create.to_bytes()})
        self._manifest = self._read_manifest()
        self._layout = Layout.of(self._manifest)

    @property
    def manifest(self) -> StoreManifest:
        return self._manifest

    def get_many(
        self, keys_K: Int64Array, columns: Collection[str] | None = None, window: TimeWindow | None = None
    ) -> Histories:
        """See `EventStore.get_many`."""
        kinds = self._manifest.types
        wanted = {name: kinds[name] for name in kinds if columns is None or name == TIMES or name in columns}

        def get() -> Histories:
            with self._side() as read:
                return self._get(read, keys_K, wanted, window)

        return self._attempt(get)

    def append(self, events: EventBatch) -> AppendReport:
        """See `EventStore.append`."""
        return append_sides([(self, [events])])[0]

    def take_behaviors(self, names: tuple[str, ...]) -> None:
        """Give further behaviors the codes that a list has for them, where this store's are its first."""

        def change(read: Read) -> Changes:
            content = read([MANIFEST])[0]
            assert content is not None, "a store has a manifest"
            manifest = StoreManifest.from_bytes(bytes(content), self._name)
            if names[: len(manifest.behaviors)] != manifest.behaviors:
                return {}
            return {MANIFEST: manifest.model_copy(update={"behaviors": names}).to_bytes()}

        self._change(change)
        self._manifest = self._read_manifest()

    def feed_position(self) -> str | None:
        """That of the newest entry of the feed, for `feed_after`; None of a store with one side, which has
        no feed.

        Raises:
            StoreUnavailableError: it did not answer.
        """

        def read_position() -> str | None:
            with self._snapshot() as read:
                if read([SIDES["item"] + MANIFEST])[0] is None:
                    return None
            return self._feed_position()

        return self._attempt(read_position)

    def feed_after(self, position: str, most: int = 1000) -> tuple[FeedEvents, str]:
        """Events that came after a position, of so many entries at most; and the position after them.

        Raises:
            FeedGoneError: events between may be gone; read the store.
            StoreUnavailableError: it did not answer.
        """
        entries, after = self._attempt(lambda: self._feed_after(position, most))
        return unpacked(entries), after

    def read_manifest_again(self) -> StoreManifest:
        """What the manifest is now: another process may have named behaviors."""
        self._manifest = self._read_manifest()
        return self._manifest

    def sources(self) -> dict[str, StoredFile]:
        """Files whose events are all here, by the sha256 of their content."""

        def read_sources() -> Mapping[str, StoredFile]:
            with self._side() as read:
                return _sources(read)

        return dict(self._attempt(read_sources))

    def add_sources(self, files: Mapping[str, StoredFile]) -> None:
        """Remember that all events of these files are here."""

        def change(read: Read) -> Changes:
            merged = {**_sources(read), **files}
            return {SOURCES: json.dumps({digest: asdict(file) for digest, file in merged.items()}).encode()}

        self._change(change)

    def is_empty(self) -> bool:
        """Whether no key has an event."""
        return next(self.key_batches(1), None) is None

    def key_batches(self, most: int) -> Iterator[Int64Array]:
        """All keys, each once, so many at a time."""
        prefix = self._prefix_of_side
        own = (name[len(prefix) :] for name in self._names() if name.startswith(prefix))
        keys = (key for name in own if (key := key_of(name)) is not None)
        while found := list(itertools.islice(keys, most)):
            yield np.array(found, dtype=np.int64)

    @abstractmethod
    def _names(self) -> Iterator[bytes]:
        """All names that there are, each once."""

    @abstractmethod
    def _feed_position(self) -> str: ...

    @abstractmethod
    def _feed_after(self, position: str, most: int) -> tuple[Sequence[bytes], str]:
        """Entries after a position, and that of the last one.

        Raises:
            FeedGoneError: see `feed_after`.
        """

    def _change(self, change: Callable[[Read], Changes]) -> None:
        """`_transact`, with the names of this side."""
        self._attempt(lambda: self._transact(lambda read: Commit(self._named(change(self._reading(read))))))

    def _reading(self, read: Read) -> Read:
        return lambda names: read([self._prefix_of_side + name for name in names])

    def _named(self, changes: Changes) -> Changes:
        return {self._prefix_of_side + name: content for name, content in changes.items()}

    @contextmanager
    def _side(self) -> Iterator[Read]:
        """`_snapshot`, with the names of this side."""
        with self._snapshot() as read:
            yield self._reading(read)

    def _attempt(self, request: Callable[[], _T]) -> _T:
        def attempt() -> _T:
            for _ in range(_TORN_READS):
                try:
                    return request()
                except _TornReadError:
                    pass
            raise RuntimeError(
                f"{self._name}: chunks of events that their key has are missing; does the service evict "
                "keys to stay in its memory? build the store again, with enough memory"
            )

        return self._retry(self._name, attempt, self._transient)

    def _read_manifest(self) -> StoreManifest:
        def read_manifest() -> bytes | None:
            with self._side() as read:
                value = read([MANIFEST])[0]
                return None if value is None else bytes(value)

        content = self._attempt(read_manifest)
        if content is None:
            raise self._missing()
        return StoreManifest.from_bytes(content, self._name)

    def _missing(self) -> NoStoreError:
        return NoStoreError(
            f"{self._name}: there is no event store"
            + (
                " by item; `rayrec data store SOURCE STORE --by item`"
                if self._by == "item"
                else "; `rayrec data store SOURCE STORE`"
            )
            + " builds one"
        )

    def _parse(self, values: Sequence[Value]) -> Values:
        return Values.parse(values, self._layout, self._name)

    def _chunks(self, read: Read, names: Sequence[bytes]) -> Values:
        values = [value for value in read(names) if value is not None]
        if len(values) < len(names):
            raise _TornReadError
        return self._parse(values)

    def _get(
        self, read: Read, keys_K: Int64Array, kinds: Mapping[str, np.dtype], window: TimeWindow | None
    ) -> Histories:
        found = read(head_names(keys_K))
        there_V = np.array([k for k, value in enumerate(found) if value is not None], dtype=np.int64)
        heads = self._parse([value for value in found if value is not None])
        directory = heads.directory
        owner_R = np.repeat(there_V, heads.num_chunks_V)
        if window is None:
            wanted_R = np.ones(len(owner_R), dtype=np.bool_)
        else:
            wanted_R = np.zeros(len(owner_R), dtype=np.bool_)
            choose_chunks(
                heads.words,
                heads.times_V,
                heads.num_events_V,
                directory.offsets_V1,
                directory.num_events_R,
                directory.first_times_R,
                directory.last_times_R,
                window.earliest_K[there_V],
                window.latest_K[there_V],
                window.last,
                wanted_R,
            )
        owner_R = owner_R[wanted_R]
        parts = [part_of(heads, there_V, window)]
        if len(owner_R):
            older = self._chunks(read, chunk_names(keys_K[owner_R], directory.numbers_R[wanted_R]))
            parts.insert(0, part_of(older, owner_R, window))
        return histories_of(parts, len(keys_K), kinds)

    def _merged(
        self, read: Read, keys_E: Int64Array, batch: Mapping[str, Column]
    ) -> tuple[Changes, AppendReport]:
        """New heads and chunks for the keys of a batch of events."""
        manifest = self._manifest
        keys_K, key_E = deduplicate(keys_E)
        earliest_K = np.full(len(keys_K), np.iinfo(np.int64).max)
        np.minimum.at(earliest_K, key_E, batch[TIMES])

        found = read(head_names(keys_K))
        there_V = np.array([k for k, value in enumerate(found) if value is not None], dtype=np.int64)
        heads = self._parse([value for value in found if value is not None])
        directory = heads.directory
        owner_R = np.repeat(there_V, heads.num_chunks_V)
        # Chunks that end at the earliest new time are read, too: by their hash, new events of that time may
        # belong before old ones, or be duplicates of them.
        reopened_R = directory.last_times_R >= earliest_K[owner_R]
        parts = [part_of(heads, there_V)]
        reopened_names = chunk_names(keys_K[owner_R[reopened_R]], directory.numbers_R[reopened_R])
        if reopened_names:
            parts.insert(0, part_of(self._chunks(read, reopened_names), owner_R[reopened_R]))
        stored = histories_of(parts, len(keys_K), manifest.types)
        stored_key_N = np.repeat(np.arange(len(keys_K)), np.diff(stored.offsets_K1))
        newest_K = np.full(len(keys_K), np.iinfo(np.int64).min)
        newest_K[there_V] = heads.words[heads.times_V + heads.num_events_V - 1]

        columns = {name: np.concatenate([stored.columns[name], batch[name]]) for name in manifest.types}
        key_M = np.concatenate([stored_key_N, key_E])
        order_M, repeated_M = event_order(key_M, keys_K[key_M], columns)
        # Stored events come first and lexsort is stable: of equal events, the stored one is kept.
        kept_M = order_M[~repeated_M]
        is_new_M = kept_M >= len(stored_key_N)
        late = int((is_new_M & (columns[TIMES][kept_M] < newest_K[key_M[kept_M]])).sum())
        report = AppendReport(int(is_new_M.sum()), int(repeated_M.sum()), late)
        if not report.added:
            return {}, report
        columns = {name: column[kept_M] for name, column in columns.items()}

        next_numbers_K = np.zeros(len(keys_K), dtype=np.int64)
        next_numbers_K[there_V] = heads.next_numbers_V
        offsets_K1 = offsets_from_lengths(np.bincount(key_M[kept_M], minlength=len(keys_K)))
        left = directory.take(np.flatnonzero(~reopened_R), owner_R[~reopened_R], len(keys_K))
        changes: dict[bytes, bytes | None] = dict.fromkeys(reopened_names)
        changes |= encoded(
            self._layout, manifest.chunk_events, keys_K, Histories(offsets_K1, columns), left, next_numbers_K
        )
        return changes, report


def append_sides(
    batches: Sequence[tuple[KeyValueEvents, Sequence[EventBatch]]],
) -> list[AppendReport]:
    """Add batches of events to sides of one store, all of them in one transaction.

    Of a store with both sides, new events of users go to its feed.

    Returns:
        What became of each batch of the first side.

    Raises:
        InputError: a batch does not fit its side.
        StoreUnavailableError: nothing is known of the events, and all may be appended again.
    """
    checked = [
        (store, [(events.keys_E, columns_of(events, store.manifest, store.name)) for events in of_side])
        for store, of_side in batches
    ]
    reports: list[AppendReport] = []

    def change(read: Read) -> Commit:
        reports.clear()  # of an attempt that failed
        changes: dict[bytes, bytes | None] = {}
        feed: list[bytes] = []
        has_both = len(batches) > 1 or read([SIDES["item"] + MANIFEST])[0] is not None

        def read_changed(names: Sequence[bytes]) -> list[Value | None]:
            """What a batch before has changed is not in the store yet."""
            stored = iter(read([name for name in names if name not in changes]))
            return [changes[name] if name in changes else next(stored) for name in names]

        for place, (store, of_side) in enumerate(checked):
            for keys_E, columns in of_side:
                report = AppendReport(0, 0, 0)
                if len(keys_E):
                    merged, report = store._merged(store._reading(read_changed), keys_E, columns)
                    changes |= store._named(merged)
                    if report.added and has_both and store.manifest.by == "user":
                        feed += packed(keys_E, columns[ITEMS], columns[TIMES], columns.get(BEHAVIORS))
                if place == 0:
                    reports.append(report)
        return Commit(changes, feed)

    first = batches[0][0]
    first._attempt(lambda: first._transact(change))
    return list(reports)


def check_sides(store: KeyValueEvents, other: KeyValueEvents) -> None:
    """Refuse two sides that are not of one log, or have other codes of behaviors.

    Raises:
        InputError: names the store.
    """
    mine, theirs = store.manifest, other.manifest
    number = min(len(mine.behaviors), len(theirs.behaviors))
    if mine.log_fingerprint != theirs.log_fingerprint or mine.behaviors[:number] != theirs.behaviors[:number]:
        raise InputError(
            f"{store.name}: its two sides are not of one log, or have other codes of behaviors; build both "
            "from the same files (rayrec data store SOURCE STORE, and again with --by item)"
        )


SIDES: dict[By, bytes] = {"user": b"", "item": b"item:"}
"""What names of each side begin with; stores of earlier versions have users alone."""
MANIFEST, SOURCES = b"manifest", b"sources"


def _sources(read: Read) -> dict[str, StoredFile]:
    content = read([SOURCES])[0]
    if content is None:
        return {}
    return {digest: StoredFile(**values) for digest, values in json.loads(bytes(content)).items()}
