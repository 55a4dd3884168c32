"""Scales that move from the inputs of layers into the norm before them.

    norm(x) · W  =  (norm(x) / s) · (s W)

A norm ends with a weight, and may have a bias: divided by s, they make inputs that are easier to quantize,
and the layers that read them take s into their weights. Nothing else may read the norm; which layers those
are, a module says itself:

    norm_readers = (("attention_norm", ("qkv",)), ("feedforward_norm", ("up",)))

Of the blocks of `transformers` we know the usual names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NORM_READERS = "norm_readers"
"""Class attribute of a module: pairs of the name of a norm in it and of the linear layers in it that alone
read its outputs, or these times something. Of lists of modules, each norm has those at its position."""
_OF_TRANSFORMERS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
)
_OTHER_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Blocks that have one use the names above for something else. So do blocks with one norm alone, which
attention and feed-forward share."""


@dataclass(frozen=True)
class Readers:
    """A norm, and what reads it."""

    norm: nn.Module
    layers: tuple[str, ...]
    """Names of linear layers of the network."""

    def divide(self, scale_K: Tensor) -> None:
        """Divide the norm's outputs by scales; the columns of the layers are to be multiplied by them."""
        norm: Any = self.norm
        scale_K = scale_K.to(norm.weight.device)
        with torch.no_grad():
            norm.weight.div_(scale_K)
            if getattr(norm, "bias", None) is not None:
                norm.bias.div_(scale_K)


def readers_of(model: nn.Module) -> Iterator[Readers]:
    """Every norm of the network that scales can be folded into."""
    for name, module in model.named_modules():
        for norm, layers in _named_in(module):
            prefix = f"{name}." if name else ""
            found = _submodule(module, norm)
            if isinstance(found, nn.ModuleList):
                for place, each in enumerate(found):
                    yield Readers(each, tuple(f"{prefix}{layer}.{place}" for layer in layers))
            elif found is not None and all(_is_linear(module, layer) for layer in layers):
                yield Readers(found, tuple(f"{prefix}{layer}" for layer in layers))


def _named_in(module: nn.Module) -> Sequence[tuple[str, tuple[str, ...]]]:
    declared: Sequence[tuple[str, tuple[str, ...]]] | None = getattr(type(module), NORM_READERS, None)
    if declared is not None:
        return declared
    if any(hasattr(module, name) for name in _OTHER_NORMS):
        return ()
    if not all(hasattr(module, norm) for norm, _ in _OF_TRANSFORMERS):
        return ()
    return [
        (norm, layers)
        for norm, layers in _OF_TRANSFORMERS
        if all(_is_linear(module, layer) for layer in layers) and _multiplies(_submodule(module, norm))
    ]


def _multiplies(norm: nn.Module | None) -> bool:
    """Whether outputs of a norm grow with its weight: some add one to it first."""
    weight: Any = getattr(norm, "weight", None)
    if norm is None or weight is None or weight.is_meta:
        return False
    x = torch.linspace(-1, 2, weight.numel(), device=weight.device)[None]
    with torch.no_grad():
        before = norm(x)
        kept = weight.clone()
        weight.mul_(2)
        doubled = norm(x)
        weight.copy_(kept)
    return torch.allclose(doubled, 2 * before, rtol=1e-4, atol=1e-6)


def _is_linear(module: nn.Module, name: str) -> bool:
    return type(_submodule(module, name)) is nn.Linear


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None
