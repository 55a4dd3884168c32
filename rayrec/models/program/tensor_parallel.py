"""Own layers split among ranks that compute each of them together, by the plans that they have.

    input, whole ─► outputs: some heads ─► their attention ─► inputs: their part of the product ─┐ sum over
    input, whole ◄─ all ranks have the same, to the bit ◄────────────────────────────────────────┘ the ranks

What has no plan (vectors of codes and items, norms, logits) is computed by every rank alike, so all choose
the same beams. The sums are those of `torch.distributed`: nothing else is sent. For inference alone:
gradients of a part would be wrong.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053; `torch.distributed.tensor.parallel`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.models.base.tensor_plan import PLAN, Joined, Part, TensorPlan
from rayrec.platform.errors import InputError


def plans_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, TensorPlan]]:
    """(Name, layer, plan) of the layers that can be split."""
    for name, module in model.named_modules():
        if (plan := getattr(module, PLAN, None)) is not None:
            yield name, module, plan()


def check_plans(model: nn.Module, num_ranks: int, setting: str) -> int:
    """Check that so many ranks can share the layers.

    Args:
        setting: that asks for it, for messages.

    Returns:
        Layers that would be split.

    Raises:
        InputError: heads or widths do not divide.
    """
    count = 0
    for _, layer, plan in plans_of(model):
        for name, size in plan.sizes.items():
            if size % num_ranks:
                raise InputError(
                    f"{setting}: {type(layer).__name__} has {name} {size}, which {num_ranks} ranks cannot "
                    "share equally; take a number that divides it"
                )
        count += 1
    return count


def split_layers(model: nn.Module, device: torch.device) -> int:
    """Split the layers in place among the processes of the default group, which all have equal weights.

    Nothing is sent: each rank keeps its part of what it has.

    Returns:
        Layers that were split.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    plans = list(plans_of(model))
    for name, _, plan in plans:
        parts = {name: plan.own} | {f"{name}.{inner}": part for inner, part in plan.modules.items()}
        table = {full: _style(part, plan.counts if full == name else ()) for full, part in parts.items()}
        parallelize_module(model, mesh, table, src_data_rank=None)
    return len(plans)


@functools.cache
def _style_class() -> type[Any]:
    # Here: torch.distributed takes long to import, and few need it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel.style import ParallelStyle

    class PartStyle(ParallelStyle):
        """A `Part`. Weights stay plain tensors, which cost a layer less than DTensors do."""

        def __init__(self, part: Part, counts: tuple[str, ...]) -> None:
            super().__init__()
            self._part, self._counts = part, counts

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            num_ranks, rank, group = device_mesh.size(), device_mesh.get_local_rank(), device_mesh.get_group()
            _take_part(module, self._part, num_ranks, rank)
            for name in self._counts:
                setattr(module, name, getattr(module, name) // num_ranks)
            if self._part.joined is Joined.SUM:
                module.register_forward_hook(functools.partial(_summed, group))
            elif self._part.joined is Joined.MOMENTS:
                assert isinstance(module, nn.LayerNorm), "the norm whose moments are known here"
                module.forward = functools.partial(_norm_of_parts, module, group)  # type: ignore[method-assign]
            return module

    return PartStyle


def _style(part: Part, counts: tuple[str, ...]) -> Any:
    return _style_class()(part, counts)


@torch.no_grad()
def _take_part(module: nn.Module, part: Part, num_ranks: int, rank: int) -> None:
    for name, axis in part.axes.items():
        parameter = getattr(module, name)
        if parameter is None:
            continue
        widths = part.widths or (parameter.shape[axis],)
        pieces = [piece.chunk(num_ranks, axis)[rank] for piece in parameter.split(widths, axis)]
        setattr(module, name, nn.Parameter(torch.cat(pieces, axis).contiguous(), requires_grad=False))
    for name in part.once:
        parameter = getattr(module, name)
        if parameter is not None and rank:
            setattr(module, name, nn.Parameter(torch.zeros_like(parameter), requires_grad=False))


def _summed(group: Any, module: nn.Module, inputs: Any, output: Any) -> Any:
    """A hook of `forward`: the sum over the ranks."""
    if isinstance(output, Tensor):
        total = output.contiguous()
        torch.distributed.all_reduce(total, group=group)
        return total
    first, *others = output
    return (_summed(group, module, inputs, first), *others)


def _norm_of_parts(norm: nn.LayerNorm, group: Any, x: Tensor) -> Tensor:
    """Of a vector of which this rank has a part, normalized as a whole.

    The ranks tell each other the mean of their part and the squares around it (Chan et al.): sums of squares
    themselves would lose digits where a mean is large.
    """
    width = x.shape[-1]
    mean = x.mean(-1)
    own = torch.stack((mean, (x - mean[..., None]).square().sum(-1)))
    num_ranks = torch.distributed.get_world_size(group)
    all_of = own.new_empty(num_ranks, *own.shape)
    torch.distributed.all_gather(list(all_of), own, group=group)
    means, squares = all_of.unbind(1)
    whole = means.mean(0)
    total = squares.sum(0) + width * (means - whole).square().sum(0)
    scale = (total / (num_ranks * width) + norm.eps).rsqrt()
    return (x - whole[..., None]) * scale[..., None] * norm.weight + norm.bias
