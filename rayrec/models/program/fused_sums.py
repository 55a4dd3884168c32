"""Sums over ranks in graphs of torch's compiler, which fuses what it can of them: a hand-over.

Of layers that are split, the methods that are compiled for training are compiled for inference, and async
tensor parallelism is switched on: products beside a gather or a scatter are cut into pieces that travel
meanwhile, in memory that the ranks have in common. Torch 2.13 looks for no such pieces in the plain sums that
there are here. Its other way, one kernel for a small sum (`_collective.auto_select`), takes no graph whose
number of tokens is open: it fails with a TypeError.

Source: `torch._inductor.config._micro_pipeline_tp`, `torch.distributed._symmetric_memory`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rayrec.models.base.tensor_plan import PLAN
from rayrec.models.program.compiled_parts import COMPILED_METHODS


def fused_methods(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """(Layer, name of a method) of what `fuse_sums` compiles."""
    for layer in model.modules():
        if hasattr(layer, PLAN):
            for name in getattr(type(layer), COMPILED_METHODS, ()):
                yield layer, name


def fuse_sums(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> int:
    """Compile what split layers compute; the ranks of the default group all do so.

    Returns:
        Methods that are compiled when they are first called.
    """
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    group = torch.distributed.group.WORLD
    assert group is not None, "ranks meet first"
    with warnings.catch_warnings():
        # Deprecated as no longer needed, but the compiler looks for what it notes down.
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)
    inductor._micro_pipeline_tp = True
    methods = list(fused_methods(model))
    for layer, name in methods:
        setattr(layer, name, torch.compile(getattr(layer, name), dynamic=True, backend=backend))
    return len(methods)
