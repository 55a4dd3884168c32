import pickle

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from pyarrow import fs

from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import remote_folder


def test_a_path_without_a_scheme_is_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = remote_folder("some/where")
    assert isinstance(folder.filesystem, fs.LocalFileSystem)
    assert folder.path_of("x.parquet") == f"{tmp_path}/some/where/x.parquet"
    assert folder.shown("x.parquet") == "some/where/x.parquet"


def test_a_file_url_and_its_path_are_one_place(tmp_path):
    (tmp_path / "x").write_bytes(b"12")
    folder = remote_folder(f"file://{tmp_path}")
    assert folder.filesystem.get_file_info(folder.path_of("x")).size == 2


def test_other_schemes_are_fsspecs():
    with fsspec.open("memory://remote-files/x", "wb") as file:
        file.write(b"12")
    folder = remote_folder("memory://remote-files")
    assert folder.filesystem.open_input_file(folder.path_of("x")).read() == b"12"
    again = pickle.loads(pickle.dumps(folder))
    assert again.filesystem.get_file_info(again.path_of("x")).size == 2


@pytest.mark.parametrize("kind", ["path", "fsspec"])
def test_a_file_written_again_has_another_version(tmp_path, kind):
    url = str(tmp_path) if kind == "path" else "memory://versions"
    folder = remote_folder(url)

    def version(content: bytes) -> str:
        with fsspec.open(f"{url}/x", "wb") as file:
            file.write(content)
        return folder.version_of(folder.filesystem.get_file_info(folder.path_of("x")))

    assert version(b"12") != version(b"34")


def test_s3_is_pyarrows():
    folder = remote_folder("s3://bucket/logs?region=eu-central-1&endpoint_override=localhost:1")
    assert isinstance(folder.filesystem, fs.S3FileSystem)
    assert folder.path_of("x.parquet") == "bucket/logs/x.parquet"


@pytest.mark.parametrize("url", ["nonsense://bucket/x", "s3://bucket?no_such_option=1"])
def test_a_scheme_that_nobody_knows_is_refused(url):
    with pytest.raises(InputError, match=r"the file system '(nonsense|s3)' cannot be used"):
        remote_folder(url)


class ServiceError(Exception):
    """As SDKs of clouds have them: not an OSError."""


class Interrupted(MemoryFile):
    def read(self, *_):
        raise ServiceError("503 while reading")

    def write(self, *_):
        raise ServiceError("503 while writing")


class Cloud(MemoryFileSystem):
    """Knows its files, and does nothing with them."""

    protocol = ("cloud",)

    def __init__(self, is_known: bool = True, **more) -> None:
        super().__init__(**more)
        if not is_known:
            raise ServiceError("401")

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("cloud:/"))

    def info(self, path, **more):
        if path.endswith("down"):
            raise ServiceError("503")
        return super().info(path, **more)

    def rm(self, *_, **more):
        raise ServiceError("503")

    def open(self, path, mode="rb", **more):
        if path.endswith("down"):
            raise ServiceError("503")
        return Interrupted(self, path)


@pytest.fixture
def cloud():
    fsspec.register_implementation("cloud", Cloud, clobber=True)
    fsspec.filesystem("memory").pipe("/cloud/x", b"12")
    yield remote_folder("cloud://cloud")
    fsspec.filesystem("memory").rm("/cloud", recursive=True)


def test_an_error_of_an_sdk_is_an_os_error_where_a_place_does_not_answer(cloud, tmp_path):
    files = cloud.filesystem
    for work in (
        lambda: cloud.exists("down"),
        lambda: cloud.read("x"),
        lambda: files.delete_file(cloud.path_of("x")),
        lambda: files.open_output_stream(cloud.path_of("down")),
        lambda: files.open_output_stream(cloud.path_of("x")).write(b"1"),
        lambda: fs.copy_files(cloud.path_of("x"), str(tmp_path / "x"), files, fs.LocalFileSystem()),
        lambda: cloud.version_of(fs.FileInfo(cloud.path_of("down"))),
    ):
        with pytest.raises(OSError, match="ServiceError: 503"):
            work()
    assert cloud.read("y") is None


def test_a_cloud_that_does_not_let_one_in_is_refused(cloud, monkeypatch):
    monkeypatch.setattr(Cloud, "_get_kwargs_from_urls", staticmethod(lambda url: {"is_known": False}))
    with pytest.raises(InputError, match="the file system 'cloud' cannot be used"):
        remote_folder("cloud://cloud/other")
