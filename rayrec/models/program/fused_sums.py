"""Sums over ranks beside or inside of products, by torch's compiler: handed over, nothing of it is ours.

Of layers that are split, the methods that are compiled for training are compiled for inference. Torch then
puts what is to be summed into memory that the ranks have in common, and sums it in one kernel
(`torch.ops.symm_mem.one_shot_all_reduce`); products that follow a gather or come before a scatter it cuts
into pieces that travel meanwhile (async tensor parallel).

Source: `torch.distributed._symmetric_memory`, `torch._inductor.config._micro_pipeline_tp`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rayrec.models.base.tensor_plan import PLAN
from rayrec.models.program.compiled_parts import COMPILED_METHODS


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
    inductor._collective.auto_select = True
    count = 0
    for layer in model.modules():
        if not hasattr(layer, PLAN):
            continue
        for name in getattr(type(layer), COMPILED_METHODS, ()):
            setattr(layer, name, torch.compile(getattr(layer, name), dynamic=True, backend=backend))
            count += 1
    return count
