"""Ids that something has happened to since a step, for snapshots of what has changed since an earlier one."""

from __future__ import annotations

import sys

from rayrec.embeddings.base.layout import NEVER
from rayrec.platform.arrays import Int64Array

_LEAST_IDS = 65_536


class IdsSince:
    """Remembers ids by the step that they were named in. Not thread-safe.

    Nothing is remembered before `begin`, nor after there were too many ids: a snapshot of what has changed is
    not worth it beyond, or finds the changes by looking at all rows. After that, `begin` starts again.

    Args:
        share: one id for so many rows is remembered at most, or 65,536 if that is more.
    """

    def __init__(self, share: int) -> None:
        self._share = share
        self._since: int | None = None
        self._newest = NEVER
        self._named: list[tuple[int, Int64Array]] = []
        self._num_ids = 0

    @property
    def num_bytes(self) -> int:
        return 8 * self._num_ids

    @property
    def is_on(self) -> bool:
        """Whether ids are remembered."""
        return self._since is not None

    @property
    def newest(self) -> int:
        """Step of the last `begin`."""
        return self._newest

    def begin(self, step: int) -> None:
        """What later steps name has to be known from now on, unless what earlier ones did is known too."""
        self._newest = step
        if self._since is None:
            self._since = step

    def add(self, ids_K: Int64Array, step: int, num_rows: int) -> None:
        """Remember what a step names; forget everything if that makes too many ids for so many rows."""
        if self._since is None or not len(ids_K):
            return
        self._named.append((step, ids_K))
        self._num_ids += len(ids_K)
        if self._num_ids > max(_LEAST_IDS, num_rows // self._share):
            self._since, self._named, self._num_ids = None, [], 0

    def knows(self, since: int) -> bool:
        """Whether everything is known that steps after this one have named."""
        return self._since is not None and self._since <= since

    def forget(self, step: int) -> None:
        """Nobody will ask for what steps until this one have named."""
        if self.knows(step):
            self._since = step
            self._named = [(of_step, ids_K) for of_step, ids_K in self._named if of_step > step]
            self._num_ids = sum(len(ids_K) for _, ids_K in self._named)

    def between(self, since: int, step: int) -> list[Int64Array]:
        """What steps after the one and until the other have named, in parts; some ids several times."""
        return [ids_K for of_step, ids_K in self._named if since < of_step <= step]

    def since(self, since: int) -> list[Int64Array] | None:
        """What steps after this one have named, as `between`; None if that is not known."""
        return self.between(since, sys.maxsize) if self.knows(since) else None
