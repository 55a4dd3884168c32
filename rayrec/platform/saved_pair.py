"""Settings in JSON and arrays in safetensors, two files that know whether they belong together.

Their version is a checksum of both, kept in the JSON file: of files that were changed, it does not fit.
Nothing in them is code.

A pair takes the place of another one at once, when its JSON file does: until then the new arrays lie beside
the old ones, with the version in their name, and afterwards they are moved over them.

    pair.json                  with its version
    pair-VERSION.safetensors   arrays of this version, unless they were moved already
    pair.safetensors           otherwise those
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rayrec.platform.errors import InputError
from rayrec.platform.files import write_atomically
from rayrec.platform.mapped_tensors import mapped_tensors

_VERSION = "[0-9a-f]{16}"
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
        """Put a pair in the place of the one that may be there; one writer at a time."""
        from safetensors.numpy import save

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        manifest = {"format_version": self.written_format, "version": version, **settings}
        contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        beside = self._beside(folder, version)
        write_atomically(beside, save(contiguous))
        write_atomically(folder / self.manifest, (json.dumps(manifest, indent=2) + "\n").encode())
        os.replace(beside, folder / self.tensors)
        self._remove_beside(folder)

    def read(self, folder: str | Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """The manifest and the arrays; whether they fit together is `check_version`'s to say.

        Raises:
            InputError: a file is missing, cannot be read or is of another format; names the file.
        """
        content = self._bytes_of(Path(folder) / self.manifest)
        while True:
            failure: InputError | None = None
            try:
                manifest = self._manifest_of(Path(folder) / self.manifest, content)
                arrays = self._arrays_of(Path(folder), manifest.get("version"))
            except InputError as error:
                failure = error
            # One that is replaced meanwhile is read again: the arrays may be those of the next.
            held, content = content, self._bytes_of(Path(folder) / self.manifest)
            if content != held:
                continue
            if failure is not None:
                raise failure
            return manifest, arrays

    def _manifest_of(self, manifest_path: Path, manifest_bytes: bytes) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads(manifest_bytes)
            format_version = manifest["format_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{manifest_path}: not the manifest of a {self.what}; make it again") from error
        if format_version not in self.readable_formats:
            readable = " and ".join(map(str, self.readable_formats))
            raise InputError(
                f"{manifest_path}: written in format {format_version}, this program reads format {readable}; "
                "make it again, or use the version of RayRec it was made with"
            )
        return manifest

    def _arrays_of(self, folder: Path, version: object) -> dict[str, NDArray[Any]]:
        if isinstance(version, str) and re.fullmatch(_VERSION, version):
            try:
                return self._arrays_in(self._beside(folder, version))
            except FileNotFoundError:  # moved to their place
                pass
        path = folder / self.tensors
        try:
            return self._arrays_in(path)
        except OSError as error:
            raise self._unreadable(path, error) from error

    def _arrays_in(self, path: Path) -> dict[str, NDArray[Any]]:
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            if path.stat().st_size >= _MAPPED_BYTES:
                return mapped_tensors(path)[1]
            return load(path.read_bytes())
        except (SafetensorError, ValueError) as error:  # a mapped one may be replaced between two looks
            raise InputError(f"{path}: damaged ({error}); make the {self.what} again") from error

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
        self._remove_beside(Path(folder))

    def _beside(self, folder: Path, version: str) -> Path:
        tensors = folder / self.tensors
        return tensors.with_name(f"{tensors.stem}-{version}{tensors.suffix}")

    def _remove_beside(self, folder: Path) -> None:
        """Delete arrays that killed writers have left."""
        stem, suffix = os.path.splitext(self.tensors)
        for path in folder.glob(f"{stem}-*{suffix}"):
            if re.fullmatch(f"{re.escape(stem)}-{_VERSION}{re.escape(suffix)}", path.name):
                path.unlink(missing_ok=True)

    def _bytes_of(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, path: Path, error: OSError) -> InputError:
        return InputError(f"{path}: cannot be read ({error.strerror}); expected a saved {self.what}")
