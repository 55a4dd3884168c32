import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors

from rayrec.embeddings.snapshot.saved_files import SavedFile, checksum_file
from rayrec.pipelines.runs.snapshots import RunState, base_of, checksum_of, read_snapshot, write_snapshot
from rayrec.platform.errors import InputError
from rayrec.samples.base.intervals import Interval
from rayrec.samples.reading.cursor import Cursor
from rayrec.samples.reading.read_plan import ReadPosition

WEIGHTS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
OPTIMIZER = {"step": np.array(7), "w/exp_avg": np.ones((2, 3), dtype=np.float32)}
POSITION = ReadPosition(epoch=2, rows=128, order="of these rows")
CURSOR = Cursor("data")
CURSOR.commit(2, [Interval("train/part-0.parquet", 5, 133)])


def state(step: int = 6) -> RunState:
    return RunState(
        committed_step=step,
        incarnation=3,
        dataset_fingerprint="data",
        semantic_ids_version=None,
        read_position=POSITION,
        progress={"best_step": 4},
    )


def save_sparse(folder: str) -> list[SavedFile]:
    return [
        saved(Path(folder) / f"item-0000{shard}.parquet", f"rows of {shard}".encode()) for shard in (0, 1)
    ]


def saved(path: Path, content: bytes) -> SavedFile:
    path.write_bytes(content)
    return SavedFile(path.name, len(content), checksum_file(path))


def write(path: Path, step: int = 6, save=save_sparse, base: str | None = None) -> None:
    write_snapshot(
        path,
        state(step),
        weights=WEIGHTS,
        optimizer_state=OPTIMIZER,
        cursor=CURSOR.to_table(),
        save_sparse=save,
        base=base,
    )


def same_arrays(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and np.array_equal(found[name], expected[name])
        for name in found
    )


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "step-7"
    write(path)

    snapshot = read_snapshot(path)

    files = (path / "item-00000.parquet", path / "item-00001.parquet")
    assert (snapshot.path, snapshot.state, snapshot.sparse_chain) == (path, state(), (files,))
    assert same_arrays(snapshot.weights, WEIGHTS)
    assert same_arrays(snapshot.optimizer_state, OPTIMIZER)
    assert snapshot.cursor.to_table().equals(CURSOR.to_table())


def test_an_increment_comes_with_all_that_it_builds_on(tmp_path):
    write(tmp_path / "step-1", step=0)
    write(tmp_path / "step-2", step=1, base="step-1")
    write(tmp_path / "step-3", step=2, base="step-2")

    chain = read_snapshot(tmp_path / "step-3").sparse_chain

    assert [files[0].parent.name for files in chain] == ["step-1", "step-2", "step-3"]
    assert [base_of(tmp_path / name) for name in ("step-1", "step-2", "step-3")] == [None, "step-1", "step-2"]


def test_an_increment_on_a_damaged_snapshot_is_refused_by_the_damaged_files_name(tmp_path):
    write(tmp_path / "step-1", step=0)
    write(tmp_path / "step-2", step=1, base="step-1")
    damaged = tmp_path / "step-1" / "item-00000.parquet"
    damaged.write_bytes(b"rows of 9")

    with pytest.raises(InputError, match=f"^{damaged}: its checksum differs"):
        read_snapshot(tmp_path / "step-2")


def test_everything_is_on_disk_before_it_is_named(tmp_path, monkeypatch):
    """Of a snapshot that appears behind its name only in part, the one before would be gone too."""
    path = tmp_path / "step-7"
    events = []

    def fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def replace(source: Path, target: Path) -> None:
        events.append(f"name {target.name}")
        os.rename(source, target)

    def rename(source: Path, target: Path) -> None:
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(Path, "rename", rename)
    write(path)

    # Of its rows whoever saves them sees to it.
    assert events[:3] == ["dense.safetensors", "optimizer.safetensors", "cursor.parquet"]
    assert events[3].startswith(".manifest.json")
    assert events[4] == "name manifest.json"
    assert events[5].startswith(".step-7.")
    assert events[6:] == ["name step-7", tmp_path.name]


FILES = ["dense.safetensors", "optimizer.safetensors", "cursor.parquet", "item-00001.parquet"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0, 7, -1])
def test_a_flipped_byte_is_refused_by_the_files_name(tmp_path, name, place):
    path = tmp_path / "step-7"
    write(path)
    content = bytearray((path / name).read_bytes())
    content[place] ^= 1
    (path / name).write_bytes(content)

    with pytest.raises(InputError, match=f"^{path / name}: its checksum differs"):
        read_snapshot(path)


def json_of(content: bytes | bytearray) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None


def test_a_flipped_byte_anywhere_in_the_manifest_is_refused_by_its_name(tmp_path):
    path = tmp_path / "step-7"
    write(path)
    content = (path / "manifest.json").read_bytes()

    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        (path / "manifest.json").write_bytes(changed)
        if json_of(changed) == json_of(content):  # another kind of blank
            continue
        with pytest.raises(InputError, match=f"^{path / 'manifest.json'}: "):
            read_snapshot(path)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_and_a_missing_file_are_refused_by_name(tmp_path, name):
    path = tmp_path / "step-7"
    write(path)
    (path / name).write_bytes((path / name).read_bytes()[:-1])

    with pytest.raises(InputError, match=f"^{path / name}: its checksum differs"):
        read_snapshot(path)

    (path / name).unlink()
    with pytest.raises(InputError, match=f"{path / name}: missing from the snapshot"):
        read_snapshot(path)


def test_a_folder_without_manifest_is_no_snapshot(tmp_path):
    path = tmp_path / "step-7"
    write(path)
    (path / "manifest.json").unlink()

    with pytest.raises(InputError, match="not a complete snapshot"):
        read_snapshot(path)


@pytest.mark.parametrize("content", ["", "[1]", '{"format_version": 1', "\x00"])
def test_a_manifest_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)

    with pytest.raises(InputError, match="not the manifest of a snapshot"):
        read_snapshot(tmp_path)


def test_another_format_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format_version": 99}')

    with pytest.raises(InputError, match="format version 99, this version reads 2 to 3"):
        read_snapshot(tmp_path)


def test_a_snapshot_that_fails_half_way_is_not_seen(tmp_path):
    path = tmp_path / "step-7"

    def fail(folder: str) -> list[SavedFile]:
        save_sparse(folder)
        assert not path.exists()
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write(path, save=fail)

    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_that_was_killed_half_way_is_not_seen_and_written_over(tmp_path):
    path = tmp_path / "step-7"
    unfinished = tmp_path / ".step-7.0a1b2c3d.unfinished"
    unfinished.mkdir()
    (unfinished / "leftover").write_bytes(b"half")

    with pytest.raises(InputError, match="not a complete snapshot"):
        read_snapshot(path)

    write(path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-7"]
    assert not (path / "leftover").exists()


def test_a_snapshot_of_the_same_step_is_replaced(tmp_path):
    path = tmp_path / "step-7"
    write(path, step=1)
    write(path, step=2)

    assert read_snapshot(path).committed_step == 2


def test_a_snapshot_that_builds_on_itself_is_refused(tmp_path):
    write(tmp_path / "step-1", step=0, base="step-2")
    write(tmp_path / "step-2", step=1, base="step-1")

    with pytest.raises(InputError, match="builds on itself"):
        read_snapshot(tmp_path / "step-2")


def change_manifest(path: Path, **changes: object) -> None:
    """As somebody does who wants to be believed: with the right checksum."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    del manifest["checksum"]
    manifest["checksum"] = checksum_of(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"sparse_files": ["../other/item-00001.parquet"]},
            "names '../other/item-00001.parquet', which is not",
        ),
        ({"sparse_files": ["/etc/passwd"]}, "names '/etc/passwd', which is not directly in the folder"),
        ({"base": ".."}, r"names '\.\.', which is not directly"),
        ({"base": "../other/step-1"}, "names '../other/step-1', which is not directly"),
        ({"sparse_files": [7]}, "names 7, which is not"),
        ({"sparse_files": ["item-00002.parquet"]}, "has no checksum of item-00002.parquet"),
        ({"checksums": {}}, "has no checksum of dense.safetensors"),
        ({"checksums": None}, "does not say which files"),
    ],
)
def test_a_manifest_of_files_elsewhere_or_without_checksums_is_refused(tmp_path, changes, said):
    path = tmp_path / "step-7"
    write(path)
    change_manifest(path, **changes)

    with pytest.raises(InputError, match=f"^{path / 'manifest.json'}: {said}"):
        read_snapshot(path)


def test_two_attempts_at_one_snapshot_do_not_write_to_one_folder(tmp_path):
    """A server of the attempt before, cut off from the driver and not from the disk, goes on writing."""
    path, folders = tmp_path / "step-7", []

    def save_and_be_replaced(folder: str) -> list[SavedFile]:
        folders.append(Path(folder))
        if len(folders) == 1:
            write(path, save=save_and_be_replaced)
            assert not Path(folder).exists()
            raise OSError("the folder is gone")
        return save_sparse(folder)

    with pytest.raises(OSError, match="the folder is gone"):
        write(path, save=save_and_be_replaced)

    assert folders[0] != folders[1]
    assert read_snapshot(path).committed_step == 6


def test_a_full_disk_is_said_with_the_file_also_where_weights_are_written(tmp_path, monkeypatch):
    def full(arrays: object, path: Path) -> None:
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left (os error 28)")

    monkeypatch.setattr("safetensors.numpy.save_file", full)

    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "step-7")
    assert caught.value.errno == errno.ENOSPC
    assert Path(caught.value.filename).name == "dense.safetensors"
