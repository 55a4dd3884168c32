"""Keyed dropout in the layers of a network of the package `transformers`.

    x ──┬─► layer ─► x + change ──► x + dropout(change)
        └────────────────────────────┘

The dropout that such networks have draws from the global random generator, and is switched off. This one
falls on all that a layer adds to what it read, attention and feed-forward together, so that it fits every
family; Vaswani et al. (arXiv:1706.03762, section 5.4) let it fall on both apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rayrec.models.base.keyed_random import KeyedDropout
from rayrec.models.program.sharding import blocks_of
from rayrec.platform.errors import InputError

_NAME = "change_dropout"
"""Of the module below a layer, so that copies of a network have their own."""


def add_dropout(network: Any, probability: float, setting: str) -> KeyedDropout:
    """Put dropout behind every layer; it acts in forward passes whose `attending` has keys of tokens.

    Args:
        probability: 0: the network stays as it is.
        setting: that asked for it, for messages.

    Returns:
        The one for vectors of tokens, which is not in the network.

    Raises:
        InputError: the layers are not found.
    """
    of_tokens = KeyedDropout(probability, 0)
    if not probability:
        return of_tokens
    layers = list(blocks_of(network))
    if len(layers) != network.config.num_hidden_layers:
        raise InputError(
            f"{setting}: the layers of {type(network).__name__} are not found; set it to 0, or choose "
            "another network"
        )
    for index, layer in enumerate(layers, 1):
        layer.add_module(_NAME, KeyedDropout(probability, index))
        layer.register_forward_hook(_drop_change, with_kwargs=True)
    return of_tokens


def _drop_change(layer: nn.Module, given: tuple[Any, ...], options: Mapping[str, Any], made: Any) -> Any:
    keys_N = getattr(options.get("attending"), "token_keys_N", None)  # without: padded rows
    if keys_N is None:
        return made
    before = given[0] if given else options["hidden_states"]
    after, *more = made if isinstance(made, tuple) else (made,)
    dropped = before + layer.get_submodule(_NAME)((after - before)[0], keys_N)[None]
    return (dropped, *more) if isinstance(made, tuple) else dropped
