"""The registry of semantic IDs: which tuple of codes stands for which item.

A model, a trie and a server speak the same language only if they were built
from the same registry. Its version is a checksum of everything in it; whatever
is derived from it carries the version, and `check_matches` refuses another.

Axes: I items in catalog order, L code levels (the digit that breaks
collisions included), C codebooks (that digit left out), K codes of a codebook,
D dimensions of an item vector.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayrec.models.tokenizers.code_tuples import num_distinct, num_distinct_tuples
from rayrec.models.tokenizers.report import level_statistics
from rayrec.platform.arrays import BoolArray, Float32Array, Int64Array
from rayrec.platform.errors import InputError
from rayrec.platform.saved_pair import SavedPair, checksum

FILES = SavedPair(
    "registry.json", "codes.safetensors", "semantic ID registry", readable_formats=(1, 2), written_format=2
)
_SETTINGS = (
    "level_sizes",
    "num_codebooks",
    "collision_policy",
    "method",
    "dataset_fingerprint",
    "fit_report",
)
_NEW_IN_FORMAT_2 = ("uniform_digit", "tokenizer_version", "ancestors")
"""Left out where they say nothing: a registry of format 1 keeps its version."""
_ARRAYS = ("item_ids_I", "codes_IL", "codebooks_CKD", "added_I")


@dataclass(frozen=True)
class Ancestor:
    """A registry that another one extends: its items have the same codes there."""

    version: str
    dataset_fingerprint: str


@dataclass(frozen=True, eq=False)
class SemanticIdRegistry:
    """Item ids and their code tuples, all distinct. Not to be changed: the version is its checksum."""

    item_ids_I: Int64Array
    codes_IL: NDArray[np.integer]
    """int16, or int32 where a level is too large for it."""
    level_sizes: tuple[int, ...]
    """Number of codes of each level."""
    num_codebooks: int
    """Levels that have a codebook; a level after them is the digit that breaks collisions."""
    collision_policy: str
    method: str
    """How the codes were made, for people."""
    dataset_fingerprint: str
    """Fingerprint of the data set whose catalog this is."""
    codebooks_CKD: Float32Array | None = None
    fit_report: dict[str, Any] = field(default_factory=dict)
    """Measured while fitting, and not to be had from the codes alone; plain JSON values."""
    uniform_digit: bool = False
    """Whether the last level merely lists the items of a tuple, each equally probable: no model learns it."""
    tokenizer_version: str | None = None
    """Of the fitted tokenizer (`ItemTokenizer`) that gives codes to new items; None where there is none."""
    ancestors: tuple[Ancestor, ...] = ()
    """Registries that this one extends, the oldest first."""
    added_I: NDArray[np.int16] | None = None
    """Which extension brought each item: n for the one of `ancestors[n - 1]`, 0 for the items of the first
    registry; None where nothing was extended."""

    def __post_init__(self) -> None:
        codes, sizes = self.codes_IL, np.array(self.level_sizes)
        if codes.ndim != 2 or codes.shape != (len(self.item_ids_I), len(sizes)) or 0 in codes.shape:
            raise ValueError(
                f"{len(self.item_ids_I)} items with {len(sizes)} levels need codes of that shape, "
                f"got {codes.shape}"
            )
        if not len(sizes) - 1 <= self.num_codebooks <= len(sizes):
            raise ValueError(f"num_codebooks is {self.num_codebooks} for {len(sizes)} levels")
        if self.uniform_digit and self.num_codebooks == len(sizes):
            raise ValueError(f"all {len(sizes)} levels have codebooks: none of them is a uniform digit")
        outside_I = ((codes < 0) | (codes >= sizes)).any(axis=1)
        if outside_I.any():
            position = int(outside_I.argmax())
            raise ValueError(
                f"item {self.item_ids_I[position]} has the codes {codes[position].tolist()}, "
                f"outside the level sizes {sizes.tolist()}"
            )
        for name, found in (
            ("item ids", num_distinct(self.item_ids_I)),
            ("code tuples", num_distinct_tuples(codes, self.level_sizes)),
        ):
            if found < len(codes):
                raise ValueError(f"{len(codes)} items have only {found} distinct {name}")

    @property
    def num_items(self) -> int:
        return len(self.item_ids_I)

    @property
    def num_learned_levels(self) -> int:
        """Levels that a model predicts and reads; a digit after them says nothing of an item."""
        return self.num_codebooks if self.uniform_digit else len(self.level_sizes)

    @property
    def learned_level_sizes(self) -> tuple[int, ...]:
        return self.level_sizes[: self.num_learned_levels]

    @property
    def learned_codes_IL(self) -> NDArray[np.integer]:
        """Not distinct where items share a tuple."""
        return self.codes_IL[:, : self.num_learned_levels]

    @cached_property
    def version(self) -> str:
        """The first 16 hex digits of the SHA-256 of settings and arrays."""
        return checksum(self._settings(), self._arrays())

    def extends(self, version: str, dataset_fingerprint: str) -> bool:
        """Whether a model that was trained with that registry and data set may use this one: what it
        learned of its codes holds here, and no level that it predicts has grown."""
        return Ancestor(version, dataset_fingerprint) in self.ancestors

    def known_to(self, version: str) -> BoolArray:
        """[I] whether each item was there in this version of the registry, its own or an ancestor's."""
        versions = [ancestor.version for ancestor in self.ancestors]
        if self.added_I is None or version not in versions:
            return np.ones(self.num_items, dtype=bool)
        known_I: BoolArray = self.added_I <= versions.index(version)
        return known_I

    def check_matches(self, version: str, holder: str) -> None:
        """Refuse a checkpoint, trie or server (`holder`, named in the error) of another registry.

        Raises:
            InputError: the versions differ.
        """
        if version != self.version:
            raise InputError(
                f"{holder} was made with version {version} of the semantic IDs, but the registry here is "
                f"version {self.version}; use the registry it was made with, or make it again"
            )

    def report(self) -> dict[str, Any]:
        """Use of the codes, level by level, and what was measured while fitting; plain JSON values."""
        return {
            "version": self.version,
            "method": self.method,
            "num_items": self.num_items,
            "num_codebooks": self.num_codebooks,
            "collision_policy": self.collision_policy,
            "ancestors": [ancestor.version for ancestor in self.ancestors],
            "levels": level_statistics(self.codes_IL, self.level_sizes),
            **self.fit_report,
        }

    def save(self, folder: str | Path) -> None:
        """Write `registry.json` and `codes.safetensors`, both or neither."""
        FILES.write(folder, self.version, self._settings(), self._arrays())

    @classmethod
    def load(cls, folder: str | Path) -> SemanticIdRegistry:
        """Read a saved registry and verify its checksum.

        Raises:
            InputError: a file is missing or cannot be read, or the content is
                not what was saved; names the file.
        """
        manifest, arrays = FILES.read(folder)
        try:
            settings: dict[str, Any] = {name: manifest[name] for name in _SETTINGS}
            settings |= {name: manifest[name] for name in _NEW_IN_FORMAT_2 if name in manifest}
            settings["level_sizes"] = tuple(settings["level_sizes"])
            settings["ancestors"] = tuple(Ancestor(**values) for values in settings.get("ancestors", ()))
            version = manifest["version"]
            tensors: dict[str, Any] = {name: arrays[name] for name in _ARRAYS if name in arrays}
            registry = cls(**settings, **tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{Path(folder) / FILES.manifest} and {FILES.tensors} do not form a registry: {error}"
            ) from error
        FILES.check_version(folder, version, registry.version)
        return registry

    def _settings(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in _SETTINGS}
        new = {
            "uniform_digit": self.uniform_digit,
            "tokenizer_version": self.tokenizer_version,
            "ancestors": [vars(ancestor) for ancestor in self.ancestors],
        }
        return settings | {name: new[name] for name in _NEW_IN_FORMAT_2 if new[name]}

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return {name: array for name, array in arrays.items() if array is not None}


def smallest_code_dtype(level_sizes: tuple[int, ...]) -> type[np.int16] | type[np.int32]:
    """The type in which a registry keeps codes of these levels."""
    return np.int16 if max(level_sizes) <= np.iinfo(np.int16).max + 1 else np.int32
