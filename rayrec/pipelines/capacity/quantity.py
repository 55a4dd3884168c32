"""A number of a cluster spec: what it is, in which unit, and where it is from.

    50 GB/s, data sheet: ConnectX-7
    0.56 of peak, measured: ZionEX, arXiv:2310.02784
    30 days, assumed

Sizes are kept in base units: bytes, bytes/s, FLOP/s, seconds, money per hour. `K`, `M`, `G`, `T`, `P` are
powers of ten, `Ki` to `Pi` powers of two, and a `bit` is an eighth of a byte.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, PlainSerializer

Mark = Literal["measured", "data sheet", "assumed"]

_PATTERN = re.compile(
    r"(?P<number>[+-]?[\d_]*\.?\d+(e[+-]?\d+)?)\s*(?P<unit>[^,]*?)\s*(,\s*(?P<rest>.*))?", re.I
)
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


def _prefixed(unit: str, times: float = 1.0, binary: bool = False) -> dict[str, float]:
    prefixes = _DECIMAL | (_BINARY if binary else {})
    return {prefix + unit: factor * times for prefix, factor in prefixes.items()}


UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes": _prefixed("B", binary=True),
    "bytes/s": _prefixed("B/s", binary=True) | _prefixed("bit/s", 1 / 8),
    "FLOP/s": _prefixed("FLOP/s"),
    "seconds": {
        "us": 1e-6,
        "ms": 1e-3,
        "s": 1.0,
        "min": 60.0,
        "h": 3600.0,
        "days": 86400.0,
        "years": 3.15576e7,
    },
    "share": {"of peak": 1.0, "%": 0.01},
    "times": {"times": 1.0},
    "money/h": {"USD/h": 1.0, "EUR/h": 1.0, "CNY/h": 1.0},
    "nodes": {"nodes": 1.0},
    "cards": {"cards": 1.0},
    "cores": {"cores": 1.0},
    "servers": {"servers": 1.0},
}
"""Kind of a number -> its units, each in base units."""


@dataclass(frozen=True)
class Quantity:
    """A number in base units, and how far it can be trusted."""

    value: float
    mark: Mark
    source: str
    """Of a measurement or data sheet; empty where none is given."""
    text: str
    """As it was written."""

    def __float__(self) -> float:
        return self.value

    def __int__(self) -> int:
        return round(self.value)


def parse_quantity(text: Any, kind: str) -> Quantity:
    """Read a number with its unit and mark.

    Args:
        kind: a key of `UNITS`.

    Raises:
        ValueError: what is missing or wrong, with an example of what was expected.
    """
    if isinstance(text, Quantity):
        return text
    units = UNITS[kind]
    example = f"such as '8 {list(units)[-1]}, assumed'"
    match = _PATTERN.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit and a mark, {example}")
    unit, rest = match["unit"], match["rest"] or ""
    if not unit:
        raise ValueError(f"{text!r} has no unit; expected one of {_listed(units)}, {example}")
    if unit not in units:
        raise ValueError(f"{text!r}: {unit!r} is no unit of {kind}; expected one of {_listed(units)}")
    mark, _, source = (part.strip() for part in rest.partition(":"))
    if mark not in get_args(Mark):
        missing = "is not marked" if not mark else f"is marked {mark!r}"
        raise ValueError(
            f"{text!r} {missing}; say whether it is 'measured', from a 'data sheet' or 'assumed', {example}"
        )
    value = float(match["number"].replace("_", "")) * units[unit]
    if value < 0:
        raise ValueError(f"{text!r} is below 0")
    if math.isinf(value):
        raise ValueError(f"{text!r} is larger than any number that can be kept")
    return Quantity(value, mark, source, str(text))  # type: ignore[arg-type]


def _listed(units: Mapping[str, float]) -> str:
    names = list(units)
    return ", ".join(names if len(names) <= 8 else [*names[:7], "..."])


def _of(kind: str) -> Any:
    """The type of a setting that is a quantity of this kind."""
    return Annotated[
        Quantity,
        BeforeValidator(lambda text: parse_quantity(text, kind)),
        PlainSerializer(lambda quantity: quantity.text),
    ]


Bytes = _of("bytes")
BytesPerSecond = _of("bytes/s")
FlopsPerSecond = _of("FLOP/s")
Seconds = _of("seconds")
Share = _of("share")
Times = _of("times")
MoneyPerHour = _of("money/h")
Nodes = _of("nodes")
Cards = _of("cards")
Cores = _of("cores")
Servers = _of("servers")
