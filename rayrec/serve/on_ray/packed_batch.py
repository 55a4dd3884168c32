"""A batch between the sparse and the dense part as one buffer: arrays side by side, laid out by safetensors.

sparse part: features, rows ─► RankBatch.packed ─► bytes ─► RankBatch.unpacked ─► dense part
             best items     ◄─ unpacked_items   ◄─ bytes ◄─ packed_items       ◄─┘
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import safetensors.numpy

from rayrec.models.decoding.beam_policy import BeamPolicy, Beams, by_level, policy_of
from rayrec.models.program.program import AllowedItems, RankedItems
from rayrec.platform.arrays import Int64Array
from rayrec.platform.event_labels import Label, Part
from rayrec.samples.base.batches import FeatureBatch, OldChunks, PromptTokens, TableLookup

_NONE = -1
"""Of a number that is not given."""


@dataclass(frozen=True)
class RankBatch:
    """What a network is asked."""

    version: int | None
    """Of the model; None where there is one only."""
    features: FeatureBatch
    """Of a batch that is to be ranked."""
    rows: Mapping[str, np.ndarray]
    """[M, D] by table."""
    k: int
    excluded_BE: Int64Array | None
    beams_B: Sequence[Beams] | None = None
    """Of each row; None: as many as k takes."""
    allowed: AllowedItems | None = None

    def packed(self) -> bytes:
        features = self.features
        numbers = (self.version, self.k, features.step)
        arrays: dict[str, np.ndarray] = {
            "numbers": np.array([_NONE if each is None else each for each in numbers], dtype=np.int64),
            "row_keys": features.row_keys_B,
            "offsets": features.offsets_B1,
            "items": features.items_N,
        }
        if features.times_N is not None:
            arrays["times"] = features.times_N
        if features.neighbors_NJ is not None and features.neighbor_weights_NJ is not None:
            arrays |= {"neighbors": features.neighbors_NJ, "neighbor weights": features.neighbor_weights_NJ}
        if (chunks := features.old_chunks) is not None:
            arrays |= {
                "chunk offsets": chunks.offsets_B1,
                "chunk items": chunks.items_XC,
                "chunk ages": chunks.ages_X,
            }
            arrays |= {f"chunk-label {name}": codes for name, codes in chunks.labels.items()}
            if chunks.is_known_X is not None and chunks.known_XKD is not None:
                arrays |= {"chunk known": chunks.is_known_X, "chunk summaries": chunks.known_XKD}
        if (prompts := features.prompts) is not None:
            arrays |= {"prompt tokens": prompts.tokens_N, "prompt offsets": prompts.offsets_B1}
            arrays |= {f"prompt-places {table}": places for table, places in prompts.filled_P.items()}
        if self.beams_B is not None:
            arrays |= _packed_beams(self.beams_B)
        if self.excluded_BE is not None:
            arrays["excluded"] = self.excluded_BE
        if self.allowed is not None:
            mask_SI, set_B = self.allowed
            # Eight items a byte: a set of a million is as large as a few rows of a table.
            arrays |= {
                "allowed": np.packbits(mask_SI, axis=1),
                "allowed sets": set_B,
                "allowed items": np.array([mask_SI.shape[1]], dtype=np.int64),
            }
        arrays |= {f"label {name}": codes for name, codes in features.labels.items()}
        arrays |= {f"instruction {part}": codes for part, codes in features.instruction.items()}
        for table, lookup in features.lookups.items():
            arrays |= {f"ids {table}": lookup.ids_M, f"inverse {table}": lookup.inverse}
            arrays[f"rows {table}"] = np.asarray(self.rows[table])
        return _packed(arrays)

    @staticmethod
    def unpacked(packed: bytes) -> RankBatch:
        arrays = safetensors.numpy.load(packed)
        version, k, step = arrays["numbers"].tolist()
        tables = _named("ids", arrays)
        inverse = _named("inverse", arrays)
        features = FeatureBatch(
            step=step,
            row_keys_B=arrays["row_keys"],
            offsets_B1=arrays["offsets"],
            items_N=arrays["items"],
            targets_N=None,
            num_targets=0,
            lookups={table: TableLookup(ids_M, inverse[table], ids_M) for table, ids_M in tables.items()},
            times_N=arrays.get("times"),
            labels=cast(dict[Label, Int64Array], _named("label", arrays)),
            instruction=cast(dict[Part, Int64Array], _named("instruction", arrays)),
            neighbors_NJ=arrays.get("neighbors"),
            neighbor_weights_NJ=arrays.get("neighbor weights"),
            old_chunks=_unpacked_chunks(arrays),
            prompts=_unpacked_prompts(arrays),
        )
        allowed = None
        if "allowed" in arrays:
            (num_items,) = arrays["allowed items"].tolist()
            mask_SI = np.unpackbits(arrays["allowed"], axis=1, count=num_items).astype(np.bool_)
            allowed = AllowedItems(mask_SI, arrays["allowed sets"])
        return RankBatch(
            None if version == _NONE else version,
            features,
            _named("rows", arrays),
            k,
            arrays.get("excluded"),
            _unpacked_beams(arrays),
            allowed,
        )


def version_of(packed: bytes) -> int | None:
    """Of a packed `RankBatch`, whose arrays are not read for it."""
    # safetensors: the length of a header, the header as JSON, and the arrays where it says.
    begin = 8 + int.from_bytes(packed[:8], "little")
    first, _ = json.loads(packed[8:begin])["numbers"]["data_offsets"]
    version = int(np.frombuffer(packed, dtype="<i8", count=1, offset=begin + first)[0])
    return None if version == _NONE else version


def _packed_beams(beams_B: Sequence[Beams]) -> dict[str, np.ndarray]:
    """[B, L] widths by level; and margins, where a row has one or keeps other widths at other levels."""
    widths_BL = np.array(by_level(beams_B), dtype=np.int64)
    if all(isinstance(each, int) for each in beams_B):
        return {"beams": widths_BL}
    margins = [policy_of(each).margin for each in beams_B]
    return {"beams": widths_BL, "beam margins": np.array(margins, dtype=np.float64)}  # None is NaN


def _unpacked_beams(arrays: Mapping[str, np.ndarray]) -> list[Beams] | None:
    if "beams" not in arrays:
        return None
    widths_BL = arrays["beams"].tolist()
    if "beam margins" not in arrays:
        return [widths[0] for widths in widths_BL]
    margins = arrays["beam margins"].tolist()
    return [
        BeamPolicy(tuple(widths), None if math.isnan(margin) else margin).beams
        for widths, margin in zip(widths_BL, margins, strict=True)
    ]


def _unpacked_chunks(arrays: Mapping[str, np.ndarray]) -> OldChunks | None:
    if "chunk items" not in arrays:
        return None
    return OldChunks(
        arrays["chunk offsets"],
        arrays["chunk items"],
        cast(dict[Label, Int64Array], _named("chunk-label", arrays)),
        arrays["chunk ages"],
        arrays.get("chunk known"),
        arrays.get("chunk summaries"),
    )


def _unpacked_prompts(arrays: Mapping[str, np.ndarray]) -> PromptTokens | None:
    if "prompt tokens" not in arrays:
        return None
    tokens_N = arrays["prompt tokens"]
    nothing_N = np.zeros(len(tokens_N), dtype=np.bool_)
    return PromptTokens(tokens_N, arrays["prompt offsets"], nothing_N, _named("prompt-places", arrays))


def packed_items(ranked: RankedItems) -> bytes:
    return _packed({"items": ranked.items_BK, "scores": ranked.scores_BK})


def unpacked_items(packed: bytes) -> RankedItems:
    arrays = safetensors.numpy.load(packed)
    return RankedItems(arrays["items"], arrays["scores"])


def _packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    return safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def _named(kind: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays whose names are `kind`, a space, and their own."""
    prefix = f"{kind} "
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
