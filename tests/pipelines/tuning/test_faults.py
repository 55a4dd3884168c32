"""Which errors are a trial's outcome, and which end the search."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayrec.models.program.program import DivergedError
from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tuning.faults import fault_of
from rayrec.platform.errors import InputError, MachineError, NoRoomError, UnavailableError


def made_of(cause: Exception) -> InputError:
    error = InputError("rows.parquet: cannot be read")
    error.__cause__ = cause
    return error


def config(data: Path) -> RunConfig:
    return RunConfig.parse({"data": {"path": str(data)}, "model": {"name": "sasrec"}})


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (DivergedError("the loss is no number", 3), "settings"),
        (MemoryError(), "settings"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "settings"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "settings"),
        (InputError("dim=9: no multiple of 2 heads"), "settings"),
        (made_of(ValueError("no number")), "settings"),
        (OSError(28, "No space left on device"), "machine"),
        (OSError(5, "Input/output error"), "machine"),
        (ConnectionError("reset"), "machine"),
        (made_of(OSError(116, "Stale file handle")), "machine"),
        (MachineError("device: 'cuda' was asked for, but no driver is there"), "machine"),
        (NoRoomError("a disk is full"), "machine"),
        (UnavailableError("s3", 3, "no answer"), "machine"),
        (RuntimeError("CUDA error: unspecified launch failure"), "unknown"),
    ],
)
def test_the_fault_of_an_error(tmp_path, error, fault):
    assert fault_of(error, config(tmp_path)) == fault


def test_data_that_have_gone_are_no_fault_of_settings(tmp_path):
    refused = InputError("data: no data set there")

    assert fault_of(refused, config(tmp_path)) == "settings"
    assert fault_of(refused, config(tmp_path / "unmounted")) == "machine"
