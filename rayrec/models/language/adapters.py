"""Low-rank adapters: a frozen network, small matrices beside its own, and rows of tokens it did not know.

The package `peft` puts them into the network, whose class stays what it was; nothing else of it is used.

Source: Hu et al., LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from rayrec.platform.errors import InputError


def add_adapters(
    network: nn.Module, rank: int, scale: float, targets: Sequence[str] | None, new_tokens: range
) -> None:
    """Freeze a network, and put adapters beside its linear layers.

    Adapters begin without effect; their first weights come of torch's default generator.

    Args:
        scale: factor of what adapters add, often called alpha / rank.
        targets: names of layers, such as `q_proj`; None: all linear ones but the matrix of outputs.
        new_tokens: whose rows, of inputs and outputs, are trained whole.

    Raises:
        InputError: the package peft is missing, or no layer has one of these names.
    """
    peft = _package()
    names = {
        name.rsplit(".", 1)[-1]: module for name, module in network.named_modules() if name.rsplit(".", 1)[-1]
    }
    if targets is not None and (unknown := sorted(set(targets) - set(names))):
        linear = sorted(name for name, module in names.items() if isinstance(module, nn.Linear))
        raise InputError(
            f"model.lora.targets: the network has no layer {unknown[0]!r}; linear ones are "
            f"{', '.join(linear)}"
        )
    tokens = {name: list(new_tokens) for name in _matrices_of_tokens(network)} if new_tokens else None
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=rank * scale,
        lora_dropout=0.0,  # it would draw from the global generator
        target_modules="all-linear" if targets is None else list(targets),
        trainable_token_indices=tokens,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied matrices, which it handles
        peft.inject_adapter_in_model(settings, network)


def merge_adapters(network: nn.Module) -> None:
    """Add what adapters have learned to the weights beside them, and leave the plain network, all trained."""
    _package()
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    wrapped: list[str] = []
    for name, module in list(network.named_modules()):
        if any(name.startswith(f"{outer}.") for outer in wrapped):
            continue  # it goes with its wrapper
        if isinstance(module, AuxiliaryTrainingWrapper):
            adapted: Any = module.token_adapter
            wrapped.append(name)
        elif isinstance(module, BaseTunerLayer):
            adapted = module
        else:
            continue
        # Of two matrices that share their rows, the second holds what the first was merged into.
        if getattr(adapted, "tied_adapter", None) is None:
            adapted.merge()
        parent, _, attribute = name.rpartition(".")
        setattr(network.get_submodule(parent), attribute, adapted.get_base_layer())
    network.tie_weights()  # type: ignore[operator]
    for parameter in network.parameters():
        parameter.requires_grad_(True)


def output_weight(head: Any) -> Tensor:
    """[V, D] matrix of outputs, with the rows that are trained in their places."""
    tokens = getattr(head, "token_adapter", None)
    if tokens is None:
        weight: Tensor = head.weight
        return weight
    merged: Tensor = tokens.get_merged_weights(tokens.active_adapters)
    return merged


def frozen_parameters(network: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in network.named_parameters() if not weight.requires_grad}


def _matrices_of_tokens(network: Any) -> list[str]:
    """Names of the layers that have a row for each token; one where inputs and outputs share them."""
    inputs, outputs = network.get_input_embeddings(), network.get_output_embeddings()
    modules = [inputs] if inputs.weight is outputs.weight else [inputs, outputs]
    return [name.rsplit(".", 1)[-1] for name, module in network.named_modules() if module in modules]


def _package() -> Any:
    if importlib.util.find_spec("peft") is None:
        raise InputError(
            "model.lora needs the package peft, which cannot be imported; install the extra with: pip "
            "install 'rayrec[language]'"
        )
    import peft

    return peft
