import json
import os
from pathlib import Path

import numpy as np
import pytest

from rayrec.pipelines.snapshots import Snapshot, read_snapshot, write_snapshot
from rayrec.platform.errors import InputError
from rayrec.samples.read_plan import ReadPosition

WEIGHTS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
OPTIMIZER = {"step": np.array(7), "w/exp_avg": np.ones((2, 3), dtype=np.float32)}


POSITION = ReadPosition(epoch=2, rows=128, order="of these rows")


def save_sparse(folder: str) -> list[str]:
    (Path(folder) / "item-00000.parquet").write_bytes(b"rows of shard 0")
    (Path(folder) / "item-00001.parquet").write_bytes(b"rows of shard 1")
    return ["item-00000.parquet", "item-00001.parquet"]


def write(path: Path, step: int = 6, save=save_sparse) -> None:
    write_snapshot(
        path,
        committed_step=step,
        incarnation=3,
        dataset_fingerprint="data",
        semantic_ids_version=None,
        read_position=POSITION,
        weights=WEIGHTS,
        optimizer_state=OPTIMIZER,
        save_sparse=save,
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
    assert snapshot == Snapshot(path, 6, "data", None, files, POSITION, incarnation=3)
    assert same_arrays(snapshot.weights, WEIGHTS)
    assert same_arrays(snapshot.optimizer_state, OPTIMIZER)


def test_a_snapshot_from_before_positions_and_incarnations_were_written_down_is_read(tmp_path):
    path = tmp_path / "step-7"
    write(path)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["read_position"], manifest["incarnation"]
    (path / "manifest.json").write_text(json.dumps(manifest))

    snapshot = read_snapshot(path)
    assert (snapshot.read_position, snapshot.incarnation) == (None, 0)


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

    files = ["dense.safetensors", "optimizer.safetensors", "item-00000.parquet", "item-00001.parquet"]
    assert events[:4] == files
    assert events[4].startswith(".manifest.json")
    assert events[5:] == ["name manifest.json", ".step-7.unfinished", "name step-7", tmp_path.name]


@pytest.mark.parametrize("name", ["dense.safetensors", "optimizer.safetensors", "item-00001.parquet"])
def test_a_flipped_byte_and_a_missing_file_are_refused_by_name(tmp_path, name):
    path = tmp_path / "step-7"
    write(path)
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    (path / name).write_bytes(content)

    with pytest.raises(InputError, match=f"{path / name}: its checksum differs"):
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

    with pytest.raises(InputError, match="format version 99, this version reads 1"):
        read_snapshot(tmp_path)


def test_a_snapshot_that_fails_half_way_is_not_seen(tmp_path):
    path = tmp_path / "step-7"

    def fail(folder: str) -> list[str]:
        save_sparse(folder)
        assert not path.exists()
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write(path, save=fail)

    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_that_was_killed_half_way_is_not_seen_and_written_over(tmp_path):
    path = tmp_path / "step-7"
    unfinished = tmp_path / ".step-7.unfinished"
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
