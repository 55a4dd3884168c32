import pickle

import fsspec
import pytest
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
