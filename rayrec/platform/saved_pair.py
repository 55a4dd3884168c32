"""Settings in JSON and arrays in safetensors, two files that know whether they belong together.

Their version is a checksum of both, kept in the JSON file, which is written last: of an interrupted pair of
writes, or of files that were changed, the checksum does not fit. Nothing in them is code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayrec.platform.errors import InputError
from rayrec.platform.files import write_atomically
from rayrec.platform.mapped_tensors import mapped_tensors

_MAPPED_BYTES = 32 << 20
"""Larger files are mapped: the processes of a node share the memory."""


def checksum(settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    """The first 16 hex digits of the SHA-256 of plain JSON values and arrays, the arrays in their order."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data if array.size else b"")
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class SavedPair:
    """Names of the two files, and what they are called in errors."""

    manifest: str
    tensors: str
    what: str
    """As in "a saved semantic ID registry"."""
    readable_formats: Collection[int]
    written_format: int

    def write(
        self, folder: str | Path, version: str, settings: Mapping[str, Any], arrays: dict[str, NDArray[Any]]
    ) -> None:
        """Write both files, each whole or not at all, the manifest last."""
        from safetensors.numpy import save

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        manifest = {"format_version": self.written_format, "version": version, **settings}
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        write_atomically(folder / self.tensors, save(contiguous))
        write_atomically(folder / self.manifest, (json.dumps(manifest, indent=2) + "\n").encode())

    def read(self, folder: str | Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """The manifest and the arrays; whether they fit together is `check_version`'s to say.

        Raises:
            InputError: a file is missing, cannot be read or is of another format; names the file.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        manifest_path, tensors_path = Path(folder) / self.manifest, Path(folder) / self.tensors
        manifest_bytes = self._bytes_of(manifest_path)
        try:
            manifest = json.loads(manifest_bytes)
            format_version = manifest["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{manifest_path}: not the manifest of a {self.what}; make it again") from error
        if format_version not in self.readable_formats:
            readable = " and ".join(map(str, self.readable_formats))
            raise InputError(
                f"{manifest_path}: written in format {format_version}, this program reads format {readable}; "
                "make it again, or use the version of RayRec it was made with"
            )
        try:
            if self._size_of(tensors_path) >= _MAPPED_BYTES:
                return manifest, mapped_tensors(tensors_path)[1]
            return manifest, load(self._bytes_of(tensors_path))
        except SafetensorError as error:
            raise InputError(f"{tensors_path}: damaged ({error}); make the {self.what} again") from error

    def check_version(self, folder: str | Path, saved: str, found: str) -> None:
        """Refuse a saved file that is not what was saved.

        Raises:
            InputError: the content's checksum is not the one that was saved.
        """
        if saved != found:
            raise InputError(
                f"{Path(folder) / self.tensors}: its content and that of {self.manifest} have checksum "
                f"{found}, but version {saved} was saved; a file was changed or damaged, "
                f"make the {self.what} again"
            )

    def remove(self, folder: str | Path) -> None:
        """Remove what an earlier write left, the manifest first."""
        for name in (self.manifest, self.tensors):
            (Path(folder) / name).unlink(missing_ok=True)

    def _size_of(self, path: Path) -> int:
        try:
            return path.stat().st_size
        except OSError as error:
            raise self._unreadable(path, error) from error

    def _bytes_of(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, path: Path, error: OSError) -> InputError:
        return InputError(f"{path}: cannot be read ({error.strerror}); expected a saved {self.what}")
