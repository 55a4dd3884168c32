"""Our code on a device that is neither CPU nor CUDA; tests/helpers/simulated_npu.py says what that proves."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    "tests/devices/simulated_npu_refuses.py",
    "tests/models/test_on_devices.py",
    "tests/embeddings/test_device_cache.py",
)


WHICH = "npu and (50 or not bits_of_the_hosts)"
"""Of the widths of rows that the host is compared with itself at, one: each operation is a call of Python."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_ranking_and_the_cache_of_rows_run_on_a_device_of_another_name():
    """A process of its own: a device is registered for good, and other tests look which there are."""
    plugins = ["-p", "tests.helpers.simulated_npu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins]

    done = subprocess.run(
        [*command, "-k", WHICH, *FILES], cwd=ROOT, capture_output=True, text=True, timeout=580
    )

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " skipped" not in done.stdout, done.stdout[-2000:]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_line_of_a_config_moves_a_run_to_another_device(tmp_path):
    command = [sys.executable, "-m", "tests.devices.one_config", str(tmp_path)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)

    assert done.returncode == 0, done.stderr[-8000:]
    report = json.loads((tmp_path / "report.json").read_text())
    # Servers, readers and feature workers stay off the node whose accelerators the trainer needs.
    there = report["on the accelerated node"]
    assert "parameter_server-0" not in there.pop("cpu")
    assert set(map(tuple, there.values())) == {("trainer-0",)}
    here = np.array(report["losses"].pop("cpu"))
    assert len(here) > 5
    # And CUDA where there is a GPU.
    assert set(report["losses"]) >= {"npu"}
    for device, losses in report["losses"].items():
        np.testing.assert_allclose(losses, here, rtol=1e-4, err_msg=device)
        assert report["recall"][device] == pytest.approx(report["recall"]["cpu"], abs=0.03)
