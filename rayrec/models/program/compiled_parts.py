"""torch.compile where it fits jagged batches: between the attentions.

Attention, layouts and lookups depend on each batch's lengths on the host, and a compiled whole would break
into pieces there, or be compiled again. So modules name those of their methods that take tensors alone
(`COMPILED_METHODS`), and these are compiled with the number of tokens left open: norms, activations,
residuals, and above all dropout, whose mask is a long chain of pointwise hashing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rayrec.platform.errors import InputError

COMPILED_METHODS = "compiled_methods"
"""Class attribute of a module: names of methods that take and return tensors, to be compiled for training."""


def compile_parts(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> int:
    """Replace what modules name by compiled versions, which are made when they are first called.

    Only training calls them: ranking goes on as without. Training belongs into `explained`.

    Returns:
        How many methods; 0 for a model that names none.
    """
    parts = [(module, name) for module in _with_parts(model) for name in _names(module)]
    # One version for every module, since some hold numbers that are compiled in, and for a few kinds of
    # arguments. Past the limit torch would silently go on without compiling.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 8 * len(parts))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 8 * len(parts))
    for module, name in parts:
        setattr(module, name, _while_training(module, getattr(module, name), backend))
    return len(parts)


@contextmanager
def explained() -> Iterator[None]:
    """Around forward and backward of a model with compiled parts.

    Raises:
        InputError: torch could not compile one of them; says why and what to do.
    """
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        raise InputError(
            f"training.compile: torch could not compile the model ({type(error).__name__}: {reason}); set "
            "training.compile to false, or give torch what it compiles with (on a CPU, a C++ compiler)"
        ) from error


def _names(module: nn.Module) -> tuple[str, ...]:
    return getattr(type(module), COMPILED_METHODS, ())


def _with_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that name methods; what is inside of one is compiled with it."""
    if _names(module):
        yield module
        return
    for child in module.children():
        yield from _with_parts(child)


def _while_training(
    module: nn.Module, plain: Callable[..., Any], backend: str | Callable[..., Any]
) -> Callable[..., Any]:
    fast = torch.compile(plain, dynamic=True, backend=backend)

    def call(*arguments: Any) -> Any:
        return (fast if module.training and torch.is_grad_enabled() else plain)(*arguments)

    return call
