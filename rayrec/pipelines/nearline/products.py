"""What a product is, and its bytes.

    format, identity of the version, user | hash of the events, their number, of the settings, time made
    | arrays | checksum

A product is for one version and one user, and stands for the events whose hash it has. Its reader does not
know the settings of the worker that made it, so they are no part of its name: a worker with other settings
replaces it. The checksum covers the kind as well, so a record under the name of another kind, version or
user reads as foreign.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from rayrec.pipelines.inference.answers import Query
from rayrec.pipelines.inference.recommender import Recommender

_HEADER = struct.Struct("<4sH16sqQQQdI")
_MAGIC, _FORMAT = b"RRnp", 2
_CHECKSUM_BYTES = 8


class ProductKey(NamedTuple):
    """What a product is of."""

    kind: str
    identity: str
    """Of the version: 32 hexadecimal digits."""
    user: int


@dataclass(frozen=True)
class Product:
    """What was computed of a user."""

    events_hash: int
    """Of the events that it stands for, see `events_hash`."""
    num_events: int
    made_at: float
    """UNIX seconds."""
    arrays: Mapping[str, np.ndarray]
    settings: int = 0
    """Hash of those of its kind, see `ProductKind.settings`."""


class ForeignRecordError(ValueError):
    """A sound record of something else, or of another format."""


class CorruptRecordError(ValueError):
    """Bytes that are no record, or half of one."""


def events_hash(recommender: Recommender, query: Query, first: int | None = None) -> int:
    """A hash of what a model can read of a history, its order included.

    Args:
        first: of the events, so many of the oldest alone.
    """
    hashed = xxhash.xxh3_64(repr(query.user_id).encode())
    columns = [np.asarray(query.history_ids, np.int64)]
    if recommender.needs_times and query.times is not None:
        columns.append(np.asarray(query.times, np.int64))
    for label in recommender.needs_labels:
        if (codes := query.labels.get(label)) is not None:
            hashed.update(label.encode())
            columns.append(np.asarray(codes, np.int64))
    for column in columns:
        hashed.update(column[:first].tobytes())
    return hashed.intdigest()


def stands_for(recommender: Recommender, product: Product, query: Query) -> bool:
    """Whether a product is of exactly the events of a query."""
    is_as_long = product.num_events == len(query.history_ids)
    return is_as_long and product.events_hash == events_hash(recommender, query)


def stands_for_earlier(recommender: Recommender, product: Product, query: Query) -> bool:
    """Whether a product is of the events of a query, or of some of the oldest of them."""
    if product.num_events > len(query.history_ids):
        return False
    return product.events_hash == events_hash(recommender, query, product.num_events)


def encoded(key: ProductKey, product: Product) -> bytes:
    """The record of a product."""
    arrays = {name: np.ascontiguousarray(array) for name, array in product.arrays.items()}
    shapes = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    described = json.dumps(shapes).encode()
    header = _HEADER.pack(
        _MAGIC,
        _FORMAT,
        bytes.fromhex(key.identity),
        key.user,
        product.events_hash,
        product.num_events,
        product.settings,
        product.made_at,
        len(described),
    )
    body = b"".join([header, described, *(array.tobytes() for array in arrays.values())])
    return body + _checksum(key.kind, body)


def decoded(key: ProductKey, record: bytes) -> Product:
    """The product of a record.

    Raises:
        CorruptRecordError: the bytes are not as they were written.
        ForeignRecordError: they are of another format, version or user.
    """
    if record[:4] == _MAGIC and len(record) >= 6 and struct.unpack_from("<H", record, 4)[0] != _FORMAT:
        raise ForeignRecordError(f"of format {struct.unpack_from('<H', record, 4)[0]}")
    body, checksum = record[:-_CHECKSUM_BYTES], record[-_CHECKSUM_BYTES:]
    if len(body) < _HEADER.size or checksum != _checksum(key.kind, body):
        raise CorruptRecordError(f"{len(record)} bytes whose checksum does not fit")
    _, _, identity, user, hashed, num_events, settings, made_at, size = _HEADER.unpack_from(body)
    if identity.hex() != key.identity or user != key.user:
        raise ForeignRecordError("of another version or user")
    try:
        at, arrays = _HEADER.size + size, dict[str, np.ndarray]()
        for name, kind, shape in json.loads(body[_HEADER.size : at]):
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(body, np.dtype(kind), count, at).reshape(shape)
            at += arrays[name].nbytes
    except (ValueError, TypeError) as error:  # of a writer that errs, since the checksum fits
        raise CorruptRecordError(str(error)) from error
    return Product(hashed, num_events, made_at, arrays, settings)


def _checksum(kind: str, body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(kind.encode() + b"\0" + body)
