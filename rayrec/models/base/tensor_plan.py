"""Which part of a layer each of several ranks has, where they compute every layer together.

A layer says it by a method `tensor_plan`; `rayrec.models.program.tensor_parallel` splits what it names.
Layers of other packages may have the method, too.

    outputs(...)   rows of a matrix: a rank has some heads, or some of the inner width
    INPUTS         its columns: what the ranks compute of them is summed
    NORM           weights of a norm over a vector of which each rank has a part

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

PLAN = "tensor_plan"
"""Method of a layer that can be split; it returns a `TensorPlan`."""


class Joined(Enum):
    """How the ranks make one result of what each has computed with its part."""

    NO = auto()
    """They do not: a rank goes on with its own part."""
    SUM = auto()
    """It is summed; of several results, the first."""
    MOMENTS = auto()
    """A norm, whose mean and variance are those of the parts of all ranks; each has its own part of the
    result."""


@dataclass(frozen=True)
class Part:
    """What each rank has of a module."""

    axes: Mapping[str, int]
    """Axis along which a parameter is divided, by name; parameters that are not there are None."""
    widths: tuple[int, ...] = ()
    """Of what stands side by side along the axis, such as queries, keys and values, each of which is divided;
    none: it is one."""
    once: tuple[str, ...] = ()
    """Parameters that are added to a sum, and so by one rank alone."""
    joined: Joined = Joined.NO


def outputs(*widths: int) -> Part:
    """Of a linear layer that makes vectors of these widths side by side."""
    return Part({"weight": 0, "bias": 0}, widths)


INPUTS = Part({"weight": 1}, once=("bias",), joined=Joined.SUM)
NORM = Part({"weight": 0, "bias": 0}, joined=Joined.MOMENTS)


@dataclass(frozen=True)
class TensorPlan:
    """How a layer is split."""

    sizes: Mapping[str, int]
    """What the ranks get equal parts of, by the name of the setting."""
    modules: Mapping[str, Part]
    """Parts of the modules in it, by name."""
    own: Part = field(default_factory=lambda: Part({}))
    """Of the parameters of the layer itself."""
    counts: tuple[str, ...] = ()
    """Attributes of the layer that are so many times smaller on each rank."""
