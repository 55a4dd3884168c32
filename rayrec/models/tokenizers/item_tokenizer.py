"""A fitted tokenizer: from what is known of an item to its codes, fitted or new.

    blocks of item vectors ─► VectorPreparation ─► Quantizer ─► codes
      text, interactions      scale, components    one of TOKENIZERS

It is saved whole, beside the registry whose codes it made, as numbers and names: no file has code in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayrec.models.tokenizers.kmeans import checked_vectors, usual_codebook_size
from rayrec.models.tokenizers.letter import Letter
from rayrec.models.tokenizers.quantizer import Quantizer
from rayrec.models.tokenizers.vector_preparation import PreparedVectors, VectorPreparation
from rayrec.platform.arrays import Float32Array, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.registry import Registry
from rayrec.platform.saved_pair import SavedPair, checksum

LETTER = "letter"
"""The tokenizer whose quantizer reads vectors of interactions."""
TOKENIZERS: Registry[type[Quantizer]] = Registry(
    "rayrec.tokenizers",
    "tokenizer",
    {
        "rq_kmeans": "rayrec.models.tokenizers.rq_kmeans:ResidualKMeans",
        "balanced_rq_kmeans": "rayrec.models.tokenizers.balanced_rq_kmeans:BalancedResidualKMeans",
        "rq_vae": "rayrec.models.tokenizers.rq_vae:RqVae",
        LETTER: "rayrec.models.tokenizers.letter:Letter",
        "opq": "rayrec.models.tokenizers.opq:OptimizedProductQuantizer",
    },
)
"""Name of a tokenizer to the class of its quantizer. Another package adds its own by an entry point of the
group `rayrec.tokenizers`; see docs/guides/add-a-tokenizer.md."""

FILES = SavedPair(
    "tokenizer.json", "tokenizer.safetensors", "item tokenizer", readable_formats=(1,), written_format=1
)
_PREPARATION, _QUANTIZER, _LEARNED = "preparation.", "quantizer.", "learned."


@dataclass(frozen=True)
class ItemTokenizer:
    """Vectors are prepared, then quantized, as on the catalog that both were fitted on."""

    name: str
    """Of the quantizer, in `TOKENIZERS`."""
    preparation: VectorPreparation
    quantizer: Quantizer
    seed: int
    vector_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By name of a source of item vectors, settings that new items need, too."""
    learned: Mapping[str, Mapping[str, NDArray[Any]]] = field(default_factory=dict)
    """Likewise, arrays that their vectors depend on (`ItemVectorSource.fit`)."""

    @classmethod
    def fit(
        cls,
        name: str,
        blocks: Mapping[str, Float32Array],
        item_ids_I: Int64Array,
        num_levels: int,
        codebook_size: int | None,
        seed: int = 0,
        num_iterations: int | None = None,
        weights: Mapping[str, float] | None = None,
        num_components: int = 64,
        max_codebook_size: int = 256,
        vector_settings: Mapping[str, Mapping[str, Any]] | None = None,
        interactions_IZ: Float32Array | None = None,
        learned: Mapping[str, Mapping[str, NDArray[Any]]] | None = None,
    ) -> ItemTokenizer:
        """Fit the preparation, then the quantizer of this name; arguments as of `fitted_quantizer`.

        Raises:
            ValueError: unknown name, blocks that cannot be combined, vectors that cannot be quantized, or a
                name in `learned` that has a dot.
        """
        for source, arrays in (learned or {}).items():
            if dotted := [name for name in arrays if "." in name]:
                raise ValueError(f"the {source} vectors keep an array {dotted[0]!r}; call it without dots")
        preparation = VectorPreparation.fit(blocks, item_ids_I, weights, num_components, seed)
        vectors_ID = torch.from_numpy(preparation.apply(blocks, item_ids_I).vectors_ID)
        quantizer = fitted_quantizer(
            name,
            vectors_ID,
            num_levels,
            codebook_size,
            seed,
            num_iterations,
            max_codebook_size,
            None if interactions_IZ is None else torch.from_numpy(interactions_IZ),
        )
        return cls(name, preparation, quantizer, seed, vector_settings or {}, learned or {})

    def vectors(self, blocks: Mapping[str, Float32Array], item_ids_I: Int64Array) -> PreparedVectors:
        """What the quantizer is given of these items. An item without any data gets noise, which is
        counted."""
        return self.preparation.apply(blocks, item_ids_I)

    def encode(self, blocks: Mapping[str, Float32Array], item_ids_I: Int64Array) -> Int64Array:
        """[I, L] codes, before collisions are resolved; errors as `VectorPreparation.apply`."""
        vectors = self.vectors(blocks, item_ids_I)
        return self.quantizer.encode(torch.from_numpy(vectors.vectors_ID)).cpu().numpy()

    def decode(self, codes_IL: NDArray[np.integer]) -> Float32Array:
        """[I, C] prepared vectors that the codes stand for; fewer columns are coarser."""
        return self.quantizer.decode(torch.from_numpy(codes_IL.astype(np.int64))).cpu().numpy()

    @property
    def version(self) -> str:
        """The first 16 hex digits of the SHA-256 of settings and arrays."""
        return checksum(self._settings(), self._arrays())

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer.safetensors`, both or neither."""
        FILES.write(folder, self.version, self._settings(), self._arrays())

    @classmethod
    def load(cls, folder: str | Path) -> ItemTokenizer:
        """Read a saved tokenizer and verify its checksum.

        Raises:
            InputError: a file is missing, cannot be read, or is not what was saved; names the file.
        """
        manifest, arrays = FILES.read(folder)
        try:
            name, version, shape = manifest["name"], manifest["version"], manifest["quantizer"]
            quantizer = TOKENIZERS[name](
                shape["num_levels"], shape["codebook_size"], manifest["seed"], shape["num_iterations"]
            ).restore(_below(_QUANTIZER, arrays))
            preparation = VectorPreparation.from_saved(manifest["preparation"], _below(_PREPARATION, arrays))
            settings, learned = manifest.get("vector_settings", {}), dict[str, dict[str, NDArray[Any]]]()
            for key, array in _below(_LEARNED, arrays).items():
                source, _, part = key.rpartition(".")
                learned.setdefault(source, {})[part] = array
            tokenizer = cls(name, preparation, quantizer, manifest["seed"], settings, learned)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{Path(folder) / FILES.manifest} and {FILES.tensors} do not form an item tokenizer: {error}"
            ) from error
        FILES.check_version(folder, version, tokenizer.version)
        return tokenizer

    def _settings(self) -> dict[str, Any]:
        # Only where there are some: checksums of older tokenizers stay what they are.
        vectors = {"vector_settings": self.vector_settings} if self.vector_settings else {}
        return {
            "name": self.name,
            "seed": self.seed,
            **vectors,
            "quantizer": {
                "num_levels": self.quantizer.num_levels,
                "codebook_size": self.quantizer.codebook_size,
                "num_iterations": self.quantizer.num_iterations,
            },
            "preparation": self.preparation.settings(),
        }

    def _arrays(self) -> dict[str, NDArray[Any]]:
        # In the order of their names: what was loaded has the same checksum as what was saved.
        arrays: dict[str, NDArray[Any]] = {
            _PREPARATION + name: array for name, array in self.preparation.arrays().items()
        }
        arrays |= {_QUANTIZER + name: array for name, array in self.quantizer.arrays().items()}
        arrays |= {
            f"{_LEARNED}{source}.{name}": array
            for source, parts in self.learned.items()
            for name, array in parts.items()
        }
        return dict(sorted(arrays.items()))


def fitted_quantizer(
    name: str,
    vectors_ID: Tensor,
    num_levels: int,
    codebook_size: int | None,
    seed: int = 0,
    num_iterations: int | None = None,
    max_codebook_size: int = 256,
    interactions_IZ: Tensor | None = None,
) -> Quantizer:
    """The quantizer of this name in `TOKENIZERS`, fitted; runs on the device of the vectors.

    Args:
        codebook_size: None takes what the distinct vectors fill, up to `max_codebook_size`; later levels may
            then leave codes unused.
        interactions_IZ: for a quantizer that reads them: see `letter`.

    Raises:
        ValueError: unknown name, or vectors that cannot be quantized.
    """
    may_leave_unused = codebook_size is None
    if codebook_size is None:
        codebook_size = usual_codebook_size(checked_vectors(vectors_ID), max_codebook_size)
    quantizer = TOKENIZERS[name](num_levels, codebook_size, seed, num_iterations)
    if interactions_IZ is None:
        return quantizer.fit(vectors_ID, may_leave_unused)
    if not isinstance(quantizer, Letter):
        raise ValueError(f"tokenizer {name!r} reads no vectors of interactions")
    return quantizer.fit(vectors_ID, may_leave_unused, interactions_IZ)


def _below(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
