"""Where products are kept: LMDB or Redis, many users in a request.

    product:KIND:IDENTITY:USER    a record, see `products`
    position:IDENTITY:...         up to where a worker has read the events, written with the products

A reader never waits for a store that is down, and never gets what it cannot use: what is missing, damaged or
foreign reads as missing, and is counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rayrec.pipelines.nearline.products import (
    CorruptRecordError,
    ForeignRecordError,
    Product,
    ProductKey,
    decoded,
    encoded,
)
from rayrec.platform.circuit import Circuit
from rayrec.platform.errors import UnavailableError
from rayrec.samples.stores.key_values import KeyValues

logger = logging.getLogger(__name__)

WARN_EVERY_S = 60.0
_PRODUCT, _POSITION = "product", "position"


class Work(NamedTuple):
    """What the workers of a version have done since they began."""

    num_users: int
    """Users that were brought up to date, each as often as that happened."""
    seconds: float
    num_waiting: int
    """Users with events that no product has seen."""

    def to_text(self) -> str:
        return f"{self.num_users} {self.seconds:.6f} {self.num_waiting}"

    @classmethod
    def of_text(cls, text: str) -> Work:
        """
        Raises:
            ValueError: nobody wrote this.
        """
        num_users, seconds, num_waiting = text.split()
        return cls(int(num_users), float(seconds), int(num_waiting))


class ProductStore:
    """Products on values under names; from any thread."""

    def __init__(
        self, values: KeyValues, pause_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            pause_s: in which a store that did not answer is not asked again.
        """
        self._values, self._clock = values, clock
        self._circuit = Circuit(pause_s, clock)
        self._warned_at = float("-inf")
        self._lock = threading.Lock()
        self._unusable = Counter[str]()

    def get_many(self, keys: Sequence[ProductKey]) -> list[Product | None]:
        """The products of some keys, in one request; None where there is none that can be used."""
        if not keys:
            return []
        try:
            records = self._circuit(lambda: self._read([_name_of(key) for key in keys]))
        except UnavailableError as error:
            self._count("down", str(error), len(keys))
            return [None] * len(keys)
        return [
            None if record is None else self._decoded(key, record)
            for key, record in zip(keys, records, strict=True)
        ]

    def _read(self, names: Sequence[bytes]) -> list[bytes | None]:
        try:
            return self._values.read_many(names)
        except UnavailableError:
            raise
        except Exception as error:  # a password that changed, a damaged file: nobody's answer fails of it
            raise UnavailableError(self._values.name, 1, str(error)) from error

    def _decoded(self, key: ProductKey, record: bytes) -> Product | None:
        try:
            return decoded(key, record)
        except CorruptRecordError as error:
            self._count("corrupt", f"{key.kind} of a user: {error}")
        except ForeignRecordError as error:
            self._count("foreign", f"{key.kind} of a user: {error}")
        return None

    def _count(self, reason: str, message: str, number: int = 1) -> None:
        with self._lock:
            self._unusable[reason] += number
            is_silent = (now := self._clock()) - self._warned_at < WARN_EVERY_S
            if not is_silent:
                self._warned_at = now
        if not is_silent:
            logger.warning(
                "near-line products of %s cannot be used (%s), and are computed instead: %s",
                self._values.name,
                reason,
                message,
            )

    @property
    def unusable(self) -> dict[str, int]:
        """Products that could not be read, by reason: `down`, `corrupt`, `foreign`."""
        with self._lock:
            return {reason: self._unusable[reason] for reason in ("down", "corrupt", "foreign")}

    def put_many(
        self, products: Mapping[ProductKey, Product | None], positions: Mapping[str, str] | None = None
    ) -> None:
        """Write products, and positions with them: all, or nothing. Where there is None, what was there goes.

        Raises:
            UnavailableError: nothing is known of them, and all may be written again.
        """
        changes: dict[bytes, bytes | None] = {
            _name_of(key): None if product is None else encoded(key, product)
            for key, product in products.items()
        }
        changes |= {
            f"{_POSITION}:{name}".encode(): position.encode() for name, position in (positions or {}).items()
        }
        self._values.write_many(changes)

    def position(self, name: str) -> str | None:
        """What `put_many` wrote last under a name.

        Raises:
            UnavailableError: the store does not answer.
        """
        (found,) = self._values.read_many([f"{_POSITION}:{name}".encode()])
        return None if found is None else found.decode(errors="replace")

    def coverage(self, identity: str) -> float:
        """Share of the active users that a version's workers looked at and have done, that of the worker that
        has done least; 0 where none began.

        Raises:
            UnavailableError: the store does not answer.
        """
        names = list(self._values.names_after(f"{_POSITION}:{identity}:coverage:".encode()))
        if not names:
            return 0.0
        parts_of: dict[bytes, set[bytes]] = {}
        for name in names:
            # Whatever their settings: a worker that was restarted may have read another state of the graph.
            of_kinds, _, part = name.rsplit(b":", 2)
            parts_of.setdefault(of_kinds + b":" + part.partition(b"of")[2], set()).add(part)
        if any(len(parts) < int(of.rpartition(b":")[2]) for of, parts in parts_of.items()):
            return 0.0  # a worker has not begun
        return min(0.0 if share is None else float(share) for share in self._values.read_many(names))

    def forget_others(self, name: str) -> None:
        """Forget what workers of the same kinds have noted that had this part with other settings, or divided
        the users in another number of parts. Other parts have workers of their own.

        Args:
            name: of a note, which ends with `:SETTINGS:PARTofPARTS`.

        Raises:
            UnavailableError: the store does not answer.
        """
        own = f"{_POSITION}:{name}".encode()
        of_kinds, _, part = own.rsplit(b":", 2)
        others = [
            each
            for each in self._values.names_after(of_kinds + b":")
            if each != own
            and (each.endswith(b":" + part) or not each.endswith(b"of" + part.partition(b"of")[2]))
        ]
        if others:
            self._values.write_many(dict.fromkeys(others))

    def work(self, identity: str) -> Work:
        """Of all workers of a version.

        Raises:
            UnavailableError: the store does not answer.
            ValueError: another format wrote it.
        """
        names = list(self._values.names_after(f"{_POSITION}:{identity}:work:".encode()))
        texts = [text.decode(errors="replace") for text in self._values.read_many(names) if text is not None]
        parts = [Work.of_text(text) for text in texts]
        return Work(*(sum(column) for column in zip(*parts, strict=True))) if parts else Work(0, 0.0, 0)

    def keep_newest(self, owner: str, identities: Sequence[str], versions: int) -> int:
        """Note that a run, or its versions, has products of these identities, and remove those that were
        noted before, but for the newest.

        Args:
            owner: path or URL of the run or the versions.
            versions: notes that are kept.

        Returns:
            Products that were removed.

        Raises:
            UnavailableError: the store does not answer; it may be called again.
        """
        name, newest = f"versions:{owner}", " ".join(sorted(identities))
        notes = [note for note in (self.position(name) or "").split(",") if note and note != newest]
        notes.append(newest)
        kept = {identity for note in notes[-versions:] for identity in note.split()}
        gone = {identity for note in notes[:-versions] for identity in note.split()} - kept
        removed = sum(self.remove(identity) for identity in sorted(gone))
        self.put_many({}, {name: ",".join(notes[-versions:])})
        return removed

    def identities(self) -> set[str]:
        """Of all versions that products are of."""
        names = self._values.names_after(f"{_PRODUCT}:".encode())
        return {name.decode().split(":")[2] for name in names}

    def remove(self, identity: str) -> int:
        """Remove the products of a version, and how far its workers were; returns how many there were."""
        suffix, removed = f":{identity}:".encode(), 0
        for prefix in (_PRODUCT, _POSITION):
            found = [
                name for name in self._values.names_after(f"{prefix}:".encode()) if suffix in name + b":"
            ]
            for first in range(0, len(found), 1000):
                self._values.write_many(dict.fromkeys(found[first : first + 1000]))
            removed += len(found) if prefix == _PRODUCT else 0
        return removed

    def close(self) -> None:
        self._values.close()


def _name_of(key: ProductKey) -> bytes:
    return f"{_PRODUCT}:{key.kind}:{key.identity}:{key.user % 2**64:016x}".encode()
