"""Sums of dense gradients over the trainers, begun while backward still computes the rest.

    backward   block 3 ──► block 2 ──► block 1 ──► embeddings
    sums            └─ bucket 0 ─────┘└─ bucket 1 ───────┘└─ bucket 2 ─► waited for by the optimizer's step

A bucket has the gradients of neighboring parameters, last ones first, as backward reaches them. Buckets are a
function of the shapes, and each trainer begins them in their order, whatever its backward has ready first:
sums have the same bits in every run.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020,
arXiv:2006.15704, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rayrec.models.program.program import PendingSum, SumOverTrainers


class BucketedSum:
    """Of one program's trained parameters."""

    def __init__(
        self,
        parameters: Sequence[tuple[Tensor, Tensor]],
        sum_over_trainers: SumOverTrainers,
        bucket_bytes: int,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            parameters: pairs of the parameter that backward reaches and the one that holds its gradient,
                which differ where masters are kept; in the model's order.
            bucket_bytes: of gradients as they are sent; a parameter is never divided.
            dtype: that gradients are sent and added in.
        """
        self._sum_over_trainers = sum_over_trainers
        self._dtype = dtype
        self._buckets = [
            [holder for _, holder in pairs]
            for pairs in _in_buckets(list(reversed(parameters)), bucket_bytes, dtype.itemsize)
        ]
        sources = {id(holder): source for source, holder in parameters}
        self._sources = [{id(sources[id(holder)]) for holder in holders} for holders in self._buckets]
        for bucket, holders in enumerate(self._buckets):
            for holder in holders:
                sources[id(holder)].register_post_accumulate_grad_hook(partial(self._arrived, bucket))
        self._is_last_backward = False
        self._missing: list[set[int]] = []
        self._begun: list[tuple[Tensor, PendingSum]] = []

    def begin_last_backward(self) -> None:
        """The next backward is the step's last: what it has added to is complete."""
        self._begun = []
        self._missing = [set(ids) for ids in self._sources]
        self._is_last_backward = True

    def abandon(self) -> None:
        """Forget the sums of a step that was given up: its gradients are of no use, nor is what was begun."""
        self._is_last_backward = False
        self._begun = []

    def _arrived(self, bucket: int, parameter: Tensor) -> None:
        if not self._is_last_backward:
            return
        if bucket < len(self._begun):
            raise RuntimeError("backward reached a weight again after the sum of its gradients had begun")
        self._missing[bucket].discard(id(parameter))
        while len(self._begun) < len(self._buckets) and not self._missing[len(self._begun)]:
            self._begin()

    def _begin(self) -> None:
        holders = self._buckets[len(self._begun)]
        flat = torch.cat([gradient_or_zeros(holder).detach().flatten() for holder in holders]).to(self._dtype)
        self._begun.append((flat, self._sum_over_trainers(flat)))

    def finish(self) -> None:
        """Replace each gradient by its sum; begins what no backward has reached."""
        self._is_last_backward = False
        while len(self._begun) < len(self._buckets):
            self._begin()
        for holders, (flat, wait) in zip(self._buckets, self._begun, strict=True):
            wait()
            sums = flat.split([holder.numel() for holder in holders])
            for holder, total in zip(holders, sums, strict=True):
                gradient = gradient_or_zeros(holder)
                gradient.copy_(total.view_as(gradient))
                holder.grad = gradient
        self._begun = []


def gradient_or_zeros(parameter: Tensor) -> Tensor:
    """The gradient of a parameter; zeros where backward did not reach it."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _in_buckets(
    parameters: Sequence[tuple[Tensor, Tensor]], bucket_bytes: int, itemsize: int
) -> list[list[tuple[Tensor, Tensor]]]:
    buckets: list[list[tuple[Tensor, Tensor]]] = []
    room = 0
    for pair in parameters:
        num_bytes = pair[1].numel() * itemsize
        if not buckets or num_bytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(pair)
        room -= num_bytes
    return buckets
