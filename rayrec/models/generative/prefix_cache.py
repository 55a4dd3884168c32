"""Prefix cache: for a returning user, only the events since the last request are computed.

    batch ─► longest cached prefix of each history ─► read_on: the events after it ─► context
                       └──────────── whole histories replace the prefix ◄────────┘

The cache holds keys and values of a causal network's layers. They depend on the events of the history and on
the weights alone, so they are looked up by the events, for any user. One pass hashes all prefixes of a
history; where a hash is known the events are compared in full, so no history is ever taken for another. As
in paged serving of language models (automatic prefix caching: Kwon et al., SOSP 2023, arXiv:2309.06180), but
by events and not by blocks. Those that have no room on the device go to tiers below it (`context_tiers`).

A history that is longer than a model reads loses its first event with each new one. Then every event has
another index, nothing in the cache fits, and the history is read from its start. With `model.window_step` it
loses events once in so many, and is read on in between.

Axes: as in `backbone`; P tokens of a cached history.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rayrec.models.attention.past import KeysAndValues, Past
from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.models.generative.backbone import Context
from rayrec.models.generative.context_tiers import ContextTiers, Kept
from rayrec.models.sequence.tensor_batch import TensorBatch
from rayrec.platform.arrays import Int64Array
from rayrec.platform.hashing import mix64

C = TypeVar("C", bound=Context)
C_co = TypeVar("C_co", bound=Context, covariant=True)


@runtime_checkable
class ReadsOn(Protocol[C_co]):
    """A backbone that can continue from cached keys and values."""

    tokens_per_event: int

    def read_on(self, batch: TensorBatch, past: Past) -> tuple[C_co, Sequence[KeysAndValues]]:
        """Context of whole rows, and what the layers have of them, rows one after the other.

        Args:
            batch: whole rows.
            past: of whole events, and not of a row's last one.
        """
        ...


class _Found(NamedTuple):
    """What is used of a kept history."""

    num_events: int
    key: int | None
    tensors: Tensor | None


_NOTHING = _Found(0, None, None)


class PrefixCache(Generic[C]):
    """Encodes contexts, from cached prefixes where there are some. Safe to call from several threads."""

    def __init__(self, backbone: ReadsOn[C], sizes: CacheSizes) -> None:
        """
        Args:
            sizes: bytes of events, keys and values in each tier; the least recently used history leaves
                first.

        Raises:
            OSError: there is to be a tier on disk, and no file can be made.
        """
        self._backbone = backbone
        self._kept = ContextTiers(sizes)
        self._lock = threading.Lock()
        self.num_read = self.num_reused = 0
        """Events."""

    def __len__(self) -> int:
        """Histories on the device."""
        return len(self._kept.tiers[0].entries)

    @property
    def num_bytes(self) -> int:
        """Of the histories on the device."""
        return self._kept.tiers[0].num_bytes

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        return {
            "prefix_cache_histories": len(self),
            "prefix_cache_bytes": self.num_bytes,
            "prefix_cache_events_read": self.num_read,
            "prefix_cache_events_reused": self.num_reused,
            **self._kept.metrics(),
        }

    def of(self, batch: TensorBatch) -> C:
        """The context of a batch, as `encode_context` has it up to rounding."""
        offsets_B1 = batch.layout.offsets_B1
        events_N = batch.items_N.cpu().numpy()
        histories = [events_N[start:stop] for start, stop in pairwise(offsets_B1)]
        keys = [prefix_hashes(history).tolist() for history in histories]
        with self._lock:
            found = [self._longest(*row) for row in zip(histories, keys, strict=True)]
        kept = [one.tensors for one in found if one.tensors is not None]
        layers = [KeysAndValues(*both) for both in torch.cat(kept, dim=2)] if kept else []
        num_events_B = np.array([one.num_events for one in found], dtype=np.int64)
        past = Past(num_events_B * self._backbone.tokens_per_event, layers)
        context, whole = self._backbone.read_on(batch, past)
        self._keep(histories, keys, found, whole, offsets_B1)
        with self._lock:
            self.num_reused += int(num_events_B.sum())
            self.num_read += len(events_N) - int(num_events_B.sum())
        return context

    def _longest(self, history: Int64Array, keys: Sequence[int]) -> _Found:
        """The longest kept prefix; never all events, since the last one is read."""
        for key in filter(self._kept.__contains__, reversed(keys)):
            events_P = self._kept.events(key)
            if not np.array_equal(events_P, history[: len(events_P)]):
                continue  # another history of the same hash
            if not (used := min(len(events_P), len(history) - 1)):
                break
            tensors = self._kept.get(key, used)
            if tensors is None:
                continue  # it was lost; a shorter prefix may be kept
            return _Found(used, key, tensors[:, :, : used * self._backbone.tokens_per_event])
        return _NOTHING

    def _keep(
        self,
        histories: Sequence[Int64Array],
        keys: Sequence[Sequence[int]],
        found: Sequence[_Found],
        whole: Sequence[KeysAndValues],
        offsets_B1: np.ndarray,
    ) -> None:
        """Store the keys and values of each history.

        Args:
            whole: of each layer, rows one after the other.
        """
        if not whole:
            return
        both = torch.stack([torch.stack(tuple(layer)) for layer in whole])
        size = self._backbone.tokens_per_event
        with self._lock:
            for row, history in enumerate(histories):
                if not len(history):
                    continue
                key, grown_from = keys[row][-1], found[row].key
                if grown_from is not None and grown_from != key:
                    self._kept.forget(grown_from)
                if key in self._kept:
                    continue
                # Copies: the rest of the batch is not to stay with them.
                part = both[:, :, offsets_B1[row] * size : offsets_B1[row + 1] * size].clone()
                self._kept.put(key, Kept(history.copy(), part))


def prefix_hashes(events_P: Int64Array) -> np.ndarray:
    """[P] a hash of each prefix of a history, as uint64: the sum of a hash of each event with its place."""
    places_P = mix64(np.arange(len(events_P)))
    hashes_P: np.ndarray = np.cumsum(mix64(events_P.astype(np.uint64) ^ places_P), dtype=np.uint64)
    return hashes_P
