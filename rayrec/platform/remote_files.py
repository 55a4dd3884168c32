"""A path or URL of any file system as pyarrow's object for the file system and the path in it.

Paths without a scheme are local. URLs with a scheme that pyarrow knows (`file`, `s3`, `gs`, `hdfs`) are
opened by pyarrow, others (`memory`, `abfs`, `http`, ...) by fsspec.

Whichever it is, a place that does not answer is an `OSError`. The SDKs behind fsspec have errors of their
own, which who asks a place again later must not take for a damaged file.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import fsspec
import pyarrow as pa
from pyarrow import fs

from rayrec.platform.errors import InputError
from rayrec.platform.files import unfinished_suffix, written_whole

ARROW_SCHEMES = ("file", "s3", "gs", "gcs", "hdfs", "viewfs")
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "memory"})
"""Protocols of fsspec."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


@contextmanager
def _told_as_os_error() -> Iterator[None]:
    """Raise an `OSError` for an error of an SDK; Python's own stay, such as those of wrong arguments."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if type(error).__module__ == "builtins":
            raise
        raise OSError(f"{type(error).__name__}: {error}") from error


class _File:
    """An open file of fsspec, whose errors are told as `OSError`."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        return _told_as_os_error()(found) if callable(found) else found


class _Handler(fs.FSSpecHandler):
    """As pyarrow's, with errors told as `OSError`; files tell theirs while they are read and written."""

    get_file_info = _told_as_os_error()(fs.FSSpecHandler.get_file_info)
    get_file_info_selector = _told_as_os_error()(fs.FSSpecHandler.get_file_info_selector)
    create_dir = _told_as_os_error()(fs.FSSpecHandler.create_dir)
    delete_dir = _told_as_os_error()(fs.FSSpecHandler.delete_dir)
    delete_dir_contents = _told_as_os_error()(fs.FSSpecHandler.delete_dir_contents)
    delete_root_dir_contents = _told_as_os_error()(fs.FSSpecHandler.delete_root_dir_contents)
    delete_file = _told_as_os_error()(fs.FSSpecHandler.delete_file)
    move = _told_as_os_error()(fs.FSSpecHandler.move)
    copy_file = _told_as_os_error()(fs.FSSpecHandler.copy_file)

    def open_input_stream(self, path: str) -> pa.PythonFile:
        return self.open_input_file(path)

    @_told_as_os_error()
    def open_input_file(self, path: str) -> pa.PythonFile:
        if not self.fs.isfile(path):
            raise FileNotFoundError(path)
        return pa.PythonFile(_File(self.fs.open(path, mode="rb")), mode="r")

    @_told_as_os_error()
    def open_output_stream(self, path: str, metadata: object) -> pa.PythonFile:
        return pa.PythonFile(_File(self.fs.open(path, mode="wb")), mode="w")

    @_told_as_os_error()
    def open_append_stream(self, path: str, metadata: object) -> pa.PythonFile:
        return pa.PythonFile(_File(self.fs.open(path, mode="ab")), mode="w")


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

    @contextmanager
    def written_whole(self, name: str) -> Iterator[str]:
        """A path in the file system to write a file of the folder to, which has its name after the block."""
        target = self.path_of(name)
        folder, _, file = target.rpartition("/")
        self.filesystem.create_dir(folder, recursive=True)
        if isinstance(self.filesystem, fs.LocalFileSystem):
            with written_whole(Path(target)) as local:
                yield str(local)
            return
        if self._shows_whole_files:
            yield target
            return
        # On HDFS or SFTP, for example, a reader would find half of it meanwhile.
        unfinished = f"{folder}/.{file}.{unfinished_suffix()}"
        try:
            yield unfinished
            self.filesystem.move(unfinished, target)
        except BaseException:
            with suppress(OSError):
                self.filesystem.delete_file(unfinished)
            raise

    @property
    def _shows_whole_files(self) -> bool:
        """Whether a file appears when all of it was written, as in object stores."""
        handler = getattr(self.filesystem, "handler", None)
        if not isinstance(handler, fs.FSSpecHandler):
            return self.filesystem.type_name in ("s3", "gcs", "abfs")
        protocol = handler.fs.protocol
        return bool(_OBJECT_STORES & set((protocol,) if isinstance(protocol, str) else protocol))

    def version_of(self, info: fs.FileInfo) -> str:
        """A string that changes when a file is rewritten, even with the same size."""
        handler = getattr(self.filesystem, "handler", None)
        if isinstance(handler, fs.FSSpecHandler):
            with _told_as_os_error():
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
            with _told_as_os_error():  # of credentials that are missing, for example
                files, path = fsspec.core.url_to_fs(text)
            filesystem = fs.PyFileSystem(_Handler(files))
    except (ImportError, ValueError, OSError, pa.ArrowException) as error:
        raise InputError(
            f"{text}: the file system {scheme[1]!r} cannot be used ({error}); give a path of this machine "
            f"or a URL that pyarrow ({', '.join(ARROW_SCHEMES)}) or an installed package of fsspec knows"
        ) from error
    return RemoteFolder(text, filesystem, path)


def is_url(location: str | Path) -> bool:
    """Whether a location has a scheme; a `Path` cannot have one."""
    return isinstance(location, str) and _SCHEME.match(location) is not None


def located(location: str | Path) -> Path:
    """A path, or what stands for one at a URL.

    Raises:
        InputError: as `remote_folder`.
    """
    return cast(Path, RemotePath.of(str(location))) if is_url(location) else Path(location)


@dataclass(frozen=True)
class RemotePath:
    """A file or folder of any file system, with those methods of `Path` that readers of tables use; it can be
    pickled."""

    filesystem: fs.FileSystem
    path: str
    """In the file system."""
    url: str
    """As it was given; for messages."""

    @classmethod
    def of(cls, url: str) -> RemotePath:
        """The file or folder at a URL.

        Raises:
            InputError: as `remote_folder`.
        """
        found = remote_folder(url)
        return cls(found.filesystem, found.path.rstrip("/"), url.rstrip("/"))

    def __str__(self) -> str:
        return self.url

    def __lt__(self, other: RemotePath) -> bool:
        return self.path < other.path

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.filesystem, f"{self.path}/{name}", f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self._pure.name

    @property
    def stem(self) -> str:
        return self._pure.stem

    @property
    def suffix(self) -> str:
        return self._pure.suffix

    @property
    def suffixes(self) -> list[str]:
        return self._pure.suffixes

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.filesystem, self.path.rpartition("/")[0], self.url.rpartition("/")[0])

    def relative_to(self, folder: RemotePath) -> PurePosixPath:
        """The path below a folder."""
        return self._pure.relative_to(folder.path)

    def resolve(self) -> RemotePath:
        """Itself."""
        return self

    def exists(self) -> bool:
        return bool(self._info.type != fs.FileType.NotFound)

    def is_file(self) -> bool:
        return bool(self._info.type == fs.FileType.File)

    def is_dir(self) -> bool:
        return bool(self._info.type == fs.FileType.Directory)

    def iterdir(self) -> Iterator[RemotePath]:
        """What is directly in the folder."""
        for info in self.filesystem.get_file_info(fs.FileSelector(self.path)):
            yield self / info.base_name

    def stat(self) -> RemoteStat:
        """Size and version of the file.

        Raises:
            FileNotFoundError: there is none.
        """
        info = self._info
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(self.url)
        return RemoteStat(info.size, RemoteFolder(self.url, self.filesystem, self.path).version_of(info))

    def open(
        self,
        mode: str = "r",
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        """The file, opened to be read."""
        binary = io.BufferedReader(self.filesystem.open_input_file(self.path))
        if "b" in mode:
            return binary
        return io.TextIOWrapper(binary, encoding, errors, newline)

    def read_text(self, encoding: str | None = None) -> str:
        """The content of the file."""
        with self.open(encoding=encoding) as file:
            return str(file.read())

    def read_bytes(self) -> bytes:
        """The content of the file."""
        with self.open("rb") as file:
            return bytes(file.read())

    @property
    def _pure(self) -> PurePosixPath:
        return PurePosixPath(self.path)

    @property
    def _info(self) -> fs.FileInfo:
        (info,) = self.filesystem.get_file_info([self.path])
        return info


@dataclass(frozen=True)
class RemoteStat:
    """What is known of a file without opening it."""

    st_size: int
    version: str
    """Changes when the file is rewritten."""


def absolute(location: str) -> str:
    """A local path made absolute; URLs are returned unchanged."""
    return location if _SCHEME.match(location) else str(Path(location).resolve())
