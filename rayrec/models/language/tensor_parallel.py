"""Matrices of a language model split among the trainers, each of which computes a part of every layer; or
among the ranks that serve one.

    q, k, v, gate, up     split by outputs: a trainer has some heads, and some of the inner width
    o, down               split by inputs: their products are summed over the trainers

All trainers go through the rows of all of them, so activations are not split, and the sums are most of what
is sent. Which layers are split how is the plan that `transformers` has for a family; matrices of tokens stay
whole, for the loss is computed without the logits of all targets at once.

To judge and to write, every trainer holds the whole network: they do not do so equally often.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayrec.models.language.networks import padded_attention
from rayrec.models.language.text_tensors import TextRows
from rayrec.models.program.sharding import is_distributed, whole
from rayrec.platform.errors import InputError

DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
"""Of a configuration, what every trainer gets an equal part of."""


NO_ADAPTERS = (
    "training.parallel is 'tensor', whose plans name the layers of a network and not the adapters beside "
    "them (model.lora): half of each adapter would have to be split as its layer is, and the other half held "
    "by all; take 'fsdp2' or 'replicated'"
)


@dataclass(frozen=True)
class Sharers:
    """Who shares the layers, for messages."""

    setting: str
    """That asks for it."""
    called: str
    otherwise: str
    """What to do where a network cannot be split."""


TRAINERS = Sharers(
    "training.parallel: tensor",
    "trainers (pipeline.num_trainers)",
    "set training.parallel to fsdp2 or replicated",
)


def check_divides(network: Any, count: int, source: str, sharers: Sharers = TRAINERS) -> None:
    """Check that so many processes can split a network.

    Raises:
        InputError: there is no plan for its family, or heads or widths do not divide.
    """
    name = type(network).__name__
    if not _plan(network):
        raise InputError(
            f"{source}: transformers has no plan by which {name} could be split ({sharers.setting}); "
            f"{sharers.otherwise}"
        )
    for setting in DIVIDED:
        value = getattr(network.config, setting, None)
        if isinstance(value, int) and value % count:
            raise InputError(
                f"{source}: {name} has {setting} {value}, which {count} {sharers.called} cannot share "
                f"equally ({sharers.setting}); take a number that divides it, or {sharers.otherwise}"
            )


class TensorParallel:
    """What has to be known of a network that is split among the processes of the default group."""

    def __init__(
        self,
        network: Any,
        device: torch.device,
        packed: bool,
        source: str = "model.base",
        sharers: Sharers = TRAINERS,
    ) -> None:
        """Split the weights in place; every process of the group does so at once, with equal weights.

        Raises:
            InputError: as `check_divides`; or the split network computes something else.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        count = torch.distributed.get_world_size()
        check_divides(network, count, source, sharers)
        network.to(device)
        expected = _said(network, packed)
        apply_tensor_parallelism(network, init_device_mesh(device.type, (count,)), _of_layers(network, count))
        self._split: dict[tuple[nn.Module, str], nn.Parameter] = {
            (module, name): parameter
            for module in network.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if is_distributed(parameter)
        }
        self._forwards: dict[nn.Module, Callable[..., Any]] = {
            module: module.__dict__["forward"]
            for module in network.modules()
            if getattr(module, "_is_hooked", False) and "forward" in module.__dict__
        }
        self._is_gathered = False
        found = _said(network, packed)
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * float(expected.std())):
            raise InputError(
                f"{source}: {type(network).__name__} computes something else when it is split by the plan of "
                f"transformers ({sharers.setting}); {sharers.otherwise}"
            )

    def gather(self) -> None:
        """Hold the whole network until `scatter`."""
        if self._is_gathered:
            return
        for (module, name), parameter in self._split.items():
            module._parameters[name] = nn.Parameter(whole(parameter.detach()), requires_grad=False)
        for module in self._forwards:
            del module.forward
        self._is_gathered = True

    def scatter(self) -> None:
        """Hold parts again."""
        if not self._is_gathered:
            return
        for (module, name), parameter in self._split.items():
            module._parameters[name] = parameter
        for module, forward in self._forwards.items():
            module.forward = forward
        self._is_gathered = False


@dataclass(frozen=True)
class Together:
    """The rows of all trainers, as `TextRows`."""

    step: int
    row_keys_B: np.ndarray
    num_targets: int
    tokens_N: np.ndarray
    is_target_N: np.ndarray
    offsets_B1: np.ndarray
    filled_P: Mapping[str, np.ndarray] = field(default_factory=dict)
    lookups: Mapping[str, Any] = field(default_factory=dict)


def together(features: TextRows) -> Together:
    """Bring the rows of all trainers to each; every process of the group does so at once."""
    own = (features.row_keys_B, features.tokens_N, features.is_target_N, np.diff(features.offsets_B1))
    shares: list[tuple[np.ndarray, ...]] = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(shares, own)
    keys_B, tokens_N, is_target_N, lengths_B = (np.concatenate(parts) for parts in zip(*shares, strict=True))
    offsets_B1 = np.concatenate([[0], np.cumsum(lengths_B)])
    return Together(features.step, keys_B, features.num_targets, tokens_N, is_target_N, offsets_B1)


def _plan(network: Any) -> dict[str, str]:
    """How the layers are split, by name with `*` for a number; not the matrices of tokens."""
    tokens = {
        name
        for name, module in network.named_modules()
        if module in (network.get_input_embeddings(), network.get_output_embeddings())
    }
    plan: dict[str, str] = network.tp_plan
    return {name: style for name, style in plan.items() if name.removesuffix(".weight") not in tokens}


def _of_layers(network: Any, count: int) -> dict[str, str]:
    """The plan with the name of every layer and weight that it is about."""
    from transformers.distributed.configuration_utils import DistributedConfig

    named, _, _ = network._resolve_parallel_plans(DistributedConfig(tp_size=count))
    kept = _plan(network)
    return {name: style for name, style in named.items() if _general(name) in _with_weights(kept)}


def _general(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _with_weights(plan: Mapping[str, str]) -> set[str]:
    return {name + end for name in plan for end in ("", ".weight", ".bias")}


@torch.no_grad()
def _said(network: Any, packed: bool) -> Tensor:
    """[tokens, D] of a few tokens, by the network's own way."""
    num_tokens = len(network.get_input_embeddings().weight)  # of codes alone, there may be very few
    tokens = torch.arange(8, device=next(iter(network.parameters())).device)[None] % num_tokens
    was_training = network.training
    network.eval()
    try:
        with padded_attention(network) if packed else contextlib.nullcontext():
            hidden: Tensor = network.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
    finally:
        network.train(was_training)
    return hidden
