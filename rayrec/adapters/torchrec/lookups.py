"""The lookup stage for `KeyedJaggedTensor`s: which distinct ids of which tables a batch reads.

Features that share a table are deduplicated together. What was split here is what `forward` may look up:
its rows are asked for before the model runs.

Axes: M distinct ids of a table, N ids of all of its features.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rayrec.adapters.torchrec.tables import TableSpec
from rayrec.platform.arrays import Int64Array
from rayrec.platform.deduplication import deduplicate
from rayrec.platform.errors import InputError
from rayrec.samples.base.batches import TableLookup

Share: TypeAlias = KeyedJaggedTensor | Sequence[KeyedJaggedTensor]
"""One batch, or one trainer's part of it; a model may take several (weighted features apart, for example)."""

_NARROWER = (torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)


@dataclass(frozen=True)
class KjtLookups:
    """A batch with what it asks of the tables. Pickles; `kjts` are still what `forward` may look up then."""

    kjts: tuple[KeyedJaggedTensor, ...]
    lookups: dict[str, TableLookup]
    """By table, for `rows` and `update` of a lookup mode; inverse is [N]."""
    positions: dict[tuple[int, str, str], slice]
    """(number of the KJT, table, feature) to the feature's part of the table's inverse."""

    @property
    def kjt(self) -> KeyedJaggedTensor:
        """The only one."""
        (kjt,) = self.kjts
        return kjt

    def to(self, device: torch.device) -> KjtLookups:
        """The same with its KJTs on a device; `forward` gets these then."""
        return replace(self, kjts=tuple(kjt.to(device) for kjt in self.kjts))


def split_kjt(kjts: Share, tables: Sequence[TableSpec], ignored_features: Collection[str] = ()) -> KjtLookups:
    """The ids of a batch by table, each once; see `split_shares` for several trainers.

    Args:
        tables: of the model, as `table_specs` tells them.
        ignored_features: keys that no table reads, and that are not a mistake.

    Raises:
        InputError: a feature is in no table, a table's feature is in no KJT, or ids are not integers of 64
            bits; names the feature.
    """
    (batch,) = split_shares([kjts], tables, ignored_features)
    return batch


def split_shares(
    shares: Sequence[Share], tables: Sequence[TableSpec], ignored_features: Collection[str] = ()
) -> list[KjtLookups]:
    """As `split_kjt`, for each trainer's part of a global batch; all have the same `updated_ids`."""
    batches = []
    for share in shares:
        kjts = (share,) if isinstance(share, KeyedJaggedTensor) else tuple(share)
        _check_features(kjts, tables, ignored_features)
        lookups: dict[str, TableLookup] = {}
        positions: dict[tuple[int, str, str], slice] = {}
        for table in tables:
            ids_N, of_table = _ids_of_table(kjts, table)
            ids_M, inverse_N = deduplicate(ids_N)
            lookups[table.name] = TableLookup(ids_M, inverse_N, updated_ids=ids_M)
            positions |= of_table
        batches.append(KjtLookups(kjts, lookups, positions))
    if len(batches) > 1:
        for table in tables:
            ids = np.concatenate([batch.lookups[table.name].ids_M for batch in batches])
            updated_ids, _ = deduplicate(ids)
            for batch in batches:
                batch.lookups[table.name] = replace(batch.lookups[table.name], updated_ids=updated_ids)
    return batches


def _check_features(
    kjts: Sequence[KeyedJaggedTensor], tables: Sequence[TableSpec], ignored: Collection[str]
) -> None:
    found = [feature for kjt in kjts for feature in kjt.keys()]  # noqa: SIM118
    known = {feature for table in tables for feature in table.feature_names}
    for feature in found:
        if feature not in known and feature not in ignored:
            raise InputError(
                f"feature {feature!r} is in no table; tables read {', '.join(sorted(known))}: add it to a "
                "table's feature_names, leave it out of the KeyedJaggedTensor, or name it in ignored_features"
            )
    for table in tables:
        for feature in table.feature_names:
            if feature not in found:
                raise InputError(
                    f"no KeyedJaggedTensor has the feature {feature!r}, which table {table.name!r} reads; "
                    f"found {', '.join(found) or 'none'}. A feature without ids has lengths of 0"
                )
    for kjt in kjts:
        if kjt.variable_stride_per_key() or kjt.inverse_indices_or_none() is not None:
            raise InputError(
                f"the features {', '.join(kjt.keys())} have batch sizes of their own (variable stride); "
                "RayRec deduplicates ids itself, so give every feature the lengths of the whole batch"
            )


def _ids_of_table(
    kjts: Sequence[KeyedJaggedTensor], table: TableSpec
) -> tuple[Int64Array, dict[tuple[int, str, str], slice]]:
    """([N] ids of all features, where each feature's are)."""
    parts: list[Int64Array] = []
    positions: dict[tuple[int, str, str], slice] = {}
    num_ids = 0
    for number, kjt in enumerate(kjts):
        keys, ends = kjt.keys(), kjt.offset_per_key()
        for feature in table.feature_names:
            if feature not in keys:
                continue
            key = keys.index(feature)
            parts.append(_as_int64(kjt.values()[ends[key] : ends[key + 1]], feature))
            positions[number, table.name, feature] = slice(num_ids, num_ids + len(parts[-1]))
            num_ids += len(parts[-1])
    return np.concatenate(parts), positions


def _as_int64(ids: torch.Tensor, feature: str) -> Int64Array:
    array = ids.detach().cpu()
    if array.dtype == torch.int64:
        return array.numpy()
    if array.dtype in _NARROWER:
        return array.to(torch.int64).numpy()
    if array.dtype == torch.uint64:
        unsigned = array.numpy()
        if len(unsigned) and unsigned.max() > np.iinfo(np.int64).max:
            raise InputError(
                f"feature {feature!r} has the id {unsigned.max()}; ids are integers of 64 bits with a sign, "
                f"up to {np.iinfo(np.int64).max}: give the values as int64 (a view of the same bits will do)"
            )
        return unsigned.astype(np.int64)
    kind = str(array.dtype).removeprefix("torch.")
    raise InputError(
        f"feature {feature!r} has values of type {kind}; ids are integers of 64 bits, which {kind} cannot "
        "hold: make the KeyedJaggedTensor with int64 values (and numbers that are no ids as its weights)"
    )
