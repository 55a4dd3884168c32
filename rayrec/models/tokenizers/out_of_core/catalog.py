"""From item vectors in files to a registry: the quantizer learns a sample, and codes are made block by block.

    sources ─► preparation (all items) ─► a sample of prepared items ─► quantizer ─► codes of all ─► registry

Vectors are prepared again where they are needed, which takes less time than to write and read them.

Axes: I items, G some of them, R items of a block, L code levels, C components.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rayrec.models.tokenizers.fit import VARIANCE, registry_of_codes
from rayrec.models.tokenizers.item_tokenizer import ItemTokenizer, fitted_quantizer
from rayrec.models.tokenizers.out_of_core.components import RunStage
from rayrec.models.tokenizers.out_of_core.preparation import Sources, fit_preparation, prepared
from rayrec.models.tokenizers.out_of_core.row_files import mapped, one_thread
from rayrec.models.tokenizers.quantizer import Quantizer
from rayrec.models.tokenizers.registry import SemanticIdRegistry, smallest_code_dtype
from rayrec.models.tokenizers.vector_preparation import VectorPreparation
from rayrec.platform.arrays import Float32Array, Float64Array, Int64Array


@dataclass(frozen=True)
class TokenizerSettings:
    """Of an `ItemTokenizer` and its registry."""

    name: str
    """Of the quantizer, in `TOKENIZERS`."""
    num_levels: int
    codebook_size: int | None
    max_codebook_size: int
    num_iterations: int | None
    seed: int
    weights: Mapping[str, float]
    num_components: int
    fit_items: int
    """Items that the quantizer learns from, about."""
    collision_policy: str
    vectors_from: str
    """For the description."""
    vector_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Tokenized(NamedTuple):
    """What was made of a catalog."""

    tokenizer: ItemTokenizer
    registry: SemanticIdRegistry
    num_without_data: int


_FEWEST_OF_A_CODE = 39
"""Items of the sample; with fewer, k-means warns elsewhere, too (Faiss, `min_points_per_centroid`)."""


class _Encoded(NamedTuple):
    """A block's items."""

    codes_RL: NDArray[np.integer]
    sum_C: Float64Array
    squares: float
    """Sum of the squares of all vectors."""
    errors_L: Float64Array
    """Sums of squared errors of the first level, the first two, ..."""
    num_without_data: int


def tokenize_blocks(
    sources: Sources,
    settings: TokenizerSettings,
    dataset_fingerprint: str,
    popularity_I: Int64Array,
    run: RunStage,
) -> Tokenized:
    """Fit a tokenizer and make the registry of all items.

    Raises:
        ValueError: as of `ItemTokenizer.fit` and `quantized_registry`.
        NoRoomError: the disk is full.
    """
    preparation = fit_preparation(sources, settings.weights, settings.num_components, settings.seed, run)
    # A task, so that the quantizer is kept: a run that goes on must not have another one.
    ((quantizer, num_fitted),) = run("quantizer", _fitted, (sources, preparation), [settings])
    tokenizer = ItemTokenizer(settings.name, preparation, quantizer, settings.seed, settings.vector_settings)
    num_items = sources.blocks.num_rows
    raw_IL = np.empty(
        (num_items, quantizer.num_levels), dtype=smallest_code_dtype((quantizer.codebook_size,))
    )
    found = [
        each
        for task in run("codes", _encode, (sources, preparation, quantizer), sources.blocks.tasks())
        for each in task
    ]
    sum_C, errors_L = np.zeros_like(found[0].sum_C), np.zeros(quantizer.num_levels)
    for block, each in enumerate(found):
        start, stop = sources.blocks.span(block)
        raw_IL[start:stop] = each.codes_RL
        sum_C += each.sum_C
        errors_L += each.errors_L
    num_without_data = sum(each.num_without_data for each in found)
    mean_C = sum_C / num_items
    variance = sum(each.squares for each in found) / num_items - float(mean_C @ mean_C)
    del found

    def last_level_distances(items_G: Int64Array) -> Float32Array:
        vectors_GC = prepared(preparation, *sources.take(items_G)).vectors_ID
        codes_GL = torch.from_numpy(raw_IL[items_G].astype(np.int64))
        with one_thread():
            return quantizer.last_level_distances(torch.from_numpy(vectors_GC), codes_GL).cpu().numpy()

    registry = registry_of_codes(
        quantizer,
        raw_IL,
        np.array(mapped(sources.ids_file, "<i8")),
        dataset_fingerprint,
        settings.collision_policy,
        last_level_distances,
        {
            "reconstruction_error": (errors_L / num_items / variance).tolist() if variance > 0 else None,
            VARIANCE: variance,
            "fitted_items": num_fitted,
        },
        vectors_from=f"{len(mean_C)} components of {settings.vectors_from}, learned of {num_fitted} items",
        popularity_I=popularity_I,
        tokenizer_version=tokenizer.version,
    )
    return Tokenized(tokenizer, registry, num_without_data)


def _fitted(shared: tuple[Sources, VectorPreparation], settings: TokenizerSettings) -> tuple[Quantizer, int]:
    """The quantizer, and of how many items. They are the first: items come in the order of a hash of their
    ids, so these are a sample, the same one each time."""
    sources, preparation = shared
    num_codes = settings.codebook_size or settings.max_codebook_size
    count = min(sources.blocks.num_rows, max(settings.fit_items, _FEWEST_OF_A_CODE * num_codes))
    parts, step = [], sources.blocks.rows
    for start in range(0, count, step):
        parts.append(prepared(preparation, *sources.read(start, min(start + step, count))).vectors_ID)
    sample_GC = torch.from_numpy(np.concatenate(parts))
    del parts
    with one_thread():
        quantizer = fitted_quantizer(
            settings.name,
            sample_GC,
            settings.num_levels,
            settings.codebook_size,
            settings.seed,
            settings.num_iterations,
            settings.max_codebook_size,
        )
    return quantizer, count


def _encode(shared: tuple[Sources, VectorPreparation, Quantizer], blocks: range) -> list[_Encoded]:
    sources, preparation, quantizer = shared
    found = []
    for block in blocks:
        ready = prepared(preparation, *sources.read(*sources.blocks.span(block)))
        vectors_RC = torch.from_numpy(ready.vectors_ID)
        with one_thread():
            codes_RL = quantizer.encode(vectors_RC)
            errors = [
                float((vectors_RC - quantizer.decode(codes_RL[:, :depth])).square().sum(dtype=torch.float64))
                for depth in range(1, quantizer.num_levels + 1)
            ]
            doubles_RC = vectors_RC.double()
            found.append(
                _Encoded(
                    codes_RL.numpy().astype(smallest_code_dtype((quantizer.codebook_size,))),
                    doubles_RC.sum(dim=0).numpy(),
                    float(doubles_RC.square().sum()),
                    np.array(errors),
                    ready.num_without_data,
                )
            )
    return found
