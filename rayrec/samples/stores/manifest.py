"""What an event store holds: its columns, its clock, how its keys were made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.samples.base.config import TimeUnit
from rayrec.samples.dataset.manifest import IdKind

FORMAT = 1

TIMES, ITEMS, BEHAVIORS = "times", "items", "behaviors"
"""The columns that every store has, and the one of the kinds of events."""

By = Literal["user", "item"]
"""Whose histories a store has: what users did, or who met an item."""

PER_SECOND: dict[TimeUnit, int] = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}

ColumnType = Literal["int8", "int16", "int32", "int64", "float32", "float64"]


class StoreManifest(Config):
    """Written when a store is made; only `behaviors` grows later."""

    format: int = FORMAT
    name: str = ""
    """What log the events are of; part of the fingerprint, so that stores of two logs have two."""
    columns: dict[str, ColumnType] = Field(default_factory=dict)
    """What an event has besides its time and item."""
    time_unit: TimeUnit = "us"
    """Unit of `times`, counted from 1970."""
    id_kinds: dict[Literal["user", "item"], IdKind] = Field({"user": "integer", "item": "integer"})
    """`integer`: ids are what the source calls users and items; `string`: hashes of that."""
    behaviors: tuple[str, ...] = ()
    """Names of the codes in the column `behaviors`."""
    by: By = "user"
    """What the keys are; the column `items` has the other one of user and item."""
    chunk_events: int = Field(256, ge=1, le=1 << 20)
    """Events of a chunk that is never written again; the newest of a key, up to twice as many, lie apart."""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        for name in (TIMES, ITEMS):
            if name in self.columns:
                raise ValueError(f"columns.{name}: every event has that already; take another name")
        if self.behaviors and BEHAVIORS not in self.columns:
            raise ValueError(f"behaviors has names, but there is no column {BEHAVIORS!r} for their codes")
        return self

    @property
    def types(self) -> dict[str, np.dtype]:
        """Every column in the order in which it is stored."""
        further = {name: np.dtype(kind) for name, kind in self.columns.items()}
        return {TIMES: np.dtype(np.int64), ITEMS: np.dtype(np.int64)} | further

    @property
    def fingerprint(self) -> str:
        """Hex; stores with the same one are of the same log and are read, appended to and joined alike."""
        if self.by != "user":
            return hashlib.sha256(f"{self.log_fingerprint} by {self.by}".encode()).hexdigest()[:32]
        return self.log_fingerprint

    @property
    def log_fingerprint(self) -> str:
        """The same for both sides of a log."""
        content = self.model_dump(mode="json", exclude={"behaviors", "chunk_events", "by"})
        content["columns"] = list(self.columns.items())  # in their order, which is that of the bytes
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def tag(self) -> int:
        """32 bits of the fingerprint, which every value in the store begins with."""
        return int(self.fingerprint[:8], 16)

    def with_behaviors(self, names: Collection[str]) -> StoreManifest:
        """With codes for behaviors that have none yet, in the order of their names; codes never change."""
        new = sorted(set(names) - set(self.behaviors))
        return self.model_copy(update={"behaviors": (*self.behaviors, *new)})

    def to_bytes(self) -> bytes:
        # A store by user is written as before there were others: earlier versions read it.
        left_out = {"by"} if self.by == "user" else set()
        return json.dumps(self.model_dump(mode="json", exclude=left_out)).encode()

    @classmethod
    def from_bytes(cls, content: bytes, store: str) -> StoreManifest:
        """The manifest that a store holds.

        Raises:
            InputError: of another format, or damaged.
        """
        try:
            values = json.loads(content)
        except ValueError as error:
            raise InputError(f"{store}: its manifest is damaged ({error}); build the store again") from error
        found = values.get("format") if isinstance(values, dict) else None
        if found != FORMAT:
            raise InputError(
                f"{store}: event store format {found!r}, this version reads {FORMAT}; build the store again"
            )
        return cls.parse(values, source=f"{store}: manifest")
