"""How a step's dense compute is done; none of it changes what is computed, up to rounding.

Torch is imported where it is used: configs name these settings in processes that do without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rayrec.platform.devices import autocast

if TYPE_CHECKING:
    import torch

Precision = Literal["float32", "bfloat16"]
Parallel = Literal["replicated", "fsdp2", "tensor"]
Weights = Literal["float32", "bfloat16_with_master"]


@dataclass(frozen=True)
class ComputeSettings:
    """Of the training step; ranking is always done in float32 and without compiling."""

    precision: Precision = "float32"
    """`bfloat16`: products of matrices and what follows them under autocast; weights, their optimizer, sums
    of losses and all gradients that leave the step stay float32."""
    micro_batches: int = 1
    """Pieces that a trainer's share is gone through in, so that activations of one piece are held."""
    compile: bool = False
    """Whether torch.compile makes one kernel of neighboring pointwise operations."""
    parallel: Parallel = "replicated"
    """Whether every trainer holds all dense weights, its shard of them, or its part of every layer."""

    weights: Weights = "float32"
    """`bfloat16_with_master`: see `rayrec.models.program.master_weights`."""
    reduce_dtype: Precision = "float32"
    """That dense gradients are sent and added up in, among trainers."""
    reduce_bucket: int = 4 * 2**20
    """Bytes of dense gradients that are added up at once; see `rayrec.models.program.bucketed_sum`."""

    @property
    def has_masters(self) -> bool:
        return self.weights == "bfloat16_with_master"

    @property
    def is_sharded(self) -> bool:
        """Whether weights are gathered to be computed with."""
        return self.parallel == "fsdp2"

    @property
    def is_split(self) -> bool:
        """Whether trainers meet within a step."""
        return self.parallel != "replicated"

    def autocast(self, device: torch.device) -> torch.autocast:
        """Around forward and loss; not around backward, which takes the types of forward."""
        return autocast(device, enabled=self.precision != "float32")

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of sums of dense gradients."""
        import torch

        dtype: torch.dtype = getattr(torch, self.reduce_dtype)
        return dtype

    @property
    def matrix_dtype(self) -> torch.dtype:
        """Of the factors in products of matrices."""
        import torch

        dtype: torch.dtype = getattr(torch, self.precision)
        return dtype


PLAIN = ComputeSettings()
