"""NVIDIA's Multi-Process Service: processes that share a GPU run on it concurrently, not in turns.

    environment() ─► of the processes ─► start_daemon(), before any of them touches the GPU

One daemon per machine and folder; processes find it by the folder in their environment. It keeps running when
the last of them ends, since others may use it: `echo quit | nvidia-cuda-mps-control` stops it.

Source: NVIDIA's documentation of the Multi-Process Service.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from rayrec.platform.errors import InputError

CONTROL = "nvidia-cuda-mps-control"
_FOLDERS = {"CUDA_MPS_PIPE_DIRECTORY": "pipes", "CUDA_MPS_LOG_DIRECTORY": "logs"}
_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_START_S = 10.0


def environment(share: float, folder: Path | None = None) -> dict[str, str]:
    """Environment variables for processes that each may use a fraction of the GPU's multiprocessors.

    Args:
        share: the fraction, above 0 and up to 1.
        folder: of the daemon; None: one for each user of the machine. Variables that are set
            already are kept.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"rayrec-mps-{os.getuid()}"
    folders = {name: os.environ.get(name, str(folder / part)) for name, part in _FOLDERS.items()}
    return folders | {_SHARE: f"{100 * share:g}"}


def start_daemon() -> None:
    """Start a daemon in the folder that this process's environment names, unless one runs there.

    Raises:
        InputError: the program is missing, or it does not start.
    """
    program = shutil.which(CONTROL)
    if program is None:
        raise InputError(
            f"mps: {CONTROL} is not on the path of this machine; it comes with NVIDIA's driver. Leave out "
            "mps, or install it"
        )
    for name in _FOLDERS:
        Path(os.environ[name]).mkdir(mode=0o700, parents=True, exist_ok=True)
    said = ""
    end = time.monotonic() + _START_S
    while not _answers(program):
        # If several processes start one at the same time, one of them succeeds.
        started = subprocess.run([program, "-d"], capture_output=True, text=True, timeout=_START_S)
        said = (started.stderr or started.stdout).strip() or said
        if time.monotonic() > end:
            raise InputError(f"mps: {CONTROL} -d starts no daemon: {said or 'it gives no reason'}")
        if started.returncode:
            time.sleep(0.2)


def _answers(program: str) -> bool:
    try:
        asked = subprocess.run(
            [program], input="get_server_list\n", capture_output=True, text=True, timeout=_START_S
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0
