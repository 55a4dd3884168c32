"""Recent answers, for requests that ask the same again."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Generic, TypeVar

import xxhash

from rayrec.serve.admission.limits import Clock
from rayrec.serve.config.admission import CacheConfig
from rayrec.serve.wire.schemas import ModelInfo, RankerInfo, RecommendRequest

Answer = TypeVar("Answer")


class AnswerCache(Generic[Answer]):
    """Bounded in entries and age: what was used longest ago leaves first. Not thread-safe."""

    def __init__(self, config: CacheConfig, clock: Clock) -> None:
        self._config, self._clock = config, clock
        self._kept: OrderedDict[bytes, tuple[float, Answer]] = OrderedDict()
        self.num_hits = 0
        self.num_misses = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> Answer | None:
        """The answer that is kept; None if there is none, or it is too old."""
        kept = self._kept.get(key)
        if kept is not None and self._clock() - kept[0] > self._config.max_age_s:
            del self._kept[key]
            kept = None
        if kept is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._kept.move_to_end(key)
        return kept[1]

    def put(self, key: bytes, answer: Answer) -> None:
        self._kept[key] = self._clock(), answer
        self._kept.move_to_end(key)
        if len(self._kept) > self._config.max_entries:
            self._kept.popitem(last=False)


def key_of(request: RecommendRequest, *models: ModelInfo | RankerInfo | None) -> bytes:
    """What an answer depends on: all that the request says, and what it is computed with.

    128 bits: that two requests in a cache share them is not to be expected.
    """
    versions = "".join(f"{None if model is None else model.model_dump_json()}\n" for model in models)
    # JSON as ASCII: a row may have texts that UTF-8 cannot encode.
    asked = json.dumps(request.model_dump(), sort_keys=True, default=repr)
    return xxhash.xxh3_128_digest((versions + asked).encode())
