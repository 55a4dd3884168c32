"""A path or URL of any file system as pyarrow's object for the file system and the path in it.

Paths without a scheme are local. URLs with a scheme that pyarrow knows (`file`, `s3`, `gs`, `hdfs`) are
opened by pyarrow, others (`memory`, `abfs`, `http`, ...) by fsspec.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pyarrow as pa
from pyarrow import fs

from rayrec.platform.errors import InputError

ARROW_SCHEMES = ("file", "s3", "gs", "gcs", "hdfs", "viewfs")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


@dataclass(frozen=True)
class RemoteFolder:
    """A folder of some file system; it can be pickled, with what is needed to connect."""

    url: str
    """As it was given; for messages."""
    filesystem: fs.FileSystem
    path: str
    """Of the folder, in the file system."""

    def path_of(self, name: str) -> str:
        """Path in the file system of a file in the folder, by its name."""
        return f"{self.path.rstrip('/')}/{name}"

    def shown(self, name: str) -> str:
        """The same as a URL, for messages."""
        return f"{self.url.rstrip('/')}/{name}"

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name in the folder."""
        (info,) = self.filesystem.get_file_info([self.path_of(name)])
        return bool(info.type == fs.FileType.File)

    def read(self, name: str) -> bytes | None:
        """Content of a file in the folder; None if there is none."""
        if not self.exists(name):
            return None
        try:
            with self.filesystem.open_input_stream(self.path_of(name)) as file:
                return bytes(file.read())
        except FileNotFoundError:  # deleted meanwhile
            return None

    def version_of(self, info: fs.FileInfo) -> str:
        """A string that changes when a file is rewritten, even with the same size."""
        handler = getattr(self.filesystem, "handler", None)
        if isinstance(handler, fs.FSSpecHandler):
            return str(handler.fs.ukey(info.path))
        return str(info.mtime_ns)


def remote_folder(url: str | Path) -> RemoteFolder:
    """The folder at a path or URL.

    Raises:
        InputError: the scheme is unknown, its package is missing, or the URL is malformed.
    """
    text = str(url)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return RemoteFolder(text, fs.LocalFileSystem(), str(Path(text).absolute()))
    try:
        if scheme[1] in ARROW_SCHEMES:
            filesystem, path = fs.FileSystem.from_uri(text)
        else:
            handler, path = fsspec.core.url_to_fs(text)
            filesystem = fs.PyFileSystem(fs.FSSpecHandler(handler))
    except (ImportError, ValueError, OSError, pa.ArrowException) as error:
        raise InputError(
            f"{text}: the file system {scheme[1]!r} cannot be used ({error}); give a path of this machine "
            f"or a URL that pyarrow ({', '.join(ARROW_SCHEMES)}) or an installed package of fsspec knows"
        ) from error
    return RemoteFolder(text, filesystem, path)


def absolute(location: str) -> str:
    """A local path made absolute; URLs are returned unchanged."""
    return location if _SCHEME.match(location) else str(Path(location).resolve())
