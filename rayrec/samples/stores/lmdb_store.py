"""The embedded store: a folder with an LMDB file, which processes of one machine share.

Readers see a consistent state and never wait; there is one writer at a time. A process may map a file
only once, so stores of one process on one path share the mapping.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import lmdb

from rayrec.platform.errors import InputError
from rayrec.samples.stores.encoding import Value
from rayrec.samples.stores.feed import MOST_ENTRIES, START, FeedGoneError
from rayrec.samples.stores.key_values import Commit, KeyValues, Read
from rayrec.samples.stores.manifest import By, StoreManifest
from rayrec.samples.stores.retry import Retry
from rayrec.samples.stores.store import KeyValueEvents

_MAP_BYTES = 1 << 40
"""Address space, not disk: the file is as large as what is in it."""
_MAX_READERS = 1024
_DATA_FILE = "data.mdb"


class LmdbValues(KeyValues):
    """Values in a folder on a local disk.

    Args:
        create: make the store if there is none.

    Raises:
        InputError: there is no store, or the folder holds something else.
    """

    _transient = (lmdb.ReadersFullError, lmdb.DiskError, lmdb.LockError)

    def __init__(self, path: str | Path, retry: Retry, create: bool = False) -> None:
        self._name, self._retry = str(path), retry
        self._path = Path(path).resolve()
        if not (self._path / _DATA_FILE).is_file():
            if not create:
                raise self._missing()
            if self._path.exists() and (not self._path.is_dir() or any(self._path.iterdir())):
                raise InputError(f"{path}: something else is there; give a new folder for the store")
            self._path.mkdir(parents=True, exist_ok=True)
        self._mapping: _Mapping | None = _Mapping.open(self._path)

    def close(self) -> None:
        if self._mapping is not None:
            self._mapping.release()
            self._mapping = None

    def names_after(self, prefix: bytes) -> Iterator[bytes]:
        """In their order, as of one moment."""
        with self._environment().begin() as transaction, transaction.cursor() as cursor:
            if prefix and not cursor.set_range(prefix):
                return
            for name in cursor.iternext(keys=True, values=False):
                if not name.startswith(prefix):
                    return
                yield name

    @contextmanager
    def _snapshot(self) -> Iterator[Read]:
        # Views into the mapped file: the only copy is the one that joins them.
        with self._environment().begin(buffers=True) as transaction:
            yield lambda names: [transaction.get(name) for name in names]

    def _transact(self, change: Callable[[Read], Commit]) -> None:
        def read(names: Sequence[bytes]) -> list[Value | None]:
            return [transaction.get(name) for name in names]

        with self._environment().begin(write=True) as transaction:
            changes, feed = change(read)
            for name in sorted(changes):  # neighbors lie on one page of the tree
                content = changes[name]
                if content is None:
                    transaction.delete(name)
                else:
                    transaction.put(name, content)
            if feed:
                _Feed(transaction).add(feed)

    def _environment(self) -> lmdb.Environment:
        assert self._mapping is not None, "the store is closed"
        if self._mapping.process != os.getpid():
            # LMDB's locks do not outlive a fork: a reader would wait for ever.
            raise RuntimeError(f"{self._name}: opened before this process was forked; spawn it instead")
        return self._mapping.environment


class LmdbStore(LmdbValues, KeyValueEvents):
    """Events in a folder on a local disk.

    Args:
        create: make the store if there is none.

    Raises:
        InputError: there is no store, or the folder holds something else.
    """

    def __init__(
        self, path: str | Path, retry: Retry, create: StoreManifest | None = None, by: By = "user"
    ) -> None:
        self._by = by
        LmdbValues.__init__(self, path, retry, create is not None)
        try:
            KeyValueEvents.__init__(self, str(path), retry, create, by)
        except BaseException:
            self.close()
            raise

    def _names(self) -> Iterator[bytes]:
        return self.names_after(b"")

    def _feed_position(self) -> str:
        with self._environment().begin() as transaction:
            return _Feed(transaction).newest()

    def _feed_after(self, position: str, most: int) -> tuple[Sequence[bytes], str]:
        with self._environment().begin() as transaction:
            return _Feed(transaction).after(position, most)


class _Feed:
    """Entries by number, in one transaction. Each has a tag of its own, by which a position is told from one
    of another store, and of this one before it was restored from a copy."""

    def __init__(self, transaction: lmdb.Transaction) -> None:
        self._transaction = transaction

    def newest(self) -> str:
        return self._position(self._last()) or START

    def after(self, position: str, most: int) -> tuple[list[bytes], str]:
        number = position.partition(":")[0]
        at = int(number) if number.isdecimal() else 0
        if position != self._position(at):
            raise FeedGoneError(position)
        last = self._last()
        if at == 0 and last > MOST_ENTRIES:
            raise FeedGoneError(position)
        stop = min(at + 1 + most, last + 1)
        found = (self._transaction.get(_entry_name(number)) for number in range(at + 1, stop))
        entries = [bytes(entry)[_TAG_BYTES:] for entry in found if entry is not None]
        return entries, self._position(stop - 1) or START

    def add(self, entries: Sequence[bytes]) -> None:
        before = self._last()
        last = before + len(entries)
        for number, entry in enumerate(entries, before + 1):
            if number > last - MOST_ENTRIES:
                self._transaction.put(_entry_name(number), os.urandom(_TAG_BYTES) + entry)
        # As many of the oldest go.
        for number in range(max(before - MOST_ENTRIES, 0) + 1, min(last - MOST_ENTRIES, before) + 1):
            self._transaction.delete(_entry_name(number))

    def _position(self, number: int) -> str | None:
        """That of an entry; None of one that is not there."""
        if number == 0:
            return START
        entry = self._transaction.get(_entry_name(number))
        return None if entry is None else f"{number}:{bytes(entry[:_TAG_BYTES]).hex()}"

    def _last(self) -> int:
        with self._transaction.cursor() as cursor:
            found = cursor.prev() if cursor.set_range(_AFTER_FEED) else cursor.last()
            name = bytes(cursor.key()) if found else b""
        return int.from_bytes(name[len(_ENTRY) :], "big") if name.startswith(_ENTRY) else 0


_ENTRY, _AFTER_FEED = b"feed:", b"feed;"
_TAG_BYTES = 8


def _entry_name(number: int) -> bytes:
    return _ENTRY + number.to_bytes(8, "big")


@dataclass
class _Mapping:
    """A mapped file of this process, and how many stores use it."""

    path: Path
    process: int
    environment: lmdb.Environment
    users: int = 0

    @classmethod
    def open(cls, path: Path) -> _Mapping:
        key = (os.getpid(), path)
        with _MAPPINGS_LOCK:
            if key not in _MAPPINGS:
                writable = os.access(path, os.W_OK) and (
                    not (path / _DATA_FILE).exists() or os.access(path / _DATA_FILE, os.W_OK)
                )
                try:
                    environment = lmdb.open(
                        str(path),
                        map_size=_MAP_BYTES,
                        max_readers=_MAX_READERS,
                        readonly=not writable,
                        lock=writable,  # without a writer there is no lock file to write
                        readahead=False,
                    )
                    if writable:
                        environment.reader_check()  # forget readers that were killed: they keep old pages
                except lmdb.Error as error:
                    raise InputError(f"{path}: cannot be opened as an event store: {error}") from error
                _MAPPINGS[key] = cls(path, os.getpid(), environment)
            mapping = _MAPPINGS[key]
            mapping.users += 1
            return mapping

    def release(self) -> None:
        with _MAPPINGS_LOCK:
            self.users -= 1
            if self.users == 0 and self.process == os.getpid():
                del _MAPPINGS[self.process, self.path]
                self.environment.close()


_MAPPINGS: dict[tuple[int, Path], _Mapping] = {}
_MAPPINGS_LOCK = Lock()
