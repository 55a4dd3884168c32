"""Networks that several ranks compute together: which can be split, and how.

layers of ours      by their own plans    `rayrec.models.program.tensor_parallel`
of transformers     by those of the package `rayrec.models.language.tensor_parallel`
"""

from __future__ import annotations

import torch
from torch import nn

from rayrec.models.generative.language_backbone import LanguageBackbone
from rayrec.models.language.tensor_parallel import Sharers, TensorParallel, check_divides
from rayrec.models.program.fused_sums import fused_methods
from rayrec.models.program.tensor_parallel import check_plans, split_layers
from rayrec.models.quantization.linear import quantized_layers
from rayrec.models.sequence.sequence_program import SequenceProgram
from rayrec.platform.errors import InputError

SETTING = "dense.tensor_parallel"
RANKS = Sharers(SETTING, "ranks", "let tensor_parallel be 1")


def check_split(model: nn.Module, num_ranks: int, run: str, fuses: bool = False) -> None:
    """Check that so many ranks can share the network of a run; its weights need not be there.

    Args:
        fuses: whether what they compute is to be compiled with its sums (`fused_sums`).

    Raises:
        InputError: heads or widths do not divide, layers are quantized or have adapters, there is no plan, or
            nothing could be compiled.
    """
    if any(True for _ in quantized_layers(model)):  # first: plans ask layers for what quantized ones lack
        raise InputError(
            f"{run}: {SETTING}: the layers of this run are quantized, and {num_ranks} ranks share layers of "
            "floating-point numbers alone; serve the run it was made of, or let tensor_parallel be 1"
        )
    count = check_plans(model, num_ranks, f"{run}: {SETTING}")
    for backbone in _language_backbones(model):
        _check_adapters(backbone, run)
        check_divides(backbone.network, num_ranks, run, RANKS)
        count += 1
    if not count:
        raise InputError(
            f"{run}: {SETTING} is {num_ranks}, and {type(model).__name__} has no layers that ranks could "
            "share; let tensor_parallel be 1"
        )
    if fuses and not any(True for _ in fused_methods(model)):
        raise InputError(
            f"{run}: dense.fused_communication compiles layers that name what can be compiled, and those of "
            f"{type(model).__name__} name nothing; leave fused_communication out"
        )


def split(program: SequenceProgram, run: str) -> None:
    """Split the network in place among the processes of the default group; all do so at once.

    Raises:
        InputError: as `check_split`; or the split network computes something else.
    """
    check_split(program.model, torch.distributed.get_world_size(), run)
    split_layers(program.model, program.device)
    for backbone in _language_backbones(program.model):
        TensorParallel(backbone.network, program.device, packed=True, source=run, sharers=RANKS)


def _language_backbones(model: nn.Module) -> list[LanguageBackbone]:
    return [module for module in model.modules() if isinstance(module, LanguageBackbone)]


def _check_adapters(backbone: LanguageBackbone, run: str) -> None:
    if any("lora_" in name for name, _ in backbone.network.named_parameters()):
        raise InputError(
            f"{run}: {SETTING} splits the layers of a network and not the adapters beside them (model.lora); "
            "let tensor_parallel be 1"
        )
