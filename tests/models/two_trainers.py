"""Two processes that meet over gloo, as two trainers do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from rayrec.models.program.program import PendingSum

NUM_TRAINERS = 2


def begin_sum(flat: torch.Tensor) -> PendingSum:
    """As `TrainerGroup.begin_all_reduce`."""
    work = torch.distributed.all_reduce(flat, async_op=True)
    assert work is not None
    return work.wait


def in_processes(check: Any, folder: Path) -> None:
    mp.spawn(_joined, (check, str(folder)), nprocs=NUM_TRAINERS)


def _joined(rank: int, check: Any, folder: str) -> None:
    torch.set_num_threads(1)
    # By a file: a port that is free now may be taken a moment later.
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", world_size=NUM_TRAINERS, rank=rank
    )
    check(rank, Path(folder))
    torch.distributed.destroy_process_group()
    # All is checked; what gloo's threads do while an interpreter is taken down may abort the process.
    os._exit(0)
