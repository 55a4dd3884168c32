"""Bytes under names, many at a time: what event stores and other stores of a service lie on.

`lmdb_store` keeps them in a folder, `redis_store` in a server. A change of many names is one transaction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

from rayrec.samples.stores.encoding import Value
from rayrec.samples.stores.errors import NoStoreError
from rayrec.samples.stores.retry import Retry

_T = TypeVar("_T")

Read = Callable[[Sequence[bytes]], Sequence[Value | None]]
"""Names of values -> their contents, None where there is none; good as long as the snapshot is open."""
Changes = Mapping[bytes, bytes | None]
"""Name of a value -> its new content; None removes it."""


class Commit(NamedTuple):
    """What a transaction writes."""

    changes: Changes
    feed: Sequence[bytes] = ()
    """Entries of the feed."""


class KeyValues(ABC):
    """Implementations say what a snapshot and a transaction are, and which errors may pass."""

    _transient: tuple[type[Exception], ...]
    _name: str
    _retry: Retry

    @property
    def name(self) -> str:
        """For messages: where it is, without any password."""
        return self._name

    def read_many(self, names: Sequence[bytes]) -> list[bytes | None]:
        """What is kept under some names, in one request; None where there is nothing.

        Raises:
            StoreUnavailableError: it did not answer.
        """

        def read() -> list[bytes | None]:
            with self._snapshot() as values:
                return [None if value is None else bytes(value) for value in values(names)]

        return self._attempt(read)

    def write_many(self, changes: Changes) -> None:
        """Change some names: all of them, or none.

        Raises:
            StoreUnavailableError: nothing is known of the change, which may be made again.
        """
        self._attempt(lambda: self._transact(lambda read: Commit(changes)))

    @abstractmethod
    def names_after(self, prefix: bytes) -> Iterator[bytes]:
        """All names with a prefix, of letters, digits and ':', each once."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _snapshot(self) -> AbstractContextManager[Read]: ...

    @abstractmethod
    def _transact(self, change: Callable[[Read], Commit]) -> None:
        """Apply what `change` returns: all of it if what it read is still so, else nothing and an error
        that may pass."""

    def _attempt(self, request: Callable[[], _T]) -> _T:
        return self._retry(self._name, request, self._transient)

    def _missing(self) -> NoStoreError:
        return NoStoreError(f"{self._name}: there is no store")
