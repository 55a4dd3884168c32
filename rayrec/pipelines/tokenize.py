"""`rayrec tokenize`: a prepared data set in, the semantic IDs of its items out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import Field

from rayrec.models.item_vectors import (
    ItemVectors,
    combine,
    interaction_vectors,
    principal_components,
    text_vectors,
)
from rayrec.models.tokenizers.fit import fit_registry
from rayrec.pipelines.features import SEMANTIC_IDS_FOLDER
from rayrec.platform.config import Config
from rayrec.platform.errors import InputError
from rayrec.samples.dataset import Dataset
from rayrec.samples.jagged import list_values

Progress = Callable[[int, int], None]
"""Called with (texts encoded, texts)."""


class TokenizeConfig(Config):
    """How items get their codes."""

    vectors: Literal["interactions", "text", "both"] = "interactions"
    """What the codes are made of: co-occurrence in training sequences, the items'
    texts (needs the extra `text`), or the two side by side."""
    text_weight: float = Field(1.0, gt=0)
    """With `both`: length of a text vector beside an interaction vector of length 1."""
    components: int = Field(64, ge=1)
    """Principal components of these vectors that are clustered; k-means fails in many more."""
    num_levels: int = Field(3, ge=1, le=8)
    codebook_size: int | None = Field(None, ge=2, le=32_768)
    """Values a code may have; None takes 256, or fewer where the catalogue is too small to fill them."""
    collisions: Literal["extra_digit", "reassign"] = "extra_digit"
    """Items with the same codes: number them with one more digit, or move some to the nearest free tuple."""
    dim: int = Field(64, ge=1)
    """Width of the interaction vectors."""
    window: int = Field(5, ge=1)
    """Events of a user this many places apart or fewer count as neighbours."""
    seed: int = Field(0, ge=0)


@dataclass(frozen=True)
class TokenizeReport:
    """What the codes look like."""

    path: Path
    num_without_data: int
    """Items about which nothing was known; their codes are arbitrary."""
    report: dict[str, Any]
    """`SemanticIdRegistry.report()`."""


def tokenize(
    data: str | Path,
    out: str | Path | None = None,
    config: TokenizeConfig | None = None,
    progress: Progress | None = None,
) -> TokenizeReport:
    """Cluster the items of a data set and write their registry.

    Args:
        out: folder of the registry; `semantic_ids` inside the data set if None.

    Raises:
        InputError: no such data set, vectors that cannot be made or clustered.
    """
    config = config or TokenizeConfig()
    dataset = Dataset.open(data)
    vectors = _item_vectors(dataset, config, progress)
    try:
        registry, report = fit_registry(
            principal_components(vectors.vectors_ID, config.components),
            dataset.items.ids_I,
            dataset.fingerprint,
            num_levels=config.num_levels,
            codebook_size=config.codebook_size or _usual_codebook_size(len(dataset.items)),
            collision_policy=config.collisions,
            seed=config.seed,
            vectors_from=f"{config.components} components of {config.vectors}",
        )
    except ValueError as error:
        raise InputError(f"{data}: {error} (--codebook-size, --levels)") from error
    path = Path(out) if out is not None else Path(data) / SEMANTIC_IDS_FOLDER
    registry.save(path)
    return TokenizeReport(path, vectors.num_without_data, report)


def _usual_codebook_size(num_items: int) -> int:
    """A power of two that leaves four items to a code on average: clusters of one leave nothing to code."""
    return max(2, min(256, 2 ** int(math.log2(max(num_items, 8) / 4))))


def _item_vectors(dataset: Dataset, config: TokenizeConfig, progress: Progress | None) -> ItemVectors:
    blocks: dict[str, NDArray[np.float32]] = {}
    if config.vectors != "text":
        blocks["interactions"] = _interactions(dataset, config)
    if config.vectors != "interactions":
        texts = dataset.items.texts.to_pylist()
        if not any(texts):
            raise InputError(
                f"{dataset.root}: its items have no text; use --vectors interactions, "
                "or prepare the data with an items file that has titles or descriptions"
            )
        blocks["text"] = text_vectors(texts, progress)
    weights = {"interactions": 1.0, "text": config.text_weight}
    return combine(blocks, dataset.items.ids_I, {name: weights[name] for name in blocks}, config.seed)


def _interactions(dataset: Dataset, config: TokenizeConfig) -> NDArray[np.float32]:
    """Vectors from the training sequences, and from nothing else."""
    tables = [pq.read_table(dataset.root / name, columns=["item_ids"]) for name in dataset.train_files]
    item_ids_N, offsets_B1 = list_values(pa.concat_tables(tables)["item_ids"])
    positions_N = dataset.item_positions(item_ids_N)
    try:
        return interaction_vectors(
            positions_N, offsets_B1, len(dataset.items), config.dim, config.window, seed=config.seed
        )
    except ValueError as error:
        raise InputError(f"{dataset.root}: {error}; use --vectors text") from error
