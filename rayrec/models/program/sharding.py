"""Dense weights split among the trainers (FSDP2), each trainer holding its shard of every weight.

    forward of a block    its weights are gathered ─► computed with ─► given up again
    backward of a block   gathered again ─► gradients summed over the trainers, each keeps its shard
    optimizer             each trainer changes its shard

Units are the blocks of a backbone (in a `ModuleList` called `blocks` or `layers`), then the model as a
whole with what is left. Gradients are summed, not averaged: the loss is divided by the global number of
targets already.

Source: torch.distributed.fsdp.fully_shard; Zhao et al., "PyTorch FSDP", VLDB 2023, arXiv:2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

BLOCKS = ("blocks", "layers", "h")
"""Names of lists of blocks; `h` is what networks after GPT-2 call them."""
FURTHER_METHODS = "sharded_methods"
"""Class attribute of a block: methods besides `forward` that compute with its weights."""
SHARDED_METHODS = ("loss", "recommend", "predict", "log_likelihoods", "generate")
"""Methods of a model, as far as it has them, that compute with weights: gathered around these as around
`forward`."""


class SplitModel(Protocol):
    """A model whose weights are split among processes, somehow."""

    def gather(self) -> None:
        """Hold all weights until `scatter`: what is ranked then need not be ranked by all at once."""

    def scatter(self) -> None:
        """Hold parts again."""


class ShardedModel:
    """What has to be known of a model whose weights are split among the processes of the default group."""

    def __init__(
        self, model: nn.Module, device: torch.device, reduce_dtype: torch.dtype = torch.float32
    ) -> None:
        """Split the weights in place; every process of the group does so at once, with equal weights.

        Args:
            reduce_dtype: that gradients are sent and added up in.

        Raises:
            ValueError: a weight that is a single number, which FSDP2 does not split.
        """
        # Here: torch.distributed takes long to import, and few need it.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            FSDPModule,
            MixedPrecisionPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        for name, parameter in model.named_parameters():
            if parameter.ndim == 0:
                raise ValueError(
                    f"training.parallel: 'fsdp2' cannot split {name!r}, which is a single number; "
                    "set training.parallel to 'replicated'"
                )
        self._mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        precision = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        for block in blocks_of(model):
            fully_shard(block, mesh=self._mesh, mp_policy=precision)
            for name in getattr(type(block), FURTHER_METHODS, ()):
                register_fsdp_forward_method(block, name)
        fully_shard(model, mesh=self._mesh, mp_policy=precision)
        self._root = model
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            # gloo has no other reduction than the sum; a factor of 1 is none.
            unit.set_force_sum_reduction_for_comms(True)
        for name in SHARDED_METHODS:
            if hasattr(model, name):
                register_fsdp_forward_method(model, name)
        self._is_gathered = False

    def gather(self) -> None:
        """Hold all weights until `scatter`: what is ranked then need not be ranked by all at once."""
        if self._is_gathered:
            return
        for unit in self._units:
            unit.unshard()
            unit.set_reshard_after_forward(False, recurse=False)
        self._is_gathered = True

    def scatter(self) -> None:
        """Hold shards again."""
        if not self._is_gathered:
            return
        for unit in self._units:
            unit.reshard()
            # The root's weights are needed first in backward: FSDP2 keeps them, by its default.
            unit.set_reshard_after_forward(unit is not self._root, recurse=False)
        self._is_gathered = False


def whole(tensor: Tensor) -> Tensor:
    """A weight as it would be without shards; asked for by all processes at once."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def is_distributed(tensor: Tensor) -> bool:
    """Whether a weight is one of several processes, each with its part or a copy."""
    return hasattr(tensor, "placements")


def is_split(tensor: Tensor) -> bool:
    """Whether this process holds a part of a weight alone."""
    return is_distributed(tensor) and not all(place.is_replicate() for place in tensor.placements)  # type: ignore[attr-defined]


def held_as(tensor: Tensor, value: np.ndarray) -> Tensor:
    """This process's part of a value that every process has, as a weight is split."""
    made = torch.tensor(value)
    if not is_distributed(tensor):
        return made
    from torch.distributed.tensor import distribute_tensor

    # Nobody sends anything: everyone takes its own part of what it has.
    place: Any = tensor
    return distribute_tensor(made, place.device_mesh, place.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a weight, as a tensor that shares its memory."""
    own: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if own is None else own()


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """What is gathered one after the other; none of a model whose layers lie otherwise."""
    for module in model.modules():
        for name in BLOCKS:
            blocks = getattr(module, name, None)
            if isinstance(blocks, nn.ModuleList):
                yield from blocks
