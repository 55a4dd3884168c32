"""Where contexts of returning users are kept: on the device, then in the host's memory, then on disk.

    put ─► device ─ least lately used ─► host ─ least lately used ─► disk ─► gone
             ▲                             │                           │
             └──────── get: back to the device, where it is used ──────┘

A context is in one tier at a time, and comes back with the bits that it left with. Tiers that are given no
bytes are not there; on a host without a device, the first tier is in its memory already. Tiers, and their
sizes, are of one network: other weights, another version, would have computed other contexts. Its files go
with it, or, after a kill, when the next one starts. Moves are made while the batch waits.

Axes: P events of a history, G heads, C channels of a head.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.platform.arrays import Int64Array
from rayrec.platform.devices import HOST
from rayrec.platform.held_folders import HeldFolder

logger = logging.getLogger(__name__)

PAUSE_S = 60.0
"""A tier that could not store a context is given none for so long."""


class Kept(NamedTuple):
    """A history, and what the network's layers have of it."""

    events_P: Int64Array
    tensors: Tensor
    """[layers, 2, tokens, G, C] keys and values."""

    @property
    def num_bytes(self) -> int:
        return int(self.events_P.nbytes + self.tensors.nbytes)


class _Entry(NamedTuple):
    events_P: Int64Array
    num_bytes: int
    tensors: Tensor | None
    """None: they are in a file."""


class _Tier(ABC):
    """What is kept in one place, least lately used first."""

    def __init__(self, name: str, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self._max_bytes, self._clock = name, max_bytes, clock
        self._paused_until = float("-inf")
        self.entries: OrderedDict[int, _Entry] = OrderedDict()
        """By the hash of the events."""
        self.num_bytes = 0

    @abstractmethod
    def _stored(self, key: int, kept: Kept) -> Tensor | None:
        """What an entry has of the tensors. Raises OSError where they cannot be stored."""

    @abstractmethod
    def _read(self, key: int, entry: _Entry) -> Tensor | None:
        """The tensors of an entry; None if they are lost."""

    def put(self, key: int, kept: Kept, is_last: bool) -> list[tuple[int, Kept]]:
        """Take one in; those that had to leave for it, or itself, where it is too large for all of the tier.

        Args:
            is_last: nobody takes what leaves.
        """
        if kept.num_bytes > self._max_bytes or self._clock() < self._paused_until:
            return [(key, kept)]
        try:
            stored = self._stored(key, kept)
        except OSError as error:
            self._paused_until = self._clock() + PAUSE_S
            logger.warning("for %g s, contexts are not kept on %s: %s", PAUSE_S, self.name, error)
            return [(key, kept)]
        self.entries[key] = _Entry(kept.events_P, kept.num_bytes, stored)
        self.num_bytes += kept.num_bytes
        left = []
        while self.num_bytes > self._max_bytes:
            oldest = next(iter(self.entries))
            if is_last:
                self.drop(oldest)
            elif (gone := self.take(oldest)) is not None:
                left.append((oldest, gone))
        return left

    def take(self, key: int) -> Kept | None:
        """Remove one; None if what is kept of it cannot be read."""
        tensors = self._read(key, entry := self.entries[key])
        self.drop(key)
        return None if tensors is None else Kept(entry.events_P, tensors)

    def drop(self, key: int) -> None:
        """Remove one."""
        self.num_bytes -= self.entries.pop(key).num_bytes


class _MemoryTier(_Tier):
    def __init__(self, name: str, max_bytes: int, on_host: bool) -> None:
        super().__init__(name, max_bytes)
        self._on_host = on_host

    def _stored(self, key: int, kept: Kept) -> Tensor:
        return kept.tensors.to(HOST.torch) if self._on_host else kept.tensors

    def _read(self, key: int, entry: _Entry) -> Tensor | None:
        return entry.tensors


class _DiskTier(_Tier):
    def __init__(self, max_bytes: int, folder: Path | None, clock: Callable[[], float]) -> None:
        """Raises OSError where there can be no files."""
        super().__init__("disk", max_bytes, clock)
        self._folder = HeldFolder("rayrec-contexts-", folder)

    def _stored(self, key: int, kept: Kept) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self._path_of(key)
        try:
            save_file({"tensors": kept.tensors.contiguous().to(HOST.torch)}, path)
        except (OSError, SafetensorError) as error:  # the latter, too, where there is no room
            path.unlink(missing_ok=True)  # what there was room for
            raise OSError(str(error)) from error

    def _read(self, key: int, entry: _Entry) -> Tensor | None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self._path_of(key)
        try:
            return load_file(path)["tensors"]
        except (OSError, KeyError, SafetensorError) as error:
            logger.warning("%s: a kept context is lost: %s", path, error)
            return None

    def drop(self, key: int) -> None:
        super().drop(key)
        self._path_of(key).unlink(missing_ok=True)

    def _path_of(self, key: int) -> Path:
        return self._folder.path / f"{key:016x}.safetensors"


class ContextTiers:
    """Contexts by the hash of their events. Not thread-safe."""

    def __init__(self, sizes: CacheSizes, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError where files are wanted and there can be none."""
        self.tiers: list[_Tier] = [_MemoryTier("device", sizes.device, on_host=False)]
        if sizes.host:
            self.tiers.append(_MemoryTier("host", sizes.host, on_host=True))
        if sizes.disk:
            self.tiers.append(_DiskTier(sizes.disk, sizes.folder, clock))
        self.num_reused = dict.fromkeys((tier.name for tier in self.tiers), 0)
        """Events, by the tier that they were found in."""
        self._device: torch.device | None = None

    def __contains__(self, key: int) -> bool:
        return any(key in tier.entries for tier in self.tiers)

    def events(self, key: int) -> Int64Array:
        """Of a context that is kept."""
        return next(tier.entries[key].events_P for tier in self.tiers if key in tier.entries)

    def get(self, key: int, num_events: int) -> Tensor | None:
        """The tensors of a context, on the device; None if they are lost.

        Args:
            num_events: that are used of it, for metrics.
        """
        tier = next(tier for tier in self.tiers if key in tier.entries)
        if tier is self.tiers[0]:
            tier.entries.move_to_end(key)
            tensors = tier.entries[key].tensors
        else:
            kept = tier.take(key)
            if kept is None:
                return None
            tensors = kept.tensors.to(self._device)
            self.put(key, Kept(kept.events_P, tensors))
        self.num_reused[tier.name] += num_events
        return tensors

    def put(self, key: int, kept: Kept) -> None:
        """Keep one as the latest; what has no room in a tier goes to the next one."""
        self._device = kept.tensors.device
        coming = [(key, kept)]
        for tier in self.tiers:
            coming = [left for each in coming for left in tier.put(*each, tier is self.tiers[-1])]

    def forget(self, key: int) -> None:
        """Drop one, if it is kept."""
        for tier in self.tiers:
            if key in tier.entries:
                tier.drop(key)

    def metrics(self) -> dict[str, float]:
        """Of the tiers below the device, and what was found where."""
        found: dict[str, float] = {}
        for tier in self.tiers[1:]:
            found[f"prefix_cache_{tier.name}_histories"] = len(tier.entries)
            found[f"prefix_cache_{tier.name}_bytes"] = tier.num_bytes
        if len(self.tiers) > 1:
            for name, count in self.num_reused.items():
                found[f"prefix_cache_{name}_events_reused"] = count
        return found
