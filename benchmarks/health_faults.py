"""Faults as a machine has them that computes wrongly: one bit, and every checksum fits what was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy
import torch

from rayrec.embeddings.snapshot.saved_files import checksum_file
from rayrec.models.program.torch_program import TorchProgram
from rayrec.pipelines.runs.snapshots import MANIFEST, checksum_of


def flip_bit_of_tensor(path: Path, random: np.random.Generator) -> str:
    """Flip a bit of one tensor in a file of a snapshot; returns the tensor's name."""
    tensors = safetensors.numpy.load_file(path)
    name = str(random.choice(sorted(name for name, each in tensors.items() if each.size)))
    flat = tensors[name].reshape(-1).view(np.uint8)
    flat[random.integers(len(flat))] ^= np.uint8(1 << random.integers(8))
    safetensors.numpy.save_file(tensors, path)
    _write_checksum(path)
    return name


def flip_bit_of_row(path: Path, column: str, random: np.random.Generator) -> int:
    """Flip a bit of one row's `weights` or `state` in a file of a snapshot; returns the row's id."""
    table = pq.read_table(path)
    values = table[column].to_pylist()
    row = int(random.integers(len(values)))
    numbers = bytearray(values[row])
    numbers[random.integers(len(numbers))] ^= 1 << int(random.integers(8))
    values[row] = bytes(numbers)
    index = table.schema.get_field_index(column)
    field = table.schema.field(column)
    pq.write_table(table.set_column(index, field, pa.array(values, field.type)), path)
    _write_checksum(path)
    return int(table["id"][row].as_py())


def _write_checksum(path: Path) -> None:
    manifest_path = path.parent / MANIFEST
    manifest = json.loads(manifest_path.read_bytes())
    manifest.pop("checksum")
    manifest["checksums"][path.name] = checksum_file(path)
    manifest_path.write_text(json.dumps(manifest | {"checksum": checksum_of(manifest)}))


@contextmanager
def wrong_bit_in_gradient(at_update: int, random: np.random.Generator) -> Iterator[None]:
    """Inside the block, one number of one dense gradient is wrong in one bit, in one update of a trainer.

    Args:
        at_update: which, counted from 1 through all trainers of this process.
    """
    update, calls = TorchProgram.update, 0

    def faulty(program: TorchProgram) -> None:
        nonlocal calls
        calls += 1
        if calls == at_update:
            gradients = [each.grad for each in program._parameters.values() if each.grad is not None]
            # Of one that is not 0: what optimizers do with the smallest numbers may be nothing.
            flat = max(gradients, key=lambda each: float(each.abs().max())).view(-1)
            place = int(flat.abs().argmax())
            # An upper bit of the fraction: lower ones may be lost in rounding, and then nothing is wrong.
            flat.view(torch.int32)[place] ^= 1 << int(random.integers(16, 23))
        update(program)

    TorchProgram.update = faulty  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchProgram.update = update  # type: ignore[method-assign]
