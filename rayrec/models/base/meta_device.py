"""Networks whose weights are on the meta device, with shapes and no memory; other tensors, such as codes of
items, are there as always."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class MetaWeights(TorchFunctionMode):
    """While the block lasts, `torch.empty`, of which every weight is made, gives tensors of the meta device.

    Not `torch.device("meta")`: that would leave nothing of codes, from which sizes of weights follow.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.empty and named.get("device") is None:
            named["device"] = "meta"
        return func(*args, **named)


def weights_are_meta() -> bool:
    """Whether weights that are made now take no memory, so that none have to be read either."""
    return torch.empty(0).is_meta
