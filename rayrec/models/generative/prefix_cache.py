"""Prefix cache: for a returning user, only the events since the last request are computed.

    batch ─► longest cached prefix of each history ─► read_on: the events after it ─► context
                       └──────────── whole histories replace the prefix ◄────────┘

The cache holds keys and values of a causal network's layers. They depend on the events of the history and on
the weights alone, so they are looked up by the events, for any user, and the events are compared in full: no
history is ever taken for another. As in paged serving of language models (automatic prefix caching: Kwon et
al., SOSP 2023, arXiv:2309.06180), but by events and not by blocks.

A history that is longer than a model reads loses its first event with each new one. Then every event has
another index, nothing in the cache fits, and the history is read from its start.

Axes: as in `backbone`; P tokens of a cached history.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rayrec.models.attention.past import KeysAndValues, Past
from rayrec.models.generative.backbone import Context
from rayrec.models.sequence.tensor_batch import TensorBatch

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


class PrefixCache(Generic[C]):
    """Encodes contexts, from cached prefixes where there are some. Safe to call from several threads."""

    def __init__(self, backbone: ReadsOn[C], max_bytes: int) -> None:
        """
        Args:
            max_bytes: of keys and values; the least recently used history is evicted first.
        """
        self._backbone, self._max_bytes = backbone, max_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        """Events -> [layers, 2, P, G, C] keys and values."""
        self._lock = threading.Lock()
        self.num_bytes = 0
        """In the cache."""
        self.num_read = self.num_reused = 0
        """Events."""

    def __len__(self) -> int:
        """Histories."""
        return len(self._kept)

    def metrics(self) -> dict[str, float]:
        """What a meter watches."""
        return {
            "prefix_cache_histories": len(self._kept),
            "prefix_cache_bytes": self.num_bytes,
            "prefix_cache_events_read": self.num_read,
            "prefix_cache_events_reused": self.num_reused,
        }

    def of(self, batch: TensorBatch) -> C:
        """The context of a batch, as `encode_context` has it up to rounding."""
        offsets_B1 = batch.layout.offsets_B1
        events_N = batch.items_N.cpu().numpy()
        histories = [events_N[start:stop] for start, stop in pairwise(offsets_B1)]
        with self._lock:
            found = [self._longest(history) for history in histories]
        kept = [tensor for _, _, tensor in found if tensor is not None]
        layers = [KeysAndValues(*both) for both in torch.cat(kept, dim=2)] if kept else []
        num_events_B = np.array([num_events for num_events, _, _ in found], dtype=np.int64)
        past = Past(num_events_B * self._backbone.tokens_per_event, layers)
        context, whole = self._backbone.read_on(batch, past)
        self._keep(histories, [key for _, key, _ in found], whole, offsets_B1)
        with self._lock:
            self.num_reused += int(num_events_B.sum())
            self.num_read += len(events_N) - int(num_events_B.sum())
        return context

    def _longest(self, history: np.ndarray) -> tuple[int, bytes | None, Tensor | None]:
        """(Number of cached events, their key, their tensors); never all events: the last one is read."""
        size = history.itemsize
        key = history.tobytes()
        for num_events in range(len(history), 0, -1):
            beginning = key[: num_events * size]
            if (kept := self._kept.get(beginning)) is None:
                continue
            self._kept.move_to_end(beginning)
            used = min(num_events, len(history) - 1)
            if not used:
                break
            return used, beginning, kept[:, :, : used * self._backbone.tokens_per_event]
        return 0, None, None

    def _keep(
        self,
        histories: Sequence[np.ndarray],
        grown_from: Sequence[bytes | None],
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
                key = history.tobytes()
                if (beginning := grown_from[row]) is not None and beginning != key:
                    self._forget(beginning)
                if key in self._kept:
                    continue
                # A copy: the rest of the batch is not to stay with it.
                kept = both[:, :, offsets_B1[row] * size : offsets_B1[row + 1] * size].clone()
                self._kept[key] = kept
                self.num_bytes += kept.nbytes
            while self.num_bytes > self._max_bytes:
                self._forget(next(iter(self._kept)))

    def _forget(self, key: bytes) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self.num_bytes -= kept.nbytes
