"""What trainers say to each other without a driver in between: sums of dense gradients, rows to owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rayrec.platform.devices import HOST_COLLECTIVE_BACKEND


class TrainerGroup:
    """One trainer's end of the process group; an `Exchange` of `rayrec.embeddings.base.exchange`."""

    def __init__(self, num_trainers: int, rank: int) -> None:
        self.num_trainers = num_trainers
        self._rank = rank
        self._host_group: Any = None

    def join(self, address: str, backend: str) -> None:
        """Meet the others at an address; `backend` carries the sums of dense gradients."""
        torch.distributed.init_process_group(
            backend, init_method=address, world_size=self.num_trainers, rank=self._rank
        )
        # A group of its own: rows lie in host memory, and are exchanged while gradients are summed.
        self._host_group = torch.distributed.new_group(backend=HOST_COLLECTIVE_BACKEND)

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Replace a tensor by its sum over the trainers."""
        torch.distributed.all_reduce(flat)

    def all_to_all(self, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        sent = np.concatenate(parts)
        num_sent = torch.tensor([len(part) for part in parts])
        num_received = torch.empty_like(num_sent)
        torch.distributed.all_to_all_single(num_received, num_sent, group=self._host_group)
        splits = num_received.tolist()
        received = np.empty((sum(splits), *sent.shape[1:]), dtype=sent.dtype)
        torch.distributed.all_to_all_single(
            torch.from_numpy(received),
            torch.from_numpy(sent),
            splits,
            num_sent.tolist(),
            group=self._host_group,
        )
        return np.split(received, np.cumsum(splits)[:-1])
