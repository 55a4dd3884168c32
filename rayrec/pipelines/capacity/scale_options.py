"""`--scale NAME=VALUE`: sizes of a larger run, as they are written on a command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, get_args

from rayrec.pipelines.capacity.workload import Mode, Scale
from rayrec.platform.errors import InputError

_SUFFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "TB": 1e12, "GB": 1e9}


def parse_scale(options: Sequence[str]) -> Scale:
    """Read options such as `trainers=1000`, `dense_parameters=10B`, `sparse_bytes=10TB`.

    Raises:
        InputError: names the option, what it could be called, or what its value should be.
    """
    known = [each.name for each in fields(Scale)]
    found: dict[str, Any] = {}
    for option in options:
        name, sign, text = (part.strip() for part in option.partition("="))
        if not sign or name not in known:
            raise InputError(f"--scale {option}: expected NAME=VALUE with one of {', '.join(known)}")
        found[name] = _READ.get(name, _whole)(option, text)
    return Scale(**found)


def _number(option: str, text: str) -> float:
    digits = text.rstrip("kKMGBT")
    factor = _SUFFIXES.get(text[len(digits) :])
    try:
        value = float(digits.replace("_", ""))
    except ValueError:
        value, factor = 0.0, None
    if factor is None or not 0 < value * factor < 1e30:
        raise InputError(
            f"--scale {option}: expected a number above 0, such as 1000, 10M, 10B (parameters) or 10TB "
            "(bytes)"
        )
    return value * factor


def _whole(option: str, text: str) -> int:
    value = _number(option, text)
    if value != int(value):
        raise InputError(f"--scale {option}: expected a whole number")
    return int(value)


def _mode(option: str, text: str) -> str:
    if text not in get_args(Mode):
        raise InputError(f"--scale {option}: expected one of {', '.join(get_args(Mode))}")
    return text


_READ: dict[str, Callable[[str, str], Any]] = {
    "batch": _number,
    "dense_parameters": _number,
    "sparse_bytes": _number,
    "table_rows": _number,
    "mode": _mode,
}
