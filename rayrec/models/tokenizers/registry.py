"""The registry of semantic IDs: which tuple of codes stands for which item.

A model, a trie and a server speak the same language only if they were built
from the same registry. Its version is a checksum of everything in it; whatever
is derived from it carries the version, and `check_matches` refuses another.

Axes: I items in catalogue order, L code levels (the digit that breaks
collisions included), C codebooks (that digit left out), K codes of a codebook,
D dimensions of an item vector.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayrec.models.tokenizers.code_tuples import tuple_groups
from rayrec.platform.errors import InputError

FORMAT_VERSION = 1
_MANIFEST, _TENSORS = "registry.json", "codes.safetensors"
_SETTINGS = (
    "level_sizes",
    "num_codebooks",
    "collision_policy",
    "method",
    "dataset_fingerprint",
    "fit_report",
)
_ARRAYS = ("item_ids_I", "codes_IL", "codebooks_CKD")


@dataclass(frozen=True, eq=False)
class SemanticIdRegistry:
    """Item ids and their code tuples, all distinct. Not to be changed: the version is its checksum."""

    item_ids_I: NDArray[np.int64]
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
    """Fingerprint of the data set whose catalogue this is."""
    codebooks_CKD: NDArray[np.float32] | None = None
    fit_report: dict[str, Any] = field(default_factory=dict)
    """Measured while fitting, and not to be had from the codes alone; plain JSON values."""

    def __post_init__(self) -> None:
        codes, sizes = self.codes_IL, np.array(self.level_sizes)
        if codes.ndim != 2 or codes.shape != (len(self.item_ids_I), len(sizes)) or 0 in codes.shape:
            raise ValueError(
                f"{len(self.item_ids_I)} items with {len(sizes)} levels need codes of that shape, "
                f"got {codes.shape}"
            )
        if not len(sizes) - 1 <= self.num_codebooks <= len(sizes):
            raise ValueError(f"num_codebooks is {self.num_codebooks} for {len(sizes)} levels")
        outside_I = ((codes < 0) | (codes >= sizes)).any(axis=1)
        if outside_I.any():
            position = int(outside_I.argmax())
            raise ValueError(
                f"item {self.item_ids_I[position]} has the codes {codes[position].tolist()}, "
                f"outside the level sizes {sizes.tolist()}"
            )
        for name, num_distinct in (
            ("item ids", len(np.unique(self.item_ids_I))),
            ("code tuples", len(tuple_groups(codes)[1])),
        ):
            if num_distinct < len(codes):
                raise ValueError(f"{len(codes)} items have only {num_distinct} distinct {name}")

    @property
    def num_items(self) -> int:
        return len(self.item_ids_I)

    @cached_property
    def version(self) -> str:
        """The first 16 hex digits of the SHA-256 of settings and arrays."""
        digest = hashlib.sha256(_canonical_json(self._settings()))
        for name, array in self._arrays().items():
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

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
        levels = []
        for level, size in enumerate(self.level_sizes):
            counts_K = np.bincount(self.codes_IL[:, level], minlength=size)
            share = counts_K[counts_K > 0] / self.num_items
            levels.append(
                {
                    "size": size,
                    "used": len(share),
                    "perplexity": float(np.exp(-(share * np.log(share)).sum())),
                    "prefixes": len(tuple_groups(self.codes_IL[:, : level + 1])[1]),
                }
            )
        return {
            "version": self.version,
            "method": self.method,
            "num_items": self.num_items,
            "num_codebooks": self.num_codebooks,
            "collision_policy": self.collision_policy,
            "levels": levels,
            **self.fit_report,
        }

    def save(self, folder: str | Path) -> None:
        """Write `registry.json` and `codes.safetensors`, each whole or not at all, the manifest last."""
        from safetensors.numpy import save

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        manifest = {"format_version": FORMAT_VERSION, "version": self.version, **self._settings()}
        _write_whole(folder / _TENSORS, save(self._arrays()))
        _write_whole(folder / _MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())

    @classmethod
    def load(cls, folder: str | Path) -> SemanticIdRegistry:
        """Read a saved registry and verify its checksum.

        Raises:
            InputError: a file is missing or cannot be read, or the content is
                not what was saved; names the file.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        manifest_path, tensors_path = Path(folder) / _MANIFEST, Path(folder) / _TENSORS
        manifest_bytes = _read(manifest_path)
        try:
            manifest = json.loads(manifest_bytes)
            format_version = manifest["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{manifest_path}: not the manifest of a semantic ID registry; make it again"
            ) from error
        if format_version != FORMAT_VERSION:
            raise InputError(
                f"{manifest_path}: written in format {format_version}, "
                f"this program reads format {FORMAT_VERSION}"
            )
        tensors_bytes = _read(tensors_path)
        try:
            arrays: dict[str, Any] = load(tensors_bytes)
        except SafetensorError as error:
            raise InputError(f"{tensors_path}: damaged ({error}); make the registry again") from error
        try:
            settings = {name: manifest[name] for name in _SETTINGS}
            settings["level_sizes"] = tuple(settings["level_sizes"])
            version = manifest["version"]
            registry = cls(**settings, **{name: arrays[name] for name in _ARRAYS if name in arrays})
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{manifest_path} and {_TENSORS} do not form a registry: {error}") from error
        if registry.version != version:
            raise InputError(
                f"{tensors_path}: its content and that of {_MANIFEST} have checksum {registry.version}, "
                f"but version {version} was saved; a file was changed or damaged, "
                "make the registry again"
            )
        return registry

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def _arrays(self) -> dict[str, NDArray[Any]]:
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return {name: array for name, array in arrays.items() if array is not None}


def smallest_code_dtype(level_sizes: tuple[int, ...]) -> type[np.int16] | type[np.int32]:
    """The type in which a registry keeps codes of these levels."""
    return np.int16 if max(level_sizes) <= np.iinfo(np.int16).max + 1 else np.int32


def _canonical_json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); expected a saved semantic ID registry"
        ) from error


def _write_whole(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
